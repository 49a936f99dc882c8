"""Buying a joint-view promise as cheaply as possible.

Everything is counted in units of `sigma_k^2`, the noise a client would need if it stood alone: a trusted
server adds 1, DP-FedAvg adds m, secure aggregation with distributed noise 1 / (1 - rho). The planner finds
the strength of the shares (kappa) and the distortion (tau^2) that leave the least noise in the sum,

    (1 - q) m eta^2 + 2 kappa q (1 - q) m,        eta^2 = tau^2 kappa, q the share of clients that drop out,

while the worst-off client, with the worst colluders found, still has its full effective variance. The second
term is what dropped clients leave uncancelled in mode `tolerate`; in mode `repair` it is zero, but edges are
revealed to the server, which counts like collusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from niss.accounting.plan import Plan
from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.mechanism import gdp_epsilon
from niss.views import Corruption, WorstCase, calibrate_for, worst_case

FloatArray = NDArray[np.float64]

MODES = ("tolerate", "repair")
KAPPA_LIMIT = 100.0
# Stronger shares gain little and make every unforeseen dropout cost more: the least kappa this close to the best.
_GOOD_ENOUGH = 1.01
_NOMINAL_KAPPA = 4.0
_SPECTRAL_LIMIT = 2_000


@dataclass(frozen=True)
class TradeOff:
    """Aggregate noise at one kappa, in units of sigma_k^2: what is left by design, and by dropouts."""

    kappa: float
    residual: float
    dropout: float

    @property
    def total(self) -> float:
        return self.residual + self.dropout


@dataclass(frozen=True)
class Planned:
    """A plan and what it costs. Ratios are variances of the sum of all uploads.

    `sigma` is the deviation of the noise a client would need alone, on its upload `p_k x_k` with
    `p_k = 1 / participants`; `plan` calibrates tau^2 again for the graph of every round, and `tau2` is what
    a typical graph needs.
    """

    plan: Plan
    participants: int
    sigma: float
    tau2: float
    kappa: float
    neighbours: float
    epsilon_joint: float | None
    epsilon_marginal: float
    effective_variance_ratio: float
    aggregate_variance_ratio_to_central: float
    aggregate_variance_ratio_to_local: float
    aggregate_variance_ratio_ideal: float
    dropout_part: float
    mode: str
    worst: WorstCase
    curve: tuple[TradeOff, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Numbers and settings, ready for `json.dumps`."""
        values = asdict(self)
        values["curve"] = [{**asdict(point), "total": point.total} for point in self.curve]
        values["worst"] = {**asdict(self.worst), "colluders": len(self.worst.colluders)}
        # With derived seeds nothing is sent; the other two are the paper's ways of sending shares.
        values["bytes_per_client"] = {
            "shares derived from key agreement": 0,
            "shares sent as seeds": 32 * math.ceil(self.neighbours),
            "shares sent as vectors, per parameter": 4 * math.ceil(self.neighbours),
        }
        return values


def make_plan(
    *,
    participants: int,
    neighbours: float | None = None,
    clip: float = 1.0,
    epsilon: float = 3.0,
    delta: float = 1e-5,
    participations: int = 1,
    collusion: float = 0.0,
    dropout: float = 0.0,
    mode: str = "tolerate",
    kappa: float | None = None,
    tau2: float | None = None,
    relation: str = "zero-out",
    progress: Callable[[str], None] | None = None,
) -> Planned:
    """The cheapest plan for the target; with `tau2` given, what that tau^2 promises instead."""
    _check(participants, epsilon, collusion, dropout, mode, kappa)
    say = progress or (lambda _: None)
    colluders = math.ceil(collusion * participants - 1e-9)
    sent = float(neighbours) if neighbours is not None else _enough_neighbours(participants)
    complete = sent >= participants - 1
    revealed = dropped = 0
    if mode == "repair":
        revealed = _most_of(min(math.ceil(2 * sent), participants - 1), dropout, delta)
        dropped = _most_of(participants, dropout, delta)
    draft = Plan(
        clip=clip,
        epsilon=epsilon,
        delta=delta,
        participations=participations,
        relation=relation,
        neighbours=sent,
        graph="complete" if complete else "regular",
        kappa=kappa or _NOMINAL_KAPPA,
        tau2=tau2,
        colluders=colluders,
        revealed=revealed,
        dropped=dropped,
    )
    _require_room(draft, participants)
    graph = _typical_graph(draft, participants)
    say("looking for the worst colluders")
    if tau2 is not None:
        chosen = kappa or 1.0
        curve: tuple[TradeOff, ...] = ()
        found = _examine(graph, draft.corruption, chosen, sent, tau2)
        needed = tau2
    else:
        curve = _trade_off(graph, draft, sent, dropout, mode)
        chosen = kappa or _cheapest(curve)
        say(f"calibrating at kappa = {chosen:.3g}")
        needed, found = calibrate_for(
            graph, draft.corruption, unit_variance=chosen / sent, target_variance=1.0
        )
    return _report(draft, participants, chosen, needed, found, dropout, mode, curve)


