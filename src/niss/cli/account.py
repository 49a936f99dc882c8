"""`niss account`: what each client of a run spent, from its verified ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niss.cli.completion import run_folders

EXAMPLES = """Examples:

  niss account runs/demo

  niss account runs/demo/niss --client 17

  niss account runs/demo --csv charges.csv --plot spent.png
"""


def account_command(
    run: Annotated[
        Path,
        typer.Argument(
            help="The folder of a run or comparison, finished or not.", autocompletion=run_folders
        ),
    ],
    client: Annotated[str | None, typer.Option(help="One client: every round it was charged for.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every charge of every client as CSV.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw epsilon spent over the rounds, as .png or .svg.")
    ] = None,
) -> None:
    """Verify the ledger of a run and show what its clients spent of what they were promised."""
    from niss.cli.account_work import account

    account(run, client=client, as_json=as_json, csv=csv, plot=plot)
