"""Buying a joint-view promise as cheaply as possible.

Everything is counted in units of `sigma_k^2`, the noise a client would need if it stood alone: a trusted
server adds 1, DP-FedAvg adds m, secure aggregation with distributed noise 1 / (1 - rho). The planner finds
the strength of the shares (kappa) and the distortion (tau^2) that leave the least noise in the sum,

    (1 - q) m eta^2 + 2 kappa q (1 - q) m,        eta^2 = tau^2 kappa, q the share of clients that drop out,

while the worst-off client, whoever collude, still has its full effective variance (`niss.views.collusion`). The second
term is what dropped clients leave uncancelled in mode `tolerate`; in mode `repair` it is zero, but edges are
revealed to the server, which counts like collusion.

`plan` gives the plan alone, `forecast` also what it costs. A run whose noise is carried from round to round is planned
as a whole (`carry=True`), and compared with what trusted servers leave in the model (`niss.accounting.committed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, overload

import numpy as np

from niss.accounting.asked import Mode, PlanQuestion, Relation
from niss.accounting.calibration import (
    NOMINAL_KAPPA,
    CarriedSearch,
    NoiseNeeded,
    TradeOff,
    carrying_nothing,
    cheapest,
    is_drawn,
    noise_in_the_sum,
    safely_within,
    total_noise,
)
from niss.accounting.committed import Committed, banded_noise, best_noise, independent_noise
from niss.accounting.plans import Plan
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import Slots, gdp_epsilon, gdp_mu
from niss.methods import client_sensitivity, enough_neighbours, marginal_mu, too_sparse
from niss.settings import check
from niss.views import WorstCase

Progress = Callable[[str], None]

# Every step towards the best correlated noise costs T^3, so that longer runs would keep a reader waiting.
BEST_ROUNDS = 200
_NO_GAIN, _LITTLE_GAIN = 0.98, 0.75


@dataclass(frozen=True)
class PlanForecast:
    """A plan and what it costs. Ratios are variances of the sum of all uploads.

    plan                        calibrates tau^2 again for the graph of every round
    sigma                       deviation of the noise a client would need alone, on its part of the average; in the
                                record unit that of one trusted curator
    noise_multiplier            z of a round in the joint view: the deviation that the worst-off client or record has
                                left, over how far it can move the sum; None: no guarantee
    noise_share                 deviation of the noise in each coordinate of the average, over the clip
    tau2                        what a typical graph needs
    kappa                       strength of the shares
    epsilon_joint               against a server that sees all uploads, with the assumed colluders; None: no guarantee
    epsilon_marginal            of one upload looked at alone, which is what the paper counts
    effective_variance_ratio    the worst-off client's effective variance over sigma^2
    aggregate_variance_ratio_*  noise in the sum, over that of a trusted server (`to_central`) and of DP-FedAvg
                                (`to_local`); `ideal` is what secure aggregation with distributed noise would reach
    dropout_part                how much of it dropped clients leave behind
    mode, recommended_mode      what happens to dropouts, and what would leave less noise
    worst                       the client that decides, and colluders that do the most to it
    curve                       the noise in the sum over kappa
    notes                       what a reader has to know
    """

    plan: Plan
    participants: int
    sigma: float
    noise_multiplier: float | None
    noise_share: float
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
    recommended_mode: str
    worst: WorstCase
    curve: tuple[TradeOff, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Numbers and settings, ready for `json.dumps`."""
        values = asdict(self)
        values["curve"] = [{**asdict(point), "total": point.total} for point in self.curve]
        values["worst"]["colluders"] = len(self.worst.colluders)
        values["assumed"] = asdict(self.plan.assumed(self.participants))
        # With derived seeds nothing is sent; the other two are the paper's ways of sending shares.
        values["bytes_per_client"] = {
            "shares derived from key agreement": 0,
            "shares sent as seeds": 32 * math.ceil(self.neighbours),
            "shares sent as vectors, per parameter": 4 * math.ceil(self.neighbours),
        }
        return values


