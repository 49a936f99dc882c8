"""`niss attack`, a command for each experiment of `niss.attacks`; `niss reproduce` and `niss verify`, for the paper's.

The paper's are in `experiments/` of the repository and not part of the installed package. `find_checkout` looks for
them; `experiments.reproduce.commands` has the commands and what they do.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import Doc

from niss.cli.errors import MissingPackageError, optional_packages
from niss.cli.options import argument, examples, from_options, lazy_app, option
from niss.cli.terminal import (
    PartProgress,
    free_folder,
    kept_on_interrupt,
    print_json,
    print_sentence,
    print_table,
    say,
)
from niss.errors import ConfigError

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


def _load_attacks() -> typer.Typer:
    """A command for each attack that is registered; its options are the fields of its dataclass."""
    from niss.attacks import EXPERIMENTS, load_experiment

    commands = typer.Typer()
    for kind in map(load_experiment, EXPERIMENTS):
        command = from_options(kind, AttackOutput, quiet=True)(execute)
        commands.command(kind.name, help=kind.summary, epilog=examples(*kind.examples))(command)
    return commands


attack_app = lazy_app(
    _load_attacks,
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


REPRODUCE_EXAMPLES = examples(
    "niss reproduce figure-3 --panel mnist-mlp-iid --rounds 100 --seeds 3 --device cuda",
    "niss reproduce figure-3 --panel cifar10-cnn-iid --x 0,1 --seeds 1 --stop-after 280",
    "niss reproduce figure-4 --image mnist:7,cifar10:7 --seeds 3",
    "niss reproduce beyond --setting mnist-iid-client-100-of-1000 --epsilons 3 --variant none,collusion",
    "niss reproduce merge other/results --out results/paper",
    more="What is in the result files is never run again; what was interrupted goes on where it stopped.",
)


def find_checkout() -> Path | None:
    """The root of a checkout of niss: the one that this package is installed from, or one around the current folder."""
    for start in (Path(__file__).resolve().parent, Path.cwd()):
        for folder in (start, *start.parents):
            if (folder / "experiments" / "reproduce" / "__init__.py").is_file() and _is_niss(folder):
                return folder
    return None


def _is_niss(folder: Path) -> bool:
    """Whether a folder is the root of this project: other projects may have `experiments/` too."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(project.get("project", {}).get("name") == "niss")


def load_experiments() -> Any:
    """The module `experiments.reproduce.commands` of the checkout. `ConfigError` where there is none."""
    root = find_checkout()
    if root is None:
        hint = "clone the repository of niss and run this command there"
        raise ConfigError("the experiments are not part of the installed package", hint=hint)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("experiments.reproduce.commands")


reproduce_app = lazy_app(
    lambda: load_experiments().app,
    help="Run the paper's experiments, and those beyond it (in a checkout of the repository).",
    epilog=REPRODUCE_EXAMPLES,
)


@dataclass(frozen=True)
class VerifyOptions:
    """Which results to check, and which texts against them."""

    results: Annotated[Path, Doc("The folder that `niss reproduce` wrote.")] = argument(Path("results"))
    text: Annotated[
        list[Path] | None, Doc("Files whose numbers are checked; by default README.md and docs/.")
    ] = None
    partial: Annotated[
        bool,
        Doc("Results of your own: do not ask for every cell and figure, nor look into README.md and docs/."),
    ] = False
    rerun: Annotated[int, Doc("Run so many cells again, drawn at random, on the processor, and compare.")] = (
        option(0, min=0)
    )
    rerun_seconds: Annotated[float, Doc("Draw among cells that take about so long, or less.")] = 60.0
    as_json: Annotated[bool, Doc("Print the findings as JSON.")] = option(False, "--json")


@from_options(VerifyOptions)
def verify_command(options: VerifyOptions) -> None:
    """Recompute every epsilon and claim from the result files; fail if one does not hold or the text disagrees.

    Accuracies cannot be computed: `--rerun 3` runs three cells again.

    Examples:
    niss verify results/
    niss verify results/ --rerun 3
    niss verify results/ --text README.md --text docs/concepts/paper.md --json
    """
    load_experiments().verify(options)
