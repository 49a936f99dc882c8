"""The same small grid for every method, judged on images held out of the training set; test images are never seen.

Every method gets the same number of trials: each combination of clip, rate and width, with one seed. FedAvg does
not clip whole updates, so in the client unit its trials with different clips would be the same run and are run once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from niss.data import Dataset, load_dataset
from niss.randomness import SimStream
from niss.reproduce.results import Result, select
from niss.reproduce.runner import Watch, run_cells
from niss.reproduce.settings import (
    METHODS,
    UNTUNED,
    Choice,
    Setting,
    held_out_setting,
    setting_base,
    setting_config,
)

TUNING = "tuning"
HELD_OUT = 1 / 6
TUNED = ("fedavg", "dp-fedavg", "central-dp", "niss-planned")
GRID = {
    "client": {"clip": (0.05, 0.1, 0.25, 0.5, 1.0), "learning_rate": (0.1, 0.2), "hidden": (16, 32)},
    "record": {"clip": (0.5, 1.0, 2.0), "learning_rate": (0.5, 2.0), "hidden": (32, 128)},
}


def choices(unit: str) -> list[Choice]:
    """The grid of a unit of privacy."""
    grid = GRID[unit]
    return [
        Choice(clip=clip, learning_rate=rate, hidden=int(hidden))
        for clip, rate, hidden in product(grid["clip"], grid["learning_rate"], grid["hidden"])
    ]


def hold_out(dataset: Dataset, share: float = HELD_OUT) -> Dataset:
    """The training images alone, a fixed random part of them in the place of the test images."""
    size = len(dataset.train_labels)
    order = SimStream(0).child("validation", dataset.name).generator().permutation(size)
    held = np.sort(order[: round(share * size)])
    kept = np.sort(order[round(share * size) :])
    return replace(
        dataset,
        name=f"{dataset.name}, validation",
        train_images=dataset.train_images[kept],
        train_labels=dataset.train_labels[kept],
        test_images=dataset.train_images[held],
        test_labels=dataset.train_labels[held],
    )


def tune(
    setting: Setting,
    epsilons: Sequence[float],
    *,
    out: Path,
    work: Path,
    methods: Sequence[str] = TUNED,
    device: str = "auto",
    grid: Sequence[Choice] | None = None,
    at_once: int | None = None,
    progress: Watch | None = None,
) -> Result:
    """Every method at every epsilon with every choice of the grid, trained without the held-out images."""
    data = hold_out(load_dataset(setting.dataset))
    cut = held_out_setting(setting, len(data.train_labels))
    cells = {}
    for method, choice, epsilon in product(methods, grid or choices(setting.unit), epsilons):
        private = METHODS[method].kind != "fedavg"
        labels: dict[str, Any] = {"method": method, "epsilon": epsilon if private else None, **asdict(choice)}
        if not private and setting.unit == "client":
            labels["clip"] = None
        identity = "/".join(
            [method]
            + [f"{name}={labels[name]:g}" for name in ("epsilon", "clip") if labels[name] is not None]
            + [f"rate={choice.learning_rate:g}", f"hidden={choice.hidden}"]
        )
        if identity not in cells:
            config = setting_config(cut, METHODS[method], choice, epsilon=epsilon, seed=1, device=device)
            cells[identity] = (labels, config)
    base = {**setting_base(cut), "held_out": len(data.test_labels), "seed": 1}
    return run_cells(
        TUNING,
        setting.full_name,
        base,
        cells,
        out=out,
        work=work,
        dataset=data,
        at_once=at_once,
        progress=progress,
    )


def chosen(tuned: Result | None, setting: Setting, method: str, epsilon: float) -> tuple[Choice, str]:
    """The best choice for a method on the held-out images, and what was tuned for it.

    It is taken from the epsilon nearest to the one wanted, among those at which the method was tuned.
    """
    untuned = UNTUNED[setting.unit]
    cells = select(tuned, method=METHODS[method].tuned_as) if tuned is not None else []
    if not cells:
        return untuned, "nothing"
    targets = sorted({cell.labels["epsilon"] for cell in cells if cell.labels["epsilon"] is not None})
    target = min(targets, key=lambda one: abs(math.log(one / epsilon)), default=None)
    tried = [cell for cell in cells if cell.labels["epsilon"] == target]
    best = max(tried, key=lambda cell: (cell.accuracy, cell.id)).labels
    clip = untuned.clip if best["clip"] is None else best["clip"]
    choice = Choice(clip=clip, learning_rate=best["learning_rate"], hidden=best["hidden"])
    return choice, METHODS[method].tuned_as + ("" if target is None else f" at epsilon {target:g}")
