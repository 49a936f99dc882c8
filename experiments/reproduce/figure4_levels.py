"""The cells of Figure 4: pictures, and the ways to protect an upload; nothing here loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.reproduce.sensitivity import Reading, Setup
from niss.errors import ConfigError

IMAGES = ("mnist:0", "mnist:7", "cifar10:4", "cifar10:7")
"""Training pictures, which are what a client holds."""
CLIENTS = 30
ITERATIONS, RESTARTS, FRAMES = 2000, 4, 8
CLIENT_NOISE = "client"
"""The label of the noise that hides a whole client: epsilon = 3, delta = 1e-5, in one round."""


@dataclass(frozen=True)
class Level:
    """One way to protect an upload, and what the server looks at: `alone` (this upload) or `joint` (all of them).

    `calibrated` sizes what does not cancel for the joint view; NISS otherwise has tau = 0. `promising` takes the
    noise of `client` instead of the paper's.
    """

    name: str
    title: str
    method: str
    view: str = "alone"
    calibrated: bool = False
    promising: bool = False


LEVELS = {
    level.name: level
    for level in (
        Level("fedavg", "FedAvg", "fedavg"),
        Level("dp-fedavg", "DP-FedAvg", "dp-fedavg"),
        Level("niss", "NISS as printed", "niss"),
        Level("niss-joint", "NISS as printed, all uploads", "niss", view="joint"),
        Level("niss-calibrated", "NISS calibrated, all uploads", "niss", view="joint", calibrated=True),
        Level("client-dp-fedavg", "DP-FedAvg", "dp-fedavg", promising=True),
        Level("client-niss", "NISS, τ = 0", "niss", promising=True),
        Level("client-niss-joint", "NISS, τ = 0, all uploads", "niss", view="joint", promising=True),
        Level(
            "client-niss-calibrated",
            "NISS calibrated, all uploads",
            "niss",
            view="joint",
            calibrated=True,
            promising=True,
        ),
    )
}
PAPER_LEVELS = ("fedavg", "dp-fedavg", "niss")


def find_levels(names: Sequence[str]) -> list[Level]:
    unknown = [name for name in names if name not in LEVELS]
    if unknown or not names:
        raise ConfigError(
            f"unknown level {unknown[0]!r}" if unknown else "names no level",
            field="--level",
            hint="use some of: " + ", ".join(LEVELS),
        )
    return [LEVELS[name] for name in names]


def picture_name(image: str) -> str:
    """`cifar10:7` as the name of a file, and of a result."""
    return image.replace(":", "-")


def cells_of(
    levels: Sequence[Level], readings: Sequence[Reading], seeds: Sequence[int]
) -> dict[str, tuple[dict[str, Any], Level, Reading]]:
    """All cells of a picture by id: its labels, its level and the paper's noise it takes, where it takes that."""
    cells: dict[str, tuple[dict[str, Any], Level, Reading]] = {}
    for seed in seeds:
        for reading in readings:
            for level in levels:
                noise = CLIENT_NOISE if level.promising else reading.name
                noise = "none" if level.method == "fedavg" else noise
                labels = {
                    "level": level.name,
                    "noise": noise,
                    "sigma_k": reading.sigma(Setup()) if noise == reading.name else None,
                    "view": level.view,
                    "seed": seed,
                }
                cells.setdefault(f"{noise}/{level.name}/seed-{seed}", (labels, level, reading))
    return cells
