"""Terms: a plan on the wire. What a round or a run is to be, a graph that keeps the promise, and its proposal.

`make_terms` turns a plan into terms, which are committed to before the beacon, and so before the graph, is known. The
residual noise is therefore taken with a margin over what several random graphs need. `propose_round` is the server's
side: it draws graphs until one keeps the promise to everyone. Where noise is carried, `make_schedule` makes the
`Schedule` that is committed to before the first round; every term of every round follows from it, and
`propose_carried_round` proposes one. What all that costs a client is for it to say (`niss.accounting.account`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from niss.accounting.account import CommittedAccount
from niss.accounting.discretisation import (
    LEAST_STEPS,
    Draws,
    Promise,
    narrowest_noise,
    require_wide_noise,
    run_cost,
)
from niss.accounting.plans import Plan
from niss.checks import BOOKS
from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.graph import ShareGraph
from niss.mechanism.grid import MAX_BITS, Grid
from niss.mechanism.noise import Noise
from niss.protocol.agreement import Agreed, agree, commitment_of, participants_hash, terms_hash
from niss.protocol.messages import (
    Beacon,
    Participant,
    PreviousRound,
    RecordTerms,
    RoundCohorts,
    RoundOpen,
    Terms,
)
from niss.protocol.schedule import Schedule
from niss.views import calibrate_for

Participants = tuple[Participant, ...]

# The grid of `make_terms` stays this far within what clients accept.
_WELL_WITHIN = 0.9
# The residual noise is at least this wide where wider noise would come too close to those limits.
_LEAST_LOG_STEPS = 4.0
# The residual noise covers the worst of this many graphs, and this much more.
_GRAPHS, _MARGIN = 3, 1.03
_LOG_STEPS = 8.0
# A record's entries are so many steps long: rounding them shortens it by less than a hundredth.
_RECORD_STEPS = 4.0
_BITS_WITHOUT_NOISE = 24
_FIRST = np.zeros(1, dtype=np.int64)
# A further attempt takes this much more noise than its predecessor lacked, and at most that much more.
_ATTEMPT_MARGIN, _ATTEMPT_MOST = 1.1, 10.0


def plan_noise(plan: Plan, participants: int) -> Noise:
    """All noise in an upload of a round of so many with equal weights, variances those of an entry, and who repairs it.

    It is what a plan commits to before any graph is drawn, in a run that carries noise and in any other. Raises
    ConfigError for a plan that the protocol cannot run, and PrivacyError where too few would be left in such a round.
    """
    if not plan.kind.has_protocol or plan.unit == "nbafl" or isinstance(plan.epsilon, tuple):
        raise ConfigError(
            "the protocol runs niss with one target for all, of clients or records", field="plan"
        )
    assumed, moved = plan.assumed(participants), plan.sensitivity(1.0 / plan.divisor(participants), 1.0)
    repairing = plan.settled_mode == "repair"
    if plan.kind.carries:
        run, square = plan.committed(participants), float(moved) ** 2
        noise = replace(run.noise.scaled(square), colluders=0)
        mask = run.noise.spatial / (2.0 * plan.kappa)
        if repairing and run.private:
            mask = run.needed_self_mask * (1.0 + BOOKS)
        mask *= square
    else:
        own = float((moved / plan.round_mu(_FIRST))[0]) ** 2
        unit = plan.kappa * own / plan.neighbours
        residual = _residual(plan, participants, unit, own)
        noise = Noise(
            participants=participants, neighbours=float(plan.neighbours), unit=unit, residual=residual
        )
        mask = max(own * (1.0 + BOOKS) - residual, 0.0)
    if not repairing:
        return noise
    counts = {name: getattr(assumed, name) for name in ("revealed", "dropped", "committee", "threshold")}
    return replace(noise, self_mask=mask, **counts)


def make_terms(
    plan: Plan,
    *,
    participants: int,
    coordinates: int,
    run: bytes,
    number: int,
    grid_bits: int | None = None,
    modulus_bits: int = 64,
) -> Terms:
    """The terms under which every participant keeps the plan's promise, with equal weights 1 / divisor.

    The grid is chosen so that the residual noise is some hundred steps wide: narrower, rounding would cost
    privacy; much wider, the sampler's tiny distance from the Gaussian would. For a very large model it is finer: an
    entry of an update as long as the clip has to be a step long, or rounding would shorten the update, and some steps
    where records are rounded one by one; but never so fine that clients would refuse (`DrawnAccount`).

    participants  how many take part
    coordinates   entries of an update
    run, number   whose round this is, and which
    grid_bits     grid steps of 2^-grid_bits; None chooses
    modulus_bits  uploads are summed modulo 2^modulus_bits

    Raises ConfigError for a plan that the protocol cannot run.
    """
    if plan.kind.carries:
        raise ConfigError(
            "the rounds of a run with carried shares follow from its schedule",
            field="plan",
            hint="make_schedule",
        )
    noise = plan_noise(plan, participants)
    terms = Terms.of_noise(
        noise,
        run=run,
        round=number,
        attempt=0,
        coordinates=coordinates,
        grid_bits=1,
        modulus_bits=modulus_bits,
        clip=float(plan.clip),
        records=None if plan.batch is None else RecordTerms(plan.batch, plan.divisor(participants)),
    )
    promise, mu = Promise.of(plan), float(plan.round_mu(_FIRST)[0])

    def cost(bits: int) -> float:
        shares = [max(1.0, plan.neighbours / (participants - 1))], [participants * math.ceil(plan.neighbours)]
        draws = Draws.of(replace(terms, grid_bits=bits), participants, *shares)
        return draws.cost(promise, mu * (plan.batch or 1.0))

    bits = _grid(plan, noise, coordinates, grid_bits, cost, promise, noise.residual)
    return replace(terms, grid_bits=bits)


def _grid(
    plan: Plan,
    noise: Noise,
    coordinates: int,
    given: int | None,
    cost: Callable[[int], float],
    promise: Promise,
    narrowest: float,
) -> int:
    """The bits that are given, or as many as keep `cost` well within 1 while the residual noise is some steps wide.

    narrowest  variance of the noise that has to stay wide enough to count

    Raises ConfigError where no grid keeps what the sampler costs within its part of delta.
    """
    if given is not None:
        if plan.calibrated:
            require_wide_noise(given, narrowest)
        return given
    size, residual = noise.participants, noise.residual
    if residual == 0.0:
        return _BITS_WITHOUT_NOISE
    # The root mean square of the entries of an update as long as the clip, or of so many steps of a record's.
    entry = plan.clip / (plan.divisor(size) * math.sqrt(coordinates))
    entry /= 1.0 if plan.batch is None else _RECORD_STEPS
    wide = _LOG_STEPS - math.log2(math.sqrt(residual))
    bits = max(1, min(60, math.ceil(max(wide, -math.log2(entry)))))
    while Grid(bits).deviation_steps(narrowest) < 2.0 * LEAST_STEPS and bits < MAX_BITS:
        bits += 1

    def is_wide(fewer: int) -> bool:
        grid = Grid(fewer)
        wide = grid.deviation_steps(residual) >= 2.0**_LEAST_LOG_STEPS
        return wide and grid.deviation_steps(narrowest) >= LEAST_STEPS

    while cost(bits) > _WELL_WITHIN and is_wide(bits - 1):
        bits -= 1
    if plan.calibrated and cost(bits) > 1.0:
        raise ConfigError(
            f"{coordinates} numbers of {size} participants over {promise.rounds} rounds are more than the "
            f"noise generator is precise enough for at epsilon = {promise.epsilon:g}, delta = {promise.delta:g}",
            field="plan",
            hint="a smaller epsilon or a larger delta, fewer rounds or neighbours, or a smaller model",
        )
    return bits


def _residual(plan: Plan, participants: int, unit: float, own: float) -> float:
    """eta^2: the given tau^2, or the most that a few random graphs need, with a margin."""
    if plan.tau2 is not None:
        if isinstance(plan.tau2, tuple):
            raise ConfigError("the protocol takes one tau2 for all", field="tau2")
        return float(plan.tau2 * unit * plan.neighbours)
    if plan.neighbours >= participants - 1:
        complete = ShareGraph.complete(participants, weight=plan.neighbours / (participants - 1))
        graphs, margin = [complete], 1.0 + BOOKS
    else:
        beacons = [hashlib.sha256(b"niss.terms" + bytes([number])).digest() for number in range(_GRAPHS)]
        graphs = [
            ShareGraph.regular(participants, degree=plan.neighbours, beacon=beacon) for beacon in beacons
        ]
        margin = _MARGIN
    assumed = plan.assumed(participants)
    needed = [calibrate_for(graph, assumed, unit_variance=unit, target_variance=own)[0] for graph in graphs]
    return margin * max(needed) * unit * plan.neighbours


def propose_round(
    plan: Plan,
    number: int,
    *,
    seat: Callable[[int], Participants],
    terms: Callable[[Participants], Terms],
    release: Callable[[int, bytes], Beacon],
    assess: Callable[[Agreed, int], float],
    allowed: float,
) -> RoundOpen:
    """The first attempt at round `number` whose graph costs no client more than `allowed`, unsigned.

    An attempt seats the participants, commits to them and to the terms, has the beacon released for that commitment,
    and draws the graph; nothing is sent to a client, so an attempt that would cost too much is given up before anyone
    is told of it or charged, and the next one has more residual noise.
    What attempts do cost is delta: a graph that is drawn again is a new chance for colluders to surround a client, so
    the failure probability of the collusion bound counts once for each of `plan.attempts`, used or not.

    plan     says how many attempts there are, and how many colluders are assumed
    seat     (attempt) -> the participants, each with the key it will use up
    terms    (participants) -> terms for that many, as `make_terms` makes them; round, attempt and the factor on the
             residual noise are filled in here, so they may come from a cache
    release  (attempt, commitment) -> the beacon, which its holder lets out for this commitment alone
    assess   (agreed, colluders) -> mu of the worst-off client: an `DrawnAccount`
    allowed  the most that mu may be; infinite where nothing was promised

    Raises PrivacyError where no attempt will do.
    """
    more, least = 1.0, math.inf
    refusal: RemoteProtocolError | None = None
    for attempt in range(plan.attempts):
        participants = seat(attempt)
        common = terms(participants)
        drawn = replace(
            common, round=number, attempt=attempt, residual_variance=more * common.residual_variance
        )
        commitment = participants_hash(participants) + terms_hash(drawn)
        opened = RoundOpen(drawn, participants, release(attempt, commitment))
        try:
            mu = assess(agree(opened), plan.assumed(len(participants)).colluders)
        except RemoteProtocolError as error:
            # A graph on which clients would refuse the round altogether is given up like one that costs too much.
            refusal = error
            continue
        if mu <= allowed:
            return opened
        least = min(least, mu)
        # Variance falls with mu^2, so this would do on the same graph; the margin allows for another one.
        more *= min(_ATTEMPT_MARGIN * (mu / allowed) ** 2, _ATTEMPT_MOST)
    why = f"the best would cost mu = {least:.4g}, {allowed:.4g} is allowed"
    if refusal is not None and least == math.inf:
        why = refusal.message
    raise _no_graph(plan.attempts, why)


def _no_graph(attempts: int, why: str) -> PrivacyError:
    return PrivacyError(
        f"none of {attempts} graphs keeps the promise for every client: {why}",
        hint="more neighbours, a larger kappa, more participants, or fewer colluders to be assumed",
    )


def make_schedule(
    plan: Plan,
    *,
    participants: int,
    coordinates: int,
    grid_bits: int | None = None,
    modulus_bits: int = 64,
) -> Schedule:
    """What a run of this plan commits to, with rounds of that many participants of equal weight.

    coordinates   entries of an update
    grid_bits     grid steps of 2^-grid_bits; None chooses, as in `make_terms`
    modulus_bits  uploads are summed modulo 2^modulus_bits

    Raises ConfigError for a plan that the protocol cannot run.
    """
    if not (plan.kind.carries and plan.kind.has_protocol):
        raise ConfigError("a schedule is made for a method that carries noise over", field="plan")
    if plan.separation < 2:
        raise ConfigError(
            "clients that return at once gain nothing from noise that is carried over",
            field="separation",
            hint="more clients, fewer in a round, or method 'niss'",
        )
    noise = plan_noise(plan, participants)
    schedule = Schedule(
        rounds=plan.planned_rounds + plan.closing,
        separation=plan.separation,
        cyclic=plan.pattern == "cyclic",
        closing=plan.closing,
        coordinates=coordinates,
        grid_bits=1,
        modulus_bits=modulus_bits,
        clip=float(plan.clip),
        noise=noise,
    )
    promise = replace(Promise.of(plan), rounds=schedule.rounds)
    mu = float(plan.round_mu(_FIRST)[0])

    def cost(bits: int) -> float:
        return run_cost(replace(schedule, grid_bits=bits), promise, mu)

    bits = _grid(plan, noise, coordinates, grid_bits, cost, promise, narrowest_noise(schedule))
    return replace(schedule, grid_bits=bits)


def propose_carried_round(
    schedule: Schedule,
    number: int,
    *,
    run: bytes,
    participants: Participants,
    following: Participants,
    previous: PreviousRound | None,
    release: Callable[[int, bytes], Beacon],
    account: CommittedAccount,
) -> RoundOpen:
    """Round `number` (from 0) of a run, unsigned: committed to, its beacon let out, its graphs good enough.

    participants  of this round: those that the round before was opened with as `following`
    following     of the next round, with the prekeys they will use up there; () in the last
    previous      `previous_of` the round before; None in the first
    release       (attempt, commitment) -> the beacon, which its holder lets out for this commitment alone
    account       anyone's, without participations: says whether clients accept the graphs that were drawn

    A scheduled run has one attempt at a round (`Schedule.check_terms`): a PrivacyError where it will not do.
    """
    terms = schedule.terms(run, number)
    beacon = release(0, commitment_of(terms, participants, following))
    opened = RoundOpen(terms, participants, beacon, cohorts=RoundCohorts(following, previous))
    try:
        account(agree(opened), account.colluders)
    except RemoteProtocolError as error:
        raise _no_graph(1, error.message) from None
    return opened