@dataclass(frozen=True)
class CarriedForecast:
    """A plan and what it costs. Ratios are variances in the model over those of trusted servers at the same mu.

    plan                                      in units of the squared `sensitivity` of one upload
    clients, epsilon, delta, dropout, mode    as asked
    participations                            the most of one client
    separation, carried_to_residual           as in the plan
    kappa                                     shares sent within a round over the noise a client would need alone
    model_variance_ratio_to_central_mean      on average over the rounds, over independent noise of a trusted server
    model_variance_ratio_to_central_final     the same for the final model
    model_variance_ratio_to_best              mean, over the best correlated noise of a trusted server (fixed cyclic
                                              cohorts); None for long runs, where it is not computed
    noise, noise_central, noise_banded        in the model after each round: ours, a trusted server's independent noise,
                                              and its banded square root (BandMF)
    noise_best                                the same of the best correlated noise; None where it is not computed
    notes                                     what a reader has to know
    """

    plan: Committed
    sensitivity: float
    clients: int
    epsilon: float
    delta: float
    dropout: float
    mode: str
    mu: float
    participations: int
    separation: int
    carried_to_residual: float
    kappa: float
    model_variance_ratio_to_central_mean: float
    model_variance_ratio_to_central_final: float
    model_variance_ratio_to_best: float | None
    noise: tuple[float, ...]
    noise_central: tuple[float, ...]
    noise_banded: tuple[float, ...]
    noise_best: tuple[float, ...] | None
    notes: tuple[str, ...]

    @property
    def residual(self) -> float:
        """Variance of the fresh noise in the sum of a round."""
        return self.plan.noise.participants * self.plan.noise.residual * self.sensitivity**2

    def to_json(self) -> dict[str, Any]:
        """Numbers and settings, ready for `json.dumps`."""
        return asdict(self)


@overload
def forecast(*, carry: Literal[True], progress: Progress | None = None, **asked: Any) -> CarriedForecast: ...


@overload
def forecast(
    *, carry: Literal[False] = False, progress: Progress | None = None, **asked: Any
) -> PlanForecast: ...


def forecast(
    *, carry: bool = False, progress: Progress | None = None, **asked: Any
) -> PlanForecast | CarriedForecast:
    """The cheapest plan for the target, and what it costs; with `tau2` given, what that tau^2 promises instead.

    carry     noise is carried from round to round, and the run is planned as a whole; else each round on its own
    progress  is told in a few words what is being computed
    asked     the fields of `PlanQuestion`, of which `participants` must be given

    An upload is `x_k / participants`, so variances are those of the average. Raises ConfigError for settings out of
    range, and PrivacyError where too few are left to share noise with, or where the graph is too sparse for the
    colluders.

    >>> planned = forecast(participants=30, epsilon=3.0, collusion=0.2, kappa=4.0)
    >>> round(planned.aggregate_variance_ratio_to_central, 2)
    1.46
    >>> planned.plan.assumed(30).colluders
    6
    >>> planned = forecast(participants=100, clients=1000, rounds=100, collusion=0.2, carry=True)
    >>> planned.plan.noise.colluders, round(planned.model_variance_ratio_to_central_mean, 2)
    (20, 0.28)
    """
    question = check(PlanQuestion, {**asked, "carry": carry})
    say = progress or (lambda _: None)
    return _carried(question, say) if carry else _within_rounds(question, say)


def plan(
    *,
    participants: int,
    unit: Literal["client", "record"] = "client",
    records: int | None = None,
    batch: float | None = None,
    neighbours: float | None = None,
    clip: float = 1.0,
    epsilon: float = 3.0,
    delta: float = 1e-5,
    rounds: int | None = None,
    participations: int | None = None,
    clients: int | None = None,
    collusion: float = 0.0,
    dropout: float = 0.0,
    mode: Literal["tolerate", "repair"] | None = None,
    kappa: float | None = None,
    tau2: float | None = None,
    relation: Relation = "zero-out",
) -> Plan:
    """The cheapest plan for a target: what is asked as in `PlanQuestion`. `forecast` also tells what it costs.

    >>> plan(participants=30, epsilon=3.0, kappa=2.0).graph
    'complete'
    """
    return forecast(**locals(), carry=False).plan


def _within_rounds(question: PlanQuestion, say: Progress) -> PlanForecast:
    size, mode, dropout = question.participants, question.planned_mode, question.dropout
    draft = _draft(question, mode)
    say("bounding what colluders can do")
    needed = NoiseNeeded(draft, size)
    curve = needed.curve() if question.tau2 is None else ()
    plan = replace(draft, kappa=question.kappa or (cheapest(curve) if curve else 1.0))
    say(f"calibrating at kappa = {plan.kappa:.3g}")
    if question.tau2 is None:
        tau2, worst = needed.calibrated(plan.kappa)
        if worst.alone:
            raise too_sparse(size, plan.neighbours, needed.assumed)
    else:
        tau2, worst = question.tau2, needed.worst(plan.kappa, question.tau2)
    better: str = mode
    if curve and question.kappa is None and dropout:
        better = _better_mode(question, min(curve, key=total_noise).total)
    mu = float(plan.round_mu(np.arange(1))[0])
    # Of one round, in units of the noise a client would need alone.
    alone = float(marginal_mu(mu, unit_variance=plan.kappa, sent=1.0, received=1.0, tau2=tau2))
    promised = mu / math.sqrt(worst.ratio) if worst.ratio > 0.0 else None
    noise = noise_in_the_sum(plan, size, plan.kappa, tau2 * plan.kappa)
    local, sigma = (1.0 - dropout) * size, float(plan.sensitivity(1.0 / plan.divisor(size), 1.0)) / mu
    return PlanForecast(
        plan=plan,
        participants=size,
        sigma=sigma,
        noise_multiplier=None if promised is None else 1.0 / promised,
        noise_share=sigma * math.sqrt(noise.total) / plan.clip,
        tau2=tau2,
        kappa=plan.kappa,
        neighbours=plan.neighbours,
        epsilon_joint=None if promised is None else _epsilon_of(plan, promised, plan.gaussian_delta),
        epsilon_marginal=_epsilon_of(plan, alone, plan.delta),
        effective_variance_ratio=worst.ratio,
        aggregate_variance_ratio_to_central=noise.total,
        aggregate_variance_ratio_to_local=noise.total / local,
        aggregate_variance_ratio_ideal=1.0 / (1.0 - needed.assumed.colluders / size),
        dropout_part=noise.dropout,
        mode=mode,
        recommended_mode=better,
        worst=worst,
        curve=curve,
        notes=tuple(_notes(plan, size, worst, noise, (mode, better), gains=noise.total < local)),
    )


