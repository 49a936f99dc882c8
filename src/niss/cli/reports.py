"""`niss report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or comparison, finished or not.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page; default FOLDER/report.html.")
    ] = None,
) -> None:
    """Write the report page of a run or comparison and print where it is."""
    from niss.report import write_report

    typer.echo(str(write_report(folder, out)))
