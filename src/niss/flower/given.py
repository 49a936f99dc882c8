"""What a run on Flower is given, checked before anyone is asked anything: its settings and its plan.

Settings are read from `[tool.flwr.app.config]` by `NissStrategy.from_run_config`:

    plan      epsilon, delta, clip, unit, batch, records, kappa, neighbours, relation, collusion, dropout, mode, as in
              `Plan`; its participations from `rounds`, or `num-server-rounds` as Flower's templates call it; with
              `carry` also separation, pattern and closing
    strategy  carry, participants, tracker, tracker-ca, server-key, coalition, report, resume, stage-timeout,
              clip-quantile, first-clip, weight-cap, deadline, count-blanks, patience, on-hopeless

A setting that is left out, or empty text, keeps its default. Flower
hands the run configuration to the nodes too, but they take no limit from it: it is the server's side that writes it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from flwr.serverapp.strategy import Strategy

from niss.accounting import Plan, outlook
from niss.accounting.asked import Mode, SettledMode
from niss.accounting.assumed import USUAL_DROPOUT, fewest_participants
from niss.accounting.calibration import noise_in_the_sum
from niss.accounting.terms import plan_noise
from niss.claims import digits
from niss.errors import ConfigError, PrivacyError, ProtocolError
from niss.flower.transport import fewest_nodes, what_to_do
from niss.methods import METHODS
from niss.protocol.keys import LINKS_PER_ROUND
from niss.session.metrics import NoisyMetrics
from niss.session.proposal import MOST_ROUNDS
from niss.session.server import Session
from niss.views.numerics import binomial_quantile

LOG = logging.getLogger("flwr")
# Graphs that may be drawn for a round until one keeps the promise with the noise that was set; counted in delta.
_ATTEMPTS = 3
# A plan pays for so many chains as long as the run's, so that clients can join that many runs under one delta.
_CHAINS = 4
# Stronger shares would take a tenth off the variance that stays, and one who does not come would leave far more.
_KAPPA = 4.0
_BATCH = 0.05
_MOST_REPAIRING = 200
# Everyone shares with everyone in rounds of so many: few neighbours could all be colluders, or lost.
_NEIGHBOURS = 200
_OWN_BEACON = (
    "this server, so colluders count as placed after the graph was drawn; a tracker would save noise"
)
_DEFAULTS = {field.name: field.default for field in fields(Plan)}


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


_ROUNDS = ("rounds", "num-server-rounds")
_PLAN = (
    *("epsilon", "delta", "clip", "unit", "batch", "records"),
    *("kappa", "neighbours", "relation", "collusion", "dropout", "mode"),
)
_CARRIED = ("separation", "pattern", "closing")
_STRATEGY: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "carry": ("carry", _switch),
    "participants": ("participants", int),
    "tracker": ("tracker", str),
    "tracker-ca": ("tracker_ca", str),
    "server-key": ("key", str),
    "coalition": ("coalition", str),
    "report": ("report", str),
    "resume": ("resume", str),
    "stage-timeout": ("stage_timeout", float),
    "clip-quantile": ("quantile", float),
    "first-clip": ("first_clip", float),
    "weight-cap": ("weight_cap", float),
    "deadline": ("deadline", float),
    "count-blanks": ("count_blanks", _switch),
    "patience": ("patience", float),
    "on-hopeless": ("on_hopeless", str),
}
_REQUIRED = ("epsilon", "clip")


def strategy_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `NissStrategy` in a run configuration, other than the plan.

    Raises `ConfigError`, naming the setting, for a value of the wrong kind.
    """
    given = _given(settings)
    return {
        argument: _read(name, given[name], parse)
        for name, (argument, parse) in _STRATEGY.items()
        if name in given
    }


def plan_of(settings: Mapping[str, Any]) -> Plan:
    """The plan in a run configuration; raises `ConfigError` for a setting that is missing or of the wrong kind."""
    given = _given(settings)
    if rounds := next((name for name in _ROUNDS if name in given), None):
        given[_ROUNDS[0]] = given[rounds]
    for name in (*_REQUIRED, _ROUNDS[0]):
        if name not in given:
            raise ConfigError(
                "is missing", field=name, hint=f"set {name} in [tool.flwr.app.config], or give a plan"
            )
    carry, _ = (_read(name, given.get(name, False), _switch) for name in ("carry", "closing"))
    names = _PLAN + (_CARRIED if carry else ())
    values = {name: given[name] for name in names if name in given}
    if values.get("unit", "client") == "client":
        values = {"kappa": _KAPPA, "neighbours": _NEIGHBOURS} | values
    values["participations"] = _read(_ROUNDS[0], given[_ROUNDS[0]], int)
    return Plan(**values)


