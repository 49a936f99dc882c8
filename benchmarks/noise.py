"""What noise costs: nanoseconds for each coordinate of each share, one core, and the memory beside the uploads.

Contestants: the shares of `niss.mechanism.add_shares` with each distortion (the simulator's noise stage), the same
round the naive way (all shares drawn at once, m x v x h numbers in memory, so a smaller h), bare Gaussians of numpy as
a yardstick, and the `SecretStream` of the real protocol, in numpy and compiled by numba (`niss[fast]`, loaded before
anything is timed). Interleaved, medians of CPU time.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
from harness import Report, Row, command_line, in_turns, seconds
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from niss.graph import ShareGraph
from niss.mechanism import add_shares
from niss.randomness import SecretStream, SimStream, add_gaussians
from niss.randomness import secret as secret_module
from niss.randomness.normal_table import load_loop

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
        uploads, graph, unit_variance=UNIT_VARIANCE, tau2=TAU2, distortion=distortion, stream=SimStream(1)
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
    secret_module.demand.worth = worth
    add_gaussians(vector, [(stream, 1000.0, 1) for stream in streams])


CONTESTANTS: dict[str, Callable[[Case], int]] = {
    **{name: partial(ours, distortion=name) for name in ("additive", "scalar", "coordinate")},
    "naive": naive,
    "bare": bare,
    "secret": partial(secret, worth=NEVER),
    "compiled": partial(secret, worth=0),
}


def measure(case: Case, names: list[str], repeats: int) -> list[Row]:
    """Nanoseconds a share coordinate, and the peak of memory in units of the uploads, interleaved."""

    def nanoseconds(name: str) -> float:
        drawn: list[int] = []
        spent = seconds(lambda: drawn.append(CONTESTANTS[name](_fitting(case, name))))
        return spent / drawn[0] * 1e9

    rows = []
    for name, spent in in_turns({name: partial(nanoseconds, name) for name in names}, repeats).items():
        fitted = _fitting(case, name)
        tracemalloc.start()
        CONTESTANTS[name](fitted)
        peak = tracemalloc.get_traced_memory()[1] / (4 * fitted.clients * fitted.coordinates)
        tracemalloc.stop()
        rows.append({"contestant": name, "ns a share coordinate": median(spent), "x uploads": peak})
    return rows


def _fitting(case: Case, name: str) -> Case:
    """The naive way gets fewer coordinates, or it would not fit into memory."""
    if name != "naive":
        return case
    edges = case.graph().senders.size
    return Case(case.clients, case.neighbours, min(case.coordinates, max(1, 20_000_000 // edges)))


def main() -> None:
    """Measure, print, write."""
    options = command_line(__doc__, only=list(CONTESTANTS))
    report = Report(options, "torch", "cryptography", "numba")
    if "compiled" in options.only and load_loop() is None:
        print("compiled skipped: numba is not installed (pip install 'niss[fast]')")
        options.only.remove("compiled")
    os.environ["OMP_NUM_THREADS"] = "1"
    cases = [Case(30, 10, 199_210), Case(30, None, 199_210), Case(30, 10, 1_663_370)]
    if options.quick:
        cases = [Case(8, 3, 5_000), Case(8, None, 5_000)]
    for case in cases:
        with threadpool_limits(1):
            report.add(case.title, measure(case, options.only, options.repeats))


if __name__ == "__main__":
    main()