def _report(
    draft: Plan,
    participants: int,
    kappa: float,
    tau2: float,
    found: WorstCase,
    dropout: float,
    mode: str,
    curve: tuple[TradeOff, ...],
) -> Planned:
    plan = Plan(**{**draft.__dict__, "kappa": kappa})
    everyone = np.arange(1)
    mu = float(plan.round_mu(everyone)[0])
    moved = float(plan.sensitivity(1.0 / participants, 1.0))
    residual = (1.0 - dropout) * participants * tau2 * kappa
    lost = 2.0 * kappa * dropout * (1.0 - dropout) * participants if mode == "tolerate" else 0.0
    total, local = residual + lost, (1.0 - dropout) * participants
    whole = mu * math.sqrt(plan.participations)
    notes = []
    if total >= local:
        notes.append(
            "No gain over DP-FedAvg: " + _what_binds(lost, residual, plan, found) + " leaves as much noise."
        )
    if not found.exact:
        notes.append(
            f"The worst case over colluders is the worst of {found.examined} sets searched, not of all."
        )
    if plan.corruption.failure:
        notes.append(
            f"{plan.delta - plan.gaussian_delta:.2g} of delta pays for rounds in which more neighbours collude "
            "than assumed."
        )
    return Planned(
        plan=plan,
        participants=participants,
        sigma=moved / mu,
        tau2=tau2,
        kappa=kappa,
        neighbours=plan.neighbours,
        epsilon_joint=_joint_epsilon(whole, found.ratio, plan.gaussian_delta),
        epsilon_marginal=gdp_epsilon(whole / math.sqrt(kappa * (2.0 + tau2)), plan.delta),
        effective_variance_ratio=found.ratio,
        aggregate_variance_ratio_to_central=total,
        aggregate_variance_ratio_to_local=total / local,
        aggregate_variance_ratio_ideal=1.0 / (1.0 - plan.colluders / participants),
        dropout_part=lost,
        mode=mode,
        worst=found,
        curve=curve,
        notes=tuple(notes),
    )


def _trade_off(graph: ShareGraph, plan: Plan, sent: float, dropout: float, mode: str) -> tuple[TradeOff, ...]:
    """The aggregate noise over kappa, against the opponent that is worst at a nominal kappa."""
    size = graph.size
    _, nominal = calibrate_for(
        graph, plan.corruption, unit_variance=_NOMINAL_KAPPA / sent, target_variance=1.0
    )
    needed = _residual_needed(graph, nominal, sent)
    points = []
    for kappa in np.geomspace(0.25, KAPPA_LIMIT, 53):
        residual = (1.0 - dropout) * size * needed(float(kappa))
        lost = 2.0 * kappa * dropout * (1.0 - dropout) * size if mode == "tolerate" else 0.0
        points.append(TradeOff(float(kappa), residual, float(lost)))
    return tuple(points)


def _residual_needed(graph: ShareGraph, opponent: WorstCase, sent: float) -> Callable[[float], float]:
    """eta^2 as a function of kappa for one client and one set of colluders.

    With equal residuals, `(Sigma^-1)_kk = sum_j u_jk^2 / (kappa lambda_j / v + eta^2)` over the eigenpairs of the
    honest Laplacian: one decomposition serves every kappa.
    """
    if graph.size > _SPECTRAL_LIMIT:
        return lambda kappa: kappa * _tau2_at(graph, opponent, kappa, sent)
    honest = np.setdiff1d(np.arange(graph.size), opponent.colluders)
    linked = ~np.isin(graph.senders, opponent.colluders) & ~np.isin(graph.receivers, opponent.colluders)
    kept = ShareGraph(
        graph.size,
        zip(
            graph.senders[linked].tolist(),
            graph.receivers[linked].tolist(),
            graph.weights[linked].tolist(),
            strict=True,
        ),
    )
    values, vectors = np.linalg.eigh(kept.laplacian()[np.ix_(honest, honest)])
    parts = vectors[int(np.searchsorted(honest, opponent.client))] ** 2
    values = np.maximum(values, 0.0)

    def needed(kappa: float) -> float:
        def shortfall(log_residual: float) -> float:
            return 1.0 - float(np.sum(parts / (kappa * values / sent + math.exp(log_residual))))

        return math.exp(float(brentq(shortfall, -math.log(graph.size) - 1.0, 1e-9)))

    return needed


