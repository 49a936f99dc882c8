"""`niss tracker` and `niss ui`, which run until they are stopped, and `niss keys`, the identities that they know."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from niss.cli.options import examples, from_options, option, register
from niss.cli.terminal import is_quiet, print_json, say, warn
from niss.errors import ConfigError, RemoteProtocolError

if TYPE_CHECKING:
    from niss.protocol.keys import Identity

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class TrackerOptions:
    """How a tracker is run. Fields that `niss.tracker` has too, in `Options` or `TrackerSettings`, go there by name.

    server_key       The public key of the server that opens rounds, from `niss keys show`.
    host             The address to listen on.
    port             0 takes a free one.
    store            sqlite:///FILE, or redis://HOST:PORT/0 for several processes.
    identity         The tracker's own key file. Default: beside the SQLite file.
    tls_cert         Serve TLS with this certificate.
    tls_key          The certificate's private key.
    external_beacon  Another tracker, which holds the beacon chains.
    external_ca      The authority of its certificate.
    holder_only      Only hold beacon chains, for the tracker whose key is given as the server's.
    admit            A coalition file: only its members may register.
    coalition        Only the members in this file may join that coalition.
    ttl              Seconds without a heartbeat until a client counts as gone.
    tolerance        Seconds by which a client's clock may be off.
    address_rate     Requests a second from one address; 0 for any number.
    identity_rate    Changing requests a second of one identity; 0 for any number.
    max_clients      Most clients that can be registered.
    log_level        debug, info, warning or error.
    """

    server_key: str = option(metavar="KEY")
    host: str = "127.0.0.1"
    port: int = option(8440, min=0, max=65535)
    store: str = option("sqlite:///tracker.db", metavar="URL", envvar="NISS_TRACKER_STORE")
    identity: Path | None = option(None, metavar="KEYFILE")
    tls_cert: Path | None = option(None, metavar="PEM")
    tls_key: Path | None = option(None, metavar="PEM")
    external_beacon: str | None = option(None, metavar="URL")
    external_ca: Path | None = option(None, metavar="PEM")
    holder_only: bool = False
    admit: Path | None = option(None, metavar="FILE")
    coalition: list[str] | None = option(None, metavar="NAME=FILE")
    ttl: float = 600.0
    tolerance: float = 60.0
    address_rate: float = 200.0
    identity_rate: float = 10.0
    max_clients: int = 1_000_000
    log_level: str = "info"


@from_options(TrackerOptions)
def tracker_command(options: TrackerOptions) -> None:
    """Run a tracker until it is told to stop. One line of JSON on stdout tells its address and keys.

    Examples:
    niss tracker --server-key 3b6a27bc...
    niss tracker --server-key 3b6a27bc... --host 0.0.0.0 --tls-cert tracker.pem --tls-key tracker-key.pem
    niss tracker --server-key 3b6a27bc... --store redis://127.0.0.1:6379/0 --identity tracker.key
    """
    from niss.tracker.auth import TrackerSettings

    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    names = {field.name for field in dataclasses.fields(TrackerSettings)}
    settings = TrackerSettings(**{name: values.pop(name) for name in names & set(values)})
    if options.log_level not in LOG_LEVELS:
        raise ConfigError(
            f"unknown level {options.log_level!r}",
            field="--log-level",
            hint=f"use one of: {', '.join(LOG_LEVELS)}",
        )
    if is_quiet() and options.log_level == "info":
        values["log_level"] = "warning"
    server = read_public_key(values.pop("server_key"), "--server-key")
    coalitions = dict(_coalition(entry) for entry in values.pop("coalition") or [])
    from niss.tracker.serve import Options, serve

    serve(Options(server=server, coalitions=coalitions, settings=settings, **values))


def _coalition(entry: str) -> tuple[str, Path]:
    """Name and file of a `--coalition`."""
    name, _, path = entry.partition("=")
    if not name or not path:
        raise ConfigError(
            f"expected NAME=FILE, got {entry!r}",
            field="--coalition",
            hint="for example clinics=clinics.toml",
        )
    return name, Path(path)


@dataclass(frozen=True)
class UiOptions:
    """Where the pages are served, and which runs they show.

    port     0 takes a free one.
    host     The address to listen on; any but loopback lets other machines in.
    runs     Where the runs are.
    no_open  Do not open a browser.
    """

    port: int = option(8765, min=0, max=65535)
    host: str = "127.0.0.1"
    runs: Path = option(Path("runs"), metavar="FOLDER")
    no_open: bool = False


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


def read_public_key(text: str, field: str) -> bytes:
    """A public key from its hex form. `ConfigError`, naming the option, where it is not one, or one of small order."""
    from niss.protocol.keys import check_public

    hint = "copy it from what its owner's `niss keys show` prints"
    try:
        public = bytes.fromhex(text)
    except ValueError:
        raise ConfigError("expected a public key in hex", field=field, hint=hint) from None
    try:
        check_public(public)
    except RemoteProtocolError as error:
        raise ConfigError(error.message, field=field, hint=hint) from None
    return public


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