def _epsilon_of(plan: Plan, mu: float, delta: float) -> float:
    """What all rounds come to that cost so much each, and in the record unit have secret batches."""
    if plan.batch is not None:
        return Slots.of((plan.batch, 1.0 / mu, plan.participations)).epsilon(delta)
    return gdp_epsilon(mu * math.sqrt(plan.participations), delta)


def _notes(
    plan: Plan, participants: int, worst: WorstCase, noise: TradeOff, modes: tuple[str, str], *, gains: bool
) -> Iterator[str]:
    """`modes`: the one that was asked for, and the one that leaves less noise."""
    if not gains:
        binding = "collusion"
        if noise.dropout > noise.residual:
            binding = "the dropout rate"
        elif worst.colluders and plan.graph == "regular":
            binding = "collusion among few neighbours"
        yield f"No gain over DP-FedAvg: {binding} leaves as much noise."
    if modes[0] != modes[1]:
        yield f"mode = {modes[1]!r} would leave less noise in the sum than {modes[0]!r} at this dropout rate."
    if not worst.exact and plan.assumed(participants).removed:
        yield "What colluders can do is bounded by a proof that covers every placement, not searched for."
    if plan.graph != "complete" and not is_drawn(participants, plan.neighbours):
        yield (
            "For a round this large the noise is that of the graph to be expected; the graph of every round is "
            "examined when it is drawn."
        )
    if plan.failure:
        drawn = 0 < plan.assumed(participants).committee < participants
        where = "neighbours or members of a committee" if drawn else "neighbours"
        yield f"{plan.failing_delta:.2g} of delta pays for graphs on which more {where} collude than assumed."


def _draft(question: PlanQuestion, mode: Mode) -> Plan:
    """The plan but for kappa, with the graph that what may be revealed needs."""
    size, often = question.participants, question.planned_participations

    def with_neighbours(sent: float) -> Plan:
        return Plan(
            unit=question.unit,
            batch=question.batch,
            records=question.records,
            clip=question.clip,
            epsilon=question.epsilon,
            delta=question.delta,
            relation=question.relation,
            participations=often,
            chain_rounds=question.rounds if often < (question.rounds or 0) else None,
            collusion=question.collusion,
            dropout=question.dropout,
            mode=mode,
            tau2=question.tau2,
            neighbours=sent,
            graph="complete" if sent >= size - 1 else "regular",
            kappa=NOMINAL_KAPPA,
        )

    if question.neighbours is not None:
        if question.neighbours > size - 1:
            raise ConfigError(
                f"a round of {size} has only {size - 1} others to send shares to, not {question.neighbours:g}",
                field="neighbours",
                hint=f"at most {size - 1}, which is everyone; left out, the planner chooses",
            )
        return with_neighbours(question.neighbours)
    # What may be revealed grows with the degree, and the degree with what may be revealed.
    sent = min(size - 1, max(30, math.ceil(4.0 * math.log2(size))))
    while sent < size - 1:
        plan = with_neighbours(float(sent))
        needed = enough_neighbours(size, plan.assumed(size), sent)
        if needed == sent:
            return plan
        sent = needed
    return with_neighbours(float(size - 1))


def _better_mode(question: PlanQuestion, total: float) -> str:
    """The mode that leaves less noise in the sum, each with its own cheapest kappa."""
    mode = question.planned_mode
    other: Mode = "repair" if mode == "tolerate" else "tolerate"
    try:
        noise = NoiseNeeded(_draft(question, other), question.participants)
        least = min(noise.curve(), key=total_noise).total
    except PrivacyError:
        return mode
    return other if least < total else mode