def flower_plan(
    *,
    epsilon: float,
    clip: float,
    colluders: float = 0.0,
    dropout: float = 0.0,
    mode: Mode = "planned",
    carry: int = 1,
    records: int | None = None,
    batch: float | None = None,
    delta: float = 1e-5,
) -> Plan:
    """A `Plan` for Flower from what only its user can say; the log has the rest, which is derived, before round 1.

    epsilon    of the promise to each client over the whole run, at `delta`
    clip       longest update, or gradient of a record
    colluders  share of the nodes that may help the server
    dropout    share of the nodes expected to be lost in a round; 0: a repair is planned for 5 %
    mode       what happens to their noise; `planned`: what leaves less of it in rounds of the size they have
    carry      every how many rounds a node takes part, its noise carried to the next round; 1: in every round, nothing
    records    of all silos together, where single records are hidden and not whole clients
    batch      part of the records in a round's batch; None: as large as a round each of 20 sees every record once

    Derived are kappa (4: stronger shares gain next to nothing), who shares with whom (everyone, in rounds of 200), the
    rounds of a client and of the run, which follow `num_rounds` and the sampling, and how many colluders and losses
    each round allows for.

    >>> plan = flower_plan(epsilon=8.0, clip=2.0, colluders=0.2)
    >>> plan.kappa, plan.participations, plan.unit
    (4.0, 'planned', 'client')
    """
    plan = Plan(
        epsilon=epsilon,
        delta=delta,
        clip=clip,
        collusion=colluders,
        dropout=dropout,
        mode=mode,
        kappa=_KAPPA,
        neighbours=_NEIGHBOURS,
        separation=carry,
        unit="client" if records is None else "record",
        records=records,
        batch=_BATCH if batch is None and records is not None else batch,
    )
    return carrying(plan) if carry > 1 else plan


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value != ""}


def _read(name: str, value: Any, parse: Callable[[Any], Any]) -> Any:
    try:
        return parse(value)
    except (TypeError, ValueError):
        raise ConfigError(f"invalid value {value!r}", field=name) from None


def carrying(plan: Plan) -> Plan:
    """The plan, with noise carried from round to round; what it leaves at its default is that of such plans.

    Everyone shares with everyone, so that delta does not have to pay for unlucky graphs.
    """
    if plan.kind.carries:
        return plan
    if plan.kind.carrying is None:
        raise ConfigError(
            f"{plan.kind.name} has no noise that could be carried to the next round", field="carry"
        )
    if plan.separation < 2:
        raise ConfigError(
            "clients that take part in every round gain nothing from noise that is carried to the next",
            field="plan.separation",
            hint="with a separation of 3, for example, a third of the nodes takes part in each round, in turn",
        )
    kind = METHODS[plan.kind.carrying]
    usual = dict(kind.defaults) | {"kappa": _KAPPA}
    usual = {name: value for name, value in usual.items() if getattr(plan, name) == _DEFAULTS[name]}
    return replace(
        plan,
        method=kind.name,
        participations=max(plan.turns, math.ceil(plan.planned_rounds / plan.separation)),
        **usual | {"graph": "complete"},
    )


def check_settings(weight: str, metrics: NoisyMetrics, *, tracker: object, key: object) -> None:
    """Refuse a hidden metric with the name of a result's weight, and a tracker without a key for the server."""
    if weight in metrics.ranges:
        raise ConfigError(f"{weight!r} is the weight of a result", field="metrics", hint="use another name")
    if tracker is not None and key is None:
        raise ConfigError(
            "is needed with a tracker, which lets in one server and knows it by its key",
            field="key",
            hint="make one with `niss keys new --out server.key`, and give its public key to `niss tracker`",
        )


def prepared(plan: Plan, *, independent: bool) -> Plan:
    """The plan as far as it is known before the number of rounds is.

    independent  whether somebody other than the server holds the beacon
    """
    if plan.attempts > LINKS_PER_ROUND:
        raise ConfigError(f"a round can have at most {LINKS_PER_ROUND} attempts", field="plan.attempts")
    if plan.kind.carries:
        # What is carried to a round goes to one list of participants, on one graph.
        return replace(plan, attempts=1)
    plan = replace(plan, attempts=max(plan.attempts, _ATTEMPTS))
    # A server that holds the beacon can place colluders after it knows the graph: then all may be neighbours.
    return plan if independent else replace(plan, graph="complete")


