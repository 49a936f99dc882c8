"""The command line: `niss run`, `niss compare`, `niss plan`, `niss account`,
`niss data`, `niss keys`, `niss tracker`, `niss up`, `niss report`, `niss ui`, `niss attack`,
`niss reproduce`, `niss verify`, `niss bench`.

Results go to stdout, progress and messages to stderr. Exit codes: 0 done, 1 other failure, 2 bad settings
or arguments, 3 data missing or damaged, 4 a privacy rule refused the work, 5 run folder unusable,
6 protocol violated, 130 interrupted.
"""

from __future__ import annotations

import sys

import typer

from niss.cli import (
    account,
    attack,
    bench,
    data,
    keys,
    plan,
    reports,
    reproduce,
    simulate,
    tracker,
    ui,
    up,
    verify,
)
from niss.cli.terminal import print_error
from niss.errors import NissError

app = typer.Typer(
    name="niss",
    help="Federated learning with noise that cancels, accounted in the joint view.",
    epilog="Start with: niss compare --preset demo --out runs/demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("run", epilog=simulate.RUN_EXAMPLES)(simulate.run_command)
app.command("compare", epilog=simulate.COMPARE_EXAMPLES)(simulate.compare_command)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan_command)
app.command("account", epilog=account.EXAMPLES)(account.account_command)
app.command("report", epilog=reports.EXAMPLES)(reports.report_command)
app.command("ui", epilog=ui.EXAMPLES)(ui.ui_command)
app.command("tracker", epilog=tracker.EXAMPLES)(tracker.tracker_command)
app.command("up", epilog=up.EXAMPLES)(up.up_command)
app.command("verify", epilog=verify.EXAMPLES)(verify.verify_command)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench_command)
app.add_typer(attack.app, name="attack")
app.add_typer(reproduce.app, name="reproduce")
app.add_typer(data.app, name="data")
app.add_typer(keys.app, name="keys")


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and stop.", is_eager=True),
) -> None:
    if version:
        from niss.version import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: turns intended errors into a message, a hint and an exit code."""
    try:
        app()
    except NissError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