def _carried(question: PlanQuestion, say: Progress) -> CarriedForecast:
    """The run that leaves least noise in the model."""
    size, dropout, repaired = question.participants, question.dropout, question.planned_mode == "repair"
    assert question.clients is not None
    assert question.rounds is not None
    # What is no target is refused in the caller's own numbers.
    gdp_mu(question.epsilon, question.delta)
    # Who stays out for longer than the run takes part once, as it does where it stays out for all of it.
    apart = _separation(size, question.clients, question.separation, question.pattern)
    apart = min(apart, max(question.rounds, 2))
    plan = Plan(
        method="niss-carried",
        graph="complete",
        epsilon=question.epsilon,
        delta=question.delta,
        participations=math.ceil(question.rounds / apart),
        horizon=question.rounds,
        separation=apart,
        pattern=question.pattern,
        closing=question.closing,
        collusion=question.collusion,
        dropout=dropout,
        mode=question.planned_mode,
    )
    search = CarriedSearch.of(plan, size, goal=question.goal)
    ratio = question.carried_to_residual
    chosen = search.at(question.kappa, ratio) if question.kappa else search.cheapest(ratio, say)
    run = safely_within(chosen, search.mu**2)
    say("comparing with trusted servers")
    sensitivity = float(client_sensitivity(1.0 / size, question.clip, question.relation))
    unit, length = (sensitivity / search.mu) ** 2, question.rounds
    whole = sensitivity**2 * run.noise_in_model(dropout, repaired=repaired)
    ours, central = whole[:length], unit * independent_noise(length, apart)
    best = unit * best_noise(length, apart) if length <= BEST_ROUNDS else None
    return CarriedForecast(
        plan=run,
        sensitivity=sensitivity,
        clients=question.clients,
        epsilon=question.epsilon,
        delta=question.delta,
        dropout=dropout,
        mode=question.planned_mode,
        mu=run.mu,
        participations=plan.participations,
        separation=apart,
        carried_to_residual=run.noise.carried / run.noise.residual,
        kappa=run.noise.spatial / (2.0 * search.alone),
        model_variance_ratio_to_central_mean=float(ours.mean() / central.mean()),
        model_variance_ratio_to_central_final=float(whole[-1] / central[-1]),
        model_variance_ratio_to_best=None if best is None else float(ours.mean() / best.mean()),
        noise=tuple(ours.tolist()),
        noise_central=tuple(central.tolist()),
        noise_banded=tuple((unit * banded_noise(length, apart)).tolist()),
        noise_best=None if best is None else tuple(best.tolist()),
        notes=tuple(_carried_notes(run, search)),
    )


def _carried_notes(run: Committed, search: CarriedSearch) -> Iterator[str]:
    if run.separation == 1:
        yield "Everyone takes part in every round: carrying noise to the next round hides nothing."
    else:
        nothing = carrying_nothing(search, run.noise.spatial / (2.0 * search.alone))
        left = search.objective(run) / search.objective(nothing)
        cause = "the run is short"
        if search.dropout:
            taken_out = search.repaired and run.noise.dropped
            cause = "repairs may reveal much of it" if taken_out else "dropouts leave it in the model"
        if left > _NO_GAIN:
            yield f"Carrying noise gains less than 2 %: {cause}."
        elif left > _LITTLE_GAIN:
            yield f"Carrying noise takes only {100.0 * (1.0 - left):.0f} % of it out: {cause}."
    repaired = replace(search, repaired=True)
    if not search.repaired and search.objective(run) > 2.0 * repaired.objective(run):
        yield "Most of the noise is what dropped clients leave of their shares within a round: repair pays."
    if not run.worst.exact:
        yield "The budget is a safe bound on the costliest pattern, not its exact cost."
    if run.horizon > BEST_ROUNDS:
        yield f"The best correlated noise is computed for up to {BEST_ROUNDS} rounds."
    yield "A server that adapts its steps to what it has seen (Adam) keeps the promise but loses the gain."


def _separation(participants: int, clients: int, asked: int | None, pattern: str) -> int:
    """How many rounds clients stay away for, and one more."""
    if clients < participants:
        raise ConfigError(
            f"{clients} clients cannot fill a round of {participants}",
            field="clients",
            hint="more clients, or fewer in a round",
        )
    filled = clients // participants
    if asked is None and pattern == "cyclic" and clients % participants:
        raise ConfigError(
            f"{clients} clients do not make whole cohorts of {participants}",
            field="clients",
            hint=f"plan for {filled * participants} or {(filled + 1) * participants} clients, or let them come back "
            f'in any pattern at least {filled} rounds apart (pattern "any")',
        )
    spread = filled if asked is None else asked
    if not 1 <= spread <= filled:
        raise ConfigError(
            f"{clients} clients fill {filled} rounds of {participants}, so nobody can stay away for {spread - 1}",
            field="separation",
            hint="more clients, fewer in a round, or a shorter separation",
        )
    return spread
