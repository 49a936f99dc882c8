"""`niss tracker`: the service that knows who is live and holds the beacon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niss.cli.choices import LOG_LEVELS
from niss.cli.completion import one_of

EXAMPLES = """Examples:

  niss tracker --server-key 3b6a27bc...

  niss tracker --server-key 3b6a27bc... --host 0.0.0.0 --tls-cert tracker.pem --tls-key tracker-key.pem

  niss tracker --server-key 3b6a27bc... --store redis://127.0.0.1:6379/0 --identity tracker.key
"""


def tracker_command(
    server_key: Annotated[
        str,
        typer.Option(
            metavar="KEY", help="The public key of the server that opens rounds, from `niss keys show`."
        ),
    ],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8440,
    store: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="NISS_TRACKER_STORE",
            help="sqlite:///FILE, or redis://HOST:PORT/0 for several processes.",
        ),
    ] = "sqlite:///tracker.db",
    identity: Annotated[
        Path | None,
        typer.Option(metavar="KEYFILE", help="The tracker's own key file. Default: beside the SQLite file."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Serve TLS with this certificate.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="PEM", help="The certificate's private key.")
    ] = None,
    external_beacon: Annotated[
        str | None, typer.Option(metavar="URL", help="Another tracker, which holds the beacon chains.")
    ] = None,
    external_ca: Annotated[
        Path | None, typer.Option(metavar="PEM", help="The authority of its certificate.")
    ] = None,
    admit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A coalition file: only its members may register.")
    ] = None,
    coalition: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="Only the members in this file may join that coalition."),
    ] = None,
    ttl: Annotated[
        float, typer.Option(help="Seconds without a heartbeat until a client counts as gone.")
    ] = 600.0,
    tolerance: Annotated[float, typer.Option(help="Seconds by which a client's clock may be off.")] = 60.0,
    address_rate: Annotated[
        float, typer.Option(help="Requests a second from one address; 0 for any number.")
    ] = 200.0,
    identity_rate: Annotated[
        float, typer.Option(help="Changing requests a second of one identity; 0 for any number.")
    ] = 10.0,
    max_clients: Annotated[int, typer.Option(help="Most clients that can be registered.")] = 1_000_000,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", autocompletion=one_of(LOG_LEVELS))
    ] = "info",
) -> None:
    """Run a tracker until it is told to stop. One line of JSON on stdout tells its address and keys."""
    from niss.cli.tracker_work import run_tracker

    run_tracker(
        host=host,
        port=port,
        store=store,
        server_key=server_key,
        identity=identity,
        tls_cert=tls_cert,
        tls_key=tls_key,
        external_beacon=external_beacon,
        external_ca=external_ca,
        admit=admit,
        coalition=coalition or [],
        ttl=ttl,
        tolerance=tolerance,
        address_rate=address_rate,
        identity_rate=identity_rate,
        max_clients=max_clients,
        log_level=log_level,
    )
