"""Buying a joint-view promise as cheaply as possible.

Everything is counted in units of `sigma_k^2`, the noise a client would need if it stood alone: a trusted
server adds 1, DP-FedAvg adds m, secure aggregation with distributed noise 1 / (1 - rho). The planner finds
the strength of the shares (kappa) and the distortion (tau^2) that leave the least noise in the sum,

    (1 - q) m eta^2 + 2 kappa q (1 - q) m,        eta^2 = tau^2 kappa, q the share of clients that drop out,

while the worst-off client, whoever collude, still has its full effective variance (`niss.views.collusion`). The second
term is what dropped clients leave uncancelled in mode `tolerate`; in mode `repair` it is zero, but edges are
revealed to the server, which counts like collusion.

`plan` gives the plan alone, `forecast` also what it costs.

`plan_carried` and `forecast_carried` do the same for a run whose noise is carried from round to round, as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
from niss.accounting.question import PlanQuestion
from niss.accounting.targets import (
    GRID_SHARE,
    client_sensitivity,
    committee_size,
    committee_threshold,
    most_dropped,
    split_failure,
)
from niss.checks import require_one_of
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import gdp_mu
from niss.methods import enough_neighbours, too_sparse
from niss.protocol.messages import MODES
from niss.settings import check

GOALS = ("mean", "final")


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
    search: bool = False,
    progress: Callable[[str], None] | None = None,
) -> PlanForecast:
    """The cheapest plan for the target, and what it costs; with `tau2` given, what that tau^2 promises instead.

    participants    of a round
    neighbours      unit shares each sends; None: as many as the colluders make necessary
    clip            L2 bound on an update
    epsilon, delta  the target of every client, over all its `participations`
    collusion       share of the participants that tell the server all they know
    dropout         share of the participants that vanish after the graph was fixed
    mode            what happens then: their noise stays in the sum (`tolerate`), or is taken out (`repair`)
    kappa           strength of the shares; None: the cheapest
    tau2            distortion of received shares; None: what the target needs
    relation        neighbouring updates, as in `Plan`
    search          also look for the worst colluders, which shows how near an attacker comes to the promise
    progress        is told in a few words what is being computed

    Raises ConfigError for settings out of range, and PrivacyError where too few are left to share noise with, or where
    the graph is too sparse for the colluders.

    >>> planned = forecast(participants=30, epsilon=3.0, collusion=0.2, kappa=4.0)
    >>> round(planned.aggregate_variance_ratio_to_central, 2)
    1.46
    >>> planned.plan.colluders
    6
    """
    check(
        PlanQuestion,
        {
            "participants": participants,
            "epsilon": epsilon,
            "delta": delta,
            "clip": clip,
            "participations": participations,
            "collusion": collusion,
            "dropout": dropout,
            "mode": mode,
            "kappa": kappa,
            "tau2": tau2,
            "relation": relation,
            "neighbours": neighbours,
        },
    )
    say = progress or (lambda _: None)
    target = {
        "clip": clip,
        "epsilon": epsilon,
        "delta": delta,
        "participations": participations,
        "relation": relation,
        "tau2": tau2,
        "colluders": math.ceil(collusion * participants - 1e-9),
    }
    draft = _draft(participants, neighbours, dropout, mode, target)
    say("bounding what colluders can do")
    noise = NoiseNeeded(draft, participants, dropout, mode)
    curve = noise.curve() if tau2 is None else ()
    chosen = replace(draft, kappa=kappa or (cheapest(curve) if curve else 1.0))
    say(f"calibrating at kappa = {chosen.kappa:.3g}")
    needed, worst = (
        noise.calibrated(chosen.kappa) if tau2 is None else (tau2, noise.worst(chosen.kappa, tau2))
    )
    if tau2 is None and worst.alone:
        raise too_sparse(participants, draft.neighbours, draft.corruption)
    better = mode
    if tau2 is None and kappa is None and dropout:
        better = _better_mode(
            participants, neighbours, dropout, mode, target, min(curve, key=total_noise).total
        )
    found = None
    if search and draft.corruption.removed:
        say("looking for the worst colluders")
        found = noise.search(chosen.kappa, needed, worst)
    return round_forecast(chosen, participants, needed, worst, found, dropout, (mode, better), curve)


def _draft(
    participants: int, neighbours: float | None, dropout: float, mode: str, target: dict[str, Any]
) -> Plan:
    """The plan but for kappa: its graph, and what a repair may reveal."""

    def with_neighbours(sent: float) -> Plan:
        plan = Plan(
            **target,
            neighbours=sent,
            graph="complete" if sent >= participants - 1 else "regular",
            kappa=NOMINAL_KAPPA,
        )
        if mode == "repair":
            plan = _repaired(plan, participants, dropout)
        _require_room(plan, participants)
        return plan

    if neighbours is not None:
        if neighbours > participants - 1:
            raise ConfigError(
                f"a round of {participants} has only {participants - 1} others to send shares to, not {neighbours:g}",
                field="neighbours",
                hint=f"at most {participants - 1}, which is everyone; left out, the planner chooses",
            )
        return with_neighbours(float(neighbours))
    # What may be revealed grows with the degree, and the degree with what may be revealed.
    sent = min(participants - 1, max(30, math.ceil(4.0 * math.log2(participants))))
    while sent < participants - 1:
        plan = with_neighbours(float(sent))
        needed = enough_neighbours(participants, plan.corruption, sent)
        if needed == sent:
            return plan
        sent = needed
    return with_neighbours(float(participants - 1))


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


def _better_mode(
    participants: int,
    neighbours: float | None,
    dropout: float,
    mode: str,
    target: dict[str, Any],
    total: float,
) -> str:
    """The mode that leaves less noise in the sum, each with its own cheapest kappa."""
    other = next(one for one in MODES if one != mode)
    try:
        draft = _draft(participants, neighbours, dropout, other, target)
        least = min(NoiseNeeded(draft, participants, dropout, other).curve(), key=total_noise).total
    except PrivacyError:
        return mode
    return other if least < total else mode


def plan(
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
) -> Plan:
    """The cheapest plan for a target. `forecast` also tells what it costs, and says what the arguments mean.

    >>> plan(participants=30, epsilon=3.0, kappa=2.0).graph
    'complete'
    """
    return forecast(
        participants=participants,
        neighbours=neighbours,
        clip=clip,
        epsilon=epsilon,
        delta=delta,
        participations=participations,
        collusion=collusion,
        dropout=dropout,
        mode=mode,
        kappa=kappa,
        tau2=tau2,
        relation=relation,
    ).plan


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


def plan_carried(
    *,
    participants: int,
    clients: int,
    rounds: int,
    epsilon: float = 3.0,
    delta: float = 1e-5,
    sensitivity: float = 1.0,
    separation: int | None = None,
    pattern: str = "cyclic",
    collusion: float = 0.0,
    dropout: float = 0.0,
    mode: str = "tolerate",
    declared_dropped: int | None = None,
    kappa: float | None = None,
    carried_to_residual: float | None = None,
    closing: bool = False,
    goal: str = "mean",
    progress: Callable[[str], None] | None = None,
) -> CarriedForecast:
    """The plan that leaves least noise in the model, for clients that return after `separation` rounds.

    participants, clients  of a round, and altogether; `separation` defaults to how often they fill a round
    rounds                 T, committed
    epsilon, delta         the target of every client over the whole run; `sensitivity` of one upload
    collusion, dropout     shares of the participants
    mode                   `tolerate`: dropped clients leave their shares in the sum; `repair`: they are taken out again
    declared_dropped       most clients of a round that may be called dropped in a repair; None: more drop out in one
                           round of a million; 0: carried shares are not repaired
    kappa                  shares sent within a round over the noise a client would need alone; None: the cheapest
    carried_to_residual    w / r; None: the best
    goal                   least noise on average over the rounds (`mean`) or in the last model (`final`)
    progress               is told in a few words what is being computed

    `pattern` and `closing` are those of `Committed`.

    >>> planned = plan_carried(participants=100, clients=1000, rounds=100)
    >>> planned.separation, round(planned.model_variance_ratio_to_central_mean, 2)
    (10, 0.21)
    """
    say = progress or (lambda _: None)
    check(
        PlanQuestion,
        {
            "participants": participants,
            "epsilon": epsilon,
            "collusion": collusion,
            "dropout": dropout,
            "mode": mode,
            "kappa": kappa,
            "rounds": rounds,
        },
    )
    require_one_of(goal, GOALS, field="goal")
    if carried_to_residual is not None and not 0.0 <= carried_to_residual < math.inf:
        raise ConfigError("must be finite and not negative", field="carried_to_residual")
    if not 0.0 < sensitivity < math.inf:
        raise ConfigError(f"must be a finite number above 0, not {sensitivity!r}", field="sensitivity")
    if declared_dropped is None:
        declared_dropped = most_dropped(participants, dropout, delta) if mode == "repair" else 0
    draft = run_draft(
        participants=participants,
        rounds=rounds,
        separation=_separation(participants, clients, separation, pattern),
        pattern=pattern,
        closing=closing,
        colluders=math.ceil(collusion * participants - 1e-9),
        dropped=declared_dropped,
    )
    search = CarriedSearch(draft, gdp_mu(epsilon, delta), dropout, mode == "repair", goal)
    ratio = carried_to_residual
    chosen = search.at(kappa, ratio) if kappa else search.cheapest(ratio, say)
    say("comparing with trusted servers")
    asked = {"clients": clients, "epsilon": epsilon, "delta": delta, "dropout": dropout, "mode": mode}
    return carried_forecast(safely_within(chosen, search.mu**2), search, sensitivity, asked)


def forecast_carried(
    *,
    participants: int,
    clients: int,
    rounds: int,
    clip: float = 1.0,
    epsilon: float = 3.0,
    delta: float = 1e-5,
    collusion: float = 0.0,
    dropout: float = 0.0,
    mode: str = "tolerate",
    kappa: float | None = None,
    relation: str = "zero-out",
    pattern: str = "cyclic",
    progress: Callable[[str], None] | None = None,
) -> CarriedForecast:
    """`plan_carried` for what a user knows: the clip on updates, what is hidden, and the whole of delta.

    An upload is `x_k / participants`, so variances are those of the average. As in every plan that a protocol can run,
    a part of delta is kept for noise on a grid. The other arguments are those of `plan_carried` and of `forecast`.

    >>> planned = forecast_carried(participants=100, clients=1000, rounds=100, collusion=0.2)
    >>> planned.plan.noise.colluders, round(planned.model_variance_ratio_to_central_mean, 2)
    (20, 0.28)
    """
    # What is no target is refused in the caller's own numbers.
    check(
        PlanQuestion,
        {
            "participants": participants,
            "relation": relation,
            "clip": clip,
            "delta": delta,
        },
    )
    gdp_mu(epsilon, delta)
    planned = plan_carried(
        participants=participants,
        clients=clients,
        rounds=rounds,
        epsilon=epsilon,
        delta=(1.0 - GRID_SHARE) * delta,
        sensitivity=float(client_sensitivity(1.0 / max(participants, 1), clip, relation)),
        pattern=pattern,
        collusion=collusion,
        dropout=dropout,
        mode=mode,
        kappa=kappa,
        progress=progress,
    )
    return replace(planned, delta=delta)


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
