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
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from niss.accounting.asked import Mode, PlanQuestion, Relation, Target, Trust
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
)
from niss.accounting.committed import Committed, banded_noise, best_noise, independent_noise
from niss.accounting.plans import Plan
from niss.claims import digits
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import Slots, gdp_epsilon, gdp_mu
from niss.methods import client_sensitivity, enough_neighbours, marginal_mu, too_sparse
from niss.settings import check
from niss.views import WorstCase

Progress = Callable[[str], None]

# Every step towards the best correlated noise costs T^3, so that longer runs would keep a reader waiting.
BEST_ROUNDS = 200
_NO_GAIN, _LITTLE_GAIN = 0.98, 0.75
# The part of the noise in a model that a round of training keeps, where that is weighed: a rule of thumb. With what is
# carried by it, MNIST at epsilon 1 (100 of 1,000) was 1.5 points better on the way and 1.2 worse in the end.
_KEPT = 0.97
# So many of the last models are averaged, in what is said about a run that ends early.
_AVERAGED = 5


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A plan and what it costs, judged round by round or, where it carries noise, as a whole run. Ratios are variances.

    plan                        with all that was left to choose; a tau^2 is calibrated again for the graph of every
                                round
    participants, clients       of a round; of the run, where they were asked for
    run                         what a run that carries noise commits to; None: nothing is carried
    sigma                       deviation of the noise a client would need alone, on its part of the average; in the
                                record unit that of one trusted curator
    tau2                        what a typical graph needs
    epsilon_joint               against a server that sees all uploads, with the assumed colluders; None: no guarantee
    aggregate_variance_ratio_to_central
                                noise in the model, on average over the rounds, over that of a trusted server with fresh
                                noise in every round; ratio_to_central_final: the same for the final model
    ratio_to_local, _ideal      the former over that of DP-FedAvg; what secure aggregation with distributed noise would
                                reach
    notes                       what a reader has to know

    Where nothing is carried:

    noise_multiplier            z of a round in the joint view: the deviation that the worst-off client or record has
                                left, over how far it can move the sum; None: no guarantee
    epsilon_marginal            of one upload looked at alone, which is what the paper counts
    effective_variance_ratio    the worst-off client's effective variance over sigma^2
    dropout_part                how much of the noise dropped clients leave behind
    recommended_mode            what would leave less noise, where clients drop out
    worst                       the client that decides, and colluders that do the most to it
    curve                       the noise in the sum over kappa

    Where noise is carried:

    over_rounds                 noise in the model after each round: ours (`niss`), a trusted server's independent noise
                                (`central`), BandMF (`banded`) and the best correlated noise (`best`, for fixed cyclic
                                cohorts), which is not computed for long runs
    ratio_to_best               mean, over that best
    ratio_to_central_early      noise in the model one round before the end, where what is carried is still in it, over
                                that of a trusted server with fresh noise; None in a run of one round
    ratio_to_central_averaged   the same of the mean of the last five models up to there, or as many as there are
    """

    plan: Plan
    participants: int
    clients: int | None = None
    run: Committed | None = None
    sigma: float
    tau2: float
    epsilon_joint: float | None
    aggregate_variance_ratio_to_central: float
    ratio_to_central_final: float
    ratio_to_local: float
    ratio_ideal: float
    notes: tuple[str, ...]
    noise_multiplier: float | None = None
    epsilon_marginal: float | None = None
    effective_variance_ratio: float | None = None
    dropout_part: float | None = None
    recommended_mode: str | None = None
    worst: WorstCase | None = None
    curve: tuple[TradeOff, ...] = ()
    over_rounds: dict[str, tuple[float, ...]] = field(default_factory=dict)
    ratio_to_best: float | None = None
    ratio_to_central_early: float | None = None
    ratio_to_central_averaged: float | None = None

    @property
    def residual(self) -> float:
        """Variance of the fresh noise in the average of a round."""
        return self.participants * self.tau2 * self.plan.kappa * self.sigma**2

    @property
    def noise_share(self) -> float:
        """Deviation of the noise in each coordinate of the average, over the clip."""
        return self.sigma * math.sqrt(self.aggregate_variance_ratio_to_central) / self.plan.clip

    def to_json(self) -> dict[str, Any]:
        """Numbers and settings, ready for `json.dumps`."""
        values = asdict(self)
        values["curve"] = [{**asdict(point), "total": point.total} for point in self.curve]
        if self.worst is not None:
            values["worst"]["colluders"] = len(self.worst.colluders)
        values["assumed"] = asdict(self.plan.assumed(self.participants))
        # With derived seeds nothing is sent; the other two are the paper's ways of sending shares.
        sent = math.ceil(self.plan.neighbours)
        values["bytes_per_client"] = {
            "shares derived from key agreement": 0,
            "shares sent as seeds": 32 * sent,
            "shares sent as vectors, per parameter": 4 * sent,
        }
        return values


def forecast(*, progress: Progress | None = None, **asked: Any) -> Forecast:
    """The cheapest plan for the target, and what it costs; with `tau2` given, what that tau^2 promises instead.

    progress  is told in a few words what is being computed
    asked     the fields of `PlanQuestion`, of which `participants` must be given; with `carry` noise is carried from
              round to round and the run is planned as a whole, else each round on its own

    An upload is `x_k / participants`, so variances are those of the average. Raises ConfigError for settings out of
    range, and PrivacyError where too few are left to share noise with, or where the graph is too sparse for the
    colluders.

    >>> planned = forecast(participants=30, epsilon=3.0, collusion=0.2, kappa=4.0)
    >>> round(planned.aggregate_variance_ratio_to_central, 2)
    1.46
    >>> planned.plan.assumed(30).colluders
    6
    >>> planned = forecast(participants=100, clients=1000, rounds=100, collusion=0.2, carry=True)
    >>> planned.plan.assumed(100).colluders, round(planned.aggregate_variance_ratio_to_central, 2)
    (20, 0.28)
    """
    question = check(PlanQuestion, asked)
    return (_carried if question.carry else _within_rounds)(question, progress or (lambda _: None))


def plan(
    *,
    participants: int,
    unit: Literal["client", "record"] = "client",
    records: int | None = None,
    batch: float | None = None,
    neighbours: int | None = None,
    clip: float = 1.0,
    epsilon: float = 3.0,
    delta: float = 1e-5,
    rounds: int | None = None,
    participations: int | None = None,
    clients: int | None = None,
    collusion: float = 0.0,
    dropout: float = 0.0,
    mode: Mode = "planned",
    kappa: float | None = None,
    tau2: float | None = None,
    relation: Relation = "zero-out",
) -> Plan:
    """The cheapest plan for a target: what is asked as in `PlanQuestion`. `forecast` also tells what it costs.

    >>> plan(participants=30, epsilon=3.0, kappa=2.0).graph
    'complete'
    """
    return forecast(**locals()).plan


def _within_rounds(question: PlanQuestion, say: Progress) -> Forecast:
    size, dropout = question.participants, question.dropout
    draft = _draft(question)
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
    better = plan.mode
    if curve and question.kappa is None and dropout:
        better = _better_mode(question, plan.mode, min(point.total for point in curve))
    mu = float(plan.round_mu(np.arange(1))[0])
    # Of one round, in units of the noise a client would need alone.
    alone = float(marginal_mu(mu, unit_variance=plan.kappa, sent=1.0, received=1.0, tau2=tau2))
    promised = mu / math.sqrt(worst.ratio) if worst.ratio > 0.0 else None
    noise = noise_in_the_sum(plan, size, plan.kappa, tau2 * plan.kappa)
    local, sigma = (1.0 - dropout) * size, float(plan.sensitivity(1.0 / plan.divisor(size), 1.0)) / mu
    return Forecast(
        plan=plan,
        participants=size,
        clients=question.clients,
        sigma=sigma,
        tau2=tau2,
        epsilon_joint=None if promised is None else _epsilon_of(plan, promised, plan.gaussian_delta),
        aggregate_variance_ratio_to_central=noise.total,
        ratio_to_central_final=noise.total,
        ratio_to_local=noise.total / local,
        ratio_ideal=_ideal(needed.assumed.colluders, size),
        notes=tuple(_notes(plan, size, worst, noise, better, gains=noise.total < local)),
        noise_multiplier=None if promised is None else 1.0 / promised,
        epsilon_marginal=_epsilon_of(plan, alone, plan.delta),
        effective_variance_ratio=worst.ratio,
        dropout_part=noise.dropout,
        recommended_mode=better,
        worst=worst,
        curve=curve,
    )


def _ideal(colluders: int, size: int) -> float:
    """The noise of secure aggregation to which every client adds its part, over that of a trusted server."""
    return 1.0 / (1.0 - colluders / size)


def _epsilon_of(plan: Plan, mu: float, delta: float) -> float:
    """What all rounds come to that cost so much each, and in the record unit have secret batches."""
    if plan.batch is not None:
        return Slots.of((plan.batch, 1.0 / mu, plan.turns)).epsilon(delta)
    return gdp_epsilon(mu * math.sqrt(plan.turns), delta)


def _notes(
    plan: Plan, participants: int, worst: WorstCase, noise: TradeOff, better: str, *, gains: bool
) -> Iterator[str]:
    """`better`: the mode that leaves less noise."""
    if not gains:
        binding = "collusion"
        if noise.dropout > noise.residual:
            binding = "the dropout rate"
        elif worst.colluders and plan.graph == "regular":
            binding = "collusion among few neighbours"
        yield f"No gain over DP-FedAvg: {binding} leaves as much noise."
    if better != plan.mode:
        yield f"mode = {better!r} would leave less noise in the sum than {plan.mode!r} at this dropout rate."
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
        yield f"{digits(plan.failing_delta, 2)} of delta pays for graphs on which more {where} collude than assumed."


def _asked(question: PlanQuestion) -> Plan:
    """What is asked, as far as a plan says it too."""
    parts = [one.name for part in (Target, Trust) for one in fields(part)]
    same = {name: getattr(question, name) for name in (*parts, "tau2") if hasattr(question, name)}
    plan = Plan(participations=question.planned_participations, horizon=question.rounds, **same)
    return replace(plan, mode=plan.settled_mode)


def _draft(question: PlanQuestion) -> Plan:
    """The plan but for kappa, with the graph that what may be revealed needs."""
    size = question.participants

    def with_neighbours(sent: int) -> Plan:
        graph = "complete" if sent >= size - 1 else "regular"
        return replace(_asked(question), neighbours=sent, graph=graph, kappa=NOMINAL_KAPPA)

    if question.neighbours is not None:
        if question.neighbours > size - 1:
            raise ConfigError(
                f"a round of {size} has only {size - 1} others to send shares to, not {question.neighbours}",
                field="neighbours",
                hint=f"at most {size - 1}, which is everyone; left out, the planner chooses",
            )
        return with_neighbours(question.neighbours)
    # What may be revealed grows with the degree, and the degree with what may be revealed.
    sent = min(size - 1, max(30, math.ceil(4.0 * math.log2(size))))
    while sent < size - 1:
        plan = with_neighbours(sent)
        needed = enough_neighbours(size, plan.assumed(size), sent)
        if needed == sent:
            return plan
        sent = needed
    return with_neighbours(size - 1)


def _better_mode(question: PlanQuestion, mode: Mode, total: float) -> Mode:
    """The mode that leaves less noise in the sum, each with its own cheapest kappa."""
    other: Mode = "repair" if mode == "tolerate" else "tolerate"
    try:
        noise = NoiseNeeded(_draft(replace(question, mode=other)), question.participants)
        least = min(point.total for point in noise.curve())
    except PrivacyError:
        return mode
    return other if least < total else mode


def _carried(question: PlanQuestion, say: Progress) -> Forecast:
    """The run that leaves least noise in the model."""
    size, ratio = question.participants, question.carried_to_residual
    assert question.clients is not None
    assert question.rounds is not None
    # What is no target is refused in the caller's own numbers.
    gdp_mu(question.epsilon, question.delta)
    # Who stays out for longer than the run takes part once, as it does where it stays out for all of it.
    apart = _separation(size, question.clients, question.separation, question.pattern)
    apart = min(apart, max(question.rounds, 2))
    plan = replace(
        _asked(question),
        method="niss-carried",
        graph="complete",
        neighbours=size - 1,
        participations=math.ceil(question.rounds / apart),
        separation=apart,
        pattern=question.pattern,
        participants=size,
        closing=question.closing,
    )
    search = CarriedSearch.of(plan, size, kept=_KEPT if question.for_ == "training" else 1.0)
    kappa = question.kappa or search.cheapest(ratio, say)
    run = safely_within(search.at(kappa, ratio), search.mu**2)
    say("comparing with trusted servers")
    sensitivity, noise = float(client_sensitivity(1.0 / size, plan.clip, plan.relation)), run.noise
    unit, length = (sensitivity / search.mu) ** 2, question.rounds
    whole = sensitivity**2 * search.noise(run)
    ours, central = whole[:length], unit * independent_noise(length, apart)
    over = {"niss": ours, "central": central, "banded": unit * banded_noise(length, apart)}
    if length <= BEST_ROUNDS:
        over["best"] = unit * best_noise(length, apart)
    mean, early = float(ours.mean() / central.mean()), length - 2
    averaged = None
    if early >= 0:
        models = min(_AVERAGED, early + 1)
        averaged = run.noise_in_mean(models, early, search.dropout, repaired=search.repaired)
        averaged *= sensitivity**2 / float(central[early])
    return Forecast(
        plan=replace(plan, kappa=kappa, carried_to_residual=run.ratio),
        participants=size,
        clients=question.clients,
        run=run,
        sigma=sensitivity * math.sqrt(search.alone),
        tau2=2.0 * noise.residual / noise.spatial,
        epsilon_joint=question.epsilon,
        aggregate_variance_ratio_to_central=mean,
        ratio_to_central_final=float(whole[-1] / central[-1]),
        ratio_to_local=mean / ((1.0 - plan.dropout) * size),
        ratio_ideal=_ideal(noise.colluders, size),
        notes=tuple(_carried_notes(run, search, kappa)),
        over_rounds={name: tuple(values.tolist()) for name, values in over.items()},
        ratio_to_best=float(ours.mean() / over["best"].mean()) if "best" in over else None,
        ratio_to_central_early=float(ours[early] / central[early]) if early >= 0 else None,
        ratio_to_central_averaged=averaged,
    )


def _carried_notes(run: Committed, search: CarriedSearch, kappa: float) -> Iterator[str]:
    if run.separation == 1:
        yield "Everyone takes part in every round: carrying noise to the next round hides nothing."
    else:
        left = search.objective(run) / search.objective(carrying_nothing(search, kappa))
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
