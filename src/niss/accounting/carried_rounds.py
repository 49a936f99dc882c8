"""Runs with carried shares over the protocol: the schedule that is committed to, its rounds, and what they cost.

`make_schedule` turns a plan into the `Schedule` that is committed to before the first round; every term of every round
follows from it. `propose_carried_round` is the server's side of a round. `CarriedAccount` is a client's own view: from
the numbers of the schedule alone it computes the matrix K of the whole run at its worst (`Committed`), for the
colluders it assumes, and charges each participation what it adds to `Delta' K[P, P] Delta`, before the upload.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from niss.accounting.committed import Committed
from niss.accounting.discretisation import LEAST_STEPS, Draws, Promise
from niss.accounting.ledger import ChargeableLedger
from niss.accounting.plans import Plan
from niss.accounting.protocol_rounds import (
    SAME,
    check_committee,
    committee_of,
    draw_round,
    first_grid,
    fit_grid,
    too_imprecise,
)
from niss.accounting.targets import client_sensitivity, split_failure
from niss.errors import ConfigError, LocalProtocolError, PrivacyError, RemoteProtocolError
from niss.mechanism.grid import MAX_BITS, Grid
from niss.mechanism.noise import Noise
from niss.methods import marginal_mu
from niss.protocol.agreement import Agreed, commitment_of
from niss.protocol.carried import Schedule
from niss.protocol.messages import MODES, Beacon, Participant, PreviousRound, RoundCohorts, RoundOpen

Participants = tuple[Participant, ...]

# Up to this ratio of carried to fresh noise the matrix of a run is inverted to six digits or more.
MOST_CARRIED = 1e6


def make_schedule(
    plan: Plan,
    *,
    participants: int,
    coordinates: int,
    mode: str = "tolerate",
    grid_bits: int | None = None,
    modulus_bits: int = 64,
) -> Schedule:
    """What a run of this plan commits to, with rounds of that many participants of equal weight.

    coordinates   entries of an update
    mode          what happens after dropouts: `tolerate` or `repair`
    grid_bits     grid steps of 2^-grid_bits; None chooses, as in `make_terms`
    modulus_bits  uploads are summed modulo 2^modulus_bits

    Raises ConfigError for a plan that the protocol cannot run.
    """
    if not (plan.kind.carries and plan.kind.has_protocol):
        raise ConfigError("a schedule is made for a method that carries noise over", field="plan")
    if mode not in MODES:
        raise ConfigError(f"unknown value {mode!r}", field="mode", hint="use one of: " + ", ".join(MODES))
    if mode == "tolerate" and (plan.dropped or plan.revealed):
        raise ConfigError(
            "the plan pays for repairs, but nothing is repaired", field="plan", hint="mode 'repair'"
        )
    if plan.separation < 2:
        raise ConfigError(
            "clients that return at once gain nothing from noise that is carried over",
            field="separation",
            hint="more clients, fewer in a round, or method 'niss'",
        )
    run = plan.committed(participants)
    noise, square = run.noise, float(plan.sensitivity(1.0 / participants, 1.0)) ** 2
    schedule = Schedule(
        participants=participants,
        rounds=run.rounds,
        separation=plan.separation,
        cyclic=plan.pattern == "cyclic",
        closing=plan.closing,
        coordinates=coordinates,
        grid_bits=1,
        modulus_bits=modulus_bits,
        clip=float(plan.clip),
        unit_variance=noise.unit * square,
        carried_variance=noise.carried * square / participants,
        residual_variance=noise.residual * square,
    )
    if mode == "repair":
        members, threshold = committee_of(plan, participants)
        alone = noise.spatial / (2.0 * plan.kappa)
        if run.private:
            alone = run.needed_self_mask * SAME
        schedule = replace(
            schedule,
            dropped=plan.dropped,
            committee=members,
            threshold=threshold,
            self_variance=alone * square,
        )
    if grid_bits is not None:
        schedule = replace(schedule, grid_bits=grid_bits)
        if plan.calibrated and _narrowest_steps(schedule) < LEAST_STEPS:
            raise ConfigError(
                f"noise of {_narrowest_steps(schedule):.2g} grid steps is too narrow to be told from a Gaussian",
                field="protocol.grid_bits",
                hint=f"use more than {grid_bits} bits",
            )
        return schedule
    residual, narrowest = schedule.residual_variance, _narrowest(schedule)
    bits = first_grid(residual, plan.clip / (participants * math.sqrt(coordinates)))
    if not residual:
        return replace(schedule, grid_bits=bits)
    while Grid(bits).deviation_steps(narrowest) < 2.0 * LEAST_STEPS and bits < MAX_BITS:
        bits += 1
    promise = replace(Promise.of(plan), rounds=schedule.rounds)
    mu = float(plan.round_mu(np.zeros(1, dtype=np.int64))[0])

    def cost(bits: int) -> float:
        return _run_cost(replace(schedule, grid_bits=bits), promise, mu)

    bits = fit_grid(cost, bits, residual, narrowest)
    if plan.calibrated and cost(bits) > 1.0:
        raise too_imprecise(coordinates, participants, promise)
    return replace(schedule, grid_bits=bits)


def _narrowest(schedule: Schedule) -> float:
    """The least variance of any noise in an upload: residual, a share, a carried one, or a self-mask."""
    noises = [schedule.residual_variance, schedule.unit_variance]
    return min(noises + [one for one in (schedule.carried_variance, schedule.self_variance) if one])


def _narrowest_steps(schedule: Schedule) -> float:
    return Grid(schedule.grid_bits).deviation_steps(_narrowest(schedule))


def _draws(schedule: Schedule, number: int) -> Draws:
    """Everything that is drawn in a round, with what it carries on: each share counts once, where it is added."""
    size = schedule.participants
    return Draws.of(
        schedule.terms(b"run", number), size, [1.0], [size * (size - 1)], carried=([1.0], [size * size])
    )


@lru_cache(maxsize=64)
def _run_cost(schedule: Schedule, promise: Promise, mu: float) -> float:
    """How much of its part of delta the grid uses in a run, all rounds together; above 1 is too much."""
    numbers = {0, min(1, schedule.rounds - 1)}
    return max(_draws(schedule, one).cost(promise, mu, rounds=schedule.rounds) for one in numbers)


def run_grid_delta(schedule: Schedule, promise: Promise) -> float:
    """What grid and sampler add to the delta of a client over the whole run, however often it takes part."""
    if not schedule.residual_variance:
        return 0.0
    numbers = {0, min(1, schedule.rounds - 1)}
    whole = replace(promise, rounds=schedule.rounds)
    return max(_draws(schedule, one).delta(whole) for one in numbers)


@lru_cache(maxsize=4)
def scheduled_run(schedule: Schedule, *, relation: str, colluders: int) -> Committed:
    """What a schedule is worth, from its own numbers; nothing where it has no fresh noise.

    Numbers that cannot be accounted for are a `RemoteProtocolError`: a schedule comes from a server.
    """
    size = schedule.participants
    # Not as a quotient, which may overflow.
    fresh, carried = schedule.residual_variance, size * schedule.carried_variance
    if fresh and not carried <= MOST_CARRIED * fresh:
        raise RemoteProtocolError(
            f"more than {MOST_CARRIED:g} times the fresh noise of a round is carried, which cannot be accounted for"
        )
    square = float(client_sensitivity(1.0 / size, schedule.clip, relation)) ** 2
    try:
        noise = Noise(
            participants=size,
            neighbours=schedule.neighbours,
            unit=schedule.unit_variance / square,
            residual=fresh / square,
            carried=carried / square,
            self_mask=schedule.self_variance / square,
            colluders=colluders,
            dropped=schedule.dropped,
            committee=schedule.committee,
            threshold=schedule.threshold,
        )
        return Committed(
            noise=noise,
            horizon=schedule.horizon,
            separation=schedule.separation,
            pattern="cyclic" if schedule.cyclic else "any",
            closing=schedule.closing,
        )
    except (ArithmeticError, ConfigError, PrivacyError) as error:
        message = error.message if isinstance(error, (ConfigError, PrivacyError)) else str(error)
        raise RemoteProtocolError(f"schedule: {message}") from None


class CarriedAccount:
    """One client's account of a run with carried shares, from the numbers of its schedule: what each round costs it.

    schedule   that the client has agreed to
    relation   neighbouring updates, as in `Plan`
    colluders  assumed in every round
    promise    to the client over the whole run: what the grid costs has to fit into its part of delta
    budget     most mu over the whole run; infinite: any
    failure    with which the bound on colluders in a committee may fail, as in `Assessor`
    earlier    the rounds of this run that it was charged for (`niss.protocol.states.rounds_answered`)

    `assess` and `charging` are what a `Client` asks. Round t costs `Delta' K[P + t] Delta - Delta' K[P] Delta`, K that
    of the whole run at its worst; missing uploads, an early end and a server that lies within the rules only
    take something off it. Refused (`RemoteProtocolError`): noise too narrow for its grid, and a participation that the
    budget or the schedule does not allow. A committee that colluders could outvote is refused when the account is made.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        relation: str = "zero-out",
        colluders: int = 0,
        promise: Promise | None = None,
        budget: float = math.inf,
        failure: float = 0.0,
        earlier: Sequence[int] = (),
    ) -> None:
        self.schedule, self.colluders, self._relation = schedule, colluders, relation
        self._promise = replace(Promise() if promise is None else promise, rounds=schedule.rounds)
        self.plan = scheduled_run(schedule, relation=relation, colluders=colluders)
        self._budget, self._taken = budget, [one for one in earlier if one < schedule.horizon]
        if schedule.committee:
            _, failure = split_failure(failure, drawn=schedule.committee < schedule.participants)
            check_committee(schedule.terms(b"run", 0), schedule.participants, colluders, failure)

    def cost(self, number: int) -> float:
        """What taking part in round `number` would add to mu^2; 0 in a round without updates."""
        if number >= self.schedule.horizon:
            return 0.0
        if not self.plan.private:
            return math.inf
        # What rounding may have taken off while the matrix was inverted: some units in the last place of its condition.
        noise = self.plan.noise
        apart = 4.0 * self.schedule.rounds * (1.0 + noise.carried / noise.residual)
        return self.plan.charge(number, self._taken, self._budget**2) * (1.0 + sys.float_info.epsilon * apart)

    def assess(self, agreed: Agreed, colluders: int) -> float:
        """What answering this round would cost: the square root of what it adds to mu^2."""
        if colluders != self.colluders:
            raise LocalProtocolError(f"the account assumes {self.colluders} colluders, not {colluders}")
        self.schedule.check_terms(agreed.terms)
        try:
            mu = math.sqrt(self.cost(agreed.terms.round))
        except PrivacyError as error:
            raise RemoteProtocolError(error.message, hint=error.hint) from None
        if 0.0 < mu < math.inf:
            self._check_noise(mu)
        return mu

    def _check_noise(self, mu: float) -> None:
        if _narrowest_steps(self.schedule) < LEAST_STEPS:
            raise RemoteProtocolError("some noise is only a few grid steps wide", hint="use more grid bits")
        cost = _run_cost(self.schedule, self._promise, mu)
        if not cost <= 1.0:
            raise RemoteProtocolError(
                f"on this grid the noise is too far from a Gaussian: {cost:.2g} times what the promise leaves room for",
                hint="use fewer grid bits",
            )

    def charging(self, ledger: ChargeableLedger, client: str) -> Callable[[Agreed, float], None]:
        """A function (round, mu) that charges a ledger under the name `client` before the upload, or refuses.

        What the grid adds to delta over the whole run, however often the client takes part, is charged with its first
        participation.
        """

        def charge(agreed: Agreed, mu: float) -> None:
            terms, schedule = agreed.terms, self.schedule
            basis: dict[str, Any] = {
                "mode": terms.mode,
                "rounds": schedule.rounds,
                "separation": schedule.separation,
                "pattern": "cyclic" if schedule.cyclic else "any",
                "dropped": schedule.dropped,
            }
            if math.isfinite(mu):
                basis["grid_delta"] = 0.0 if self._taken else run_grid_delta(schedule, self._promise)
            if terms.round < schedule.horizon:
                ledger.charge(
                    terms.round, terms.attempt, {client: (mu, self.marginal_mu(terms.round))}, basis
                )
                self._taken.append(terms.round)

        return charge

    def marginal_mu(self, number: int) -> float:
        """mu of one upload of round `number` looked at alone, with all its shares."""
        schedule = self.schedule
        gaps = (number > 0) + (number < schedule.rounds - 1)
        over = gaps * schedule.participants * schedule.carried_variance
        return float(
            marginal_mu(
                client_sensitivity(1.0 / schedule.participants, schedule.clip, self._relation),
                unit_variance=schedule.unit_variance,
                sent=schedule.neighbours,
                received=schedule.neighbours,
                residual_variance=schedule.residual_variance + over,
            )
        )


def propose_carried_round(
    schedule: Schedule,
    number: int,
    *,
    run: bytes,
    participants: Participants,
    following: Participants,
    previous: PreviousRound | None,
    release: Callable[[int, bytes], Beacon],
    account: CarriedAccount,
) -> RoundOpen:
    """Round `number` (from 0) of a run, unsigned: committed to, its beacon let out, its graphs good enough.

    participants  of this round: those that the round before was opened with as `following`
    following     of the next round, with the prekeys they will use up there; () in the last
    previous      `previous_of` the round before; None in the first
    release       (attempt, commitment) -> the beacon, which its holder lets out for this commitment alone
    account       anyone's, without participations: says whether clients accept the graphs that were drawn

    A scheduled run has one attempt at a round (`Schedule.check_terms`): a PrivacyError where it will not do.
    """

    def propose(attempt: int, _more: float) -> RoundOpen:
        terms = schedule.terms(run, number)
        beacon = release(attempt, commitment_of(terms, participants, following))
        return RoundOpen(terms, participants, beacon, cohorts=RoundCohorts(following, previous))

    return draw_round(propose, account.assess, attempts=1, colluders=account.colluders, allowed=math.inf)[0]
