"""Buying a joint-view promise as cheaply as possible.

Everything is counted in units of `sigma_k^2`, the noise a client would need if it stood alone: a trusted
server adds 1, DP-FedAvg adds m, secure aggregation with distributed noise 1 / (1 - rho). The planner finds
the strength of the shares (kappa) and the distortion (tau^2) that leave the least noise in the sum,

    (1 - q) m eta^2 + 2 kappa q (1 - q) m,        eta^2 = tau^2 kappa, q the share of clients that drop out,

while the worst-off client, whoever collude, still has its full effective variance (`niss.views.collusion`). The second
term is what dropped clients leave uncancelled in mode `tolerate`; in mode `repair` it is zero, but edges are
revealed to the server, which counts like collusion.

`plan` gives the plan alone, `forecast` also what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting.judgement import Outlook, outlook
from niss.accounting.plan_noise import (
    NOMINAL_KAPPA,
    NoiseNeeded,
    TradeOff,
    cheapest,
    is_drawn,
    noise_in_the_sum,
    total_noise,
)
from niss.accounting.plans import Plan
from niss.accounting.question import PlanQuestion
from niss.accounting.targets import (
    committee_size,
    committee_threshold,
    most_dropped,
    split_failure,
)
from niss.claims import rounded_up
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import gdp_epsilon
from niss.methods import enough_neighbours, marginal_mu, too_sparse
from niss.protocol.messages import MODES
from niss.settings import check
from niss.views import WorstCase

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class PlanForecast:
    """A plan and what it costs. Ratios are variances of the sum of all uploads.

    plan                        calibrates tau^2 again for the graph of every round
    sigma                       deviation of the noise a client would need alone, on its upload x_k / participants
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
    found                       the worst colluders that a search found, where one was asked for
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
    recommended_mode: str
    worst: WorstCase
    found: WorstCase | None
    curve: tuple[TradeOff, ...]
    notes: tuple[str, ...]

    def outlook(self, parameters: int, rounds: int | None = None) -> Outlook:
        """Whether a model of that size can learn anything in so many rounds; None: in those of one client."""
        return outlook(
            parameters=parameters,
            rounds=rounds or self.plan.participations,
            clip=self.plan.clip,
            variance=self.aggregate_variance_ratio_to_central * self.sigma**2,
        )

    def to_json(self) -> dict[str, Any]:
        """Numbers and settings, ready for `json.dumps`."""
        values = asdict(self)
        values["curve"] = [{**asdict(point), "total": point.total} for point in self.curve]
        for name in ("worst", "found"):
            if values[name] is not None:
                values[name]["colluders"] = len(values[name]["colluders"])
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
    return _forecast(chosen, participants, needed, worst, found, dropout, (mode, better), curve)


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


def _forecast(
    plan: Plan,
    participants: int,
    tau2: float,
    worst: WorstCase,
    found: WorstCase | None,
    dropout: float,
    modes: tuple[str, str],
    curve: tuple[TradeOff, ...],
) -> PlanForecast:
    """`modes`: the one that was asked for, and the one that leaves less noise."""
    mu = float(plan.round_mu(np.arange(1))[0])
    # Over all participations, in units of the noise a client would need alone.
    whole = mu * math.sqrt(plan.participations)
    noise = noise_in_the_sum(plan.kappa, tau2 * plan.kappa, participants, dropout, modes[0])
    local = (1.0 - dropout) * participants
    return PlanForecast(
        plan=plan,
        participants=participants,
        sigma=float(plan.sensitivity(1.0 / participants, 1.0)) / mu,
        tau2=tau2,
        kappa=plan.kappa,
        neighbours=plan.neighbours,
        epsilon_joint=_epsilon(plan, whole, worst),
        epsilon_marginal=gdp_epsilon(
            float(marginal_mu(whole, unit_variance=plan.kappa, sent=1.0, received=1.0, tau2=tau2)),
            plan.delta,
        ),
        effective_variance_ratio=worst.ratio,
        aggregate_variance_ratio_to_central=noise.total,
        aggregate_variance_ratio_to_local=noise.total / local,
        aggregate_variance_ratio_ideal=1.0 / (1.0 - plan.colluders / participants),
        dropout_part=noise.dropout,
        mode=modes[0],
        recommended_mode=modes[1],
        worst=worst,
        found=found,
        curve=curve,
        notes=tuple(_notes(plan, participants, worst, noise, local, modes, found, whole)),
    )


def _epsilon(plan: Plan, mu: float, worst: WorstCase) -> float | None:
    return gdp_epsilon(mu / math.sqrt(worst.ratio), plan.gaussian_delta) if worst.ratio > 0.0 else None


def _notes(
    plan: Plan,
    participants: int,
    worst: WorstCase,
    noise: TradeOff,
    local: float,
    modes: tuple[str, str],
    found: WorstCase | None,
    mu: float,
) -> Iterator[str]:
    if noise.total >= local:
        binding = "collusion"
        if noise.dropout > noise.residual:
            binding = "the dropout rate"
        elif worst.colluders and plan.graph == "regular":
            binding = "collusion among few neighbours"
        yield f"No gain over DP-FedAvg: {binding} leaves as much noise."
    if modes[0] != modes[1]:
        yield f"mode = {modes[1]!r} would leave less noise in the sum than {modes[0]!r} at this dropout rate."
    if not worst.exact and plan.corruption.removed:
        yield "What colluders can do is bounded by a proof that covers every placement, not searched for."
    if plan.graph != "complete" and not is_drawn(participants, plan.neighbours):
        yield (
            "For a round this large the noise is that of the graph to be expected; the graph of every round is "
            "examined when it is drawn."
        )
    if found is not None:
        reached = _epsilon(plan, mu, found)
        shown = "no bound at all" if reached is None else f"epsilon = {rounded_up(reached)}"
        yield f"The worst colluders that a search found reach {shown}."
    if plan.failure:
        where = "neighbours or members of a committee" if plan.committee else "neighbours"
        yield f"{plan.failing_delta:.2g} of delta pays for graphs on which more {where} collude than assumed."


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
