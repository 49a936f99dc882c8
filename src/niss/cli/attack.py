"""`niss attack`: attacks on what really leaves the devices. Each experiment of `niss.attacks` is a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import Doc

from niss.cli.errors import MissingPackageError, optional_packages
from niss.cli.options import examples, from_options, lazy_app, option
from niss.cli.terminal import (
    PartProgress,
    free_folder,
    kept_on_interrupt,
    print_json,
    print_sentence,
    print_table,
    say,
)

if TYPE_CHECKING:
    from niss.attacks.experiment import Experiment, Findings


@dataclass(frozen=True)
class AttackOutput:
    """Where the results of an attack go, and how they are printed."""

    out: Annotated[
        Path | None, Doc("Folder for attack.json, attack.png and report.html; default runs/attack-...")
    ] = option(None, metavar="DIR")
    overwrite: Annotated[bool, Doc("Replace an earlier attack in that folder.")] = False
    as_json: Annotated[bool, Doc("Print the result as JSON.")] = option(False, "--json")


def _load_app() -> typer.Typer:
    """A command for each attack that is registered; its options are the fields of its dataclass."""
    from niss.attacks import EXPERIMENTS, load_experiment

    commands = typer.Typer()
    for kind in map(load_experiment, EXPERIMENTS):
        command = from_options(kind, AttackOutput, quiet=True)(execute)
        commands.command(kind.name, help=kind.summary, epilog=examples(*kind.examples))(command)
    return commands


app = lazy_app(
    _load_app,
    help="Attack what leaves the devices, and see what an adversary gets.",
    epilog=examples(
        "niss attack joint --out runs/joint",
        "niss attack dlg --plan paper --methods fedavg,dp-fedavg,niss --out runs/figure-4",
        "niss attack audit --rounds 100000",
    ),
)


def execute(experiment: Experiment, output: AttackOutput) -> None:
    """Check, run, write `attack.json`, `attack.png` and the report, print the table; interrupted, as far as it got."""
    from niss.attacks.experiment import prepare_folder

    findings = experiment.start()
    folder = output.out if output.out is not None else free_folder(Path("runs"), f"attack-{experiment.name}")
    prepare_folder(folder, overwrite=output.overwrite)

    def kept() -> str:
        page = _write(experiment, findings, folder)
        return f"what was found so far is in {page}. Start again with --overwrite"

    with kept_on_interrupt(kept), PartProgress() as progress:
        experiment.run(findings, progress)
    page = _write(experiment, findings, folder)
    if output.as_json:
        print_json(findings.to_json())
    else:
        from niss.report.attacks import attack_cell

        rows = [[attack_cell(row, key) for key in findings.columns] for row in findings.rows]
        print_table(list(findings.columns.values()), rows)
        if findings.headline:
            print_sentence(findings.headline)
    say(f"report: {page}")


def _write(experiment: Experiment, findings: Findings, folder: Path) -> Path:
    """Write everything down; returns the page that shows it, or the numbers alone where nothing can be drawn."""
    from niss.attacks.experiment import RESULT_FILE, write_results
    from niss.report import write_report

    try:
        with optional_packages():
            write_results(experiment, findings, folder)
            return write_report(folder)
    except MissingPackageError as error:
        say(f"no figure and no page: {error.message}")
        return folder / RESULT_FILE
