"""`niss reproduce` and `niss verify`: the options of each experiment, and what is done with them.

Whatever ends an experiment, what is whole is kept and presented, and the same command goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typing_extensions import Doc

from experiments.reproduce import design, paper
from experiments.reproduce.paper import find_reading
from experiments.reproduce.session import RESULTS, RUNS, Comparison, play
from niss.cli.experiments import VerifyOptions
from niss.cli.options import from_options, option, parse_settings, register
from niss.cli.terminal import PartProgress, RoundProgress, kept_on_interrupt, print_json, say
from niss.errors import RunFolderError
from niss.files import write_output

app = typer.Typer()

SECONDS_A_ROUND = {"mlp": 0.027, "cnn": 0.21}
"""Seconds that a round of one cell takes on an NVIDIA H200: 30 clients, 5 epochs, evaluation included."""

Out = Annotated[Path, typer.Option(help="Folder of the result files, figures and tables.")]
Piece = Callable[..., object]
"""A part of an experiment, called with `progress`."""


@dataclass(frozen=True)
class Experiment:
    """What every experiment takes."""

    seeds: Annotated[int, Doc("How many seeds.")] = option(3, min=1)
    device: Annotated[str, Doc("Where clients train: auto, cpu or cuda.")] = "auto"
    out: Annotated[Path, Doc("Folder of the result files, figures and tables.")] = RESULTS
    stop_after: Annotated[float | None, Doc("Stop after so many seconds, ready to go on.")] = None

    def places(self, *more: str) -> dict[str, Any]:
        """The options that the experiments take under the same name, and the seeds."""
        same = {name: getattr(self, name) for name in ("out", "device", *more)}
        return {**same, "seeds": range(1, self.seeds + 1)}


@dataclass(frozen=True)
class Training(Experiment):
    """What every experiment that trains takes; its runs go on from their last round."""

    work: Annotated[Path, Doc("Folder of the runs, from which an interrupted one goes on.")] = RUNS


@dataclass(frozen=True)
class Panels(Training):
    """What both experiments on panels take; the panels come one after the other."""

    panel: Annotated[tuple[str, ...], Doc("Comma-separated, or all.")] = ("all",)
    rounds: Annotated[int, Doc("Rounds.")] = option(100, min=1)
    settings: Annotated[list[str] | None, Doc("Change a setting of the paper.")] = option(
        None, "--set", metavar="KEY=VALUE"
    )

    @property
    def panels(self) -> Sequence[paper.Panel]:
        return paper.PANELS if self.panel == ("all",) else [paper.find_panel(name) for name in self.panel]

    @property
    def overrides(self) -> dict[str, Any]:
        return parse_settings(self.settings)


@dataclass(frozen=True)
class Figure3(Panels):
    """All X and seeds of a panel at once."""

    x: Annotated[tuple[float, ...], Doc("Comma-separated values of X = tau^2.")] = paper.X_VALUES
    reading: Annotated[str, Doc("Of the sensitivity: see `niss reproduce readings`; or sigma_k itself.")] = (
        "nbafl"
    )
    dry_run: Annotated[bool, Doc("Only say what would be run.")] = False


@register(app, "figure-3")
@from_options(Figure3, quiet=True)
def figure_3(options: Figure3) -> None:
    """The eight panels of Figure 3: accuracy over rounds at X = 0, 0.3, 0.6 and 1.

    Examples:
    niss reproduce figure-3 --panel mnist-mlp-iid --device cuda
    niss reproduce figure-3 --panel all --seeds 1 --dry-run
    """
    from experiments.reproduce.figure3 import base_config, panel_cells, run_panel
    from experiments.reproduce.results import read_result, result_path

    more: dict[str, Any] = {"xs": options.x, "reading": (reading := find_reading(options.reading))}
    places, pieces = options.places("work", "rounds", "overrides"), dict[str, Piece]()
    for panel in options.panels:
        pieces[panel.name] = partial(run_panel, panel, **more, **places)
        if options.dry_run:
            base = base_config(
                panel, rounds=options.rounds, device=options.device, overrides=options.overrides
            )
            cells = panel_cells(base, seeds=places["seeds"], xs=options.x, reading=reading)
            known = read_result(result_path(options.out, paper.FIGURE_3, panel.name))
            left = len(cells.keys() - {cell.id for cell in (known.cells if known else ())})
            seconds = SECONDS_A_ROUND[panel.model] * options.rounds * left
            typer.echo(f"{panel.name}: {left} cells left, about {seconds:.0f} s on an H200")
    if not options.dry_run:
        _work_through(pieces, options)


@dataclass(frozen=True)
class Figure4(Experiment):
    """The pictures one after the other, every level with every seed."""

    image: Annotated[tuple[str, ...], Doc("Training pictures, comma-separated DATASET:INDEX; or all.")] = (
        "all",
    )
    iterations: Annotated[int, Doc("Most iterations of the search.")] = option(paper.ITERATIONS, min=1)
    restarts: Annotated[int, Doc("Random starts, tried side by side.")] = option(paper.RESTARTS, min=1)


@register(app, "figure-4")
@from_options(Figure4, quiet=True)
def figure_4(options: Figure4) -> None:
    """Figure 4, Deep Leakage from Gradients: what comes back of a client's picture, on a CPU.

    Examples:
    niss reproduce figure-4 --image mnist:7 --seeds 3
    """
    from experiments.reproduce.figure4 import load_victim, run_picture

    images = paper.IMAGES if options.image == ("all",) else options.image
    for image in images:
        load_victim(image)
    places = options.places("iterations", "restarts")
    places["cells"] = paper.attack_cells(places.pop("seeds"))
    pieces: dict[str, Piece] = {image: partial(run_picture, image, **places) for image in images}
    _work_through(pieces, options, PartProgress)


@dataclass(frozen=True)
class Sweep(Panels):
    """X = 1 over sigma_k, for each panel."""

    seeds: Annotated[int, Doc("How many seeds.")] = option(1, min=1)
    panel: Annotated[tuple[str, ...], Doc("Comma-separated, or all.")] = ("mnist-mlp-iid",)
    sigmas: Annotated[tuple[float, ...] | None, Doc("Comma-separated values of sigma_k.")] = None


@register(app, "sweep")
@from_options(Sweep, quiet=True)
def sweep(options: Sweep) -> None:
    """X = 1 over the size of the noise: where would the paper's gaps arise?

    Examples:
    niss reproduce sweep --panel mnist-mlp-iid --sigmas 0.001,0.01,0.1
    """
    from experiments.reproduce.figure3 import run_sweep

    places = options.places("work", "rounds", "overrides", "sigmas")
    _work_through({panel.name: partial(run_sweep, panel, **places) for panel in options.panels}, options)


@register(app, "beyond")
@from_options(Comparison)
def beyond(options: Comparison) -> None:
    """Every method at the same epsilon in the joint view, tuned with the same effort.

    Examples:
    niss reproduce beyond --setting mnist-iid-client-100-of-1000 --epsilons 3 --methods niss-planned
    niss reproduce beyond --setting shakespeare-gru,cifar10-resnet --processes 2 --stop-after 560
    """
    options.settings()
    try:
        if left := play(options):
            raise RunFolderError(
                f"{len(left)} settings are left: {', '.join(left)}", hint="the same command goes on"
            )
    finally:
        if options.out.is_dir():
            present(options.out)


@register(app, "demos")
@from_options(Training, quiet=True)
def demos(options: Training) -> None:
    """The comparisons of the presets, whose numbers README and tutorial have; minutes on a CPU.

    Examples:
    niss reproduce demos --device cpu
    """
    from experiments.reproduce.beyond import run_demo

    places = options.places("work")
    del places["seeds"]
    _work_through({name: partial(run_demo, name, **places) for name in design.PRESETS}, options)


@register(app, "merge")
def merge(
    folders: Annotated[list[Path], typer.Argument(help="Result folders from elsewhere.")],
    out: Out = RESULTS,
) -> None:
    """Take the cells of other result folders into this one, and draw figures and tables again.

    Examples:
    niss reproduce merge other/results --out results/paper
    """
    from experiments.reproduce.results import merge_results

    merge_results(folders, out)
    present(out)


@register(app, "figures")
def figures(out: Out = RESULTS) -> None:
    """Draw the figures and write the tables again from the result files.

    Examples:
    niss reproduce figures --out results/paper
    """
    if not out.is_dir():
        raise RunFolderError(
            f"{out} does not exist", hint="run `niss reproduce figure-3` or another one first"
        )
    present(out)


@register(app, "readings")
def readings() -> None:
    """The readings of the paper's sensitivity, and the noise each one gives.

    Examples:
    niss reproduce readings
    """
    from experiments.reproduce.tables import readings_table

    typer.echo(readings_table(), nl=False)


def present(out: Path) -> None:
    """Write the tables, draw the figures, and say where."""
    from experiments.reproduce.text import TABLES_FILE, tables_text

    typer.echo(str(write_output(out / TABLES_FILE, tables_text(out).encode())))
    from experiments.reproduce.chart import write_figures

    for path in write_figures(out):
        typer.echo(str(path))


def _work_through(pieces: Mapping[str, Piece], options: Experiment, shown: type[Any] = RoundProgress) -> None:
    """One piece after the other, with progress; whatever ends it, what is whole is presented."""
    from experiments.reproduce.runner import Watch

    until = None if options.stop_after is None else time.monotonic() + options.stop_after
    with kept_on_interrupt(lambda: "the same command goes on where this one stopped"):
        try:
            for number, (name, piece) in enumerate(pieces.items(), start=1):
                say(f"{name} ({number} of {len(pieces)})")
                with shown() as progress:
                    piece(progress=Watch(progress, until=until))
        finally:
            if options.out.is_dir():
                present(options.out)


UNVERIFIED = (
    "not computed again: accuracies, which only a run can tell (--rerun 3 runs three cells again); how long a run took "
    "and on which machine; attacks, but for their scores; numbers of the docs outside marks, such as benchmarks"
)


def verify(options: VerifyOptions) -> None:
    """Compute the result files again, check every claim against them, and what text and figures say.

    Prints what was found, and what cannot be; ends with code 1 where something does not add up.
    """
    from experiments.reproduce.checks import Fault, check_files
    from experiments.reproduce.claims import check_claims
    from experiments.reproduce.text import disagreements, figure_faults, results_folder, text_faults

    folder = results_folder(options.results)
    if not folder.is_dir():
        raise RunFolderError(f"{folder} does not exist", hint="run `niss reproduce` first")
    published = [] if options.partial else [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
    texts = published if options.text is None else options.text
    faults = check_files(folder, partial=options.partial)
    if not options.partial:
        faults += [*figure_faults(folder, Path("docs/images")), *text_faults(folder, Path())]
    claims = check_claims(folder)
    wrong = [one for path in texts if path.exists() for one in disagreements(path, folder)]
    failed = [claim for claim in claims if claim.required and claim.holds is False]
    again = []
    if options.rerun:
        from experiments.reproduce.rerun import rerun_some

        say(f"running {options.rerun} cells again, each in about {options.rerun_seconds:g} s or less")
        again = list(rerun_some(folder, options.rerun, options.rerun_seconds))
        faults += [Fault("rerun", one.where, one.detail) for one in again if not one.agrees]
        if len(again) < options.rerun:
            say(f"only {len(again)} cells take that long or less: --rerun-seconds allows more")
    if options.as_json:
        print_json(
            {
                "faults": [asdict(fault) for fault in faults],
                "claims": [asdict(claim) for claim in claims],
                "disagreements": [{**asdict(one), "path": str(one.path)} for one in wrong],
                "reruns": [asdict(one) for one in again],
                "unverified": UNVERIFIED,
            }
        )
    else:
        say(f"{len(sorted(folder.glob('*/*.json')))} result files computed again: {len(faults)} faults")
        lines = [(f"{fault.kind} is wrong", f"{fault.where}: {fault.detail}") for fault in faults]
        lines += [(claim.verdict, f"{claim.name}: {claim.detail}") for claim in claims]
        lines += [
            ("text is wrong", f"{one.path}: {one.key} does not say what the files say") for one in wrong
        ]
        lines += [(f"again, {one.seconds:.0f} s", f"{one.where}: {one.detail}") for one in again]
        for kind, detail in lines:
            typer.echo(f"{kind:16}  {detail}")
        say(UNVERIFIED)
    if faults or failed or wrong:
        typer.echo(
            f"{len(faults)} faults, {len(failed)} claims do not hold, {len(wrong)} places in the text disagree; "
            "`python tools/update_results.py` fills the text from the files",
            err=True,
        )
        raise typer.Exit(1)
