"""Buying a joint-view promise as cheaply as possible.

Everything is counted in units of `sigma_k^2`, the noise a client would need if it stood alone: a trusted
server adds 1, DP-FedAvg adds m, secure aggregation with distributed noise 1 / (1 - rho). The planner finds
the strength of the shares (kappa) and the distortion (tau^2) that leave the least noise in the sum,

    (1 - q) m eta^2 + 2 kappa q (1 - q) m,        eta^2 = tau^2 kappa, q the share of clients that drop out,

while the worst-off client, with the worst colluders found, still has its full effective variance. The second
term is what dropped clients leave uncancelled in mode `tolerate`; in mode `repair` it is zero, but edges are
revealed to the server, which counts like collusion.

`plan` gives the plan alone, `forecast` also what it costs, and `plan_coalitions` compares groups that trust each other
inside and distrust everyone outside (the paper's IoT case) with one flat population. Shares stay within a group, so
only colluders inside it matter to its members, and each group has its own collusion share, kappa and tau^2. The noises
of the groups add up in the sum: with g groups a trusted server's 1 becomes at least g, which pays where the flat
population would have to assume many more colluders.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from niss.accounting.plans import Plan
from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.mechanism import gdp_epsilon
from niss.methods import draw_graph, marginal_mu
from niss.protocol.messages import MODES
from niss.views import WorstCase, calibrate_for, worst_case
from niss.views.collusion import least_tau2_against

FloatArray = NDArray[np.float64]

KAPPA_LIMIT = 100.0
# Stronger shares gain little and make every unforeseen dropout cost more: the least kappa this close to the best.
_GOOD_ENOUGH = 1.01
_NOMINAL_KAPPA = 4.0
_SPECTRAL_LIMIT = 2_000


@dataclass(frozen=True)
class TradeOff:
    """Aggregate noise at one kappa, in units of sigma_k^2.

    residual  what is left by design
    dropout   what dropped clients leave uncancelled
    """

    kappa: float
    residual: float
    dropout: float

    @property
    def total(self) -> float:
        return self.residual + self.dropout


@dataclass(frozen=True)
class PlanForecast:
    """A plan and what it costs. Ratios are variances of the sum of all uploads.

    plan                        calibrates tau^2 again for the graph of every round
    sigma                       deviation of the noise a client would need alone, on its upload x_k / participants
    tau2                        what a typical graph needs
    epsilon_joint               against a server that sees all uploads, with the assumed colluders; None: no guarantee
    epsilon_marginal            of one upload looked at alone, which is what the paper counts
    effective_variance_ratio    the worst-off client's effective variance over sigma^2
    aggregate_variance_ratio_*  noise in the sum, over that of a trusted server (`to_central`) and of DP-FedAvg
                                (`to_local`); `ideal` is what secure aggregation with distributed noise would reach
    dropout_part                how much of it dropped clients leave behind
    worst                       the client and the colluders that decide
    curve                       the noise in the sum over kappa
    notes                       what a reader has to know
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


def forecast(
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
) -> PlanForecast:
    """The cheapest plan for the target, and what it costs; with `tau2` given, what that tau^2 promises instead.

    participants    of a round
    neighbours      unit shares each sends; None: enough for a dense graph
    clip            L2 bound on an update
    epsilon, delta  the target of every client, over all its `participations`
    collusion       share of the participants that tell the server all they know
    dropout         share of the participants that vanish after the graph was fixed
    mode            what happens then: their noise stays in the sum (`tolerate`), or is taken out (`repair`)
    kappa           strength of the shares; None: the cheapest
    tau2            distortion of received shares; None: what the target needs
    relation        neighbouring updates, as in `Plan`
    progress        is told in a few words what is being computed

    Raises ConfigError for settings out of range, and PrivacyError where too few are left to share noise with.

    >>> planned = forecast(participants=30, epsilon=3.0, collusion=0.2, kappa=4.0)
    >>> round(planned.aggregate_variance_ratio_to_central, 2)
    1.46
    >>> planned.plan.colluders
    6
    """
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
    graph = draw_graph(draft.graph, range(participants), degree=sent, beacon=b"niss.planner")
    say("looking for the worst colluders")
    if tau2 is not None:
        chosen = replace(draft, kappa=kappa or 1.0)
        curve: tuple[TradeOff, ...] = ()
        unit = chosen.kappa / sent
        worst = worst_case(
            graph,
            draft.corruption,
            unit_variance=unit,
            residual_variance=tau2 * unit * graph.in_weight,
            target_variance=1.0,
        )
        needed = tau2
    else:
        curve = _trade_off(graph, draft, dropout, mode)
        chosen = replace(draft, kappa=kappa or _cheapest(curve))
        say(f"calibrating at kappa = {chosen.kappa:.3g}")
        needed, worst = calibrate_for(
            graph, draft.corruption, unit_variance=chosen.kappa / sent, target_variance=1.0
        )
    return _forecast(chosen, participants, needed, worst, dropout, mode, curve)


