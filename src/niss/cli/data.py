"""`niss data`, `niss report` and `niss export`: datasets in, and pages and numbers of runs out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from typing_extensions import Doc

from niss.cli.options import Quiet, argument, examples, from_options, option, register
from niss.cli.terminal import DownloadProgress, kept_on_interrupt, print_json, print_table
from niss.errors import ConfigError, RunFolderError

app = typer.Typer(
    help="List and get datasets.",
    epilog=examples("niss data list", "niss data get mnist"),
    no_args_is_help=True,
)


_KINDS = {"images": "images", "tokens": "text"}
# Of a dataset's entry in the catalog, what its files are read by and no list shows.
_INTERNAL = ("mean", "std", "vocabulary", "layout", "file_sets")


@register(app, "list")
def list_command(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """Show every dataset, and whether it is on this machine.

    Examples:
    niss data list
    niss data list --json
    """
    from niss.data import list_datasets

    datasets = list_datasets()
    if as_json:
        entries = [
            asdict(info) | {"kind": info.kind, "available": info.available, "location": info.location}
            for info in datasets
        ]
        print_json([{key: value for key, value in one.items() if key not in _INTERNAL} for one in entries])
        return
    rows = [
        (
            info.name,
            _KINDS[info.kind],
            "x".join(str(side) for side in info.shape),
            f"{info.train_size:,}",
            f"{info.test_size:,}",
            "–" if info.clients is None else f"{info.clients:,}",
            "yes" if info.available else "no",
            info.description,
        )
        for info in datasets
    ]
    header = ("Name", "Kind", "Shape", "Train", "Test", "Clients", "Here", "Description")
    print_table(header, rows, left=(0, 1, 2, 6, 7), spare=(2, 4, 3))


@register(app, "get")
def get_command(
    name: Annotated[str, typer.Argument(help="A name from `niss data list`.")],
    quiet: Quiet = False,  # noqa: ARG001 (its callback does the work)
) -> None:
    """Download a dataset, verify its checksums, and print where it is. Interrupted downloads resume.

    Examples:
    niss data get mnist
    niss data get shakespeare
    niss data get cifar10 --quiet
    """
    from niss.data import fetch_dataset

    kept = f"what has arrived is kept. Go on with: niss data get {name}"
    with kept_on_interrupt(lambda: kept), DownloadProgress() as progress:
        path = fetch_dataset(name, progress=progress)
    typer.echo(str(path))


@dataclass(frozen=True)
class ReportOptions:
    """Which runs the page is about."""

    folders: Annotated[list[Path], Doc("The folders of runs, comparisons or attacks, finished or not.")] = (
        argument(metavar="RUN...")
    )
    out: Annotated[
        Path | None,
        Doc("Where to write the page; by default RUN/report.html, or reports.html next to several runs."),
    ] = None


@from_options(ReportOptions)
def report_command(options: ReportOptions) -> None:
    """Write one page on a run, a comparison or an attack, or on several, and print where it is.

    Examples:
    niss report runs/demo
    niss report runs/demo runs/mine --out both.html      one page on several runs
    niss report runs/attack-joint-1
    """
    from niss.report import write_report

    typer.echo(str(write_report(options.folders, options.out)))


@dataclass(frozen=True)
class ExportOptions:
    """Which runs to export, and where to."""

    folders: Annotated[list[Path], Doc("The folders of runs or comparisons, finished or not.")] = argument(
        metavar="RUN..."
    )
    csv: Annotated[Path | None, Doc("Write one line a round as CSV.")] = option(None, metavar="FILE")
    overwrite: Annotated[bool, Doc("Replace what an earlier export wrote there.")] = False


@from_options(ExportOptions)
def export_command(options: ExportOptions) -> None:
    """Export accuracy, loss, tau^2, noise and epsilon spent, round by round, and print where it is.

    Examples:
    niss export runs/demo runs/mine --csv metrics.csv
    """
    from niss.report.summary import read_rows, write_csv

    if options.csv is None:
        raise ConfigError("nowhere to export to", field="--csv", hint="give --csv FILE")
    rows = read_rows(options.folders)
    if options.csv.exists() and not options.overwrite:
        raise RunFolderError(f"{options.csv} already exists", hint="choose another place, or add --overwrite")
    typer.echo(str(write_csv(rows, options.csv)))
