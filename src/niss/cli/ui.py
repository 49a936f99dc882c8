"""`niss ui`: plan with sliders, read the reports of runs and watch one in progress, in the browser."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from niss.errors import ConfigError

EXAMPLES = """Examples:

  niss ui                       the planner, and the runs in ./runs

  niss ui --runs /data/runs --port 0 --no-open
"""


def ui_command(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
    host: Annotated[
        str, typer.Option(help="The address to listen on; others than loopback let others in.")
    ] = "127.0.0.1",
    runs: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the runs are.")] = Path("runs"),
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Serve the planner and the runs as web pages on this machine, until Ctrl-C."""
    try:
        from niss.ui.guard import is_loopback
        from niss.ui.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"the pages need the package {error.name}", hint="pip install 'niss[ui]'") from None
    from niss.cli.terminal import messages, warn

    if runs.exists() and not runs.is_dir():
        raise ConfigError(f"{runs} is a file", field="--runs", hint="give the folder that holds your runs")
    if not is_loopback(host):
        warn(
            f"listening on {host}: everyone who reaches this machine can read the runs in {runs} and "
            "make it compute; there is no password and no encryption"
        )

    def ready(url: str) -> None:
        typer.echo(url)
        messages().print("stop with Ctrl-C")

    # Ctrl-C is how this command is ended, so it is no interruption.
    with suppress(KeyboardInterrupt):
        serve(host=host, port=port, runs=runs, open_browser=not no_open, ready=ready)