def plan(*, participants: int, **target: Any) -> Plan:
    """The cheapest plan for a target. `forecast` also tells what it costs, and says what the arguments mean.

    participants  of a round
    target        epsilon, delta, participations, collusion, dropout and the other arguments of `forecast`

    >>> plan(participants=30, epsilon=3.0, kappa=2.0).graph
    'complete'
    """
    return forecast(participants=participants, **target).plan


# Whoever asks for help sees the arguments themselves.
plan.__signature__ = inspect.signature(forecast).replace(return_annotation=Plan)  # type: ignore[attr-defined]


def _forecast(
    plan: Plan,
    participants: int,
    tau2: float,
    worst: WorstCase,
    dropout: float,
    mode: str,
    curve: tuple[TradeOff, ...],
) -> PlanForecast:
    mu = float(plan.round_mu(np.arange(1))[0])
    # Over all participations, in units of the noise a client would need alone.
    whole = mu * math.sqrt(plan.participations)
    noise = _noise_in_the_sum(plan.kappa, tau2 * plan.kappa, participants, dropout, mode)
    local = (1.0 - dropout) * participants
    return PlanForecast(
        plan=plan,
        participants=participants,
        sigma=float(plan.sensitivity(1.0 / participants, 1.0)) / mu,
        tau2=tau2,
        kappa=plan.kappa,
        neighbours=plan.neighbours,
        epsilon_joint=gdp_epsilon(whole / math.sqrt(worst.ratio), plan.gaussian_delta)
        if worst.ratio > 0.0
        else None,
        epsilon_marginal=gdp_epsilon(
            float(marginal_mu(whole, unit_variance=plan.kappa, sent=1.0, received=1.0, tau2=tau2)), plan.delta
        ),
        effective_variance_ratio=worst.ratio,
        aggregate_variance_ratio_to_central=noise.total,
        aggregate_variance_ratio_to_local=noise.total / local,
        aggregate_variance_ratio_ideal=1.0 / (1.0 - plan.colluders / participants),
        dropout_part=noise.dropout,
        mode=mode,
        worst=worst,
        curve=curve,
        notes=tuple(_notes(plan, worst, noise, local)),
    )


def _notes(plan: Plan, worst: WorstCase, noise: TradeOff, local: float) -> Iterator[str]:
    if noise.total >= local:
        binding = "collusion"
        if noise.dropout > noise.residual:
            binding = "the dropout rate"
        elif worst.colluders and plan.graph == "regular":
            binding = "collusion among few neighbours"
        yield f"No gain over DP-FedAvg: {binding} leaves as much noise."
    if not worst.exact:
        yield f"The worst case over colluders is the worst of {worst.examined} sets searched, not of all."
    if plan.corruption.failure:
        yield (
            f"{plan.delta - plan.gaussian_delta:.2g} of delta pays for rounds in which more neighbours collude "
            "than assumed."
        )


def _noise_in_the_sum(kappa: float, residual: float, size: int, dropout: float, mode: str) -> TradeOff:
    """In units of sigma_k^2, with a residual eta^2 in the same units."""
    lost = 2.0 * kappa * dropout * (1.0 - dropout) * size if mode == "tolerate" else 0.0
    return TradeOff(kappa, (1.0 - dropout) * size * residual, lost)


