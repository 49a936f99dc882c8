"""`niss plan`: what to set, what it costs, and what it promises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from niss.cli.options import from_options, option
from niss.cli.plan_carried import plan_carry
from niss.cli.terminal import print_aligned, print_json, print_sentence, width_asked, working
from niss.errors import ConfigError

if TYPE_CHECKING:
    from niss.accounting import PlanForecast

_TARGET = (
    "clip",
    "epsilon",
    "delta",
    "dropout",
    "mode",
    "kappa",
    "tau2",
    "relation",
    "neighbours",
    "search",
)
"""The options that the planner takes under the same name."""
_SAME_BAR = 0.15
"""Logarithm of the ratio up to which a kappa of the curve gives way to the plan's own."""


@dataclass(frozen=True)
class PlanOptions:
    """The round, what every client is promised, and what may go wrong.

    participants    Clients in a round.
    neighbours      Unit shares each sends; default: enough.
    clip            L2 bound on a client's update.
    epsilon         Target over all participations.
    delta           Target over all participations.
    rounds          Rounds of the whole training.
    participations  Rounds one client takes part in; default: all.
    collusion       Share of participants that collude with the server.
    dropout         Share of participants that drop out.
    mode            What dropouts do: tolerate or repair.
    kappa           Strength of the shares; default: the cheapest.
    tau2            Ask what this distortion promises.
    relation        zero-out or replace-one.
    parameters      Size of the model: say whether it can learn anything under this noise.
    search          Also look for the worst colluders: how near does an attacker come?
    carry           Carry noise shares to the next round, where they are taken out again.
    clients         All clients, with --carry; rounds are filled from them in turn.
    pattern         How clients come back, with --carry: cyclic (fixed cohorts) or any.
    plot            Draw the trade-off, or with --carry the noise over the rounds, into this file (.png or .svg).
    as_json         Print the plan as JSON.
    """

    participants: int | None = None
    neighbours: float | None = None
    clip: float = 1.0
    epsilon: float = 3.0
    delta: float = 1e-5
    rounds: int | None = None
    participations: int | None = None
    collusion: float = 0.0
    dropout: float = 0.0
    mode: str = "tolerate"
    kappa: float | None = None
    tau2: float | None = None
    relation: str = "zero-out"
    parameters: int | None = None
    search: bool = False
    carry: bool = False
    clients: int | None = None
    pattern: str | None = None
    plot: Path | None = None
    as_json: bool = option(False, "--json")


@from_options(PlanOptions, quiet=True)
def plan_command(options: PlanOptions) -> None:
    """Find the cheapest noise that keeps a joint-view promise to every client.

    Examples:
    niss plan --participants 30 --neighbours 29 --clip 3 --epsilon 8 --delta 1e-5 --rounds 100 --participations 30
    niss plan --participants 1000 --epsilon 3 --participations 6 --collusion 0.2 --json
    niss plan --participants 200 --collusion 0.2 --search      how near does the worst attacker found come?
    niss plan --participants 10 --epsilon 8 --rounds 20 --parameters 62000      is there any hope?
    niss plan --participants 30 --tau2 0.3          what does that tau^2 promise?
    niss plan --rounds 100 --participants 100 --clients 1000 --carry      noise that cancels across rounds
    niss plan --rounds 100 --participants 100 --clients 1000 --carry --dropout 0.02 --plot noise.png
    """
    from niss.accounting import forecast, judge_plan

    if options.carry:
        plan_carry(options)
        return
    for name in ("clients", "pattern"):
        if getattr(options, name) is not None:
            raise ConfigError("belongs to carried shares", field=f"--{name}", hint="add --carry")
    rounds, participations = options.rounds, options.participations
    if rounds is not None and participations is not None and participations > rounds:
        raise ConfigError(f"{participations} in only {rounds} rounds", field="--participations")
    target: dict[str, Any] = {name: getattr(options, name) for name in _TARGET}
    target["participations"] = participations or rounds or 1
    if options.participants is None:
        raise ConfigError("is missing", field="--participants", hint="for example --participants 200")
    with working("planning") as progress:
        planned = forecast(
            participants=options.participants, collusion=options.collusion, progress=progress, **target
        )
    if options.plot is not None:
        _plot(planned, options.plot)
    values = {**planned.to_json(), "rounds": rounds, "dropout": options.dropout}
    judged = None
    if options.parameters is not None:
        judged = judge_plan(planned, parameters=options.parameters, rounds=rounds, clip=planned.plan.clip)
        values["outlook"] = judged.to_json()
    if options.as_json:
        print_json(values)
        return
    _print_plan(planned)
    if judged is not None:
        print_sentence(f"outlook: {judged.words}")


