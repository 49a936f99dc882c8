"""Result files: cells that are independent of one another, in one JSON file for each panel, setting or picture.

A cell of training is a `Cell`, an attack on a picture an `Attempt`. Files with the same base settings merge by taking
the union of their cells, so an experiment can be spread over machines and days.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from experiments.reproduce.paper import FIGURE_4
from niss.errors import RunFolderError
from niss.files import parse_json, to_json, write_output
from niss.runs import five_before


@dataclass(frozen=True)
class AnyCell(ABC):
    """What every cell has: a name, and the labels that tell it apart."""

    id: str
    labels: dict[str, Any]

    @property
    @abstractmethod
    def course(self) -> tuple[tuple[int, float], ...]:
        """What tells a run from every other: (round, accuracy) or (iteration, loss)."""

    def same_run(self, other: AnyCell) -> bool:
        """Whether both are the same run, wherever it was made and however long it took."""
        return self.course == other.course and self.labels == other.labels


C = TypeVar("C", bound=AnyCell)


@dataclass(frozen=True)
class Record(Generic[C]):
    """All cells of one panel, setting or picture; `base` are the settings they have in common.

    That of a picture holds the PSNR of an even grey, which says nothing about it.
    """

    experiment: str
    name: str
    base: dict[str, Any]
    cells: tuple[C, ...] = ()

    def with_cells(self, more: Iterable[C]) -> Self:
        """The union; a cell that both have must be the same run, else one of the two is not what it says."""
        cells = {cell.id: cell for cell in self.cells}
        for cell in more:
            if not cells.setdefault(cell.id, cell).same_run(cell):
                raise RunFolderError(
                    f"{self.experiment}/{self.name}: two different runs are called {cell.id}",
                    hint="keep the one you trust and remove the other file",
                )
        return replace(self, cells=tuple(cells[key] for key in sorted(cells)))


def result_path(folder: Path, experiment: str, name: str) -> Path:
    return folder / experiment / f"{name}.json"


def write_result(path: Path, result: Record[Any]) -> None:
    """One line for each cell: a file of long curves stays small, and its changes readable."""
    values = to_json(asdict(result))
    cells = ",\n".join("    " + json.dumps(cell, allow_nan=False) for cell in values.pop("cells"))
    head = json.dumps(values, indent=2, allow_nan=False).removesuffix("\n}")
    write_output(path, f'{head},\n  "cells": [\n{cells}\n  ]\n}}\n'.encode())


def require_same_base(result: Record[Any], base: Mapping[str, Any], where: Path) -> None:
    if result.base != base:
        different = sorted(key for key in {*result.base, *base} if result.base.get(key) != base.get(key))
        raise RunFolderError(
            f"{where} has other settings than {result.experiment}/{result.name}: {', '.join(different)}",
            hint="keep them in another folder with --out",
        )


def select(result: Record[C] | None, **labels: Any) -> list[C]:
    """The cells that carry all these labels; of no result, none."""
    cells = result.cells if result else ()
    return [cell for cell in cells if all(cell.labels.get(name) == value for name, value in labels.items())]


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


def over_seeds(cells: Sequence[C], measure: str) -> Spread | None:
    """Of a measure of the cells; of none, None."""
    return spread([getattr(cell, measure) for cell in cells]) if cells else None


@dataclass(frozen=True)
class Difference:
    """The mean of differences between paired runs, and half of its 95 % interval, by Student's t."""

    mean: float
    half: float

    @property
    def verdict(self) -> str:
        """Who is better, where the interval says so."""
        if abs(self.mean) <= self.half:
            return ""
        return "ahead" if self.mean > 0.0 else "behind"


def difference(one: Sequence[Cell], other: Sequence[Cell], measure: str = "accuracy") -> Difference | None:
    """Of a `measure` of the cells, over the seeds that both have; None for fewer than two.

    Without noise there is one run for all epsilons.
    """
    from scipy.stats import t

    left, right = ({cell.labels["seed"]: getattr(cell, measure) for cell in cells} for cells in (one, other))
    paired = [left[seed] - right[seed] for seed in left if seed in right]
    if len(paired) < 2:
        return None
    found = spread(paired)
    return Difference(found.mean, float(t.ppf(0.975, found.count - 1)) * found.error)


