"""The JSON files of an experiment: one for each panel or setting, its cells independent of one another.

A cell is one training run. Files with the same base settings merge by taking the union of their cells, so an
experiment can be spread over machines and days.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from niss.errors import RunFolderError
from niss.report.files import read_json_object
from niss.simulation.records import write_json


@dataclass(frozen=True)
class Cell:
    """One training run: what tells it apart (`labels`), and what came of it.

    `curve` holds (round, accuracy on the test data); `accuracy` is the last of them. An epsilon of None means that
    there is none: nothing finite holds.
    """

    id: str
    labels: dict[str, Any]
    rounds: int
    accuracy: float
    curve: tuple[tuple[int, float], ...]
    epsilon_joint: float | None
    epsilon_marginal: float | None
    aggregate_variance: float
    seconds: float
    engine: str

    @property
    def settled(self) -> float:
        """Mean accuracy over the last tenth of the rounds: with non-IID clients a single round says little."""
        last = [accuracy for number, accuracy in self.curve if number > 0.9 * self.rounds]
        return sum(last) / len(last)

    def at(self, round_number: int) -> float | None:
        """The best accuracy evaluated up to and including that round; None where training never got there."""
        if self.rounds < round_number:
            return None
        return max((accuracy for number, accuracy in self.curve if number <= round_number), default=None)


@dataclass(frozen=True)
class Result:
    """All cells of one panel or setting; `base` are the settings they have in common."""

    experiment: str
    name: str
    base: dict[str, Any]
    cells: tuple[Cell, ...] = field(default=())

    def with_cells(self, more: Iterable[Cell]) -> Result:
        """The union; a cell that both have must be the same run, else one of the two is not what it says."""
        cells = {cell.id: cell for cell in self.cells}
        for cell in more:
            known = cells.setdefault(cell.id, cell)
            if known.curve != cell.curve or known.labels != cell.labels:
                raise RunFolderError(
                    f"{self.experiment}/{self.name}: two different runs are called {cell.id}",
                    hint="keep the one you trust and remove the other file",
                )
        return Result(self.experiment, self.name, self.base, tuple(cells[key] for key in sorted(cells)))


def result_path(folder: Path, experiment: str, name: str) -> Path:
    return folder / experiment / f"{name}.json"


def read_result(path: Path) -> Result | None:
    """The result in a file, or None where there is none."""
    value = read_json_object(path)
    if value is None:
        return None
    try:
        cells = tuple(
            Cell(**{**cell, "curve": tuple((int(at), float(accuracy)) for at, accuracy in cell["curve"])})
            for cell in value["cells"]
        )
        return Result(value["experiment"], value["name"], value["base"], cells)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{path} holds no result: {error!r}", hint="was it written by `niss reproduce`?"
        ) from None


def read_results(folder: Path, experiment: str) -> dict[str, Result]:
    """All results of an experiment, by name."""
    found = (read_result(path) for path in sorted((folder / experiment).glob("*.json")))
    return {result.name: result for result in found if result is not None}


def write_result(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**asdict(result), "cells": [asdict(cell) for cell in result.cells]})


def merge_results(folders: Sequence[Path], out: Path) -> list[Path]:
    """Merge the results in `folders`, and what `out` holds already, into `out`; returns the files written."""
    written = []
    for folder in folders:
        for path in sorted(folder.glob("*/*.json")):
            found = read_result(path)
            if found is None:
                continue
            target = result_path(out, found.experiment, found.name)
            before = read_result(target)
            if before is not None:
                require_same_base(before, found.base, path)
                found = before.with_cells(found.cells)
            write_result(target, found.with_cells(()))
            written.append(target)
    if not written:
        raise RunFolderError("no results found to merge", hint="give folders that `niss reproduce` wrote")
    return sorted(set(written))


def require_same_base(result: Result, base: Mapping[str, Any], where: Path) -> None:
    if result.base != base:
        different = sorted(key for key in {*result.base, *base} if result.base.get(key) != base.get(key))
        raise RunFolderError(
            f"{where} has other settings than {result.experiment}/{result.name}: {', '.join(different)}",
            hint="keep them in another folder with --out",
        )


@dataclass(frozen=True)
class Spread:
    """A number over seeds: mean, standard deviation (0 for one seed) and how many."""

    mean: float
    deviation: float
    count: int

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.deviation / math.sqrt(self.count)


def spread(values: Sequence[float]) -> Spread:
    count = len(values)
    mean = sum(values) / count
    squares = sum((value - mean) ** 2 for value in values)
    return Spread(mean, math.sqrt(squares / (count - 1)) if count > 1 else 0.0, count)


def select(result: Result, **labels: Any) -> list[Cell]:
    """The cells that carry all these labels."""
    return [
        cell for cell in result.cells if all(cell.labels.get(name) == value for name, value in labels.items())
    ]
