"""`niss plan`: what to set, what it costs, and what it promises."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import Doc

from niss.accounting.asked import PlanQuestion
from niss.cli.options import Flags, from_options, option
from niss.cli.terminal import print_aligned, print_json, print_sentence, width_asked, working
from niss.errors import ConfigError

if TYPE_CHECKING:
    from niss.accounting import Committed, Forecast

_SAME_BAR = 0.15
"""Logarithm of the ratio up to which a kappa of the curve gives way to the plan's own."""
_BAR = 40
"""The longest bar of a round."""


@dataclass(frozen=True)
class PlanOutput:
    """What else is asked, and how the answer is shown."""

    plot: Annotated[
        Path | None,
        Doc("Draw the trade-off, or with --carry the noise over the rounds, into this file (.png or .svg)."),
    ] = None
    as_json: Annotated[bool, Doc("Print the plan as JSON.")] = option(False, "--json")


QUESTION = Flags.all_of(PlanQuestion)


@from_options(QUESTION, PlanOutput, quiet=True)
def plan_command(asked: dict[str, Any], output: PlanOutput) -> None:
    """Find the cheapest noise that keeps a joint-view promise to every client, or to every record of silos.

    Examples:
    niss plan --participants 30 --neighbours 29 --clip 3 --epsilon 8 --delta 1e-5 --rounds 100 --participations 30
    niss plan --participants 1000 --epsilon 3 --participations 6 --collusion 0.2 --json
    niss plan --participants 10 --epsilon 8 --rounds 20 --parameters 62000      is there any hope?
    niss plan --participants 30 --tau2 0.3          what does that tau^2 promise?
    niss plan --unit record --participants 10 --records 60000 --batch 0.05 --rounds 600 --epsilon 1      ten silos
    niss plan --unit record --participants 10 --records 60000 --batch 0.05 --rounds 600 --collusion 0.2
    niss plan --rounds 100 --participants 100 --clients 1000 --carry      noise that cancels across rounds
    niss plan --rounds 100 --participants 100 --clients 1000 --carry --dropout 0.02 --plot noise.png
    """
    question: PlanQuestion = QUESTION.check(asked)
    with working("planning") as progress:
        planned = question.forecast(progress)
    values = question.to_json(planned)
    if output.plot is not None:
        from niss.report.run_charts import plan_chart, save_charts

        if not values["carry"] and not values["curve"]:
            raise ConfigError(
                "a given tau2 has no trade-off to draw", field="--plot", hint="leave out --tau2"
            )
        save_charts(output.plot, [plan_chart(values)])
    if output.as_json:
        print_json(values)
        return
    if planned.run is None:
        _print_plan(planned, values)
    else:
        _print_carried(planned, planned.run)
    if "outlook" in values:
        outlook = values["outlook"]
        print_sentence(f"outlook: {outlook['finding']}", indent=9)
        if outlook["verdict"] != "good":
            print_sentence(f"helps:   {outlook['helps']}", indent=9)


