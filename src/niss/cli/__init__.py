"""The command line: `niss run`, `niss compare`, `niss plan`, `niss account`,
`niss data`, `niss keys`, `niss tracker`, `niss up`, `niss report`, `niss ui`, `niss attack`,
`niss reproduce`, `niss verify`, `niss export`.

Results go to stdout, progress and messages to stderr. The exit codes are in `niss.cli.errors`. Importing this package
loads nothing heavy: commands import what they need when they run.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from niss.cli import account, experiments, plan, services, simulate, up
from niss.cli.errors import CRASHED, EXIT_CODES, INTERRUPTED, optional_packages, print_error, report_crash
from niss.cli.launch import only_first_speaks, refuse_together
from niss.cli.options import Commands, Quiet, examples, register
from niss.cli.terminal import STATE
from niss.errors import NissError

app = typer.Typer(
    name="niss",
    cls=Commands,
    help="Federated learning with noise that cancels, accounted in the joint view.",
    epilog=examples(
        "niss compare --preset demo --out runs/demo      a first look",
        "niss plan --participants 200 --epsilon 3 --participations 6",
        "niss --quiet run --rounds 20 --out runs/a",
        more=f"Exit codes: {', '.join(f'{code} {name}' for code, name, _ in EXIT_CODES)}.",
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
register(app, "run")(simulate.run_command)
register(app, "compare")(simulate.compare_command)
register(app, "plan")(plan.plan_command)
register(app, "account")(account.account_command)
register(app, "report")(services.report_command)
register(app, "export")(services.export_command)
register(app, "ui")(services.ui_command)
register(app, "tracker")(services.tracker_command)
register(app, "up")(up.up_command)
register(app, "new")(up.new_command)
register(app, "verify")(experiments.verify_command)
app.add_typer(experiments.attack_app, name="attack")
app.add_typer(experiments.reproduce_app, name="reproduce")
app.add_typer(services.data_app, name="data")
app.add_typer(services.keys_app, name="keys")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and stop.", is_eager=True),
    quiet: Quiet = False,  # noqa: ARG001 (its callback does the work)
    debug: bool = typer.Option(False, "--debug", help="Show the traceback if niss itself crashes."),
) -> None:
    """Options that stand before any command."""
    if version:
        from niss.version import __version__

        typer.echo(__version__)
        raise typer.Exit
    STATE.debug, STATE.interruption_reported = debug, False
    refuse_together(context.invoked_subcommand)


def main() -> None:
    """Entry point: intended errors become a message with a hint, others a crash with a log, each with its code."""
    try:
        with only_first_speaks(), optional_packages():
            app()
    except NissError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _end_interrupted()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _end_interrupted()
        raise
    except Exception as error:
        report_crash(error, sys.argv[1:], debug=STATE.debug)
        sys.exit(CRASHED)


def _end_interrupted() -> NoReturn:
    """End with the code for Ctrl-C; says that nothing is kept, unless the command has said what is."""
    if not STATE.interruption_reported:
        typer.echo("interrupted; this command keeps nothing. Start it again", err=True)
    sys.exit(INTERRUPTED)
