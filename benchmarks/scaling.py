"""Time and memory of a simulated round against m (clients in a round), v (neighbours), h (parameters) and K (clients).

Each point is a run of its own process through `niss.run`, with one local epoch on a handful of synthetic samples for
each client, so that what grows is the federation, not the training. Reported are the median seconds of a round after
the first, wall and CPU of all processes; the peak memory of the process beyond that of an idle one, with what its
workers have to themselves; and the clients' data, which lie there twice, the caller's and the engine's, and for a
moment three times, when workers are started.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from harness import machine, one_line, write_json

SAMPLES = 4


@dataclass(frozen=True)
class Point:
    """One run: `registered` clients, `participants` a round, `neighbours` each, an MLP with `width` hidden units.

    With `folder` everything is written, ledger and checkpoint after each round.
    """

    registered: int = 1_000
    participants: int = 100
    neighbours: int = 10
    width: int = 50
    rounds: int = 3
    folder: bool = False


BASE = Point()
AXES = {
    "m": [replace(BASE, participants=m) for m in (30, 100, 300, 1_000)],
    "many": [
        replace(BASE, registered=10_000, participants=m, width=10) for m in (1_000, 2_000, 3_000, 10_000)
    ],
    "v": [replace(BASE, neighbours=v) for v in (5, 10, 20, 40, 80)],
    "h": [replace(BASE, width=width) for width in (1, 10, 100, 1_000)],
    "K": [
        replace(BASE, registered=clients, participants=1_000, width=10)
        for clients in (1_000, 10_000, 100_000, 1_000_000)
    ],
    "both": [
        replace(BASE, registered=1_000_000, participants=10_000, width=10, folder=folder)
        for folder in (False, True)
    ],
}
QUICK = {
    name: [replace(points[0], participants=20, registered=50, neighbours=5)] for name, points in AXES.items()
}


class Dealt(Sequence[tuple[Any, Any]]):
    """A dataset for each client, out of two arrays: a million pairs of arrays would take more than their numbers."""

    def __init__(self, inputs: Any, labels: Any) -> None:
        self._inputs, self._labels = inputs, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, place: Any) -> tuple[Any, Any]:
        return self._inputs[place], self._labels[place]


def play(point: Point) -> dict[str, float]:
    """The run itself, in this process."""
    import numpy as np
    import torch

    import niss
    from niss.learning import Mlp

    idle = _peak()
    drawn = np.random.default_rng(1)
    inputs = drawn.standard_normal((point.registered, SAMPLES, 64), dtype=np.float32)
    labels = drawn.integers(0, 10, (point.registered, SAMPLES))
    torch.manual_seed(1)
    module = Mlp(64, (point.width,), 10)
    config = niss.make_config(
        {
            "rounds": point.rounds,
            "evaluate_every": point.rounds,
            "data": {"clients": point.registered},
            "training": {"participants": point.participants, "epochs": 1, "device": "cpu"},
            "privacy": {"epsilon": 8.0, "clip": 0.5},
            "methods": [{"name": "niss", "neighbours": point.neighbours}],
        }
    )
    ended: list[tuple[float, float]] = []
    workers = [0.0]

    def note(_: object) -> None:
        ended.append((time.perf_counter(), _cpu_seconds()))
        workers.append(_workers_megabytes())

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        niss.run(
            config,
            model=module,
            clients=Dealt(inputs, labels),
            test=(inputs[:100, 0], labels[:100, 0]),
            out=Path(folder) / "run" if point.folder else None,
            progress=note,
        )
        written = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    wall, cpu = ([after - before for before, after in pairwise(times)] for times in zip(*ended, strict=True))
    return {
        "parameters": sum(part.numel() for part in module.parameters()),
        "round_seconds": median(wall),
        "round_cpu_seconds": median(cpu),
        "whole_seconds": time.perf_counter() - began,
        "megabytes": _peak() - idle + max(workers),
        "uploads_megabytes": point.participants
        * sum(part.numel() for part in module.parameters())
        * 4
        / 2**20,
        "data_megabytes": 2 * (inputs.nbytes + labels.nbytes) / 2**20,
        "folder_megabytes": written / 2**20,
    }


def _cpu_seconds() -> float:
    """CPU time of this process and of the workers it has."""
    used = time.process_time()
    for worker in _workers():
        fields = (worker / "stat").read_text().rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def _workers() -> list[Path]:
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return [Path("/proc") / number for numbers in children for number in numbers]


def _workers_megabytes() -> float:
    """What the workers have to themselves; data and updates lie in memory that they share with this process."""
    lines = [line for worker in _workers() for line in (worker / "smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024.0


def _peak() -> float:
    """Megabytes of this process, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


def in_its_own_process(point: Point) -> dict[str, float]:
    """Peak memory never falls, so every point starts afresh."""
    command = [sys.executable, __file__, "--point", json.dumps(asdict(point))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{point} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/scaling.py --only m K --json scaling.json",
    )
    parser.add_argument("--json", type=Path, help="write all points there")
    parser.add_argument("--only", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--quick", action="store_true", help="one small point for each axis, as a smoke test")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each point; the median is shown")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = parse()
    if options.point is not None:
        print(json.dumps(play(Point(**json.loads(options.point)))))
        return
    where = machine("torch")
    print(one_line(where))
    rows: list[dict[str, Any]] = []
    for axis in options.only:
        print(f"\n{axis:6}     K        m    v         h   s/round  CPU s     MB  data MB  folder MB")
        for point in (QUICK if options.quick else AXES)[axis]:
            runs = [in_its_own_process(point) for _ in range(options.repeats)]
            found = {name: median(run[name] for run in runs) for name in runs[0]}
            rows.append({"axis": axis, **asdict(point), **found})
            print(
                f"  {point.registered:8,} {point.participants:8,} {point.neighbours:4} {found['parameters']:9,.0f} "
                f"{found['round_seconds']:9.2f} {found['round_cpu_seconds']:6.2f} {found['megabytes']:6.0f} "
                f"{found['data_megabytes']:8.0f} {found['folder_megabytes']:10.1f}"
            )
            write_json(options.json, {"machine": where, "rows": rows})


if __name__ == "__main__":
    main()