def _print_plan(planned: Forecast, values: Mapping[str, Any]) -> None:
    """Print a plan: what is promised in either view, what to set, and what it costs.

    The cost is the variance of the noise left in the sum, in units of what a trusted server would add, of what
    DP-FedAvg would leave, and of what ideal secure aggregation with distributed noise would need. Where records are
    hidden the server is one curator of all of them, and in the place of DP-FedAvg each silo adds all the noise itself.
    """
    from niss.claims import printed_claim

    plan, epsilon, size = planned.plan, planned.epsilon_joint, planned.participants
    colluders, often = plan.assumed(size).colluders, _often(plan.turns)
    promise = "no guarantee" if epsilon is None else f"epsilon {printed_claim(epsilon)}"
    against = f" and {colluders} static colluders of {size}" if colluders else "; no client colludes"
    origin = "as given" if plan.tau2 is not None else "calibrated anew for each round's graph"
    as_seeds = planned.to_json()["bytes_per_client"]["shares sent as seeds"]
    records = plan.unit == "record"
    server, local = (
        ("one trusted curator", "silos that each add all of it")
        if records
        else ("a trusted server", "DP-FedAvg")
    )
    hidden = f"over {often}, {'one record more or less' if records else plan.relation}"
    rows = [
        f"promise, joint view | {promise} | at delta {plan.delta:g} {hidden}",
        f"| | against a server that sees every upload{against}",
        f"promise, marginal view | epsilon {printed_claim(planned.epsilon_marginal)} "
        "| one upload alone: what the paper counts",
        f"neighbours | {plan.neighbours:g} | {plan.graph} graph of {size} participants",
        f"kappa | {plan.kappa:.3g} | strength of the shares, in units of sigma_k^2",
        f"tau^2 | {planned.tau2:.4g} | distortion of received shares, {origin}",
        f"sigma_k | {planned.sigma:.4g} | noise a client would need alone, on its upload p_k x_k",
        f"noise in the sum | {planned.aggregate_variance_ratio_to_central:.3g} x | what {server} would add",
        f"| {planned.ratio_to_local:.3g} x | what {local} would leave",
        f"| {planned.ratio_ideal:.3g} x "
        "| would be enough with ideal secure aggregation and distributed noise",
    ]
    if planned.dropout_part:
        rows.append(f"| {planned.dropout_part:.3g} x | of it left uncancelled by dropped clients")
    if records:
        rows += _record_rows(planned, values)
    rows.append(f"sent per client | nothing | shares derived from keys; {as_seeds} bytes if sent as seeds")
    print_aligned(rows)
    for note in planned.notes:
        print_sentence(f"note: {note}", indent=6)
    if planned.curve:
        typer.echo("\nnoise in the sum (trusted server = 1, log scale) over kappa")
        _print_curve(planned)


def _record_rows(planned: Forecast, values: Mapping[str, Any]) -> Iterator[str]:
    """What a promise to records rests on, what a lost silo costs in either mode, and what would change the noise."""
    from niss.claims import rounded_up

    yield f"noise in the average | {100.0 * planned.noise_share:.3g} % | of the clip, in each coordinate"
    if planned.noise_multiplier is not None:
        meaning = "noise multiplier of a round: what its secret batches are counted with"
        yield f"z | {planned.noise_multiplier:.4g} | {meaning}"
        known = rounded_up(values["epsilon_batches_known"])
        yield f"if all batches were known | epsilon {known} | so their sizes, times and losses stay with the silos"
    yield f"a silo is lost | {values['one_lost_tolerated']:.3g} x | its noise tolerated in the sum"
    if (repaired := values["one_lost_repaired"]) is not None:
        yield f"| {repaired:.3g} x | planned for and repaired; this plan: {planned.plan.mode}"
    for number, (change, factor) in enumerate(values["levers"].items()):
        yield f"{'' if number else 'noise over the run'} | {factor:.3g} x | {change}"


def _often(participations: int) -> str:
    return f"{participations} participation{'s' * (participations != 1)}"


def _print_curve(planned: Forecast) -> None:
    """One bar per kappa, on a log scale; the light part is the share of it that dropouts leave.

    The plan has a bar of its own, with the kappa and the noise that are printed above it.
    """
    chosen, total = planned.plan.kappa, planned.aggregate_variance_ratio_to_central
    bars = [
        (point.kappa, point.total, point.dropout)
        for point in planned.curve[::4]
        if abs(math.log(point.kappa / chosen)) > _SAME_BAR
    ]
    bars = sorted([*bars, (chosen, total, planned.dropout_part or 0.0)])
    span = math.log(max(bar[1] for bar in bars) / 0.9)
    longest = min(44, max((width_asked() or 140) - 34, 8))
    for kappa, noise, dropout in bars:
        length = round(longest * math.log(noise / 0.9) / span)
        light = round(length * dropout / noise)
        mark = "<- the plan" if kappa == chosen else ""
        typer.echo(f"{kappa:8.3g}  {'█' * (length - light)}{'░' * light} {noise:.3g} {mark}".rstrip())