def _trade_off(graph: ShareGraph, plan: Plan, dropout: float, mode: str) -> tuple[TradeOff, ...]:
    """The aggregate noise over kappa, against the opponent that is worst at a nominal kappa."""
    _, nominal = calibrate_for(
        graph, plan.corruption, unit_variance=_NOMINAL_KAPPA / plan.neighbours, target_variance=1.0
    )
    needed = _residual_needed(graph, nominal, plan.neighbours)
    return tuple(
        _noise_in_the_sum(kappa, needed(kappa), graph.size, dropout, mode)
        for kappa in np.geomspace(0.25, KAPPA_LIMIT, 53).tolist()
    )


def _residual_needed(graph: ShareGraph, opponent: WorstCase, sent: float) -> Callable[[float], float]:
    """eta^2 as a function of kappa for one client and one set of colluders.

    With equal residuals, `(Sigma^-1)_kk = sum_j u_jk^2 / (kappa lambda_j / v + eta^2)` over the eigenpairs of the
    honest Laplacian: one decomposition serves every kappa.
    """
    if graph.size > _SPECTRAL_LIMIT:
        return lambda kappa: kappa * least_tau2_against(graph, [opponent], unit_variance=kappa / sent)
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


def _cheapest(curve: tuple[TradeOff, ...]) -> float:
    best = min(curve, key=lambda point: point.total)
    if best.dropout:
        return best.kappa
    return next(point.kappa for point in curve if point.total <= _GOOD_ENOUGH * best.total)


def _enough_neighbours(participants: int) -> float:
    """Complete for small rounds; else a few times the logarithm, where a random regular graph is dense enough."""
    return float(min(participants - 1, max(30, math.ceil(4.0 * math.log2(participants)))))


def _most_of(count: int, dropout: float, delta: float) -> int:
    """The most of `count` clients that drop out, but for one round in a million; beyond it a repair is refused."""
    from scipy.stats import binom

    return int(binom.isf(min(1e-6, delta), count, dropout)) if dropout else 0


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


@dataclass(frozen=True)
class Group:
    """`size` clients, of whom at most the share `collusion` tell the server what they know."""

    size: int
    collusion: float = 0.0


@dataclass(frozen=True)
class CoalitionPlan:
    """One plan per group, the plan of the same clients as one flat population, and the gain.

    All ratios are variances of the whole sum in units of what a trusted server would add.
    """

    groups: tuple[PlanForecast, ...]
    flat: PlanForecast
    aggregate_variance_ratio_to_central: float
    gain: float

    def to_json(self) -> dict[str, Any]:
        return {
            "groups": [group.to_json() for group in self.groups],
            "flat": self.flat.to_json(),
            "aggregate_variance_ratio_to_central": self.aggregate_variance_ratio_to_central,
            "gain": self.gain,
        }


def plan_coalitions(
    groups: Sequence[Group],
    *,
    flat_collusion: float,
    neighbours: float | None = None,
    **target: Any,
) -> CoalitionPlan:
    """Plan every group by itself, and all clients together at the collusion they must fear from strangers.

    groups          their sizes and the collusion to be feared inside each
    flat_collusion  the collusion to be feared in one flat population
    neighbours      unit shares each sends, within its group or anywhere; None: enough for a dense graph
    target          the other arguments of `forecast`
    """
    if not groups:
        raise ConfigError(
            "needs at least one group", field="groups", hint="for example groups=[Group(10), Group(20, 0.1)]"
        )
    everyone = sum(group.size for group in groups)
    flat = forecast(participants=everyone, neighbours=neighbours, collusion=flat_collusion, **target)
    planned = []
    for number, group in enumerate(groups):
        if group.size < 2:
            raise ConfigError(f"group {number} has {group.size} clients", field="groups", hint="two or more")
        within = None if neighbours is None else min(neighbours, group.size - 1)
        planned.append(
            forecast(participants=group.size, neighbours=within, collusion=group.collusion, **target)
        )
    # Each group's ratio is in units of one client's own noise, which is the same in every group.
    total = sum(plan.aggregate_variance_ratio_to_central for plan in planned)
    return CoalitionPlan(tuple(planned), flat, total, flat.aggregate_variance_ratio_to_central / total)
