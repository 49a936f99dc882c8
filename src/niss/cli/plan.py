"""`niss plan`: what to set, what it costs, and what it promises."""

from __future__ import annotations

import math
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
    from niss.accounting import Forecast

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
    from niss.report.plans import plan_lines

    question: PlanQuestion = QUESTION.check(asked)
    with working("planning") as progress:
        planned = question.forecast(progress)
    values = question.to_json(planned)
    if output.plot is not None:
        from niss.report.plans import plan_chart
        from niss.report.run_charts import save_charts

        if not values["carry"] and not values["curve"]:
            raise ConfigError(
                "a given tau2 has no trade-off to draw", field="--plot", hint="leave out --tau2"
            )
        save_charts(output.plot, [plan_chart(values)])
    if output.as_json:
        print_json(values)
        return
    print_aligned(line[1:] for line in plan_lines(planned, values))
    for note in planned.notes:
        print_sentence(f"note: {note}", indent=6)
    if planned.over_rounds:
        print_sentence(
            "\nnoise in the model after a round (trusted server with fresh noise, final model = 1)"
        )
        _print_rounds(planned)
    elif planned.curve:
        typer.echo("\nnoise in the sum (trusted server = 1, log scale) over kappa")
        _print_curve(planned)
    if "outlook" in values:
        outlook = values["outlook"]
        print_sentence(f"outlook: {outlook['finding']}", indent=9)
        if outlook["verdict"] != "good":
            print_sentence(f"helps:   {outlook['helps']}", indent=9)


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
