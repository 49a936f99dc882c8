"""The switches that hold for every command: `--quiet` and `--debug`.

They may stand before the command (`niss --quiet run ...`); long commands take `--quiet` behind their name too.
"""

from __future__ import annotations

from typing import Annotated

import click
import typer

_QUIET = "niss.cli.quiet"


class Switches:
    """What is asked for or known of the whole process, and still needed when the command has ended.

    `debug` is whether a crash shows its traceback; `interruption_told` whether a command that was interrupted has
    already said what it kept.
    """

    debug = False
    interruption_told = False


SWITCHES = Switches()


def be_quiet(context: typer.Context, asked: bool) -> bool:
    """The value of a `--quiet`: its own, or that of a command around it."""
    context.meta[_QUIET] = asked or context.meta.get(_QUIET, False)
    return bool(context.meta[_QUIET])


def is_quiet() -> bool:
    """Whether the command that runs was told to be quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET, False))


Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", callback=be_quiet, help="No progress and no remarks; results and errors."),
]
