"""Result files of attacks on pictures: one for each picture, a cell for each kind of protection and seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niss.report.files import read_json_object
from niss.reproduce.records import Record, no_result, select

FIGURE_4 = "figure-4"


@dataclass(frozen=True)
class Attempt:
    """One attack on a picture: what tells it apart (`labels`), and what came of it.

    `noise` is the error of the update that the server worked with, relative to the true one. `losses` holds some
    (iteration, best DLG loss); `loss` is the last of them. Scores are those of the restart with the least loss, at
    the end; `frames` holds (iteration, PSNR) on the way, since a search that goes on long enough fits the noise as
    well. An epsilon of None means that there is none.
    """

    id: str
    labels: dict[str, Any]
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

    def same_run(self, other: Attempt) -> bool:
        return self.losses == other.losses and self.labels == other.labels


@dataclass(frozen=True)
class Leaks(Record[Attempt]):
    """All attacks on one picture. Its `base` holds the PSNR of an even grey, which says nothing about the picture."""

    @property
    def grey(self) -> float:
        return float(self.base["grey_psnr"])


def _pairs(values: list[list[float]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(at), float(value)) for at, value in values)


def leaks_of(value: dict[str, Any], path: Path) -> Leaks:
    """The result in a parsed file."""
    try:
        cells = tuple(
            Attempt(**{**cell, **{name: _pairs(cell[name]) for name in ("losses", "frames")}})
            for cell in value["cells"]
        )
        return Leaks(value["experiment"], value["name"], value["base"], cells)
    except (KeyError, TypeError, ValueError) as error:
        raise no_result(path, error) from None


def read_leaks(path: Path) -> Leaks | None:
    """The attacks in a file, or None where there is none."""
    value = read_json_object(path)
    return None if value is None else leaks_of(value, path)


def all_leaks(folder: Path, experiment: str = FIGURE_4) -> dict[str, Leaks]:
    """The attacks on all pictures, by name."""
    found = (read_leaks(path) for path in sorted((folder / experiment).glob("*.json")))
    return {leaks.name: leaks for leaks in found if leaks is not None}


def select_level(leaks: Leaks, level: str, noise: str | None = None) -> list[Attempt]:
    """The attempts at a level, at one size of the paper's noise or at every one."""
    return select(leaks, level=level) if noise is None else select(leaks, level=level, noise=noise)


def pictures_path(work: Path, name: str, cell: str) -> Path:
    """Where a run keeps the original and what it recovered of it."""
    return work / FIGURE_4 / name / (cell.replace("/", "_") + ".npz")
