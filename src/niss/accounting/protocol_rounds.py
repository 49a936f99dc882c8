"""Rounds of the protocol: their terms, a graph that keeps the promise, and what that costs a client.

`make_terms` turns a plan into terms, which are committed to before the beacon, and so before the graph, is known. The
residual noise is therefore taken with a margin over what several random graphs need. `propose_round` is the server's
side: it draws graphs until one keeps the promise to everyone. `Assessor` is a client's own view of a proposed round:
what would it cost me in the worst case? It is asked before anything is uploaded, and the answer holds for the graph
that was drawn, the colluders this client assumes, the edges a repair may reveal, and a server that lies about who
dropped out: it can have the committee reveal every edge of a client whose upload it holds, but then not that client's
self-mask, which must be strong enough alone. `charge_to` puts the cost into a ledger.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from niss.accounting.discretisation import (
    LEAST_STEPS,
    Draws,
    Promise,
    check_discretisation,
    is_wide_enough,
    require_wide_noise,
    round_grid_delta,
)
from niss.accounting.ledger import ChargeableLedger
from niss.accounting.plans import Plan
from niss.accounting.targets import RELATIONS, client_sensitivity, committee_threshold, split_failure
from niss.errors import ConfigError, LocalProtocolError, PrivacyError, RemoteProtocolError
from niss.graph import ShareGraph
from niss.mechanism.grid import Grid
from niss.methods import marginal_mu
from niss.protocol.agreement import Agreed, agree, participants_hash, terms_hash
from niss.protocol.messages import MODES, Beacon, Participant, RoundOpen, Terms
from niss.views import Corruption, WorstCase, calibrate_for, worst_case

Participants = tuple[Participant, ...]

# The grid of `make_terms` stays this far within what clients accept.
_WELL_WITHIN = 0.9
# The residual noise is at least this wide where wider noise would come too close to those limits.
_LEAST_LOG_STEPS = 4.0
# The residual noise covers the worst of this many graphs, and this much more.
_GRAPHS, _MARGIN = 3, 1.03
# A hair more than the promise needs, so that no client refuses for the last bit of a float.
SAME = 1.0 + 1e-9
_LOG_STEPS = 8.0
# From this ratio of variances on, rounding in the joint view counts.
_FAR_APART = 1e9
_BITS_WITHOUT_NOISE = 24
_FIRST = np.zeros(1, dtype=np.int64)
# A further attempt takes this much more noise than its predecessor lacked, and at most that much more.
_ATTEMPT_MARGIN, _ATTEMPT_MOST = 1.1, 10.0


def make_terms(
    plan: Plan,
    *,
    participants: int,
    coordinates: int,
    run: bytes,
    number: int,
    attempt: int = 0,
    mode: str = "tolerate",
    grid_bits: int | None = None,
    modulus_bits: int = 64,
) -> Terms:
    """The terms under which every participant keeps the plan's promise, with equal weights 1 / participants.

    The grid is chosen so that the residual noise is some hundred steps wide: narrower, rounding would cost
    privacy; much wider, the sampler's tiny distance from the Gaussian would. For a very large model it is finer: an
    entry of an update as long as the clip has to be a step long, or rounding would shorten the update; but never so
    fine that clients would refuse (`Assessor`).

    participants  how many take part
    coordinates   entries of an update
    run, number   whose round this is, and which
    mode          what happens after dropouts: `tolerate` or `repair`
    grid_bits     grid steps of 2^-grid_bits; None chooses
    modulus_bits  uploads are summed modulo 2^modulus_bits

    Raises ConfigError for a plan that the protocol cannot run.
    """
    if not plan.kind.has_protocol or plan.unit != "client" or isinstance(plan.epsilon, tuple):
        raise ConfigError("the protocol runs niss with one client-level target for all", field="plan")
    if plan.kind.carries:
        raise ConfigError(
            "the rounds of a run with carried shares follow from its schedule",
            field="plan",
            hint="make_schedule",
        )
    if mode not in MODES:
        raise ConfigError(f"unknown value {mode!r}", field="mode", hint="use one of: " + ", ".join(MODES))
    own = float((plan.sensitivity(1.0 / participants, 1.0) / plan.round_mu(_FIRST))[0]) ** 2
    unit = plan.kappa * own / plan.neighbours
    residual = _residual(plan, participants, unit, own)
    repairing = mode == "repair"
    committee, threshold = committee_of(plan, participants) if repairing else (0, 0)
    chosen = grid_bits
    if chosen is None:
        chosen = first_grid(residual, plan.clip / (participants * math.sqrt(coordinates)))
    terms = Terms(
        run=run,
        round=number,
        attempt=attempt,
        mode=mode,
        coordinates=coordinates,
        grid_bits=chosen,
        modulus_bits=modulus_bits,
        clip=float(plan.clip),
        neighbours=float(plan.neighbours),
        unit_variance=unit,
        residual_variance=residual,
        self_variance=max(own * SAME - residual, 0.0) if repairing else 0.0,
        revealed=plan.revealed if repairing else 0,
        dropped=plan.dropped if repairing else 0,
        committee=committee,
        threshold=threshold,
    )
    if grid_bits is not None and plan.calibrated:
        require_wide_noise(terms)
    if grid_bits is None and residual > 0.0:
        weight = max(1.0, plan.neighbours / (participants - 1))
        drawn = np.array([weight]), np.array([participants * math.ceil(plan.neighbours)])
        promise = Promise.of(plan)
        mu = float(plan.round_mu(_FIRST)[0])

        def cost(bits: int) -> float:
            return Draws.of(replace(terms, grid_bits=bits), participants, *drawn).cost(promise, mu)

        bits = fit_grid(cost, chosen, residual)
        if plan.calibrated and cost(bits) > 1.0:
            raise too_imprecise(coordinates, participants, promise)
        terms = replace(terms, grid_bits=bits)
    return terms


def committee_of(plan: Plan, participants: int) -> tuple[int, int]:
    """Size and threshold of the committee; raises `ConfigError` where too many of its members may collude."""
    size = min(plan.committee or participants, participants)
    _, failure = split_failure(plan.failure, drawn=plan.committee is not None)
    threshold = max(2, committee_threshold(participants, size, plan.colluders, failure))
    if threshold > size:
        raise ConfigError(
            f"all {size} members of the committee that repairs a round may collude",
            field="plan.committee",
            hint="a larger committee, or fewer colluders to be assumed",
        )
    return size, threshold


def fit_grid(cost: Callable[[int], float], bits: int, residual: float, narrowest: float | None = None) -> int:
    """At most that many bits, and as many as keep `cost` well within 1 while the residual noise is some steps wide.

    narrowest  variance of a noise that has to stay wide enough to count
    """

    def coarser(fewer: int) -> bool:
        grid, narrow = Grid(fewer), residual if narrowest is None else narrowest
        wide = grid.deviation_steps(residual) >= 2.0**_LEAST_LOG_STEPS
        return wide and grid.deviation_steps(narrow) >= LEAST_STEPS

    while cost(bits) > _WELL_WITHIN and coarser(bits - 1):
        bits -= 1
    return bits


def too_imprecise(coordinates: int, participants: int, promise: Promise) -> ConfigError:
    """No grid keeps what the sampler costs within its part of delta."""
    return ConfigError(
        f"{coordinates} numbers of {participants} participants over {promise.rounds} rounds are more than the "
        f"noise generator is precise enough for at epsilon = {promise.epsilon:g}, delta = {promise.delta:g}",
        field="plan",
        hint="a smaller epsilon or a larger delta, fewer rounds or neighbours, or a smaller model",
    )


def first_grid(residual: float, entry: float) -> int:
    """For a residual variance, and the root mean square of the entries of an update as long as the clip."""
    if residual == 0.0:
        return _BITS_WITHOUT_NOISE
    wide = _LOG_STEPS - math.log2(math.sqrt(residual))
    return max(1, min(60, math.ceil(max(wide, -math.log2(entry)))))


def _residual(plan: Plan, participants: int, unit: float, own: float) -> float:
    """eta^2: the given tau^2, or the most that a few random graphs need, with a margin."""
    if plan.tau2 is not None:
        if isinstance(plan.tau2, tuple):
            raise ConfigError("the protocol takes one tau2 for all", field="tau2")
        return float(plan.tau2 * unit * plan.neighbours)
    if plan.neighbours >= participants - 1:
        complete = ShareGraph.complete(participants, weight=plan.neighbours / (participants - 1))
        graphs, margin = [complete], SAME
    else:
        beacons = [hashlib.sha256(b"niss.terms" + bytes([number])).digest() for number in range(_GRAPHS)]
        graphs = [
            ShareGraph.regular(participants, degree=plan.neighbours, beacon=beacon) for beacon in beacons
        ]
        margin = _MARGIN
    needed = [
        calibrate_for(graph, plan.corruption, unit_variance=unit, target_variance=own)[0] for graph in graphs
    ]
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
) -> tuple[RoundOpen, float]:
    """The first attempt at round `number` whose graph costs no client more than `allowed`, and its mu.

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
    assess   (agreed, colluders) -> mu of the worst-off client: an `Assessor`
    allowed  the most that mu may be; infinite where nothing was promised

    Returns the unsigned opening of the round, and its mu. Raises PrivacyError where no attempt will do.
    """

    def propose(attempt: int, more: float) -> RoundOpen:
        participants = seat(attempt)
        common = terms(participants)
        drawn = replace(
            common, round=number, attempt=attempt, residual_variance=more * common.residual_variance
        )
        commitment = participants_hash(participants) + terms_hash(drawn)
        return RoundOpen(drawn, participants, release(attempt, commitment))

    return draw_round(propose, assess, attempts=plan.attempts, colluders=plan.colluders, allowed=allowed)


def draw_round(
    propose: Callable[[int, float], RoundOpen],
    assess: Callable[[Agreed, int], float],
    *,
    attempts: int,
    colluders: int,
    allowed: float,
) -> tuple[RoundOpen, float]:
    """The loop of `propose_round`: `propose(attempt, more)` takes `more` times the residual variance of the terms.

    A graph on which clients would refuse the round altogether is given up like one that costs too much.
    """
    more, least = 1.0, math.inf
    refusal: RemoteProtocolError | None = None
    for attempt in range(attempts):
        opened = propose(attempt, more)
        try:
            mu = assess(agree(opened), colluders)
        except RemoteProtocolError as error:
            refusal = error
            continue
        if mu <= allowed:
            return opened, mu
        least = min(least, mu)
        # Variance falls with mu^2, so this would do on the same graph; the margin allows for another one.
        more *= min(_ATTEMPT_MARGIN * (mu / allowed) ** 2, _ATTEMPT_MOST)
    why = f"the best would cost mu = {least:.4g}, {allowed:.4g} is allowed"
    if refusal is not None and least == math.inf:
        why = refusal.message
    raise PrivacyError(
        f"none of {attempts} graphs keeps the promise for every client: {why}",
        hint="more neighbours, a larger kappa, more participants, or fewer colluders to be assumed",
    )


class Assessor:
    """A function (round, colluders) -> mu of the worst-off client.

    relation  neighbouring updates, as in `Plan`
    failure   the probability with which bounds on colluding neighbours and members may fail, per graph, charged to
              delta elsewhere (`Plan.failure`)
    promise   to the client, over all rounds

    mu is that of ideal Gaussians. What a real sampler on a grid of the server's choice costs on top has to fit into the
    part of delta that is reserved for it, and terms under which it does not are refused (`RemoteProtocolError`): on too
    fine a grid noise would fall on a lattice coarser than the update.
    """

    def __init__(
        self, *, relation: str = "zero-out", failure: float = 0.0, promise: Promise | None = None
    ) -> None:
        if relation not in RELATIONS:
            raise ConfigError(
                f"unknown value {relation!r}", field="relation", hint="use one of: " + ", ".join(RELATIONS)
            )
        self._relation, self._failure = relation, failure
        self._promise = Promise() if promise is None else promise
        self._known: dict[tuple[bytes, int], tuple[float, WorstCase]] = {}

    def __call__(self, agreed: Agreed, colluders: int) -> float:
        return self._assessed(agreed, colluders)[0]

    def worst_case(self, agreed: Agreed, colluders: int) -> WorstCase:
        """What the answer rests on: the worst case over colluders, exact or a bound on it."""
        return self._assessed(agreed, colluders)[1]

    def _assessed(self, agreed: Agreed, colluders: int) -> tuple[float, WorstCase]:
        if agreed.terms.carrying is not None:
            raise LocalProtocolError(
                "what a round with carried shares costs depends on its whole run", hint="use a CarriedAccount"
            )
        key = agreed.digest, colluders
        if key not in self._known:
            self._known.clear()
            found = _worst_mu(agreed, colluders, self._relation, self._failure)
            check_discretisation(agreed, found[0], self._promise)
            self._known[key] = found
        return self._known[key]


def _worst_mu(agreed: Agreed, colluders: int, relation: str, failure: float) -> tuple[float, WorstCase]:
    terms = agreed.terms
    size = len(agreed.participants)
    if colluders > size - 2:
        raise RemoteProtocolError(f"{size} participants are too few against {colluders} colluders")
    repairing = terms.mode == "repair"
    if repairing:
        drawn = terms.committee < size
        failure, committee_failure = split_failure(failure, drawn=drawn)
        check_committee(terms, size, colluders, committee_failure)
    worst = worst_case(
        agreed.graph,
        Corruption(
            colluders=colluders,
            revealed=terms.revealed if repairing else 0,
            dropped=terms.dropped if repairing else 0,
            failure=failure,
        ),
        unit_variance=terms.unit_variance,
        residual_variance=terms.residual_variance,
        target_variance=1.0,
    )
    share = float(agreed.graph.weights.min()) * terms.unit_variance
    variance = worst.ratio if is_wide_enough(agreed, share) else terms.residual_variance
    if repairing:
        mask = terms.self_variance if is_wide_enough(agreed, terms.self_variance) else 0.0
        variance = min(variance, terms.residual_variance + mask)
    moved = RELATIONS[relation] * terms.clip / size
    return _rounded_up(agreed, moved / math.sqrt(variance)) if variance > 0.0 else math.inf, worst


def _rounded_up(agreed: Agreed, mu: float) -> float:
    """mu, and what rounding may have taken off it while the covariance was inverted.

    That is some units in the last place for each participant, times how far the variances are apart, which a server
    can make 10^13. In the terms of an honest server it stays below a millionth and is not counted.
    """
    terms, graph = agreed.terms, agreed.graph
    shares = 2.0 * terms.unit_variance * float(graph.weights.max()) * float(graph.degrees.max())
    apart = shares / terms.residual_variance if terms.residual_variance > 0.0 else math.inf
    return mu if apart < _FAR_APART else mu * (1.0 + graph.size * sys.float_info.epsilon * apart)


def check_committee(terms: Terms, size: int, colluders: int, failure: float) -> None:
    """A committee must be safe with as many colluders as this client assumes."""
    wanted = committee_threshold(size, terms.committee, colluders, failure)
    if terms.threshold < wanted:
        raise RemoteProtocolError(
            f"{terms.threshold} of the {terms.committee} members of the committee can repair the round, but {wanted} "
            f"must, if {colluders} of {size} participants collude",
            hint="a higher threshold, a larger committee, or fewer colluders to be assumed",
        )


def upload_mu(terms: Terms, participants: int, relation: str) -> float:
    """mu of one upload under these terms looked at alone, `Delta / sqrt(2 v sigma^2 + eta^2)`: the marginal view.

    A self-mask, which a repair takes out again, is not counted.
    """
    mu = marginal_mu(
        client_sensitivity(1.0 / participants, terms.clip, relation),
        unit_variance=terms.unit_variance,
        sent=terms.neighbours,
        received=terms.neighbours,
        residual_variance=terms.residual_variance,
    )
    return float(mu)


def charge_to(
    ledger: ChargeableLedger, client: str, *, relation: str, promise: Promise | None = None
) -> Callable[[Agreed, float], None]:
    """A function (round, mu of the joint view) that charges one client's ledger before it uploads, or refuses.

    ledger    where to: a `LedgerFile`, or whatever charges like one
    client    under which name
    relation  neighbouring updates, as in the client's `Assessor`
    promise   to the client: says what the grid costs, which goes into the basis of the charge
    """

    def charge(agreed: Agreed, mu: float) -> None:
        terms = agreed.terms
        marginal = upload_mu(terms, len(agreed.participants), relation)
        basis: dict[str, Any] = {"mode": terms.mode, "revealed": terms.revealed, "dropped": terms.dropped}
        if promise is not None and math.isfinite(mu):
            basis["grid_delta"] = round_grid_delta(agreed, promise)
        ledger.charge(terms.round, terms.attempt, {client: (mu, marginal)}, basis)

    return charge
