"""`niss data`, `niss report` and `niss export`: datasets in, and pages and numbers of runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niss.cli.completion import DATASETS, one_of, run_folders
from niss.cli.errors import optional_packages
from niss.cli.options import Quiet, examples
from niss.cli.terminal import DownloadProgress, kept_on_interrupt, print_json, print_table
from niss.errors import ConfigError

app = typer.Typer(
    help="List and fetch datasets.",
    epilog=examples("niss data list", "niss data fetch mnist"),
    no_args_is_help=True,
)
REPORT_EXAMPLES = examples(
    "niss report runs/demo",
    "niss report runs/demo runs/mine --out both.html      one page on several runs",
    "niss report runs/attack-joint-1",
)
EXPORT_EXAMPLES = examples(
    "niss export runs/demo --tensorboard tb      then: tensorboard --logdir tb",
    "niss export runs/demo runs/mine --csv metrics.csv",
    "niss export runs/demo --tensorboard tb --overwrite",
)


@app.command("list", epilog=examples("niss data list", "niss data list --json"))
def list_command(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """Show every dataset, where it comes from and whether it is on this machine."""
    from dataclasses import asdict

    from niss.data import list_datasets

    datasets = list_datasets()
    if as_json:
        print_json([{**asdict(info), "location": info.location and str(info.location)} for info in datasets])
        return
    rows = [
        (
            info.name,
            "x".join(str(side) for side in info.image_shape),
            f"{info.train_size:,}",
            f"{info.test_size:,}",
            "yes" if info.available else "no",
            info.description,
        )
        for info in datasets
    ]
    header = ("Name", "Images", "Train", "Test", "Here", "Description")
    print_table(header, rows, right=lambda column: header[column] in ("Train", "Test"))


@app.command("fetch", epilog=examples("niss data fetch mnist", "niss data fetch cifar10 --quiet"))
def fetch_command(
    name: Annotated[
        str, typer.Argument(help="A name from `niss data list`.", autocompletion=one_of(DATASETS))
    ],
    quiet: Quiet = False,  # noqa: ARG001 (its callback does the work)
) -> None:
    """Download a dataset, verify its checksums, and print where it is. Interrupted downloads resume."""
    from niss.data import fetch_dataset

    kept = f"what has arrived is kept. Go on with: niss data fetch {name}"
    with kept_on_interrupt(lambda: kept), DownloadProgress() as progress:
        path = fetch_dataset(name, progress=progress)
    typer.echo(str(path))


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
        with optional_packages():
            from niss.report.event_files import write_event_files
        for path in write_event_files(series, tensorboard, overwrite=overwrite):
            typer.echo(str(path))
    if csv is not None:
        typer.echo(str(write_csv(series, csv)))
