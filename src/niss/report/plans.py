"""A plan for a reader, in the terminal and on the page: what it says line by line, and the curve that it lies on.

Stronger shares need less distortion, so less noise is left in the sum by design; where clients drop out, more of their
shares stays uncancelled. Unless kappa was given, the plan takes the least kappa that comes close to the lowest point
of the curve: stronger shares gain little and make every unforeseen dropout cost more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from niss.charts import Curves, Series, numbered, points
from niss.claims import digits, printed_claim
from niss.methods import look_of
from niss.methods.look import DOTTED, INK, Look

if TYPE_CHECKING:
    from niss.accounting import Committed, Forecast

_Line = tuple[str, str, str, str]
_NOISE = "aggregate_variance_ratio_to_central"
# A smaller part of the noise would press the rest of a logarithmic axis together.
_LEAST_PART = 1e-6
# The method that leaves the noise of each curve over the rounds; no method reaches the best correlated noise.
_OVER_ROUNDS = {
    "central": ("trusted server, fresh noise", "central-dp"),
    "niss": ("carried shares, nobody trusted", "niss-carried"),
    "banded": ("trusted server, BandMF", "central-mf"),
    "best": ("trusted server, best correlated noise", None),
}
# Where ideal secure aggregation needs hardly more than a trusted server, their lines would lie on each other.
_NOTICEABLY_MORE = 1.25


class PlanLine(NamedTuple):
    """One number of a plan: its key in JSON, its name, how it is written, and what it means."""

    key: str
    name: str
    text: str
    remark: str


def plan_lines(planned: Forecast, values: Mapping[str, Any]) -> list[PlanLine]:
    """What a plan promises, what to set and what it costs; `values` is what `niss plan --json` prints of it.

    The cost is a variance of noise, in units of what a trusted server would add, of what DP-FedAvg would leave, and of
    what ideal secure aggregation with distributed noise would need. Where records are hidden the server is one curator
    of all of them, and in the place of DP-FedAvg each silo adds all the noise itself.
    """
    lines = _round_lines(planned, values) if planned.run is None else _run_lines(planned, planned.run)
    return [PlanLine(*line) for line in lines]


def _server_and_local(unit: str) -> tuple[str, str]:
    """Whom a plan is measured against: who would add noise once, and those that all add it."""
    if unit == "record":
        return "one trusted curator", "silos that each add all of it"
    return "a trusted server", "DP-FedAvg"


def _times(value: float) -> str:
    return f"{digits(value)} ×"


def _often(number: int, what: str) -> str:
    return f"{digits(number)} {what}{'s' * (number != 1)}"


def _round_lines(planned: Forecast, values: Mapping[str, Any]) -> Iterator[_Line]:
    plan, size = planned.plan, planned.participants
    colluders, records = plan.assumed(size).colluders, plan.unit == "record"
    server, local = _server_and_local(plan.unit)
    silo = "silo" if records else "client"
    hidden = "one record more or less" if records else plan.relation
    against = f"{colluders} static colluders of {size}" if colluders else "no client colludes"
    promise = (
        f"at delta {digits(plan.delta)} over {_often(plan.turns, 'round' if records else 'participation')}"
    )
    promise += f", {hidden}, against a server that sees every upload; {against}"
    yield ("epsilon_joint", f"epsilon of each {plan.unit}", printed_claim(planned.epsilon_joint), promise)
    alone = printed_claim(planned.epsilon_marginal)
    yield ("epsilon_marginal", "epsilon of one upload", alone, "looked at alone: what the paper counts")
    graph = f"{plan.graph} graph of {digits(size)} {silo}s"
    yield ("neighbours", "neighbours", digits(plan.neighbours), graph)
    yield ("kappa", "kappa", digits(plan.kappa), "strength of the shares, in units of sigma^2")
    origin = "as given" if plan.tau2 is not None else "calibrated anew for each round's graph"
    yield ("tau2", "tau2", digits(planned.tau2), f"distortion of received shares, {origin}")
    needed = (
        "that one curator would need" if records else "a client would need alone, on its part of the average"
    )
    yield ("sigma", "sigma", digits(planned.sigma), f"noise {needed}")
    ratio = planned.aggregate_variance_ratio_to_central
    yield (_NOISE, "noise in the sum", _times(ratio), f"what {server} would add")
    yield ("ratio_to_local", "noise in the sum", _times(planned.ratio_to_local), f"what {local} would leave")
    ideal = "would be enough with ideal secure aggregation and distributed noise"
    yield ("ratio_ideal", "noise in the sum", _times(planned.ratio_ideal), ideal)
    if planned.dropout_part:
        left = f"of it left uncancelled by dropped {silo}s"
        yield ("dropout_part", "noise in the sum", _times(planned.dropout_part), left)
    if records:
        yield from _record_lines(planned, values)
    seeds = values["bytes_per_client"]["shares sent as seeds"]
    derived = f"shares are derived from keys; {digits(seeds)} bytes if sent as seeds"
    yield ("bytes_per_client", "sent for the shares", "nothing", derived)


def _record_lines(planned: Forecast, values: Mapping[str, Any]) -> Iterator[_Line]:
    """What a promise to records rests on, what a lost silo costs in either mode, and what would change the noise."""
    share = f"{digits(100.0 * planned.noise_share)} %"
    yield ("noise_share", "noise in the average", share, "of the clip, in each coordinate")
    if planned.noise_multiplier is not None:
        meaning = "noise multiplier of a round: what its secret batches are counted with"
        yield ("noise_multiplier", "z", digits(planned.noise_multiplier), meaning)
        known, silent = (
            printed_claim(values["epsilon_batches_known"]),
            "so their sizes, times and losses stay secret",
        )
        yield ("epsilon_batches_known", "epsilon, batches known", known, silent)
    tolerated, repaired = values["one_lost_tolerated"], values["one_lost_repaired"]
    yield ("one_lost_tolerated", "a silo is lost", _times(tolerated), "its noise tolerated in the sum")
    if repaired is not None:
        mode = f"planned for and repaired; this plan: {planned.plan.mode}"
        yield ("one_lost_repaired", "a silo is lost", _times(repaired), mode)
    for change, factor in values["levers"].items():
        yield ("levers", "noise over the run", _times(factor), f"with {change}")
    largest = values["outlook"]["largest"]
    yield ("largest", "largest model", digits(largest), "parameters that lose little to this noise")


def _run_lines(planned: Forecast, run: Committed) -> Iterator[_Line]:
    """What a plan of a run that carries noise promises, costs, and asks of the schedule."""
    plan, noise, size = planned.plan, run.noise, planned.participants
    helpers = (
        f"{noise.colluders} static colluders of {size} in every round"
        if noise.colluders
        else "no client colludes"
    )
    promise = f"at delta {digits(plan.delta)} over all {digits(run.horizon)} rounds, in at most "
    promise += f"{_often(plan.turns, 'participation')}, against a server that sees all uploads of all rounds; {helpers}"
    yield ("epsilon_joint", "epsilon of each client", printed_claim(planned.epsilon_joint), promise)
    exactly = "exactly" if run.pattern == "cyclic" else "at least"
    apart = f"clients come back after {exactly} so many rounds; {digits(planned.clients)} in all, {digits(size)} each"
    yield ("separation", "separation", digits(run.separation), apart)
    strength = "strength of the shares within a round, in units of sigma^2"
    yield ("kappa", "kappa", digits(plan.kappa), strength)
    carried = "noise that a later cohort takes out again, over noise that stays"
    ratio = plan.carried_to_residual
    yield ("carried_to_residual", "carried to residual", digits(ratio), carried)
    stays = "deviation of the noise of a round that stays in the average"
    yield ("residual", "residual", digits(planned.residual**0.5), stays)
    fresh = "what a trusted server with fresh noise in every round leaves, mean over the rounds"
    yield (_NOISE, "noise in the model", _times(planned.aggregate_variance_ratio_to_central), fresh)
    final = planned.ratio_to_central_final
    yield ("ratio_to_central_final", "noise in the model", _times(final), "the same for the final model")
    if planned.ratio_to_central_early is not None and planned.ratio_to_central_averaged is not None:
        early, mean = planned.ratio_to_central_early, digits(planned.ratio_to_central_averaged)
        meaning = f"ended a round early, with what is carried still in it; in the mean of the last five models {mean}"
        yield ("ratio_to_central_early", "noise in the model", _times(early), meaning)
    banded = sum(planned.over_rounds["niss"]) / sum(planned.over_rounds["banded"])
    correlated = "a trusted server with correlated noise (BandMF), mean"
    yield ("ratio_to_banded", "noise in the model", _times(banded), correlated)
    if (best := planned.ratio_to_best) is not None:
        possible = "the best correlated noise that a trusted server could use, mean"
        yield ("ratio_to_best", "noise in the model", _times(best), possible)
    if plan.dropout:
        meaning = "what they carried stays in the model, and the plan carries less for it"
        if noise.dropped:
            meaning = f"what they carried is taken out; up to {noise.dropped} of a round count like colluders"
        lost = f"{digits(100.0 * plan.dropout)} %"
        yield ("dropout", "dropouts", lost, f"mode {plan.mode}; {meaning}")
    turns = f"{digits(run.separation)} fixed cohorts of {digits(size)} take turns"
    if run.separation == 1:
        turns = "everyone takes part in every round"
    elif run.pattern != "cyclic":
        turns = f"nobody takes part twice within {digits(run.separation)} rounds"
    yield ("participants", "participants", digits(size), f"{turns}; who takes part is fixed one round ahead")
    ends = "are committed: ending early is safe, going on is a new run"
    yield ("rounds", "rounds", digits(run.horizon), ends)
    rate = "whoever arrives; it steps at a rate fixed in advance"
    yield ("divisor", "server divides by", digits(size), rate)


def plan_chart(plan: Mapping[str, Any]) -> Curves:
    """What a plan trades off, from the dictionary that `niss plan --json` prints.

    It is the noise in the sum over the strength of the shares or, where they are carried, in the model over rounds.
    """
    return _rounds_chart(plan["over_rounds"]) if plan["over_rounds"] else _kappa_chart(plan)


def _rounds_chart(over_rounds: Mapping[str, Sequence[float]]) -> Curves:
    """The variance in the model after each round, as a part of what a trusted server leaves in the end."""
    final = over_rounds["central"][-1]
    series = []
    for key, (name, method) in _OVER_ROUNDS.items():
        if key in over_rounds:
            look = look_of(method) if method else Look(INK, "o", DOTTED)
            values = [value / final for value in over_rounds[key]]
            series.append(Series(name, look, points(range(1, len(values) + 1), values)))
    up = "Noise variance in the model\n(fresh central noise at the end = 1)"
    return Curves(title="Noise in the model", across="Round", up=up, series=series, head="Round", least=0.0)


def _kappa_chart(plan: Mapping[str, Any]) -> Curves:
    """The variance in the sum over kappa, as multiples of what a trusted server would add.

    Shown are the curve, its two parts where clients may drop out, the plan itself, and as lines the trusted server,
    ideal secure aggregation (where it needs noticeably more) and DP-FedAvg.
    """
    curve, kappa, chosen = plan["curve"], plan["plan"]["kappa"], plan["aggregate_variance_ratio_to_central"]
    parts = {"total": "NISS, all noise"}
    if plan["dropout_part"] > _LEAST_PART * chosen:
        parts |= {"residual": "by design", "dropout": "left by dropped clients"}
    kappas = [point["kappa"] for point in curve]
    series = [
        Series(name, numbered(number), points(kappas, [point[part] for point in curve], "xy"))
        for number, (part, name) in enumerate(parts.items())
    ]
    server, each = (
        ("one curator", "each silo alone") if plan["unit"] == "record" else ("trusted server", "DP-FedAvg")
    )
    name = f"the plan: {digits(chosen)} at κ {digits(kappa)}"
    series.append(Series(name, Look(INK, "o"), points([kappa], [chosen], "xy"), line=False))
    ideal, local = plan["ratio_ideal"], chosen / plan["ratio_to_local"]
    levels = {f"{server}: 1": 1.0, f"{each}: {digits(local)}": local}
    if ideal >= _NOTICEABLY_MORE:
        levels["ideal secure aggregation"] = ideal
    return Curves(
        title="Noise over the strength of the shares",
        across="Strength of the shares, κ",
        up=f"Noise variance in the sum\n({server} = 1)",
        series=series,
        log="xy",
        levels=levels,
        head="κ",
    )
