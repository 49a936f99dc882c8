"""The cohort on the processor: which formulation trains a group of clients, and which process does it.

Every process uses one torch thread: threads inside an operation collapse as soon as anything else runs on the
machine, processes do not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from niss.learning.cohort import Engine, Job, Problem, Take, Work, numbers_by_start
from niss.learning.cpu.cnn import CnnLoop
from niss.learning.cpu.mlp import MlpGroups
from niss.learning.cpu.pool import CannotLoad, Group, Pool
from niss.learning.cpu.steps import MOST_CLIENTS, PlainLoop
from niss.learning.cpu.vmap import VmapGroups, why_not
from niss.learning.local import Evaluation, evaluate
from niss.learning.models import Cnn, Mlp

# Seconds of training in this process after which worker processes, seconds to start, are worth it.
PATIENCE = 0.5


def choose_formulation(problem: Problem) -> PlainLoop:
    """The fastest way to train a group in one process that equals the reference; see `choose_engine`.

    Where it is the plain loop, its name says why. Convolutions are never stacked: on a CPU that is slower than one
    client at a time.
    """
    if problem.built is Mlp:
        return MlpGroups(problem)
    if problem.built is Cnn:
        return CnnLoop(problem)
    stacked = VmapGroups(problem)
    if stacked.largest_group < MOST_CLIENTS:
        return PlainLoop(problem, "the module is too large to gain from stacking on a CPU")
    reason = why_not(problem)
    return stacked if reason is None else PlainLoop(problem, reason)


class CpuEngine(Engine):
    """Trains groups of clients here and in worker processes.

    Work begins in this process. Once it has taken `PATIENCE` seconds, over all calls, worker processes are
    started; this process goes on until they have loaded, then they take over for good. So small work never
    waits for them, and nothing has to be guessed beforehand.
    """

    device = torch.device("cpu")

    def __init__(self, formulation: PlainLoop, *, workers: int, reason: str = "") -> None:
        """Train groups by `formulation`, in up to `workers` processes; `reason` says why there is only one."""
        self._formulation = formulation
        self._workers, self._reason = workers, reason
        self._pool: Pool | None = None
        self._seconds = 0.0

    @property
    def name(self) -> str:
        where = f"{self._workers} workers" if self._workers > 1 else "one process"
        because = f", because {self._reason}" if self._reason else ""
        dtype = str(self._formulation.problem.layout.dtype).removeprefix("torch.")
        return f"cpu: {where}{because}; {self._formulation.name}; {dtype}"

    def perform(self, work: Work, jobs: Sequence[Job], take: Take) -> None:
        """As `Engine.perform`, group by group; the same bits from this process and from workers."""
        groups = make_groups(jobs, self._formulation.largest_group, self._workers)
        try:
            self._perform_here(work, groups, take)
            if groups:
                assert self._pool is not None
                self._pool.run(work, groups, take)
        except BaseException:
            # Workers in the middle of something (Ctrl-C, a death among them) are of no further use.
            self.close()
            raise

    def evaluate(self, weights: Tensor, inputs: Tensor, labels: Tensor) -> Evaluation:
        problem = self._formulation.problem
        problem.layout.load(problem.module, weights)
        return evaluate(problem.module, inputs, labels)

    def start(self) -> None:
        if self._workers > 1:
            self._start_pool()
            self._has_workers(timeout=None)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _perform_here(self, work: Work, groups: deque[Group], take: Take) -> None:
        """Empty `groups` in this process, until there are workers to do it."""
        layout = self._formulation.problem.layout
        while groups:
            if self._workers > 1 and self._seconds > PATIENCE:
                self._start_pool()
            if self._has_workers():
                return
            numbers, jobs = groups.popleft()
            updates = torch.empty(len(numbers), layout.size, dtype=layout.dtype)
            began = time.perf_counter()
            with _one_thread():
                self._formulation.perform(work, jobs, updates)
            self._seconds += time.perf_counter() - began
            take(numbers, updates)

    def _has_workers(self, timeout: float | None = 0.0) -> bool:
        """Whether all workers have loaded; without them for good where they cannot load the module."""
        try:
            return self._pool is not None and self._pool.is_ready(timeout)
        except CannotLoad as problem:
            self.close()
            self._workers, self._reason = 1, f"workers cannot load the module ({problem})"
            return False

    def _start_pool(self) -> None:
        if self._pool is None:
            self._pool = Pool(self._formulation, self._workers)
            # One copy of the data is enough: the shared one serves this process too.
            self._formulation = replace(self._formulation, problem=self._pool.problem)


def make_groups(jobs: Sequence[Job], largest: int, workers: int) -> deque[Group]:
    """Clients of one start and of like size together, largest first; as many groups for each worker, where possible.

    The last bits of a batched product depend on who is in it: a group never mixes starts, so that what the
    clients of one method get does not depend on the methods trained beside them.
    """
    groups = [
        group for numbers in numbers_by_start(jobs) for group in _split(numbers, jobs, largest, workers)
    ]
    groups.sort(key=lambda group: -len(jobs[group[0]].samples))
    return deque((numbers, [jobs[number] for number in numbers]) for numbers in groups)


def _split(numbers: list[int], jobs: Sequence[Job], largest: int, workers: int) -> list[tuple[int, ...]]:
    """`numbers` in falling order of samples, in a multiple of `workers` pieces of at most `largest`."""
    order = sorted(numbers, key=lambda number: -len(jobs[number].samples))
    count = -(-len(order) // largest)
    count = min(len(order), -(-count // workers) * workers)
    return [tuple(piece.tolist()) for piece in np.array_split(np.array(order, dtype=np.int64), count)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch computes with one thread, as workers do: the last bits of its sums depend on that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
