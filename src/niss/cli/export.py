"""`niss export`: the numbers of runs, for TensorBoard or a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niss.cli.completion import run_folders
from niss.errors import ConfigError

EXAMPLES = """Examples:

  niss export runs/demo --tensorboard tb      then: tensorboard --logdir tb

  niss export runs/demo runs/mine --csv metrics.csv

  niss export runs/demo --tensorboard tb --overwrite
"""


def export_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="The folders of runs or comparisons, finished or not.",
            autocompletion=run_folders,
        ),
    ],
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write event files for TensorBoard below this folder.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one line a round as CSV.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier export wrote there.")
    ] = False,
) -> None:
    """Export accuracy, loss, tau^2, noise and epsilon spent, round by round, and print where it is."""
    from niss.report.export import check_free, read_series, write_csv

    if tensorboard is None and csv is None:
        raise ConfigError(
            "nowhere to export to", field="--tensorboard", hint="give --tensorboard DIR or --csv FILE"
        )
    series = read_series(folders)
    if csv is not None:
        check_free([csv], overwrite=overwrite)
    if tensorboard is not None:
        try:
            from niss.report.event_files import write_event_files
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the export needs the package {error.name}",
                field="--tensorboard",
                hint="pip install 'niss[tensorboard]'",
            ) from None
        for path in write_event_files(series, tensorboard, overwrite=overwrite):
            typer.echo(str(path))
    if csv is not None:
        typer.echo(str(write_csv(series, csv)))
