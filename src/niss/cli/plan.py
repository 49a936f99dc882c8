"""`niss plan`: what to set, what it costs, and what it promises."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from niss.cli.choices import MODES, RELATIONS
from niss.cli.completion import one_of
from niss.cli.switches import Quiet
from niss.errors import ConfigError

if TYPE_CHECKING:
    from niss.accounting import CoalitionPlan, Planned

EXAMPLES = """Examples:

  niss plan --participants 30 --neighbours 29 --clip 3 --epsilon 8 --delta 1e-5 --rounds 100 --participations 30

  niss plan --participants 1000 --epsilon 3 --participations 6 --collusion 0.2 --json

  niss plan --participants 30 --tau2 0.3          what does that tau^2 promise?

  niss plan --group 10:0 --group 20:0.1 --collusion 0.5      coalitions against one flat population
"""


def plan_command(
    participants: Annotated[int | None, typer.Option(help="Clients in a round.")] = None,
    neighbours: Annotated[float | None, typer.Option(help="Unit shares each sends; default: enough.")] = None,
    clip: Annotated[float, typer.Option(help="L2 bound on a client's update.")] = 1.0,
    epsilon: Annotated[float, typer.Option(help="Target over all participations.")] = 3.0,
    delta: Annotated[float, typer.Option(help="Target over all participations.")] = 1e-5,
    rounds: Annotated[int | None, typer.Option(help="Rounds of the whole training.")] = None,
    participations: Annotated[
        int | None, typer.Option(help="Rounds one client takes part in; default: all.")
    ] = None,
    collusion: Annotated[
        float, typer.Option(help="Share of participants that collude with the server.")
    ] = 0.0,
    dropout: Annotated[float, typer.Option(help="Share of participants that drop out.")] = 0.0,
    mode: Annotated[
        str, typer.Option(help="What dropouts do: tolerate or repair.", autocompletion=one_of(MODES))
    ] = "tolerate",
    kappa: Annotated[
        float | None, typer.Option(help="Strength of the shares; default: the cheapest.")
    ] = None,
    tau2: Annotated[float | None, typer.Option(help="Ask what this distortion promises.")] = None,
    relation: Annotated[
        str, typer.Option(help="zero-out or replace-one.", autocompletion=one_of(RELATIONS))
    ] = "zero-out",
    group: Annotated[
        list[str] | None, typer.Option(metavar="SIZE:COLLUSION", help="A coalition; repeat for each.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the trade-off into this file (.png or .svg).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    quiet: Quiet = False,  # noqa: ARG001 (its callback does the work)
) -> None:
    """Find the cheapest noise that keeps a joint-view promise to every client."""
    from niss.accounting import Group, make_plan, plan_coalitions
    from niss.cli.terminal import print_json, working

    if rounds is not None and participations is not None and participations > rounds:
        raise ConfigError(f"{participations} in only {rounds} rounds", field="--participations")
    target: dict[str, Any] = {
        "clip": clip,
        "epsilon": epsilon,
        "delta": delta,
        "participations": participations or rounds or 1,
        "dropout": dropout,
        "mode": mode,
        "kappa": kappa,
        "tau2": tau2,
        "relation": relation,
        "neighbours": neighbours,
    }
    with working("planning") as say:
        if group:
            groups = [Group(*_group(text)) for text in group]
            if participants not in (None, sum(one.size for one in groups)):
                raise ConfigError("is not the sum of the groups", field="--participants", hint="leave it out")
            coalitions = plan_coalitions(groups, flat_collusion=collusion, **target)
        elif participants is None:
            raise ConfigError("is missing", field="--participants", hint="for example --participants 200")
        else:
            planned = make_plan(participants=participants, collusion=collusion, progress=say, **target)
    if group:
        print_json(coalitions.to_json()) if as_json else _print_coalitions(coalitions)
        return
    if plot is not None:
        _plot(planned, plot)
    print_json({**planned.to_json(), "rounds": rounds}) if as_json else _print_plan(planned)


def _group(text: str) -> tuple[int, float]:
    size, _, collusion = text.partition(":")
    try:
        return int(size), float(collusion or 0.0)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no SIZE:COLLUSION", field="--group", hint="for example 10:0.1"
        ) from None


def _print_plan(planned: Planned) -> None:
    plan = planned.plan
    epsilon = planned.epsilon_joint
    promise = "no guarantee" if epsilon is None else f"epsilon {epsilon:.2f} at delta {plan.delta:g}"
    rows: list[tuple[str, str, str]] = [
        (
            "promise, joint view",
            promise,
            f"over {plan.participations} participation{'s' * (plan.participations != 1)}, {plan.relation}",
        ),
        ("", "", _adversary(planned)),
        (
            "promise, marginal view",
            f"epsilon {planned.epsilon_marginal:.2f}",
            "one upload alone: what the paper counts",
        ),
        (
            "neighbours",
            f"{planned.neighbours:g}",
            f"{plan.graph} graph of {planned.participants} participants",
        ),
        ("kappa", f"{planned.kappa:.3g}", "strength of the shares, in units of sigma_k^2"),
        (
            "tau^2",
            f"{planned.tau2:.4g}",
            "distortion of received shares, " + _origin(planned),
        ),
        ("sigma_k", f"{planned.sigma:.4g}", "noise a client would need alone, on its upload p_k x_k"),
        (
            "noise in the sum",
            f"{planned.aggregate_variance_ratio_to_central:.3g} x",
            "what a trusted server would add",
        ),
        ("", f"{planned.aggregate_variance_ratio_to_local:.3g} x", "what DP-FedAvg would leave"),
        (
            "",
            f"{planned.aggregate_variance_ratio_ideal:.3g} x",
            "is what ideal secure aggregation with distributed noise needs",
        ),
    ]
    if planned.dropout_part:
        rows.append(("", f"{planned.dropout_part:.3g} x", "of it left uncancelled by dropped clients"))
    rows.append(
        (
            "sent per client",
            "nothing",
            "shares derived from keys; "
            f"{planned.to_json()['bytes_per_client']['shares sent as seeds']} bytes if sent as seeds",
        )
    )
    _print_rows(rows)
    for note in planned.notes:
        typer.echo(f"note: {note}")
    if planned.curve:
        typer.echo("\nnoise in the sum (trusted server = 1, log scale) over kappa")
        _print_curve(planned)


def _print_rows(rows: list[tuple[str, str, str]]) -> None:
    wide = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    for name, value, remark in rows:
        typer.echo(f"{name:<{wide[0]}}  {value:>{wide[1]}}  {remark}".rstrip())


def _adversary(planned: Planned) -> str:
    colluders = planned.plan.colluders
    if not colluders:
        return "against a server that sees every upload; no client colludes"
    return (
        f"against a server that sees every upload and {colluders} static colluders of {planned.participants}"
    )


def _origin(planned: Planned) -> str:
    return "as given" if planned.plan.tau2 is not None else "calibrated anew for each round's graph"


def _print_curve(planned: Planned) -> None:
    """One bar per kappa, on a log scale; the light part is the share of it that dropouts leave."""
    points = planned.curve[::4]
    span = math.log(max(point.total for point in points) / 0.9)
    for point in points:
        length = round(44 * math.log(point.total / 0.9) / span)
        light = round(length * point.dropout / point.total)
        solid = length - light
        mark = "<-" if abs(point.kappa / planned.kappa - 1.0) < 0.25 else ""
        typer.echo(f"{point.kappa:8.2f}  {'█' * solid}{'░' * light} {point.total:.3g} {mark}".rstrip())


def _print_coalitions(coalitions: CoalitionPlan) -> None:
    rows: list[tuple[str, str, str]] = []
    for number, one in enumerate(coalitions.groups):
        rows.append(
            (
                f"group {number}",
                f"{one.aggregate_variance_ratio_to_central:.3g} x",
                f"{one.participants} clients, {one.plan.colluders} colluders, "
                f"kappa {one.kappa:.3g}, tau^2 {one.tau2:.3g}",
            )
        )
    flat = coalitions.flat
    rows += [
        (
            "all groups",
            f"{coalitions.aggregate_variance_ratio_to_central:.3g} x",
            "what a trusted server would add",
        ),
        (
            "flat",
            f"{flat.aggregate_variance_ratio_to_central:.3g} x",
            f"one population of {flat.participants} with {flat.plan.colluders} colluders",
        ),
        ("gain", f"{coalitions.gain:.3g} x", "less noise" if coalitions.gain > 1 else "below 1: stay flat"),
    ]
    _print_rows(rows)


def _plot(planned: Planned, path: Path) -> None:
    from niss.report import plan_figure

    values: dict[str, Any] = planned.to_json()
    if not values["curve"]:
        raise ConfigError("a given tau2 has no trade-off to draw", field="--plot", hint="leave out --tau2")
    plan_figure(values, path)