def for_rounds(plan: Plan, rounds: int) -> Plan:
    """The plan of a run of that many rounds: how many graphs a client has to reckon with, or what noise is carried."""
    if plan.kind.carries:
        return _committed_to(plan, rounds)
    planned = plan.chain_rounds or min(_CHAINS * rounds, MOST_ROUNDS)
    if not rounds <= planned <= MOST_ROUNDS:
        raise ConfigError(
            f"a run of {rounds} rounds needs a plan for {rounds} to {MOST_ROUNDS} rounds, not {planned}",
            field="plan.chain_rounds",
            hint="leave it out, or split the run",
        )
    return replace(plan, chain_rounds=planned)


def lasting(plan: Plan, strategy: Strategy, rounds: int, nodes: int) -> Plan:
    """The plan with as many participations as so many rounds ask of a client, where they are left to be planned.

    A strategy that draws m of n nodes draws each of them Binomial(rounds, m / n) times: so often that any of them is
    drawn more often in one run of a hundred. Raises `ConfigError` for a plan whose participations cannot last.

    nodes  how many are there when the run begins
    """
    if plan.kind.carries or not plan.calibrated or rounds < 1:
        return plan
    nodes = max(nodes, fewest_nodes(strategy))
    share = drawn_of(strategy, nodes) / max(nodes, 1)
    enough = max(1, binomial_quantile(0.01 / max(nodes, 1), rounds, share)) if share < 1.0 else rounds
    if plan.participations == "planned":
        return replace(plan, participations=enough)
    fraction = float(getattr(strategy, "fraction_train", 0.0))
    if plan.turns < rounds * min(1.0, fraction) - 1e-9:
        raise ConfigError(
            f"a client can take part in {plan.turns} rounds, but {rounds} rounds with {fraction:.0%} of the "
            "nodes ask more of it",
            field="plan.participations",
            hint=f"leave it out, and it follows num_rounds and fraction_train; {enough} are enough",
        )
    if plan.turns < enough:
        LOG.warning(
            "niss: nodes that are drawn more than %d times in %d rounds are not asked again, and rounds get smaller; "
            "participations=%d are enough, or leave it out",
            *(plan.turns, rounds, enough),
        )
    return plan


def drawn_of(strategy: Strategy, nodes: int) -> int:
    """How many of so many nodes a strategy draws for a round, as far as it says; else all."""
    drawn = int(nodes * min(1.0, float(getattr(strategy, "fraction_train", 1.0))))
    drawn = max(drawn, int(getattr(strategy, "min_train_nodes", 0)))
    return drawn if 0 < drawn < nodes else nodes


def in_better_mode(plan: Plan, strategy: Strategy, nodes: int) -> Plan:
    """The plan in the mode that leaves less noise in the sum of the rounds of so many nodes, where clients drop out.

    As many are taken to as the plan expects, or 5 % where it expects none, and at least one in every round; after
    whose loss the next round must have enough to repair it. Where everyone repairs, that is the work of their square:
    in rounds of more than 200 it is for those who ask for it.
    """
    participants = drawn_of(strategy, max(nodes, fewest_nodes(strategy)))
    if not plan.calibrated or plan.kind.carries or plan.unit == "record" or participants < 2:
        return plan
    if plan.everyone_near and participants > _MOST_REPAIRING:
        return plan
    lost = max(plan.dropout or USUAL_DROPOUT, 1.0 / participants)

    def noise(mode: SettledMode) -> float:
        tried = replace(plan, mode=mode)
        planned = plan_noise(tried, participants)
        own = planned.unit * planned.neighbours / plan.kappa
        tried = replace(tried, dropout=lost)
        return noise_in_the_sum(tried, participants, plan.kappa, planned.residual / own).total

    with suppress(PrivacyError):  # Too few to repair anything.
        repairing = replace(plan, mode="repair")
        if fewest_participants(repairing) < participants and noise("repair") < noise("tolerate"):
            return repairing
    return plan


