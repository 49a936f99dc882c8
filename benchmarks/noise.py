"""What noise costs: nanoseconds for each coordinate of each share, one core, and the memory beside the uploads.

Contestants: the shares of `niss.mechanism.add_shares` with each distortion (the simulator's noise stage), the same
round the naive way (all shares drawn at once, m x v x h numbers in memory, so a smaller h), bare Gaussians of numpy as
a yardstick, and the `SecretStream` of the real protocol, in numpy and compiled by numba (`niss[fast]`, loaded before
anything is timed); both also on a vector of 10 million with 20 shares, in wall time and with threads. Then a whole run
of `niss` on complete graphs beside the same run with noise carried from round to round (`niss-carried`), on each device
there is. With a CUDA device also the fused kernel of the GPU engine beside the device's own rate of Gaussians.
Interleaved, medians of CPU time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import machine, one_line, write_json
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from niss.graph import ShareGraph
from niss.mechanism import add_shares
from niss.randomness import SecretStream, SimStream, add_gaussians
from niss.randomness import secret as secret_module
from niss.randomness.normal_table import Demand, load_loop
from niss.simulation import make_config, run

NEVER = 2**63
TAU2 = 0.05
UNIT_VARIANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A round: m clients, v neighbours each (None: complete), h coordinates."""

    clients: int
    neighbours: int | None
    coordinates: int

    def graph(self) -> ShareGraph:
        if self.neighbours is None:
            return ShareGraph.complete(self.clients)
        return ShareGraph.regular(self.clients, degree=self.neighbours, beacon=b"benchmark")

    @property
    def title(self) -> str:
        shares = "complete" if self.neighbours is None else f"v = {self.neighbours}"
        return f"m = {self.clients}, {shares}, h = {self.coordinates:,}"


def ours(case: Case, distortion: str) -> int:
    """The noise stage of the simulator; returns how many share coordinates it added."""
    graph = case.graph()
    uploads = np.zeros((case.clients, case.coordinates), dtype=np.float32)
    add_shares(
        uploads,
        graph,
        unit_variance=UNIT_VARIANCE,
        tau2=TAU2,
        distortion=distortion,
        stream=SimStream(1).child("noise"),
    )
    return graph.senders.size * case.coordinates


def naive(case: Case) -> int:
    """Every share drawn first, then added: O(m v h) memory."""
    graph = case.graph()
    uploads = np.zeros((case.clients, case.coordinates))
    shares = np.random.default_rng(1).standard_normal((graph.senders.size, case.coordinates))
    shares *= np.sqrt(UNIT_VARIANCE)
    np.add.at(uploads, graph.senders, shares)
    factors = 1.0 + np.sqrt(TAU2) * np.random.default_rng(2).standard_normal(graph.senders.size)
    np.subtract.at(uploads, graph.receivers, factors[:, None] * shares)
    return int(shares.size)


def bare(case: Case) -> int:
    """Gaussians alone, added to nothing."""
    vector = np.empty(case.coordinates, dtype=np.float32)
    generator = np.random.Generator(np.random.SFC64(1))
    edges = case.graph().senders.size
    for _ in range(edges):
        generator.standard_normal(out=vector, dtype=np.float32)
    return edges * case.coordinates


def secret(case: Case, worth: int) -> int:
    """What one client of the protocol adds: its shares, sent and received, on the grid."""
    vector = np.zeros(case.coordinates, dtype=np.uint64)
    degree = 2 * (case.clients - 1 if case.neighbours is None else case.neighbours)
    expand(vector, degree, worth)
    return degree * case.coordinates


def expand(vector: NDArray[np.uint64], degree: int, worth: int) -> None:
    """Add so many shares; compiled once `worth` numbers were drawn: from the first on (0), or never."""
    streams = [SecretStream(number.to_bytes(32, "little")) for number in range(degree)]
    secret_module.demand = Demand(worth)
    add_gaussians(vector, [(stream, 1000.0, 1) for stream in streams])


CONTESTANTS: dict[str, Callable[[Case], int]] = {
    "additive": lambda case: ours(case, "additive"),
    "scalar": lambda case: ours(case, "scalar"),
    "coordinate": lambda case: ours(case, "coordinate"),
    "naive": naive,
    "bare": bare,
    "secret": lambda case: secret(case, NEVER),
    "compiled": lambda case: secret(case, 0),
}