@dataclass(frozen=True)
class Attempt(AnyCell):
    """One attack on a picture: what tells it apart (`labels`), and what came of it.

    `noise` is the error of the update that the server worked with, relative to the true one. `losses` holds some
    (iteration, best DLG loss); `loss` is the last of them. Scores are those of the restart with the least loss, at
    the end; `frames` holds (iteration, PSNR) on the way, since a search that goes on long enough fits the noise as
    well. An epsilon of None means that there is none.
    """

    noise: float
    loss: float
    losses: tuple[tuple[int, float], ...]
    frames: tuple[tuple[int, float], ...]
    iterations: int
    stopped: str
    mse: float
    psnr: float
    ssim: float
    label_found: bool
    epsilon_joint: float | None
    epsilon_marginal: float | None
    seconds: float

    @property
    def best_psnr(self) -> float:
        """The PSNR had the server stopped at the best of the frames, which it cannot know."""
        return max(psnr for _, psnr in self.frames)

    @property
    def course(self) -> tuple[tuple[int, float], ...]:
        return self.losses


ORIGINAL = "original"
"""The victim's own picture among those that are kept."""


def _pictures_path(folder: Path, name: str) -> Path:
    return folder / FIGURE_4 / f"{name}.npz"


def kept_pictures(folder: Path, name: str) -> dict[str, NDArray[np.uint8]]:
    """The pictures of Figure 4 that lie beside its results: `ORIGINAL`, and by cell what was recovered."""
    path = _pictures_path(folder, name)
    if not path.exists():
        return {}
    with np.load(path) as kept:
        return dict(kept)


def keep_pictures(folder: Path, name: str, pictures: Mapping[str, NDArray[np.uint8]]) -> None:
    """Add to them; the file is written whole or not at all."""
    content = BytesIO()
    np.savez_compressed(content, **kept_pictures(folder, name) | dict(pictures))  # type: ignore[arg-type]
    write_output(_pictures_path(folder, name), content.getvalue())


@dataclass(frozen=True)
class Cell(AnyCell):
    """One training run: what tells it apart (`labels`), and what came of it.

    `curve` holds (round, accuracy on the test data); `accuracy` is the last of them. An epsilon of None means that
    there is none: nothing finite holds. `mechanism` is what its epsilon was made of, for those who compute it again.
    """

    rounds: int
    accuracy: float
    curve: tuple[tuple[int, float], ...]
    epsilon_joint: float | None
    epsilon_marginal: float | None
    aggregate_variance: float
    seconds: float
    engine: str
    mechanism: dict[str, Any] = field(default_factory=dict)

    @property
    def before(self) -> float:
        """Mean accuracy over the five rounds before the last, at most: what a run has that ends a little earlier."""
        earlier = five_before([accuracy for _, accuracy in self.curve])
        return self.accuracy if earlier is None else earlier

    @property
    def score(self) -> float:
        """What a search compares where trials have several seeds: neither the last round alone, nor those before it."""
        return (self.accuracy + self.before) / 2.0

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

    @property
    def course(self) -> tuple[tuple[int, float], ...]:
        return self.curve


Result = Record[Cell]
Leaks = Record[Attempt]


def read_result(path: Path) -> Record[Any] | None:
    """The training runs, or the attacks on a picture, in a file; None if it does not exist."""
    if not path.exists():
        return None
    try:
        return _parsed(path.read_bytes())
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{path} does not contain results: {error!r}", hint="was it written by `niss reproduce`?"
        ) from None


@lru_cache(maxsize=256)
def _parsed(content: bytes) -> Record[Any]:
    """Tables, claims and checks read the same files over and over."""
    value = parse_json(content.decode("utf-8", errors="replace"))
    kind = Attempt if value["experiment"] == FIGURE_4 else Cell
    for cell in value["cells"]:
        # JSON has lists where a cell has tuples of (round or iteration, value).
        for name in {"curve", "losses", "frames"} & cell.keys():
            cell[name] = tuple((int(at), float(value)) for at, value in cell[name])
    cells = tuple(kind(**cell) for cell in value["cells"])
    return Record(value["experiment"], value["name"], value["base"], cells)


def read_results(folder: Path, experiment: str) -> dict[str, Record[Any]]:
    """All results of an experiment, by name."""
    results = (read_result(path) for path in sorted((folder / experiment).glob("*.json")))
    return {result.name: result for result in results if result is not None}


def merge_results(folders: Sequence[Path], out: Path) -> list[Path]:
    """Merge the results in `folders`, and what `out` holds already, into `out`; returns the files written."""
    written = set()
    for path in (path for folder in folders for path in sorted(folder.glob("*/*.json"))):
        result = read_result(path)
        assert result is not None
        target = result_path(out, result.experiment, result.name)
        before = read_result(target)
        if before is not None:
            require_same_base(before, result.base, path)
            result = before.with_cells(result.cells)
        write_result(target, result.with_cells(()))
        if pictures := kept_pictures(path.parents[1], path.stem):
            keep_pictures(out, path.stem, pictures)
        written.add(target)
    if not written:
        raise RunFolderError("no results found to merge", hint="give folders that `niss reproduce` wrote")
    return sorted(written)
