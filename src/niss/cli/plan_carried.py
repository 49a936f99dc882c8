"""`niss plan --carry`: noise that cancels across rounds, and what it leaves in the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from niss.cli.terminal import print_aligned, print_json, print_sentence, width_asked, working
from niss.errors import ConfigError

if TYPE_CHECKING:
    from niss.accounting import CarriedForecast
    from niss.cli.plan import PlanOptions

_TARGET = ("participants", "clients", "rounds")
_OPTIONAL = ("clip", "epsilon", "delta", "collusion", "dropout", "mode", "kappa", "relation")
# What has no meaning here, and why.
_FOREIGN = {
    "neighbours": "the plan is for rounds in which everyone shares noise with everyone",
    "participations": "it follows from --rounds, --clients and --participants",
    "tau2": "what a carried run promises depends on all of its rounds",
    "search": "what colluders can do is known exactly here",
}
_BAR = 40


def plan_carry(options: PlanOptions) -> None:
    """Plan a run with carried shares and print it."""
    from niss.accounting import forecast_carried, judge_plan

    for name, reason in _FOREIGN.items():
        if getattr(options, name):
            raise ConfigError(f"does not go with --carry: {reason}", field=f"--{name}", hint="leave it out")
    target: dict[str, Any] = {name: getattr(options, name) for name in (*_TARGET, *_OPTIONAL)}
    for name, example in zip(_TARGET, (100, 1000, 100), strict=True):
        if target[name] is None:
            raise ConfigError(
                "is missing, and --carry needs it", field=f"--{name}", hint=f"for example --{name} {example}"
            )
    with working("planning") as progress:
        planned = forecast_carried(
            **target,
            pattern=options.pattern or "cyclic",
            progress=progress,
        )
    if options.plot is not None:
        from niss.report import carried_figure

        carried_figure(planned.to_json(), options.plot)
    values = {
        **planned.to_json(),
        "rounds": options.rounds,
        "clip": options.clip,
        "relation": options.relation,
    }
    judged = None
    if options.parameters is not None:
        judged = judge_plan(planned, parameters=options.parameters, rounds=options.rounds, clip=options.clip)
        values["outlook"] = judged.to_json()
    if options.as_json:
        print_json(values)
        return
    _print(planned)
    if judged is not None:
        print_sentence(f"outlook: {judged.words}")


def _print(planned: CarriedForecast) -> None:
    from niss.claims import rounded_up

    plan, size = planned.plan, planned.plan.noise.participants
    often = f"{planned.participations} participation{'s' * (planned.participations != 1)}"
    pattern = "exactly" if plan.pattern == "cyclic" else "at least"
    against = "no client colludes"
    if plan.noise.colluders:
        against = f"{plan.noise.colluders} static colluders of {size} in every round"
    rows: list[tuple[str, str, str]] = [
        (
            "promise, joint view",
            f"epsilon {rounded_up(planned.epsilon)}",
            f"at delta {planned.delta:g} for every client over all {plan.horizon} rounds, in at most {often}",
        ),
        ("", "", f"against a server that sees every upload of every round; {against}"),
        (
            "separation",
            f"{planned.separation}",
            f"clients come back after {pattern} so many rounds; {planned.clients} of them, {size} a round",
        ),
        ("kappa", f"{planned.kappa:.3g}", "strength of the shares within a round, in units of sigma_k^2"),
        (
            "carried to residual",
            f"{planned.carried_to_residual:.3g}",
            "noise that a later cohort takes out again, over noise that stays",
        ),
        (
            "residual",
            f"{planned.residual**0.5:.3g}",
            "deviation of the noise of a round that stays in the average",
        ),
        (
            "noise in the model",
            f"{planned.model_variance_ratio_to_central_mean:.3g} x",
            "what a trusted server with fresh noise in every round leaves, mean over the rounds",
        ),
        ("", f"{planned.model_variance_ratio_to_central_final:.3g} x", "the same for the final model"),
        (
            "",
            f"{sum(planned.noise) / sum(planned.noise_banded):.3g} x",
            "a trusted server with correlated noise (BandMF), mean",
        ),
    ]
    if planned.model_variance_ratio_to_best is not None:
        rows.append(
            (
                "",
                f"{planned.model_variance_ratio_to_best:.3g} x",
                "the best correlated noise that a trusted server could use, mean",
            )
        )
    if planned.dropout:
        meaning = "what they carried stays in the model, and the plan carries less for it"
        if plan.noise.dropped:
            meaning = (
                f"what they carried is taken out; up to {plan.noise.dropped} of a round count like colluders"
            )
        rows.append(("dropouts", f"{100.0 * planned.dropout:g} %", f"mode {planned.mode}; {meaning}"))
    print_aligned(rows)
    typer.echo("\nwhat it asks of the schedule")
    for line in _schedule(planned):
        print_sentence(f"  - {line}", indent=4)
    for note in planned.notes:
        print_sentence(f"note: {note}", indent=6)
    typer.echo("")
    print_sentence("noise in the model after a round (trusted server with fresh noise, final model = 1)")
    _print_rounds(planned)


def _schedule(planned: CarriedForecast) -> list[str]:
    plan = planned.plan
    cohorts = f"{planned.separation} fixed cohorts of {plan.noise.participants} take turns"
    if planned.separation == 1:
        cohorts = "everyone takes part in every round"
    elif plan.pattern != "cyclic":
        cohorts = f"nobody takes part twice within {planned.separation} rounds"
    return [
        f"{cohorts}; who takes part is fixed one round ahead",
        f"{plan.horizon} rounds are committed: ending early is safe, going on is a new run",
        f"the server divides by {plan.noise.participants}, whoever arrives, and steps at a rate fixed in advance",
    ]


def _print_rounds(planned: CarriedForecast) -> None:
    """A bar for every tenth of the run, and beside it what trusted servers leave."""
    final = planned.noise_central[-1]
    curves = [("NISS", planned.noise), ("fresh", planned.noise_central), ("BandMF", planned.noise_banded)]
    if planned.noise_best is not None:
        curves.append(("best", planned.noise_best))
    typer.echo(f"{'round':>8}  " + "".join(f"{name:>8}" for name, _ in curves))
    length = len(planned.noise)
    rounds = sorted({max(1, round(part * length / 10)) for part in range(1, 11)})
    highest = max(1.0, max(planned.noise) / final)
    longest = min(_BAR, max((width_asked() or 140) - 12 - 8 * len(curves), 8))
    for number in rounds:
        values = [curve[number - 1] / final for _, curve in curves]
        bar = "█" * max(1, round(longest * values[0] / highest))
        typer.echo(f"{number:>8}  " + "".join(f"{value:>8.3f}" for value in values) + f"  {bar}")
