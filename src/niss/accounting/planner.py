"""Buying a joint-view promise as cheaply as possible.

Everything is counted in units of `sigma_k^2`, the noise a client would need if it stood alone: a trusted
server adds 1, DP-FedAvg adds m, secure aggregation with distributed noise 1 / (1 - rho). The planner finds
the strength of the shares (kappa) and the distortion (tau^2) that leave the least noise in the sum,

    (1 - q) m eta^2 + 2 kappa q (1 - q) m,        eta^2 = tau^2 kappa, q the share of clients that drop out,

while the worst-off client, whoever collude, still has its full effective variance (`niss.views.collusion`). The second
term is what dropped clients leave uncancelled in mode `tolerate`; in mode `repair` it is zero, but edges are
revealed to the server, which counts like collusion.

`plan` gives the plan alone, `forecast` also what it costs. A run whose noise is carried from round to round is planned
as a whole (`carry=True`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, overload

from niss.accounting.asked import Mode, PlanQuestion
from niss.accounting.calibration import (
    NOMINAL_KAPPA,
    CarriedSearch,
    NoiseNeeded,
    cheapest,
    run_draft,
    safely_within,
    total_noise,
)
from niss.accounting.forecasts import CarriedForecast, PlanForecast, carried_forecast, round_forecast
from niss.accounting.plans import Plan
from niss.accounting.targets import (
    GRID_SHARE,
    committee_size,
    committee_threshold,
    most_dropped,
    split_failure,
)
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import gdp_mu
from niss.methods import client_sensitivity, enough_neighbours, too_sparse
from niss.settings import check


@overload
def forecast(
    *,
    carry: Literal[True],
    search: bool = False,
    progress: Callable[[str], None] | None = None,
    **asked: Any,
) -> CarriedForecast: ...


@overload
def forecast(
    *,
    carry: Literal[False] = False,
    search: bool = False,
    progress: Callable[[str], None] | None = None,
    **asked: Any,
) -> PlanForecast: ...


def forecast(
    *,
    carry: bool = False,
    search: bool = False,
    progress: Callable[[str], None] | None = None,
    **asked: Any,
) -> PlanForecast | CarriedForecast:
    """The cheapest plan for the target, and what it costs; with `tau2` given, what that tau^2 promises instead.

    carry     noise is carried from round to round, and the run is planned as a whole; else each round on its own
    search    also look for the worst colluders, which shows how near an attacker comes to the promise
    progress  is told in a few words what is being computed
    asked     the fields of `PlanQuestion`, of which `participants` must be given

    An upload is `x_k / participants`, so variances are those of the average. Raises ConfigError for settings out of
    range, and PrivacyError where too few are left to share noise with, or where the graph is too sparse for the
    colluders.

    >>> planned = forecast(participants=30, epsilon=3.0, collusion=0.2, kappa=4.0)
    >>> round(planned.aggregate_variance_ratio_to_central, 2)
    1.46
    >>> planned.plan.colluders
    6
    >>> planned = forecast(participants=100, clients=1000, rounds=100, collusion=0.2, carry=True)
    >>> planned.plan.noise.colluders, round(planned.model_variance_ratio_to_central_mean, 2)
    (20, 0.28)
    """
    question = check(PlanQuestion, {**asked, "carry": carry})
    say = progress or (lambda _: None)
    return _carried(question, say) if carry else _within_rounds(question, search, say)


def plan(**asked: Any) -> Plan:
    """The cheapest plan for a target. `forecast` also tells what it costs, and says what may be asked.

    >>> plan(participants=30, epsilon=3.0, kappa=2.0).graph
    'complete'
    """
    return forecast(**asked, carry=False).plan


def _within_rounds(question: PlanQuestion, search: bool, say: Callable[[str], None]) -> PlanForecast:
    mode, tau2, kappa = question.mode, question.tau2, question.kappa
    draft = _draft(question, mode)
    say("bounding what colluders can do")
    noise = NoiseNeeded(draft, question.participants, question.dropout, mode)
    curve = noise.curve() if tau2 is None else ()
    chosen = replace(draft, kappa=kappa or (cheapest(curve) if curve else 1.0))
    say(f"calibrating at kappa = {chosen.kappa:.3g}")
    needed, worst = (
        noise.calibrated(chosen.kappa) if tau2 is None else (tau2, noise.worst(chosen.kappa, tau2))
    )
    if tau2 is None and worst.alone:
        raise too_sparse(question.participants, draft.neighbours, draft.corruption)
    better: str = mode
    if tau2 is None and kappa is None and question.dropout:
        better = _better_mode(question, min(curve, key=total_noise).total)
    found = None
    if search and draft.corruption.removed:
        say("looking for the worst colluders")
        found = noise.search(chosen.kappa, needed, worst)
    return round_forecast(
        chosen, question.participants, needed, worst, found, question.dropout, (mode, better), curve
    )


def _draft(question: PlanQuestion, mode: Mode) -> Plan:
    """The plan but for kappa: its graph, and what a repair may reveal."""
    size = question.participants

    def with_neighbours(sent: float) -> Plan:
        plan = Plan(
            clip=question.clip,
            epsilon=question.epsilon,
            delta=question.delta,
            relation=question.relation,
            participations=question.participations or question.rounds or 1,
            colluders=_colluders(question),
            tau2=question.tau2,
            neighbours=sent,
            graph="complete" if sent >= size - 1 else "regular",
            kappa=NOMINAL_KAPPA,
        )
        if mode == "repair":
            plan = _repaired(plan, size, question.dropout)
        _require_room(plan, size)
        return plan

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
        needed = enough_neighbours(size, plan.corruption, sent)
        if needed == sent:
            return plan
        sent = needed
    return with_neighbours(float(size - 1))


def _colluders(question: PlanQuestion) -> int:
    return math.ceil(question.collusion * question.participants - 1e-9)


def _repaired(plan: Plan, participants: int, dropout: float) -> Plan:
    """The plan with a committee, and with what a repair may reveal."""
    # The failure that is left for a committee does not depend on its size.
    _, failure = split_failure(replace(plan, committee=participants).failure, drawn=True)
    size = committee_size(participants, plan.colluders, failure, dropout)
    needed = committee_threshold(participants, size or participants, plan.colluders, failure)
    # Where more drop out than a committee of everyone can lose, nothing is repaired, and nothing revealed.
    most = participants - needed
    if size is None and dropout * participants > most:
        raise PrivacyError(
            f"infeasible: a repair needs {needed} of {participants} participants, but {dropout:.0%} drop out",
            hint="mode = 'tolerate', a lower dropout rate, or fewer colluders to be assumed",
        )
    near = min(math.ceil(2 * plan.neighbours), participants - 1)
    dropped = min(most_dropped(participants, dropout, plan.delta), most)
    revealed = min(most_dropped(near, dropout, plan.delta / participants), dropped)
    return replace(plan, committee=size, dropped=dropped, revealed=revealed)


def _better_mode(question: PlanQuestion, total: float) -> str:
    """The mode that leaves less noise in the sum, each with its own cheapest kappa."""
    other: Mode = "repair" if question.mode == "tolerate" else "tolerate"
    try:
        noise = NoiseNeeded(_draft(question, other), question.participants, question.dropout, other)
        least = min(noise.curve(), key=total_noise).total
    except PrivacyError:
        return question.mode
    return other if least < total else question.mode


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


def _carried(question: PlanQuestion, say: Callable[[str], None]) -> CarriedForecast:
    """The run that leaves least noise in the model."""
    size, dropout = question.participants, question.dropout
    assert question.clients is not None
    assert question.rounds is not None
    # What is no target is refused in the caller's own numbers.
    gdp_mu(question.epsilon, question.delta)
    delta = (1.0 - GRID_SHARE) * question.delta
    dropped = question.declared_dropped
    if dropped is None:
        dropped = most_dropped(size, dropout, delta) if question.mode == "repair" else 0
    draft = run_draft(
        participants=size,
        rounds=question.rounds,
        separation=_separation(size, question.clients, question.separation, question.pattern),
        pattern=question.pattern,
        closing=question.closing,
        colluders=_colluders(question),
        dropped=dropped,
    )
    repaired, ratio = question.mode == "repair", question.carried_to_residual
    search = CarriedSearch(draft, gdp_mu(question.epsilon, delta), dropout, repaired, question.goal)
    chosen = search.at(question.kappa, ratio) if question.kappa else search.cheapest(ratio, say)
    say("comparing with trusted servers")
    sensitivity = float(client_sensitivity(1.0 / size, question.clip, question.relation))
    asked = {name: getattr(question, name) for name in ("clients", "epsilon", "delta", "dropout", "mode")}
    return carried_forecast(safely_within(chosen, search.mu**2), search, sensitivity, asked)


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