def measure(case: Case, names: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """Nanoseconds a share coordinate and peak bytes for each share coordinate, interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, float] = {}
    for _ in range(repeats):
        for name in names:
            start = time.process_time()
            drawn = CONTESTANTS[name](_fitting(case, name))
            seconds[name].append((time.process_time() - start) / drawn * 1e9)
    for name in names:
        fitted = _fitting(case, name)
        tracemalloc.start()
        CONTESTANTS[name](fitted)
        peaks[name] = tracemalloc.get_traced_memory()[1] / (4 * fitted.clients * fitted.coordinates)
        tracemalloc.stop()
    return {
        name: {"ns": statistics.median(seconds[name]), "memory_in_uploads": peaks[name]} for name in names
    }


def _fitting(case: Case, name: str) -> Case:
    """The naive way gets fewer coordinates, or it would not fit into memory."""
    if name != "naive":
        return case
    edges = case.graph().senders.size
    return Case(case.clients, case.neighbours, min(case.coordinates, max(1, 20_000_000 // edges)))


def large(coordinates: int, degree: int, repeats: int) -> dict[str, dict[str, float]]:
    """Wall and CPU seconds in which a client adds its shares to a large vector, in numpy and compiled, by threads."""
    vector = np.zeros(coordinates, dtype=np.uint64)
    ways = {"numpy": (NEVER, "1"), "compiled, 1 thread": (0, "1"), "compiled, 2 threads": (0, "2")}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (worth, threads) in ways.items():
            os.environ["OMP_NUM_THREADS"] = threads
            wall, cpu = time.perf_counter(), time.process_time()
            expand(vector, degree, worth)
            seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: {
            "wall_s": statistics.median(wall for wall, _ in found),
            "least_wall_s": min(wall for wall, _ in found),
            "cpu_s": statistics.median(cpu for _, cpu in found),
        }
        for name, found in seconds.items()
    }


def gpu(case: Case, repeats: int) -> dict[str, float] | None:
    """The fused kernel beside `torch.randn`, in Gaussians a second; None without a device."""
    if not torch.cuda.is_available():
        return None
    from niss.simulation.cuda import add_shares_on_device

    graph = case.graph()
    uploads = torch.zeros(case.clients, case.coordinates, device="cuda")
    plain = torch.empty(64 * 1024 * 1024, device="cuda")

    def fused() -> int:
        add_shares_on_device(
            uploads, graph, unit_variance=UNIT_VARIANCE, tau2=0.0, distortion="additive", stream=SimStream(1)
        )
        return graph.senders.size * case.coordinates

    def raw() -> int:
        plain.normal_()
        return plain.numel()

    rates: dict[str, list[float]] = {"fused": [], "raw": []}
    for _ in range(repeats + 1):
        for name, work in (("fused", fused), ("raw", raw)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            drawn = work()
            torch.cuda.synchronize()
            rates[name].append(drawn / (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def carried(device: str, repeats: int, *, quick: bool) -> dict[str, float]:
    """Seconds of a run of `niss` on complete graphs, and of the same run with noise carried over; interleaved.

    Planning the noise, which is done once, is not counted.
    """
    methods = {
        "niss": {"name": "niss", "graph": "complete", "kappa": 20.0},
        "carried": {"name": "niss-carried"},
    }
    configs = {
        name: make_config(
            {
                "rounds": 4 if quick else 10,
                "evaluate_every": 100,
                "data": {"clients": 100 if quick else 500, "samples_per_client": 10},
                "model": {"hidden": [32] if quick else [200, 200]},
                "training": {
                    "participants": 20 if quick else 100,
                    "sampling": "cyclic",
                    "epochs": 1,
                    "device": device,
                    "workers": 1,
                },
                "methods": [method],
            }
        )
        for name, method in methods.items()
    }
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    for _ in range(repeats + 1):
        for name, config in configs.items():
            start = clock()
            run(config)
            seconds[name].append(clock() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/noise.py --only additive secret --json noise.json",
    )
    parser.add_argument("--json", type=Path, help="write all medians there")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small rounds, as a smoke test")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = parse()
    where = machine("torch", "cryptography", "numba")
    print(one_line(where))
    if "compiled" in options.only and load_loop() is None:
        print("skipped: compiled, numba is not installed (pip install 'niss[fast]')")
        options.only.remove("compiled")
    os.environ["OMP_NUM_THREADS"] = "1"
    cases = [Case(30, 10, 199_210), Case(30, None, 199_210), Case(30, 10, 1_663_370)]
    if options.quick:
        cases = [Case(8, 3, 5_000), Case(8, None, 5_000)]
    rows: list[dict[str, Any]] = []
    for case in cases:
        with threadpool_limits(1):
            found = measure(case, options.only, options.repeats)
        print(f"\n{case.title}")
        for name, numbers in found.items():
            print(
                f"  {name:<11}{numbers['ns']:7.1f} ns a share coordinate, "
                f"{numbers['memory_in_uploads']:6.2f} x the uploads at the peak"
            )
        device = gpu(case, options.repeats)
        if device is None:
            print("  gpu         skipped: no CUDA device")
        else:
            ratio = device["raw"] / device["fused"]
            print(
                f"  gpu         {device['fused'] / 1e9:.0f} G shares/s, raw {device['raw'] / 1e9:.0f} G/s: {ratio:.2f}x"
            )
        rows.append({"case": case.title, "cpu": found, "gpu": device})
        write_json(options.json, {"machine": where, "rows": rows})
    if "compiled" in options.only:
        coordinates = 100_000 if options.quick else 10_000_000
        found = large(coordinates, 20, options.repeats)
        print(f"\n20 shares of {coordinates:,} coordinates")
        for name, numbers in found.items():
            print(
                f"  {name:<20}{numbers['wall_s']:6.2f} s (at least {numbers['least_wall_s']:.2f}), "
                f"{numbers['cpu_s']:.2f} s of CPU, {numbers['cpu_s'] / (20 * coordinates) * 1e9:.2f} ns a coordinate"
            )
        rows.append({"case": f"20 shares, h = {coordinates:,}", "large": found})
    runs = {}
    for place in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        runs[place] = carried(place, options.repeats, quick=options.quick)
        ratio = runs[place]["carried"] / runs[place]["niss"]
        print(
            f"\na run on {place}: {runs[place]['niss']:.2f} s, with noise carried over {runs[place]['carried']:.2f} s: "
            f"{ratio:.2f}x"
        )
    write_json(options.json, {"machine": where, "rows": rows, "carried": runs})


if __name__ == "__main__":
    main()
