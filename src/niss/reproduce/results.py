"""Result files of training: one JSON file for each panel or setting; a cell of it is one training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niss.errors import RunFolderError
from niss.report.files import read_json_object
from niss.reproduce.leaks import FIGURE_4, Leaks, leaks_of
from niss.reproduce.records import (
    Record,
    Spread,
    no_result,
    require_same_base,
    result_path,
    select,
    spread,
    write_result,
)

__all__ = [
    "Cell",
    "Result",
    "Spread",
    "merge_results",
    "read_result",
    "read_results",
    "require_same_base",
    "result_path",
    "select",
    "spread",
    "write_result",
]


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

    def same_run(self, other: Cell) -> bool:
        return self.curve == other.curve and self.labels == other.labels


@dataclass(frozen=True)
class Result(Record[Cell]):
    """All cells of one panel or setting; `base` are the settings they have in common."""


def read_result(path: Path) -> Result | None:
    """The result in a file, or None where there is none."""
    value = read_json_object(path)
    return None if value is None else _result_of(value, path)


def read_results(folder: Path, experiment: str) -> dict[str, Result]:
    """All results of an experiment, by name."""
    found = (read_result(path) for path in sorted((folder / experiment).glob("*.json")))
    return {result.name: result for result in found if result is not None}


def _result_of(value: dict[str, Any], path: Path) -> Result:
    try:
        cells = tuple(
            Cell(**{**cell, "curve": tuple((int(at), float(accuracy)) for at, accuracy in cell["curve"])})
            for cell in value["cells"]
        )
        return Result(value["experiment"], value["name"], value["base"], cells)
    except (KeyError, TypeError, ValueError) as error:
        raise no_result(path, error) from None


def _read_either(path: Path) -> Result | Leaks | None:
    value = read_json_object(path)
    if value is None:
        return None
    return leaks_of(value, path) if value.get("experiment") == FIGURE_4 else _result_of(value, path)


def merge_results(folders: Sequence[Path], out: Path) -> list[Path]:
    """Merge the results in `folders`, and what `out` holds already, into `out`; returns the files written."""
    written = []
    for folder in folders:
        for path in sorted(folder.glob("*/*.json")):
            found: Any = _read_either(path)
            if found is None:
                continue
            target = result_path(out, found.experiment, found.name)
            before: Any = _read_either(target)
            if before is not None:
                require_same_base(before, found.base, path)
                found = before.with_cells(found.cells)
            write_result(target, found.with_cells(()))
            written.append(target)
    if not written:
        raise RunFolderError("no results found to merge", hint="give folders that `niss reproduce` wrote")
    return sorted(set(written))
