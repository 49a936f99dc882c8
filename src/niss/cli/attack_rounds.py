"""The attacks of `niss attack` that are about rounds rather than pictures: collusion, lies, repetition, audits."""

from __future__ import annotations

from typing import Annotated

import typer

from niss.cli.attack_options import (
    AsJson,
    Clients,
    Delta,
    Device,
    Epsilon,
    Hidden,
    Image,
    Out,
    Overwrite,
    Quiet,
    Seed,
    names,
)
from niss.cli.choices import DISTORTIONS
from niss.cli.completion import several_of
from niss.cli.help_text import examples
from niss.errors import ConfigError

Neighbours = Annotated[float, typer.Option(help="Unit shares each client sends.")]


COLLUDE_EXAMPLES = examples(
    "niss attack collude --out runs/collude",
    "niss attack collude --distortions coordinate,additive --neighbours 2 --rho 0,0.5,1",
)
AVERAGE_EXAMPLES = examples("niss attack average --rounds 3000 --out runs/average")
FAKE_DROPOUT_EXAMPLES = examples("niss attack fake-dropout --out runs/fake-dropout")
RERUN_EXAMPLES = examples("niss attack rerun --repeats 256 --out runs/rerun")
AUDIT_EXAMPLES = examples("niss attack audit --rounds 100000 --out runs/audit", "niss attack audit --json")


def register(app: typer.Typer) -> None:
    """Add these commands to `niss attack`."""
    app.command("collude", epilog=COLLUDE_EXAMPLES)(collude_command)
    app.command("average", epilog=AVERAGE_EXAMPLES)(average_command)
    app.command("fake-dropout", epilog=FAKE_DROPOUT_EXAMPLES)(fake_dropout_command)
    app.command("rerun", epilog=RERUN_EXAMPLES)(rerun_command)
    app.command("audit", epilog=AUDIT_EXAMPLES)(audit_command)


