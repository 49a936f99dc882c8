"""Result files of experiments that nobody ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.reproduce.results import Cell, Record, result_path, write_result


def made_up_cell(name: str, labels: dict[str, Any], accuracy: float, **changes: Any) -> Cell:
    """A run of one round without noise that ended with this accuracy, but for the changes."""
    usual: dict[str, Any] = {
        "rounds": 1,
        "curve": ((1, accuracy),),
        **dict.fromkeys(("epsilon_joint", "epsilon_marginal")),
        "aggregate_variance": 0.0,
        "seconds": 1.0,
        "engine": "none",
    }
    return Cell(id=name, labels=labels, accuracy=accuracy, **usual | changes)


def keep(folder: Path, result: Record[Any]) -> Path:
    """Write a result where it belongs in a folder of results."""
    path = result_path(folder, result.experiment, result.name)
    write_result(path, result)
    return path
