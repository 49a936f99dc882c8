"""`niss run` and `niss compare`: their flags. The work is in `niss.cli.work`, imported when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niss.cli import choices
from niss.cli.completion import one_of, run_folders, several_of
from niss.cli.switches import Quiet

RUN_EXAMPLES = """Examples:

  niss run --dataset mnist-mini --model mlp --split iid --method niss --tau2 0.3 --rounds 20 --seed 1 --out runs/a

  niss run CONFIG.toml --set privacy.epsilon=8 --json

  niss run --resume runs/a
"""
COMPARE_EXAMPLES = """Examples:

  niss compare --preset demo --out runs/demo

  niss compare --methods fedavg,dp-fedavg,central-dp,niss --epsilon 8 --rounds 20

  niss compare --resume runs/demo
"""

ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Settings; flags override them.")
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Start from settings shipped with niss: demo or paper.", autocompletion=one_of(choices.PRESETS)
    ),
]
Dataset = Annotated[
    str | None, typer.Option(help="See `niss data list`.", autocompletion=one_of(choices.DATASETS))
]
Model = Annotated[str | None, typer.Option(help="mlp or cnn.", autocompletion=one_of(choices.MODELS))]
Split = Annotated[
    str | None, typer.Option(help="iid, shards or dirichlet.", autocompletion=one_of(choices.SPLITS))
]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the simulation.")]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
Participants = Annotated[int | None, typer.Option(help="Clients that take part in a round.")]
Epochs = Annotated[int | None, typer.Option(help="Local epochs.")]
BatchSize = Annotated[int | None, typer.Option(help="Local batch size.")]
Rate = Annotated[float | None, typer.Option("--lr", help="Local learning rate.")]
Epsilon = Annotated[float | None, typer.Option(help="Privacy target of every client.")]
Delta = Annotated[float | None, typer.Option(help="Privacy target of every client.")]
Clip = Annotated[float | None, typer.Option(help="L2 bound on a client's update.")]
Kappa = Annotated[float | None, typer.Option(help="Strength of the shares, in units of the DP noise.")]
Neighbours = Annotated[float | None, typer.Option(help="Unit shares each client sends.")]
Graph = Annotated[
    str | None, typer.Option(help="regular, complete or random.", autocompletion=one_of(choices.GRAPHS))
]
Distortion = Annotated[
    str | None,
    typer.Option(help="additive, scalar or coordinate.", autocompletion=one_of(choices.DISTORTIONS)),
]
Tau2 = Annotated[
    str | None,
    typer.Option(
        help="Distortion of received shares: a number, or 'calibrated'.",
        autocompletion=one_of(("calibrated",)),
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="Where clients train: auto, cpu or cuda.", autocompletion=one_of(choices.DEVICES)),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. privacy.scope=round."),
]
Out = Annotated[Path | None, typer.Option(help="Folder for everything this run leaves behind.")]
Resume = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Go on with a run that was stopped.", autocompletion=run_folders),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in that folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def run_command(
    config: ConfigFile = None,
    preset: Preset = None,
    dataset: Dataset = None,
    model: Model = None,
    split: Split = None,
    method: Annotated[
        str | None,
        typer.Option(help="fedavg, dp-fedavg, central-dp or niss.", autocompletion=one_of(choices.METHODS)),
    ] = None,
    tau2: Tau2 = None,
    kappa: Kappa = None,
    neighbours: Neighbours = None,
    graph: Graph = None,
    distortion: Distortion = None,
    rounds: Rounds = None,
    seed: Seed = None,
    clients: Clients = None,
    participants: Participants = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    learning_rate: Rate = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    clip: Clip = None,
    device: Device = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train with one method and say what it promised."""
    given = dict(locals())
    from niss.cli.work import run_from_flags

    run_from_flags(given)


def compare_command(
    config: ConfigFile = None,
    preset: Preset = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: fedavg, dp-fedavg, central-dp, niss.",
            autocompletion=several_of(choices.METHODS),
        ),
    ] = None,
    dataset: Dataset = None,
    model: Model = None,
    split: Split = None,
    rounds: Rounds = None,
    seed: Seed = None,
    clients: Clients = None,
    participants: Participants = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    learning_rate: Rate = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    clip: Clip = None,
    device: Device = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train with several methods on the same clients, batches and initial weights."""
    given = dict(locals())
    from niss.cli.work import compare_from_flags

    compare_from_flags(given)
