"""`niss up`: a whole federation on this machine, from the first process to the last."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niss.cli.switches import Quiet

EXAMPLES = """Examples:

  niss up --nodes 5 --tls

  niss up --nodes 3 --rounds 2 --no-tls --no-tracker --set colluders=0 --keep runs/up

  niss up --app my_app --set epsilon=3.0 --set clip=1.0
"""


def up_command(
    nodes: Annotated[int, typer.Option(min=2, help="How many SuperNodes to start.")] = 5,
    tls: Annotated[
        bool, typer.Option(help="TLS everywhere, and SuperNodes that authenticate themselves.")
    ] = True,
    tracker: Annotated[
        bool, typer.Option(help="A tracker hands out keys and holds the beacon; else the server does.")
    ] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training.")] = 3,
    app: Annotated[Path, typer.Option(metavar="FOLDER", help="The Flower app to run.")] = Path(
        "examples/flower_app"
    ),
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the app, in TOML; may be repeated."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep keys, logs, ledgers and the report in this new folder."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Quiet = False,
) -> None:
    """Start tracker, SuperLink and SuperNodes on this machine, run an app, and take everything down again."""
    from niss.cli.up_work import bring_up

    bring_up(
        nodes=nodes,
        tls=tls,
        tracker=tracker,
        rounds=rounds,
        app=app,
        settings=settings or [],
        keep=keep,
        as_json=as_json,
        quiet=quiet,
    )
