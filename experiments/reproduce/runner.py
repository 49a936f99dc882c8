"""Runs the cells that a result file still lacks, as few cohorts as there are models, and keeps what came of them."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.reproduce.results import (
    Cell,
    Result,
    read_result,
    require_same_base,
    result_path,
    write_result,
)
from niss.data import Dataset
from niss.errors import NissError, RunFolderError
from niss.files import MANIFEST, TIMING, locked_folder, read_json, read_json_lines
from niss.simulation import Config
from niss.simulation.method_run import TrainingEvent
from niss.simulation.results import Comparison, RunResult
from niss.simulation.runner import compare_together

Cells = Mapping[str, tuple[dict[str, Any], Config]]
"""Cells by id: what tells each apart, and its settings, which have one method."""
AT_ONCE = 15
"""As many as the first step of a search has: more fill a GPU no better, and what is whole is kept more often."""


class OutOfTime(NissError):
    """The time given is over; whole rounds are kept."""


class Watch:
    """Passes progress on, and ends the work at a time of `time.monotonic`, if there is one."""

    def __init__(self, progress: Any = None, *, until: float | None = None) -> None:
        self._progress, self._until = progress, until

    def __call__(self, *event: Any) -> None:
        if self._progress is not None:
            self._progress(*event)
        if self._until is not None and time.monotonic() > self._until:
            raise OutOfTime(
                "the time given with --stop-after is over; every whole round and cell is kept",
                hint="give the same command again to go on",
            )

    def training(self, event: TrainingEvent) -> None:
        if tell := getattr(self._progress, "training", None):
            tell(event)


def run_cells(
    experiment: str,
    name: str,
    base: Mapping[str, Any],
    cells: Cells,
    *,
    out: Path,
    work: Path,
    dataset: Dataset | None = None,
    progress: Watch | None = None,
) -> Result:
    """Run the cells that `out/experiment/name.json` lacks; their run folders are in `work/experiment/name`.

    A cell that is there is never run again, wherever it was run. After a kill, cells go on from their last round.
    `AT_ONCE` cells of the same model train as one cohort; the file is written after each, with what other processes
    have written to it since.
    """
    path = result_path(out, experiment, name)
    result = kept(path, experiment, name, base)
    known = {cell.id: cell for cell in result.cells}
    groups: dict[str, list[str]] = defaultdict(list)
    for cell, (labels, config) in cells.items():
        if cell in known and known[cell].labels != labels:
            raise RunFolderError(
                f"{path}: {cell} was run with other settings (tuned since then?)",
                hint="remove that file, or give another --out",
            )
        if cell not in known:
            groups[repr((config.model, config.data.dataset))].append(cell)
    folder = work / experiment / name
    for group in groups.values():
        for first in range(0, len(group), AT_ONCE):
            configs = {cell: cells[cell][1] for cell in group[first : first + AT_ONCE]}
            found = compare_together(configs, out=folder, dataset=dataset, progress=progress)
            done = [cell_of(cell, *cells[cell], found[cell].results[0], found[cell]) for cell in configs]
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked_folder(path.parent):
                result = kept(path, experiment, name, base).with_cells(done)
                write_result(path, result)
    return result


def kept(path: Path, experiment: str, name: str, base: Mapping[str, Any]) -> Result:
    """What a file holds; nothing yet where there is none."""
    result = read_result(path) or Result(experiment, name, dict(base))
    require_same_base(result, base, path)
    return result


def cell_of(
    name: str, labels: dict[str, Any], config: Config, run: RunResult, comparison: Comparison
) -> Cell:
    """What is kept of one of the runs of a comparison; `config` has its method alone."""
    if run.folder is None or comparison.folder is None:
        raise RunFolderError(f"{name} was run without a folder")
    curve = tuple((one.round, one.accuracy) for one in run.rounds if one.accuracy is not None)
    return Cell(
        id=name,
        labels=labels,
        rounds=len(run.rounds),
        accuracy=run.summary["accuracy"],
        curve=curve,
        epsilon_joint=run.summary["epsilon_joint"],
        epsilon_marginal=run.summary["epsilon_marginal"],
        aggregate_variance=run.summary["aggregate_variance"],
        seconds=round(sum(line["seconds"] for line in read_json_lines(run.folder / TIMING)[0]), 2),
        engine=read_json(comparison.folder / MANIFEST)["engine"],
        mechanism=_mechanism(config, run),
    )


def _mechanism(config: Config, run: RunResult) -> dict[str, Any]:
    """What the epsilons of a run were made of: its plan, and the most that one of its rounds cost a client."""
    plan = config.plan(config.methods[0])
    if not plan.private:
        return {}
    names = ("kappa", "neighbours", "graph", "carried_to_residual")
    shared = {name: getattr(plan, name) for name in names if plan.kind.uses(name)} | plan.kind.own
    assumed = plan.assumed(config.participants)
    for name, setting in {"colluders": "collusion", "revealed": "mode", "dropped": "mode"}.items():
        if plan.kind.uses(setting):
            shared[name] = getattr(assumed, name)
    if plan.kind.whole_run:
        shared = {"sampling_probability": 1.0, **shared, "separation": plan.separation}
    if plan.kind.carries:
        size = config.participants
        noise = plan.committed(size).noise
        shared |= {
            "spatial": noise.spatial,
            "carried": size * noise.carried,
            "residual": size * noise.residual,
        }
    return {
        "exchange": config.exchange,
        "participations": plan.participations,
        "delta": run.statement.delta,
        "gaussian_delta": plan.gaussian_delta,
        **shared,
        "tau2": run.summary["tau2"],
        "mu_joint": _largest(run, "mu_joint"),
        "mu_marginal": _largest(run, "mu_marginal"),
        "predicted_variance": run.summary["aggregate_variance_predicted"],
        "grid_delta": sum(one.grid_delta or 0.0 for one in run.rounds),
    }


def _largest(run: RunResult, name: str) -> float | None:
    """Over the rounds; None where there is no bound."""
    most = max(getattr(one, name) for one in run.rounds)
    return most if math.isfinite(most) else None
