"""`niss report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  niss report runs/demo

  niss report runs/demo runs/mine --out both.html      one page on several runs
"""


def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="The folders of runs or comparisons, finished or not."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the page; default RUN/report.html, of several reports.html beside them."
        ),
    ] = None,
) -> None:
    """Write one page on a run or comparison, or on several, and print where it is."""
    from niss.report import write_report

    typer.echo(str(write_report(folders, out)))
