"""`niss tracker` and `niss ui`, which run until they are stopped, and `niss keys`, the identities that they know."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import Doc

from niss.cli.options import examples, from_options, option, register
from niss.cli.terminal import is_quiet, print_json, say, warn
from niss.errors import ConfigError
from niss.tracker.options import TrackerOptions

if TYPE_CHECKING:
    from niss.protocol.keys import Identity


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
    help="Make and show the identity of a client.",
    epilog=examples("niss keys new", "niss keys show"),
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


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