def collude_command(
    image: Image = "mnist-mini:0",
    distortions: Annotated[
        str,
        typer.Option(
            help="Comma-separated: scalar, coordinate, additive.", autocompletion=several_of(DISTORTIONS)
        ),
    ] = "scalar,coordinate,additive",
    rho: Annotated[str, typer.Option(help="Comma-separated parts of the neighbours that collude.")] = (
        "0,0.2,0.4,0.6,0.8,0.95,1"
    ),
    tau2: Annotated[float, typer.Option(help="Distortion in the sweep over rho.")] = 1.0,
    points: Annotated[int, typer.Option(help="Values of tau^2 in its own sweep, at rho = 1.")] = 6,
    clients: Clients = 30,
    neighbours: Neighbours = 10.0,
    epsilon: Epsilon = None,
    delta: Delta = None,
    hidden: Hidden = 16,
    seed: Seed = 1,
    device: Device = "auto",
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Neighbours tell the server their shares: subtract, project, pick coordinates; sweeps over rho and tau^2."""
    from niss.attacks.experiments.collude import ColludeExperiment
    from niss.attacks.figures.collusion import draw_collusion
    from niss.cli.attack_work import execute, plain_device

    plain_device(device)
    experiment = ColludeExperiment(
        image=image,
        distortions=names(distortions),
        clients=clients,
        neighbours=neighbours,
        epsilon=epsilon,
        delta=delta,
        tau2=tau2,
        rhos=_numbers(rho, "--rho"),
        points=points,
        hidden=hidden,
        seed=seed,
    )
    execute(experiment, draw_collusion, out=out, overwrite=overwrite, as_json=as_json, quiet=quiet)


def average_command(
    image: Image = "mnist-mini:0",
    clients: Clients = 6,
    epsilon: Epsilon = None,
    delta: Delta = None,
    participations: Annotated[int, typer.Option(help="Rounds that the budget covers.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds the server averages over.")] = 10_000,
    hidden: Hidden = 4,
    seed: Seed = 1,
    device: Device = "auto",
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Average a client's uploads over rounds of a model that never moves; the ledger says when to stop."""
    from niss.attacks.experiments.average import AverageExperiment
    from niss.attacks.figures.steps import draw_steps
    from niss.cli.attack_work import execute, plain_device

    plain_device(device)
    experiment = AverageExperiment(
        image=image,
        clients=clients,
        epsilon=epsilon,
        delta=delta,
        participations=participations,
        rounds=rounds,
        hidden=hidden,
        seed=seed,
    )
    execute(experiment, draw_steps, out=out, overwrite=overwrite, as_json=as_json, quiet=quiet)


def fake_dropout_command(
    image: Image = "mnist-mini:0",
    clients: Clients = 24,
    epsilon: Epsilon = None,
    delta: Delta = None,
    threshold_share: Annotated[
        float,
        typer.Option(help="Part of the neighbours whose pieces rebuild a mask, as the server proposes."),
    ] = 0.1,
    hidden: Hidden = 4,
    seed: Seed = 1,
    device: Device = "auto",
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """A server calls a live client dropped to have its noise revealed: the one-verdict rule off and on."""
    from niss.attacks.experiments.fake_dropout import FakeDropoutExperiment
    from niss.attacks.figures.stories import draw_stories
    from niss.cli.attack_work import execute, plain_device

    plain_device(device)
    experiment = FakeDropoutExperiment(
        image=image,
        clients=clients,
        epsilon=epsilon,
        delta=delta,
        threshold_share=threshold_share,
        hidden=hidden,
        seed=seed,
    )
    execute(experiment, draw_stories, out=out, overwrite=overwrite, as_json=as_json, quiet=quiet)


def rerun_command(
    image: Image = "mnist-mini:0",
    clients: Clients = 24,
    epsilon: Epsilon = None,
    delta: Delta = None,
    repeats: Annotated[int, typer.Option(help="How often each of the two models is sent.")] = 1024,
    hidden: Hidden = 4,
    seed: Seed = 1,
    device: Device = "auto",
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Open the same round again and again: a client with its memory refuses, one without gives itself away."""
    from niss.attacks.experiments.rerun import RerunExperiment
    from niss.attacks.figures.steps import draw_steps
    from niss.cli.attack_work import execute, plain_device

    plain_device(device)
    experiment = RerunExperiment(
        image=image,
        clients=clients,
        epsilon=epsilon,
        delta=delta,
        repeats=repeats,
        hidden=hidden,
        seed=seed,
    )
    execute(experiment, draw_steps, out=out, overwrite=overwrite, as_json=as_json, quiet=quiet)


def audit_command(
    clients: Clients = 12,
    neighbours: Neighbours = 4.0,
    epsilon: Epsilon = None,
    delta: Delta = None,
    rounds: Annotated[int, typer.Option(help="Rounds with the canary, and as many without.")] = 100_000,
    dimension: Annotated[int, typer.Option(help="Coordinates of the canary.")] = 8,
    confidence: Annotated[float, typer.Option(help="Of each lower bound.")] = 0.95,
    seed: Seed = 1,
    device: Device = "auto",
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Canary audit: a lower bound on epsilon from true- and false-positive rates, beside what is claimed."""
    from niss.attacks.experiments.audit import AuditExperiment
    from niss.attacks.figures.audit import draw_audit
    from niss.cli.attack_work import execute, plain_device

    plain_device(device)
    experiment = AuditExperiment(
        clients=clients,
        neighbours=neighbours,
        epsilon=epsilon,
        delta=delta,
        dimension=dimension,
        rounds=rounds,
        confidence=confidence,
        seed=seed,
    )
    execute(experiment, draw_audit, out=out, overwrite=overwrite, as_json=as_json, quiet=quiet)


def _numbers(text: str, field: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in names(text))
    except ValueError:
        raise ConfigError(
            f"{text!r} is no list of numbers", field=field, hint="for example 0,0.5,1"
        ) from None