def _tau2_at(graph: ShareGraph, opponent: WorstCase, kappa: float, sent: float) -> float:
    from niss.views.joint import effective_variance, least_tau2

    unit = kappa / sent

    def ratio(tau2: float) -> float:
        variance = effective_variance(
            graph,
            unit_variance=unit,
            residual_variance=tau2 * unit * graph.in_weight,
            colluders=opponent.colluders,
            clients=[opponent.client],
        )
        return float(variance[0])

    return least_tau2(graph, unit, np.ones(graph.size), np.arange(graph.size), ratio)


def _cheapest(curve: tuple[TradeOff, ...]) -> float:
    best = min(curve, key=lambda point: point.total)
    if best.dropout:
        return best.kappa
    return next(point.kappa for point in curve if point.total <= _GOOD_ENOUGH * best.total)


def _examine(graph: ShareGraph, corruption: Corruption, kappa: float, sent: float, tau2: float) -> WorstCase:
    residual = tau2 * kappa / sent * graph.in_weight
    return worst_case(
        graph, corruption, unit_variance=kappa / sent, residual_variance=residual, target_variance=1.0
    )


def _typical_graph(plan: Plan, participants: int) -> ShareGraph:
    if plan.graph == "complete":
        return ShareGraph.complete(participants, weight=plan.neighbours / (participants - 1))
    return ShareGraph.regular(participants, degree=plan.neighbours, beacon=b"niss.planner")


def _enough_neighbours(participants: int) -> float:
    """Complete for small rounds; else a few times the logarithm, where a random regular graph is dense enough."""
    return float(min(participants - 1, max(30, math.ceil(4.0 * math.log2(participants)))))


def _most_of(count: int, dropout: float, delta: float) -> int:
    """The most of `count` clients that drop out, but for one round in a million; beyond it a repair is refused."""
    from scipy.stats import binom

    return int(binom.isf(min(1e-6, delta), count, dropout)) if dropout else 0


def _joint_epsilon(mu: float, ratio: float, delta: float) -> float | None:
    return gdp_epsilon(mu / math.sqrt(ratio), delta) if ratio > 0.0 else None


def _what_binds(lost: float, residual: float, plan: Plan, found: WorstCase) -> str:
    if lost > residual:
        return "the dropout rate"
    return "collusion among few neighbours" if found.colluders and plan.graph == "regular" else "collusion"


def _require_room(plan: Plan, participants: int) -> None:
    known = plan.corruption.removed
    if known > participants - 2:
        parts = f"{plan.colluders} colluders"
        if plan.revealed:
            parts += f" and {plan.dropped} dropped clients with revealed edges"
        raise PrivacyError(
            f"infeasible: {parts} of {participants} participants leave nobody to share noise with",
            hint="the collusion (or, in repair, the dropout rate) binds: lower it, or let more clients take part",
        )


def _check(
    participants: int, epsilon: float, collusion: float, dropout: float, mode: str, kappa: float | None
) -> None:
    if participants < 2:
        raise ConfigError(f"a round needs at least two, not {participants}", field="participants")
    if not (math.isfinite(epsilon) and epsilon > 0.0):
        raise ConfigError(f"must be a finite number above 0, not {epsilon!r}", field="epsilon")
    for field, value in (("collusion", collusion), ("dropout", dropout)):
        if not 0.0 <= value < 1.0:
            raise ConfigError(
                f"must lie in [0, 1), not {value!r}", field=field, hint="a share of the participants"
            )
    if mode not in MODES:
        raise ConfigError(f"unknown value {mode!r}", field="mode", hint="use one of: " + ", ".join(MODES))
    if kappa is not None and not (math.isfinite(kappa) and kappa > 0.0):
        raise ConfigError(f"must be a finite number above 0, not {kappa!r}", field="kappa")
