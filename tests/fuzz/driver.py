"""What all fuzzers share: counts, seeds, worker processes, progress, and findings that are kept.

A target makes inputs from a seeded generator and says what came of each. Inputs come in chunks with a seed of their
own, so the same seed and count feed the same inputs, whatever the number of workers, and a finding is fed again by its
chunk alone: `--seed 1 --chunk 37`. An exception that a target lets through is a finding.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

Feed = Callable[[random.Random], tuple[str, str]]
"""Makes one input and feeds it: what came of it, in a few words, and what should not have (empty: nothing)."""


@dataclass(frozen=True)
class Target:
    """Something to be fed.

    name   on the command line, and of the file with its findings
    chunk  inputs a chunk; setting up is paid once for each
    start  (label) -> a context manager that sets up what is fed and gives the function that feeds it
    """

    name: str
    chunk: int
    start: Callable[[str], AbstractContextManager[Feed]]


@dataclass
class Tally:
    """What came of the inputs so far, and what should not have."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.findings += other.findings
        self.slowest = max(self.slowest, other.slowest)

    @property
    def total(self) -> int:
        return self.counts.total()


def run_chunk(target: Target, seed: int, chunk: int, count: int) -> Tally:
    """Feeds `count` inputs of one chunk."""
    label = f"{target.name} {seed} {chunk}"
    rng, tally = random.Random(label), Tally()
    with target.start(label) as feed:
        for number in range(count):
            started = time.perf_counter()
            try:
                outcome, finding = feed(rng)
            except Exception as error:
                where = traceback.format_exc(limit=-4)
                outcome, finding = "crash", f"{type(error).__name__}\n{where}"
            tally.slowest = max(tally.slowest, time.perf_counter() - started)
            tally.counts[outcome] += 1
            if finding:
                tally.findings.append(f"seed {seed}, chunk {chunk}, input {number}: {finding}")
    return tally


def fuzz(
    target: Target, *, count: int, seed: int, workers: int, folder: Path, only: int | None = None
) -> tuple[Tally, bool]:
    """Feeds `count` inputs over all workers and reports as it goes; what there is, and whether it is all.

    Findings are appended to `FOLDER/TARGET.txt` as they come. After Ctrl-C what was fed until then still counts.
    """
    sizes = [min(target.chunk, count - place) for place in range(0, count, target.chunk)]
    chunks = list(enumerate(sizes)) if only is None else [(only, target.chunk)]
    everything = sum(size for _, size in chunks)
    tally, complete = Tally(), False
    with multiprocessing.Pool(workers, _ignore_interrupts) as pool, _bar(target.name, everything) as show:
        try:
            for part in pool.imap_unordered(partial(_job, target, seed), chunks):
                tally.add(part)
                _keep(folder / f"{target.name}.txt", part.findings)
                show(tally)
            complete = True
        except KeyboardInterrupt:
            pool.terminate()
    return tally, complete


def report(target: Target, tally: Tally) -> str:
    """The counts, the slowest input, and the first findings."""
    lines = [f"{number:>12,} {kind}" for kind, number in sorted(tally.counts.items())]
    lines.append(f"{target.name}: {tally.total:,} fed, {len(tally.findings)} findings, ")
    lines[-1] += f"slowest input {1e3 * tally.slowest:.1f} ms"
    return "\n".join([*lines, *(f"FOUND {finding[:1000]}" for finding in tally.findings[:20])])


def _job(target: Target, seed: int, chunk: tuple[int, int]) -> Tally:
    return run_chunk(target, seed, *chunk)


def _ignore_interrupts() -> None:
    # Ctrl-C reaches the whole group; the parent says what is done about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _keep(path: Path, findings: list[str]) -> None:
    if findings:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"{finding}\n" for finding in findings)


@contextmanager
def _bar(name: str, everything: int) -> Iterator[Callable[[Tally], None]]:
    """A bar on a terminal; elsewhere a line every ten seconds."""
    started, last, live = time.monotonic(), 0.0, sys.stderr.isatty()

    def show(tally: Tally) -> None:
        nonlocal last
        now = time.monotonic()
        if tally.total < everything and now - last < (0.1 if live else 10.0):
            return
        last = now
        speed = tally.total / max(now - started, 1e-9)
        filled = 30 * tally.total // max(everything, 1)
        line = f"{name} [{'#' * filled:<30}] {tally.total:,} of {everything:,}, {speed:,.0f} a second, "
        line += f"{len(tally.findings)} findings"
        sys.stderr.write(f"\r{line}\x1b[K" if live else f"{line}\n")
        sys.stderr.flush()

    yield show
    if live:
        sys.stderr.write("\n")
