"""Time and memory of a simulated round against m (clients in a round), v (neighbours), h (parameters) and K (clients).

Each point is a run of its own process through `niss.run`, with one local epoch on a handful of synthetic samples for
each client, so that what grows is the federation, not the training. Reported are the median seconds of a round after
the first, and the peak memory of the process and its workers beyond that of an idle one.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from harness import machine, one_line, write_json

SAMPLES = 4


@dataclass(frozen=True)
class Point:
    """One run: `registered` clients, `participants` a round, `neighbours` each, an MLP with `width` hidden units."""

    registered: int = 1_000
    participants: int = 100
    neighbours: int = 10
    width: int = 50
    rounds: int = 3


BASE = Point()
AXES = {
    "m": [replace(BASE, participants=m) for m in (30, 100, 300, 1_000)],
    "v": [replace(BASE, neighbours=v) for v in (5, 10, 20, 40, 80)],
    "h": [replace(BASE, width=width) for width in (1, 10, 100, 1_000)],
    "K": [
        replace(BASE, registered=clients, participants=1_000, width=10)
        for clients in (1_000, 10_000, 100_000)
    ],
}
QUICK = {
    name: [replace(points[0], participants=20, registered=50, neighbours=5)] for name, points in AXES.items()
}


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
    seconds: list[float] = []
    began = time.perf_counter()
    niss.run(
        config,
        model=module,
        clients=list(zip(inputs, labels, strict=True)),
        test=(inputs[:100, 0], labels[:100, 0]),
        progress=lambda event: seconds.append(event.seconds),
    )
    return {
        "parameters": sum(part.numel() for part in module.parameters()),
        "round_seconds": median(seconds[1:] or seconds),
        "whole_seconds": time.perf_counter() - began,
        "megabytes": (_peak() - idle) / 1024.0,
        "uploads_megabytes": point.participants
        * sum(part.numel() for part in module.parameters())
        * 4
        / 2**20,
    }


def _peak() -> float:
    """Kilobytes of this process and of the largest of its children."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return float(own + children)


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
        print(f"\n{axis}        K        m    v         h   s/round   MB   uploads MB")
        for point in (QUICK if options.quick else AXES)[axis]:
            runs = [in_its_own_process(point) for _ in range(options.repeats)]
            found = {name: median(run[name] for run in runs) for name in runs[0]}
            rows.append({"axis": axis, **asdict(point), **found})
            print(
                f"  {point.registered:8,} {point.participants:8,} {point.neighbours:4} {found['parameters']:9,.0f} "
                f"{found['round_seconds']:9.2f} {found['megabytes']:4.0f} {found['uploads_megabytes']:12.0f}"
            )
            write_json(options.json, {"machine": where, "rows": rows})


if __name__ == "__main__":
    main()
