"""Time and memory of a simulated round against m (clients in a round), v (neighbours), h (parameters) and K (clients).

Each point is a run of its own process through `niss.run`, with one local epoch on a handful of synthetic samples for
each client, so that what grows is the federation, not the training. Reported are the median seconds of a round after
the first, wall and CPU of all processes; the peak memory of the process beyond that of an idle one, with what its
workers have to themselves; and the clients' data, which lie there twice, the caller's and the engine's, and for a
moment three times, when workers are started.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from harness import Report, answer, command_line, cpu_seconds, elsewhere, family, medians, megabytes, peak

SAMPLES, ROUNDS = 4, 3
BASE = {"K": 1_000, "m": 100, "v": 10, "width": 50, "folder": False}
"""K registered clients, m in a round with v neighbours each, an MLP with so many hidden units.

With `folder` everything is written, ledger and checkpoint after each round."""
AXES = {
    "m": [BASE | {"m": m} for m in (30, 100, 300, 1_000)],
    "many": [BASE | {"K": 10_000, "m": m, "width": 10} for m in (1_000, 2_000, 3_000, 10_000)],
    "v": [BASE | {"v": v} for v in (5, 10, 20, 40, 80)],
    "h": [BASE | {"width": width} for width in (1, 10, 100, 1_000)],
    "K": [BASE | {"K": clients, "m": 1_000, "width": 10} for clients in (1_000, 10_000, 100_000, 1_000_000)],
    "both": [BASE | {"K": 1_000_000, "m": 10_000, "width": 10, "folder": folder} for folder in (False, True)],
}


class Dealt(Sequence[tuple[Any, Any]]):
    """A dataset for each client, out of two arrays: a million pairs of arrays would take more than their numbers."""

    def __init__(self, inputs: Any, labels: Any) -> None:
        self._inputs, self._labels = inputs, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, place: Any) -> tuple[Any, Any]:
        return self._inputs[place], self._labels[place]


def play(point: dict[str, Any]) -> dict[str, float]:
    """The run itself, in a process of its own: peak memory never falls."""
    import numpy as np
    import torch

    import niss
    from niss.learning import Mlp

    idle = peak()
    drawn = np.random.default_rng(1)
    inputs = drawn.standard_normal((point["K"], SAMPLES, 64), dtype=np.float32)
    labels = drawn.integers(0, 10, (point["K"], SAMPLES))
    torch.manual_seed(1)
    module = Mlp(64, (point["width"],), 10)
    config = niss.make_config(
        {
            "rounds": ROUNDS,
            "evaluate_every": ROUNDS,
            "data": {"clients": point["K"]},
            "training": {"participants": point["m"], "epochs": 1, "device": "cpu"},
            "privacy": {"epsilon": 8.0, "clip": 0.5},
            "methods": [{"name": "niss", "neighbours": point["v"]}],
        }
    )
    ended: list[tuple[float, float]] = []
    workers = [0.0]

    def note(_: object) -> None:
        own, *others = family(os.getpid())
        ended.append((time.perf_counter(), cpu_seconds([own, *others])))
        # Data and updates lie in memory that workers share with this process.
        workers.append(megabytes(others, "Private_"))

    with tempfile.TemporaryDirectory() as folder:
        niss.run(
            config,
            model=module,
            clients=Dealt(inputs, labels),
            test=(inputs[:100, 0], labels[:100, 0]),
            out=Path(folder) / "run" if point["folder"] else None,
            progress=note,
        )
        written = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    wall, cpu = ([after - before for before, after in pairwise(times)] for times in zip(*ended, strict=True))
    return {
        "h": sum(part.numel() for part in module.parameters()),
        "s/round": median(wall),
        "CPU s/round": median(cpu),
        "MB": peak() - idle + max(workers),
        "data MB": 2 * (inputs.nbytes + labels.nbytes) / 2**20,
        "folder MB": written / 2**20,
    }


def main() -> None:
    """Measure, print, write."""
    options = command_line(__doc__, only=list(AXES), repeats=1)
    report = Report(options, "torch")
    for axis in options.only:
        points = [AXES[axis][0] | {"K": 50, "m": 20, "v": 5}] if options.quick else AXES[axis]
        for point in points:
            runs = [answer(elsewhere("scaling.play", point)) for _ in range(options.repeats)]
            report.add(f"against {axis}", [point | medians(runs)])


if __name__ == "__main__":
    main()
