"""`niss data`, datasets in; `report` and `export`, pages and numbers out; the services `tracker`, `ui`; and `keys`."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import Doc

from niss.cli.options import Commands, Quiet, argument, examples, from_options, option, register
from niss.cli.terminal import (
    DownloadProgress,
    is_quiet,
    kept_on_interrupt,
    print_json,
    print_table,
    say,
    warn,
)
from niss.errors import ConfigError, RunFolderError
from niss.tracker.options import TrackerOptions

if TYPE_CHECKING:
    from niss.protocol.keys import Identity


AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]

data_app = typer.Typer(
    cls=Commands,
    help="List and get datasets.",
    epilog=examples("niss data list", "niss data get mnist"),
    no_args_is_help=True,
)


# Of a dataset's entry in the catalog, what its files are read by and no list shows.
_INTERNAL = ("mean", "std", "vocabulary", "layout", "file_sets")


@register(data_app, "list")
def list_command(as_json: AsJson = False) -> None:
    """Show every dataset, and whether it is on this machine.

    Examples:
    niss data list
    niss data list --json
    """
    from niss.claims import digits
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
            digits(info.train_size),
            digits(info.clients),
            "yes" if info.available else "no",
            info.description,
        )
        for info in datasets
    ]
    print_table(("Name", "Examples", "Clients", "Here", "Description"), rows, left=(0, 3, 4))


@register(data_app, "get")
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


@from_options(TrackerOptions)
def tracker_command(options: TrackerOptions) -> None:
    """Run a tracker until it is told to stop. One line of JSON on stdout tells its address and keys.

    Examples:
    niss tracker --server-key 3b6a27bc...
    niss tracker --server-key 3b6a27bc... --host 0.0.0.0 --tls-cert tracker.pem --tls-key tracker-key.pem
    niss tracker --server-key 3b6a27bc... --store redis://127.0.0.1:6379/0 --identity tracker.key
    """
    from niss.tracker.serve import serve

    if is_quiet() and options.log_level == "info":
        options = replace(options, log_level="warning")
    serve(options)


@dataclass(frozen=True)
class UiOptions:
    """Where the pages are served, and which runs they show."""

    port: Annotated[int, Doc("0 takes a free one.")] = option(8765, min=0, max=65535)
    host: Annotated[str, Doc("The address to listen on; any but loopback lets other machines in.")] = (
        "127.0.0.1"
    )
    runs: Annotated[Path, Doc("Where the runs are.")] = option(Path("runs"), metavar="FOLDER")
    no_open: Annotated[bool, Doc("Do not open a browser.")] = False


@from_options(UiOptions)
def ui_command(options: UiOptions) -> None:
    """Serve the planner and the runs as web pages on this machine, until Ctrl-C.

    Examples:
    niss ui                       the planner, and the runs in ./runs
    niss ui --runs /data/runs --port 0 --no-open
    """
    from niss.ui.app import is_loopback, serve

    host, runs = options.host, options.runs
    if runs.exists() and not runs.is_dir():
        raise ConfigError(f"{runs} is a file", field="--runs", hint="give the folder that holds your runs")
    if not is_loopback(host):
        warn(
            f"listening on {host}: everyone who reaches this machine can read the runs in {runs} and "
            "make it compute; there is no password and no encryption"
        )

    def ready(url: str) -> None:
        typer.echo(url)
        say("stop with Ctrl-C")

    # Ctrl-C is how this command is ended, so it is not an interruption.
    with suppress(KeyboardInterrupt):
        serve(host=host, port=options.port, runs=runs, open_browser=not options.no_open, ready=ready)


keys_app = typer.Typer(
    cls=Commands,
    help="Make and show the identity of a client.",
    epilog=examples("niss keys new", "niss keys show"),
    no_args_is_help=True,
)


@register(keys_app, "new")
def new_key_command(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="The new key file. Default: niss/identity.key in your configuration."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make an identity in a file that only you can read. A file that is there is never overwritten.

    Examples:
    niss keys new
    niss keys new --out north.key
    """
    from niss.protocol.keyfile import create_keyfile, default_keyfile
    from niss.protocol.keys import Identity

    path = default_keyfile(os.environ) if out is None else out
    identity = Identity.generate(os.urandom)
    create_keyfile(path, identity)
    _print_identity(path, identity, as_json=as_json)
    say("Give the public key to your coalition; never give away the file.")


@register(keys_app, "show")
def show_key_command(
    path: Annotated[
        Path | None, typer.Argument(help="A key file. Default: niss/identity.key in your configuration.")
    ] = None,
    as_json: AsJson = False,
    public: Annotated[bool, typer.Option("--public", help="Print the public key alone.")] = False,
) -> None:
    """Show the public key of an identity and its fingerprint. Nothing secret is printed.

    Examples:
    niss keys show
    niss keys show north.key --json
    niss keys show north.key --public
    """
    from niss.protocol.keyfile import default_keyfile, load_identity

    path = default_keyfile(os.environ) if path is None else path
    identity = load_identity(path)
    if public:
        typer.echo(identity.public.hex())
        return
    _print_identity(path, identity, as_json=as_json)


def _print_identity(path: Path, identity: Identity, *, as_json: bool) -> None:
    """Print the public half of an identity, and where its file is."""
    from niss.protocol.keys import fingerprint

    values = {
        "path": str(path),
        "public_key": identity.public.hex(),
        "fingerprint": fingerprint(identity.public),
    }
    if as_json:
        print_json(values)
        return
    width = max(len(label) for label in values) + 2
    for label, value in values.items():
        typer.echo(f"{(label.replace('_', ' ') + ':').ljust(width)}{value}")
