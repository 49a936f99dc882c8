"""NISS: clients share noise over a graph, so that all of it but a small residual cancels in the sum.

With `v sigma^2 = kappa sigma_k^2` of shares sent, the same received, and a distortion tau^2 of what was received,

    one upload alone carries    sigma^2 (out_k + (1 + tau_k^2) in_k)        marginal view, the paper's
    the sum carries             sum_k tau_k^2 sigma^2 in_k                  the paper's Theorem 2
    client k is protected by    1 / (Sigma_H^-1)_kk                         joint view, `niss.views`

where `out_k` and `in_k` are the unit shares client k sends and receives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.mechanism import share_counts
from niss.mechanism.shares import Edges, distortion_named
from niss.methods.base import (
    FloatArray,
    IntArray,
    Method,
    Shares,
    UploadRows,
    mu_of,
    of_participants,
    server_adversary,
)
from niss.methods.distortions import why_no_bound
from niss.methods.look import BLUE, Look
from niss.randomness import SimStream
from niss.views import (
    EXACT_LIMIT,
    Corruption,
    WorstCase,
    calibrate_for,
    effective_variance,
    expected_bound,
    worst_case,
)

if TYPE_CHECKING:
    from niss.accounting.plans import Plan
    from niss.accounting.round_plans import RoundPlan

# Factors per coordinate can be accounted for in rounds of at most this many clients, and this many numbers.
_MOST_CLIENTS, _MOST_FACTORS = 40, 2e7
# What is lost to colluders among few neighbours, in units of 1 / kappa, is little up to this.
_LITTLE = 3.0


def marginal_variance(
    *,
    unit_variance: float,
    sent: ArrayLike,
    received: ArrayLike,
    tau2: ArrayLike = 0.0,
    residual_variance: ArrayLike = 0.0,
) -> FloatArray:
    """Noise variance of one upload looked at alone: `sigma^2 (sent + (1 + tau^2) received) + residual`.

    sent, received     unit shares (of variance `unit_variance`) that the client sends and receives
    tau2               distortion of what it receives; leave it out where the residual is given itself
    residual_variance  eta^2, the fresh noise that the client adds; with v shares each way, 2 v sigma^2 + eta^2
    """
    undistorted = np.asarray(sent) + (1.0 + np.asarray(tau2)) * np.asarray(received)
    return np.asarray(unit_variance * undistorted + np.asarray(residual_variance))


def marginal_mu(sensitivity: ArrayLike, **noise: Any) -> FloatArray:
    """mu of one upload looked at alone: `sensitivity / sqrt(marginal_variance(...))`, the only place that says so.

    `sensitivity` is how far one client can move its upload `p_k x_k`, in L2 norm: `p_k clip` where its update becomes
    zero, twice that where it becomes any other. The noise is that of `marginal_variance`, whose arguments it takes.
    """
    return mu_of(sensitivity, marginal_variance(**noise))


class Niss(Method):
    """Noise shares that cancel, with a residual that is calibrated for the joint view unless tau^2 is given.

    With strong shares (a large kappa) the sum carries about `sigma_k^2 / (1 - rho)` per coordinate against a share rho
    of colluders, where a trusted server would add `sigma_k^2`; no client has to trust the server. The colluders are
    fixed before the beacon, and so before the graph, is known; the graph is public.
    """

    name = "niss"
    look = Look(BLUE, "o")
    trusts = "that at most the assumed number of participants collude with the server"
    shares_noise = True
    has_protocol = True
    pays_for_grid = True
    carrying = "niss-carried"
    settings = frozenset(
        (
            "kappa",
            "neighbours",
            "graph",
            "groups",
            "distortion",
            "tau2",
            "colluders",
            "revealed",
            "dropped",
        )
    )

    def share(self, plan: Plan, participants: IntArray, own_variance: FloatArray, beacon: bytes) -> Shares:
        """The graph of the round, the unit variance `kappa min_k sigma_k^2 / v`, and tau^2.

        A client that needs more noise sends and receives in proportion, so that shares have one unit variance.
        """
        size, least = participants.size, float(own_variance.min())
        unit = plan.kappa * least / plan.neighbours
        counts = share_counts(plan.kappa * own_variance, unit)
        graph = draw_graph(
            plan.graph,
            participants.tolist(),
            degree=plan.neighbours,
            beacon=beacon,
            groups=plan.groups,
            shares=None if np.allclose(counts, counts[0], rtol=1e-12) else counts,
        )
        if plan.tau2 is None:
            # In units of the least own variance, where the same graph needs the same tau^2 for any epsilon.
            target = (own_variance / own_variance.min()).tobytes()
            common, opponent = _calibrated(graph, plan.corruption, plan.kappa / plan.neighbours, target)
            if opponent.alone:
                raise too_sparse(size, plan.neighbours, plan.corruption)
            return Shares(graph, unit, np.full(size, common), opponent)
        return Shares(graph, unit, np.array(of_participants(plan.tau2, participants, "tau2")))

    def add_client_noise(
        self,
        uploads: UploadRows,
        round_plan: RoundPlan,
        stream: SimStream,
        edges: Edges | None = None,
        *,
        keep_factors: bool | None = None,
    ) -> RoundPlan:
        graph = round_plan.graph
        if keep_factors is None:
            # One matrix of the cohort per coordinate.
            factors = graph.senders.size * uploads.shape[1]
            keep_factors = round_plan.participants.size <= _MOST_CLIENTS and factors <= _MOST_FACTORS
        scales = uploads.add_shares(
            graph if edges is None else edges,
            unit_variance=round_plan.unit_variance,
            tau2=round_plan.tau2,
            distortion=round_plan.plan.distortion,
            stream=stream,
            keep_factors=keep_factors,
        )
        return round_plan.with_scales(None if scales is None else scales.astype(np.float64))

    def joint_variance(self, round_plan: RoundPlan) -> FloatArray | None:
        """Exact without colluders, up to some thousand clients; else the worst ratio of any client, or a bound on it,
        for every client."""
        # Against colluders or reveals no worst case is computed for a multiplicative distortion.
        if _is_multiplied(round_plan):
            unknown = round_plan.scales is None or round_plan.plan.corruption.removed
            return None if unknown else self.variance_against(round_plan, ())
        worst = round_plan.worst
        return (
            self.variance_against(round_plan, ()) if worst is None else worst.ratio * round_plan.own_variance
        )

    def worst(self, round_plan: RoundPlan) -> WorstCase | None:
        assumed, size = round_plan.plan.corruption, round_plan.participants.size
        if assumed.removed == 0 and size <= EXACT_LIMIT:
            return None
        if round_plan.opponent is not None or distortion_named(round_plan.plan.distortion).multiplies:
            return round_plan.opponent
        return worst_case(
            round_plan.graph,
            assumed,
            unit_variance=round_plan.unit_variance,
            residual_variance=round_plan.residual_variance,
            target_variance=round_plan.own_variance,
        )

    def variance_against(self, round_plan: RoundPlan, colluders: Collection[int]) -> FloatArray:
        if _is_multiplied(round_plan) and round_plan.scales is None:
            raise ConfigError(
                "the factors of this round were not kept",
                field="keep_factors",
                hint="draw the round with them",
            )
        multiplied = distortion_named(round_plan.plan.distortion).multiplies
        return effective_variance(
            round_plan.graph,
            unit_variance=round_plan.unit_variance,
            residual_variance=0.0 if multiplied else round_plan.residual_variance,
            colluders=colluders,
            scales=round_plan.scales,
        )

    def marginal_variance(self, round_plan: RoundPlan) -> FloatArray:
        return marginal_variance(
            unit_variance=round_plan.unit_variance,
            sent=round_plan.graph.out_weight,
            received=round_plan.graph.in_weight,
            tau2=round_plan.tau2,
        )

    def left_over_variance(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> float:
        """`sum_{k here} tau_k^2 sigma^2 in_k`, and unless repaired `sum c_e sigma^2` over edges with one end lost."""
        if not absent:
            return float(round_plan.residual_variance.sum())
        here = np.ones(round_plan.participants.size, dtype=bool)
        here[list(absent)] = False
        graph = round_plan.graph
        left = float(round_plan.residual_variance[here].sum())
        if not repaired:
            crossing = here[graph.senders] != here[graph.receivers]
            left += round_plan.unit_variance * float(graph.weights[crossing].sum())
        return left

    def joint_mu(self, round_plan: RoundPlan, *, repairing: bool = False) -> FloatArray:
        """mu of the joint view; where rounds are repaired, also against a story that leaves the self-mask alone.

        A self-mask of `sigma_k^2 - residual` is in each upload until it is repaired (`niss.accounting.make_terms`), and
        a server that has a client's edges revealed is left with it and the residual: `max(sigma_k^2, residual)`.
        """
        mu = super().joint_mu(round_plan)
        if not repairing:
            return mu
        masked = np.sqrt(np.maximum(round_plan.own_variance, round_plan.residual_variance))
        return np.maximum(mu, round_plan.sensitivity / masked)

    def calibrated(self, plan: Plan) -> bool:
        return plan.tau2 is None

    def adversary(self, plan: Plan) -> str:
        return server_adversary(plan.colluders)

    def why_no_guarantee(self, plan: Plan) -> str:
        tau2 = plan.tau2 if isinstance(plan.tau2, tuple) else (plan.tau2,)
        if any(value != 0.0 for value in tau2):
            return why_no_bound(distortion_named(plan.distortion))
        return (
            "The noises of all uploads cancel exactly, so a server that knows the other updates subtracts them from "
            "the sum and is left with the bare one."
        )

    def caveats(self, plan: Plan) -> tuple[str, ...]:
        caveats = []
        if plan.colluders == 0:
            caveats.append("Clients that collude with the server are not counted here.")
        if plan.failure:
            caveats.append(
                f"{plan.failing_delta:.2g} of delta pays for graphs on which more neighbours of a client collude than "
                "the accountant assumes."
            )
        if plan.graph == "random":
            caveats.append(
                "In a random list clients receive unequal numbers of shares: the worst-off client decides the epsilon, "
                "and the aggregate variance differs from Theorem 2."
            )
        return tuple(caveats)

    def ledger_basis(self, plan: Plan) -> dict[str, Any]:
        return {"colluders": plan.colluders, "revealed": plan.revealed}


def _is_multiplied(round_plan: RoundPlan) -> bool:
    distortion = distortion_named(round_plan.plan.distortion)
    return distortion.multiplies and bool(np.any(round_plan.tau2 > 0.0))


def too_sparse(size: int, neighbours: float, corruption: Corruption) -> PrivacyError:
    """What to say where colluders could cut a client off from the others, so that its shares are worth nothing."""
    if corruption.removed == 0:
        return PrivacyError(
            f"with {neighbours:g} neighbours each, nothing is proved about how noise spreads among {size} participants",
            hint="let each send more shares (neighbours = 4)",
        )
    enough = enough_neighbours(size, corruption)
    hint = "use graph = 'complete', more participants, or fewer colluders"
    if enough < size - 1:
        hint = f"let each send {enough} shares (neighbours = {enough}), or use graph = 'complete'"
    return PrivacyError(
        f"with {neighbours:g} neighbours each, {corruption.removed} of {size} participants could cut a client off from "
        "the others' noise",
        hint=hint,
    )


def enough_neighbours(size: int, corruption: Corruption, least: int = 4) -> int:
    """The fewest neighbours, `least` or more, with which colluders cost little; `size - 1` where only all will do.

    Little: with shares of strength kappa, at most 3 / kappa of the noise a client would need alone.
    """
    degree = least
    while degree < (size - 1) / 2:
        if degree * expected_bound(size, float(degree), corruption).energy <= _LITTLE:
            return degree
        degree += max(1, degree // 8)
    return size - 1


def draw_graph(
    kind: str,
    members: Sequence[int],
    *,
    degree: float,
    beacon: bytes,
    groups: Sequence[Sequence[int]] = (),
    shares: FloatArray | None = None,
) -> ShareGraph:
    """The share graph of these participants, drawn from the beacon: the same for everyone who draws it.

    kind     one of `niss.graph.GRAPHS`
    members  the clients that take part, seat by seat
    degree   unit shares that a client sends, the one with the least noise where `shares` differ
    groups   for a coalition graph: the clients of each group
    shares   unit shares that each member sends, where they are not all alike

    Raises ConfigError where a member of a coalition graph has no partner in its group.
    """
    size = len(members)
    if kind == "coalition":
        seats = {client: seat for seat, client in enumerate(members)}
        seated = [[seats[client] for client in group if client in seats] for group in groups]
        seated = [group for group in seated if len(group) >= 2]
        single = size - sum(len(group) for group in seated)
        if single:
            raise ConfigError(
                f"{single} participants of this round have no partner in their group",
                field="groups",
                hint="let whole groups take part, or use graph = 'regular'",
            )
        return ShareGraph.coalition(size, groups=seated, degree=degree, beacon=beacon, shares=shares)
    if kind == "random":
        return ShareGraph.random(size, degree=degree, beacon=beacon, shares=shares)
    if kind == "complete":
        if shares is None:
            return ShareGraph.complete(size, weight=degree / (size - 1))
        degree = size - 1
    if shares is None:
        return _regular(size, degree, beacon)
    return ShareGraph.regular(size, degree=degree, beacon=beacon, shares=shares)


# Methods that are compared draw the same graph in the same round, and have the same worst case.
@lru_cache(maxsize=32)
def _regular(size: int, degree: float, beacon: bytes) -> ShareGraph:
    return ShareGraph.regular(size, degree=degree, beacon=beacon)


@lru_cache(maxsize=32)
def _calibrated(
    graph: ShareGraph, corruption: Corruption, unit: float, target: bytes
) -> tuple[float, WorstCase]:
    return calibrate_for(
        graph, corruption, unit_variance=unit, target_variance=np.frombuffer(target, dtype=np.float64)
    )
