"""`niss report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niss.cli.completion import run_folders

EXAMPLES = """Examples:

  niss report runs/demo

  niss report runs/demo runs/mine --out both.html      one page on several runs

  niss report runs/attack-joint-1
"""


def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="The folders of runs, comparisons or attacks, finished or not.",
            autocompletion=run_folders,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the page; default RUN/report.html, of several reports.html beside them."
        ),
    ] = None,
) -> None:
    """Write one page on a run, a comparison or an attack, or on several, and print where it is."""
    from niss.report import write_report

    typer.echo(str(write_report(folders, out)))
