"""The flags that `niss attack` commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niss.cli.choices import DEVICES
from niss.cli.completion import one_of
from niss.cli.switches import Quiet

__all__ = [
    "AsJson",
    "Clients",
    "Delta",
    "Device",
    "Epsilon",
    "Hidden",
    "Image",
    "Iterations",
    "Label",
    "Out",
    "Overwrite",
    "Quiet",
    "Restarts",
    "Seed",
    "names",
]

Image = Annotated[
    str, typer.Option(metavar="PATH|DATASET:INDEX", help="The private picture: a file, or one of a dataset.")
]
Label = Annotated[int | None, typer.Option(help="Class of a picture from a file; default 0.")]
Clients = Annotated[int, typer.Option(help="Participants of the round, the victim among them.")]
Epsilon = Annotated[float | None, typer.Option(help="Privacy target; default: that of the plan.")]
Delta = Annotated[float | None, typer.Option(help="Privacy target; default: that of the plan.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random here.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", autocompletion=one_of(DEVICES))]
Restarts = Annotated[int, typer.Option(help="Random starts, tried side by side.")]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder for attack.json, attack.png and report.html; default runs/attack-..."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier attack in that folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Iterations = Annotated[int, typer.Option(help="Most iterations; it stops early when nothing moves any more.")]
Hidden = Annotated[int, typer.Option(help="Width of the hidden layer of the model.")]


def names(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