def for_nodes(plan: Plan, participants: int | None, nodes: int) -> Plan:
    """The plan of a run that carries noise, with its rounds' size: as given, or as many as take turns.

    nodes  how many are there when the run begins
    """
    size = plan.participants or participants or nodes // plan.separation
    if participants not in (None, size):
        raise ConfigError(
            f"rounds of {participants}, but the plan is for {size}", field="participants", hint="leave it out"
        )
    if size < (least := fewest_participants(plan)):
        raise ConfigError(
            f"{nodes} nodes that take part in one round of {plan.separation} make rounds of {size}, too few: the plan "
            f"needs {least}",
            field="participants",
            hint="have more nodes, or plan a smaller separation, fewer colluders or fewer dropouts",
        )
    return replace(plan, participants=size)


def _committed_to(plan: Plan, rounds: int) -> Plan:
    """Noise is carried to the very end, so that the number of rounds is part of what is promised."""
    training = rounds - plan.closing
    if training < 1 or plan.horizon not in (None, training):
        raise ConfigError(
            f"a plan that carries noise over {plan.horizon or 1} rounds is not one for {training}",
            field="plan.horizon",
            hint="leave it out, or start that many rounds" + (" and the closing one" if plan.closing else ""),
        )
    return replace(plan, horizon=training, participations=math.ceil(training / plan.separation))


def in_short(plan: Plan, metrics: Iterable[str], tracker: str) -> list[str]:
    """The plan with all that was derived, what travels inside the uploads, and who holds the beacon; a line each."""
    dropout = (
        f"{plan.dropout or USUAL_DROPOUT:.0%} expected"
        if plan.settled_mode == "repair"
        else "their noise stays"
    )
    said = [
        f"target: epsilon {plan.epsilon}, delta {digits(plan.delta)}, {plan.relation}",
        f"{plan.turns} rounds of a client, clip {plan.clip:g}, {100.0 * plan.collusion:.3g} % collude",
        f"noise shares: with {plan.neighbours:g} others, or all there are; kappa {plan.kappa:g}",
        f"dropouts: {plan.settled_mode}, {dropout}",
    ]
    if plan.kind.carries:
        said.append(
            f"noise carried over {plan.planned_rounds} rounds, nodes in turn, every {plan.separation}"
        )
    if names := ", ".join(metrics):
        said.append(f"metrics in the noisy sum: {names}")
    return [*said, f"keys and beacon: {tracker or _OWN_BEACON}"]


def foresee(session: Session, number: int, parameters: int, rounds: int, *, stop: bool) -> None:
    """Before anyone pays for the first round: can this model learn anything, and can the nodes pay for it all?

    With `stop`, a run under a hopeless plan ends here (`ConfigError`), its round, counted from 1, skipped.
    """
    assert session.round is not None
    terms = session.round.agreed.terms
    variance = len(session.round.nodes) * terms.residual_variance
    unit = session.proposal.plan.unit
    judged = outlook(parameters=parameters, rounds=rounds, clip=terms.clip, variance=variance, unit=unit)
    LOG.log(logging.INFO if judged.verdict == "good" else logging.WARNING, "niss: %s", judged.words)
    told = [member.rounds for member in session.members.by_node.values()]
    if short := [one for one in told if one < session.proposal.plan.turns]:
        LOG.warning(
            "niss: %d of %d nodes can pay for a part of the run only, some for no more than %d rounds; rounds that "
            "too few can pay for are not opened",
            *(len(short), len(told), min(short)),
        )
    if judged.verdict == "hopeless" and stop:
        session.skip(number - 1, "the plan is hopeless, and the run was to stop then")
        session.save()
        why = "nothing can be learned under this plan, and nobody has paid for it"
        raise ConfigError(why, field="on_hopeless", hint=judged.words)


def no_round(session: Session | None) -> ProtocolError:
    """Why the model of a run is the one that it began with, and what to do about it."""
    why, hint = "the strategy asked no node to train", "see `fraction_train`"
    if session is not None and session.books.rounds:
        last = session.books.rounds[-1]
        why = last.skipped or f"every upload was lost ({_most_common(last.lost.values())})"
        hint = "the log says why of each node; `participants` is how many a round needs"
    if session is not None and not session.members.by_node:
        reason = _most_common(session.members.left_out.values())
        why, hint = f"{why}; no node joined ({reason})", what_to_do(reason)
    return ProtocolError(f"no round took place: {why}", hint=hint)


def _most_common(reasons: Iterable[str]) -> str:
    counted = Counter(reasons).most_common(1)
    return counted[0][0] if counted else "no reason is known"
