"""Result files in general: cells that are independent of one another, in one JSON file for each panel or picture.

Files with the same base settings merge by taking the union of their cells, so an experiment can be spread over
machines and days.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from niss.errors import RunFolderError
from niss.simulation.records import plain_json, write_atomically


class AnyCell(Protocol):
    """What every cell has: a name, and the labels that tell it apart."""

    @property
    def id(self) -> str: ...

    @property
    def labels(self) -> dict[str, Any]: ...

    def same_run(self, other: Any) -> bool:
        """Whether both are the same run, wherever it was made and however long it took."""
        ...


C = TypeVar("C", bound=AnyCell)


@dataclass(frozen=True)
class Record(Generic[C]):
    """All cells of one panel, setting or picture; `base` are the settings they have in common."""

    experiment: str
    name: str
    base: dict[str, Any]
    cells: tuple[C, ...] = field(default=())

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
    values = plain_json(asdict(result))
    cells = ",\n".join("    " + json.dumps(cell, allow_nan=False) for cell in values.pop("cells"))
    head = json.dumps(values, indent=2, allow_nan=False).removesuffix("\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f'{head},\n  "cells": [\n{cells}\n  ]\n}}\n'.encode())
    # Made for its owner alone; results are meant to be shared.
    path.chmod(0o644)


def no_result(path: Path, error: Exception) -> RunFolderError:
    """What to say of a file that holds something else."""
    return RunFolderError(f"{path} holds no result: {error!r}", hint="was it written by `niss reproduce`?")


def require_same_base(result: Record[Any], base: Mapping[str, Any], where: Path) -> None:
    if result.base != base:
        different = sorted(key for key in {*result.base, *base} if result.base.get(key) != base.get(key))
        raise RunFolderError(
            f"{where} has other settings than {result.experiment}/{result.name}: {', '.join(different)}",
            hint="keep them in another folder with --out",
        )


def select(result: Record[C], **labels: Any) -> list[C]:
    """The cells that carry all these labels."""
    return [
        cell for cell in result.cells if all(cell.labels.get(name) == value for name, value in labels.items())
    ]


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
