"""Run stored cells again, on the processor, and compare: the one check of an accuracy that nobody can compute.

What was run on a processor has to come out the same to the last digit. A GPU adds in another order, as do runs of
silos that share chunks of records, and the runs drift apart as runs of different seeds do: then the whole curves have
to be as near as seeds are, and the noise has to agree.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.reproduce import beyond, design, figure3, paper
from experiments.reproduce.design import Choice, Contestant
from experiments.reproduce.promises import CLOSE
from experiments.reproduce.results import Cell, Record, read_results, select, spread
from experiments.reproduce.runner import run_cells
from niss.data import Dataset
from niss.simulation import Config, preset, with_overrides

SECONDS_A_STEP = {"mlp": 4e-4, "cnn": 2e-2, "gru": 5e-2, "resnet": 5e-2}
SECONDS_A_RECORD = {"cnn": 4e-4, "logistic": 2e-5}
SECONDS_A_CLIENT = 5e-3
"""On one core of a busy machine: of a local step on ten samples, of a record's gradient, of a client in a round."""
NEAR, DEVIATIONS = 0.02, 4.0
"""How far apart the mean accuracies of a run on a GPU and one on a processor may be: at least, and in deviations over
the stored seeds."""


@dataclass(frozen=True)
class Rerun:
    """A cell that was run again."""

    where: str
    seconds: float
    agrees: bool
    detail: str


def candidates(folder: Path, most: float) -> list[tuple[Record[Any], Cell]]:
    """The cells that take at most so many seconds, by a rough guess."""
    trained = [name for name in design.EXPERIMENTS if name != paper.FIGURE_4]
    records = [one for name in trained for one in read_results(folder, name).values()]
    return [(record, cell) for record in records if expected_seconds(record) <= most for cell in record.cells]


def expected_seconds(record: Record[Any]) -> float:
    """A rough guess for one of its cells."""
    base = record.base
    seconds = base["rounds"] * base["participants"] * SECONDS_A_CLIENT
    model = base.get("model", "mlp")
    if base.get("unit") == "record":
        return float(seconds + base["rounds"] * base["batch"] * base["records"] * SECONDS_A_RECORD[model])
    images = base.get("images_per_client") or base.get("records", 10)
    steps = base.get("local_epochs", paper.EPOCHS) * -(-images // base.get("batch_size", 10))
    return float(seconds + base["rounds"] * base["participants"] * steps * SECONDS_A_STEP[model])


def config_of(record: Record[Any], cell: Cell) -> tuple[Config, Dataset | None]:
    """What a cell was run with, from its file and its labels alone; and its data, where they are no dataset of niss."""
    labels, base = cell.labels, record.base
    if record.experiment in (paper.FIGURE_3, paper.SWEEP):
        panel = paper.find_panel(record.name)
        own = figure3.base_config(panel, rounds=base["rounds"], device="cpu", overrides=base.get("changed"))
        reading = paper.find_reading(labels["reading"].removeprefix("sigma-"))
        if labels["reading"].startswith("sigma-"):
            reading = paper.given_sigma(labels["sigma_k"])
        return figure3.cell_config(own, x=labels["x"], seed=labels["seed"], reading=reading), None
    if record.experiment == design.DEMOS:
        whole = with_overrides(preset(record.name), {"training.device": "cpu"})
        method = next(one for one in whole.methods if one.title == labels["method"])
        return replace(whole, methods=(method,)), None
    setting = replace(design.setting_of(record.name, base), rounds=base["rounds"])
    if "images_per_client" in base:
        setting = replace(setting, images=base["images_per_client"])
    data = beyond.load(setting.dataset)
    if record.experiment == design.TUNING:
        setting, data, _ = beyond.held_out(setting)
    clip = Choice().clip if labels["clip"] is None else labels["clip"]
    choice = Choice(clip, labels["learning_rate"], labels["hidden"])
    seed, one = labels.get("seed", 1), Contestant.of(labels)
    return beyond.setting_config(setting, one, choice, seed=seed, device="cpu"), data


def rerun(record: Record[Any], cell: Cell) -> Rerun:
    """Once more from nothing, and how the two compare."""
    began, (config, data) = time.monotonic(), config_of(record, cell)
    with TemporaryDirectory() as folder:
        out, work = (Path(folder) / name for name in ("out", "work"))
        known = record.experiment, record.name, record.base, {cell.id: (cell.labels, config)}
        (again,) = run_cells(*known, dataset=data, out=out, work=work).cells
    agrees, detail = compare(record, cell, again)
    where = f"{record.experiment}/{record.name}: {cell.id}"
    return Rerun(where, time.monotonic() - began, agrees, detail)


def compare(record: Record[Any], cell: Cell, again: Cell) -> tuple[bool, str]:
    """Whether a cell and its second run are the same, and how far apart they are."""
    means = [sum(value for _, value in one.curve) / len(one.curve) for one in (cell, again)]
    noise = (
        abs(again.aggregate_variance / cell.aggregate_variance - 1.0)
        if cell.aggregate_variance > 1e-12
        else 0.0
    )
    words = (
        f"{100 * cell.accuracy:.1f} % stored and {100 * again.accuracy:.1f} % now, "
        f"{100 * means[0]:.2f} and {100 * means[1]:.2f} on average over its rounds, noise {100 * noise:.1f} % apart"
    )
    if cell.course == again.course:
        return True, f"the same curve; {words}"
    if not cell.engine.startswith("cuda") and record.base.get("unit") != "record":
        return False, f"another curve; {words}"
    same = {name: value for name, value in cell.labels.items() if name not in ("seed", "tuned_for")}
    over_seeds = spread([one.accuracy for one in select(record, **same)]).deviation
    near = abs(means[0] - means[1]) <= max(NEAR, DEVIATIONS * over_seeds) and noise <= 10.0 * CLOSE
    return near, f"added up in another order then; {words}"


def rerun_some(folder: Path, count: int, most: float) -> Iterator[Rerun]:
    """So many cells drawn at random among those that take at most so many seconds."""
    found = candidates(folder, most)
    for record, cell in secrets.SystemRandom().sample(found, min(count, len(found))):
        yield rerun(record, cell)
