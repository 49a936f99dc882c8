"""`niss new`: a Flower app to begin with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from niss.cli.options import argument, from_options
from niss.cli.terminal import say


@dataclass(frozen=True)
class NewOptions:
    """Where the app goes.

    folder  A new folder; its name becomes that of the app.
    """

    folder: Path = argument(metavar="NAME")


@from_options(NewOptions)
def new_command(options: NewOptions) -> None:
    """Write a Flower app that learns under NISS, ready to run and to change: the model and data are in task.py.

    Examples:
    niss new my-app
    niss new apps/digits      then: niss up --app apps/digits
    """
    from niss.local import new_app

    folder = new_app(options.folder)
    typer.echo(str(folder))
    say(f"try it: niss up --app {folder}, or: cd {folder} && flwr run . --stream")