def _print_carried(planned: Forecast, run: Committed) -> None:
    """Print a plan of a run that carries noise: promise, cost, what it asks of the schedule, noise over the rounds."""
    from niss.claims import printed_claim

    plan, noise, separation, size = planned.plan, run.noise, run.separation, planned.participants
    cyclic = run.pattern == "cyclic"
    against = (
        f"{noise.colluders} static colluders of {size} in every round"
        if noise.colluders
        else "no client colludes"
    )
    often = f"for every client over all {run.horizon} rounds, in at most {_often(plan.turns)}"
    apart = f"clients come back after {'exactly' if cyclic else 'at least'} so many rounds"
    banded = sum(planned.over_rounds["niss"]) / sum(planned.over_rounds["banded"])
    rows = [
        f"promise, joint view | epsilon {printed_claim(planned.epsilon_joint)} | at delta {plan.delta:g} {often}",
        f"| | against a server that sees every upload of every round; {against}",
        f"separation | {separation} | {apart}; {planned.clients} of them, {size} a round",
        f"kappa | {plan.kappa:.3g} | strength of the shares within a round, in units of sigma_k^2",
        f"carried to residual | {plan.carried_to_residual:.3g} "
        "| noise that a later cohort takes out again, over noise that stays",
        f"residual | {planned.residual**0.5:.3g} | deviation of the noise of a round that stays in the average",
        f"noise in the model | {planned.aggregate_variance_ratio_to_central:.3g} x "
        "| what a trusted server with fresh noise in every round leaves, mean over the rounds",
        f"| {planned.ratio_to_central_final:.3g} x | the same for the final model",
        f"| {banded:.3g} x | a trusted server with correlated noise (BandMF), mean",
    ]
    if (best := planned.ratio_to_best) is not None:
        rows.append(f"| {best:.3g} x | the best correlated noise that a trusted server could use, mean")
    if plan.dropout:
        meaning = "what they carried stays in the model, and the plan carries less for it"
        if noise.dropped:
            meaning = f"what they carried is taken out; up to {noise.dropped} of a round count like colluders"
        rows.append(f"dropouts | {100.0 * plan.dropout:g} % | mode {plan.mode}; {meaning}")
    print_aligned(rows)
    typer.echo("\nwhat it asks of the schedule")
    cohorts = f"{separation} fixed cohorts of {size} take turns"
    if separation == 1:
        cohorts = "everyone takes part in every round"
    elif not cyclic:
        cohorts = f"nobody takes part twice within {separation} rounds"
    for line in (
        f"{cohorts}; who takes part is fixed one round ahead",
        f"{run.horizon} rounds are committed: ending early is safe, going on is a new run",
        f"the server divides by {size}, whoever arrives, and steps at a rate fixed in advance",
    ):
        print_sentence(f"  - {line}", indent=4)
    for note in planned.notes:
        print_sentence(f"note: {note}", indent=6)
    typer.echo("")
    print_sentence("noise in the model after a round (trusted server with fresh noise, final model = 1)")
    _print_rounds(planned)


def _print_rounds(planned: Forecast) -> None:
    """A bar for every tenth of the run, and beside it what trusted servers leave."""
    curves, final = planned.over_rounds, planned.over_rounds["central"][-1]
    names = {"niss": "NISS", "central": "fresh", "banded": "BandMF", "best": "best"}
    typer.echo(f"{'round':>8}  " + "".join(f"{names[key]:>8}" for key in curves))
    length = len(curves["niss"])
    rounds = sorted({max(1, round(part * length / 10)) for part in range(1, 11)})
    highest = max(1.0, max(curves["niss"]) / final)
    longest = min(_BAR, max((width_asked() or 140) - 12 - 8 * len(curves), 8))
    for number in rounds:
        values = [curve[number - 1] / final for curve in curves.values()]
        bar = "█" * max(1, round(longest * values[0] / highest))
        typer.echo(f"{number:>8}  " + "".join(f"{value:>8.3f}" for value in values) + f"  {bar}")