def _print_plan(planned: PlanForecast) -> None:
    """Print a plan: what is promised in either view, what to set, and what it costs.

    The cost is the variance of the noise left in the sum, in units of what a trusted server would add, of what
    DP-FedAvg would leave, and of what ideal secure aggregation with distributed noise would need.
    """
    from niss.claims import rounded_up

    plan = planned.plan
    epsilon = planned.epsilon_joint
    promise = "no guarantee" if epsilon is None else f"epsilon {rounded_up(epsilon)}"
    often = f"{plan.participations} participation{'s' * (plan.participations != 1)}"
    rows: list[tuple[str, str, str]] = [
        (
            "promise, joint view",
            promise,
            f"at delta {plan.delta:g} over {often}, {plan.relation}",
        ),
        ("", "", _adversary(planned)),
        (
            "promise, marginal view",
            f"epsilon {rounded_up(planned.epsilon_marginal)}",
            "one upload alone: what the paper counts",
        ),
        (
            "neighbours",
            f"{planned.neighbours:g}",
            f"{plan.graph} graph of {planned.participants} participants",
        ),
        ("kappa", f"{planned.kappa:.3g}", "strength of the shares, in units of sigma_k^2"),
        ("tau^2", f"{planned.tau2:.4g}", "distortion of received shares, " + _origin(planned)),
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
            "would be enough with ideal secure aggregation and distributed noise",
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
    print_aligned(rows)
    for note in planned.notes:
        print_sentence(f"note: {note}", indent=6)
    if planned.curve:
        typer.echo("\nnoise in the sum (trusted server = 1, log scale) over kappa")
        _print_curve(planned)


def _adversary(planned: PlanForecast) -> str:
    """Against whom the promise of the joint view holds, in words."""
    colluders = planned.plan.colluders
    if not colluders:
        return "against a server that sees every upload; no client colludes"
    return (
        f"against a server that sees every upload and {colluders} static colluders of {planned.participants}"
    )


def _origin(planned: PlanForecast) -> str:
    """Where tau^2 comes from: the user, or the calibration, which each round's graph repeats."""
    return "as given" if planned.plan.tau2 is not None else "calibrated anew for each round's graph"


def _print_curve(planned: PlanForecast) -> None:
    """One bar per kappa, on a log scale; the light part is the share of it that dropouts leave.

    The plan has a bar of its own, with the kappa and the noise that are printed above it.
    """
    chosen, total = planned.kappa, planned.aggregate_variance_ratio_to_central
    bars = [
        (point.kappa, point.total, point.dropout)
        for point in planned.curve[::4]
        if abs(math.log(point.kappa / chosen)) > _SAME_BAR
    ]
    bars = sorted([*bars, (chosen, total, planned.dropout_part)])
    span = math.log(max(bar[1] for bar in bars) / 0.9)
    longest = min(44, max((width_asked() or 140) - 34, 8))
    for kappa, noise, dropout in bars:
        length = round(longest * math.log(noise / 0.9) / span)
        light = round(length * dropout / noise)
        mark = "<- the plan" if kappa == chosen else ""
        typer.echo(f"{kappa:8.3g}  {'█' * (length - light)}{'░' * light} {noise:.3g} {mark}".rstrip())


def _plot(planned: PlanForecast, path: Path) -> None:
    """Draw the noise in the sum over kappa. `ConfigError` where tau^2 was given, since then nothing is traded off."""
    from niss.report import plan_figure

    values: dict[str, Any] = planned.to_json()
    if not values["curve"]:
        raise ConfigError("a given tau2 has no trade-off to draw", field="--plot", hint="leave out --tau2")
    plan_figure(values, path)
