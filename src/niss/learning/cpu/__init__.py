"""The cohort on the processor: which formulation trains a group of clients, and which process does it.

`formulations` and `vmap` are the ways to train a group, `pool` is the worker processes, seen from both sides.
Every process uses one torch thread: threads inside an operation collapse as soon as anything else runs on the
machine, processes do not.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from niss.learning.cohort import Cohort, Job, Problem, TakeUpdates, numbers_by_start
from niss.learning.cpu.formulations import MOST_CLIENTS, CnnLoop, MlpGroups, PlainLoop
from niss.learning.cpu.pool import CannotLoad, Group, Pool
from niss.learning.cpu.vmap import VmapGroups, why_not
from niss.learning.local import Evaluation, LocalTraining, evaluate, torch_threads
from niss.learning.models import Cnn, Mlp

# Seconds of training after which worker processes are started, which takes about as long on a core each; this process
# does not wait for them. At worst their start doubles what was spent so far.
WORTH_WORKERS = 2.0
# Seconds of a round from which on it is shared with workers that are there: on a busy machine they may answer late.
WORTH_SHARING = 0.01
# What remains of a measured time with each round after it, so that the slower way is tried again now and then.
REMEMBERED = 0.98


@dataclass
class Pace:
    """What a sample takes, by the latest measurements; and how many seconds were measured in all."""

    total: float = 0.0
    seconds: float = 0.0
    samples: float = 0.0

    def __float__(self) -> float:
        """Seconds for a sample; without end while that is unknown."""
        return self.seconds / self.samples if self.samples else math.inf

    @contextmanager
    def measure(self, samples: int) -> Iterator[None]:
        """Inside, so many samples are trained; it counts as much as everything before it."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self.total += seconds
        self.seconds = self.seconds / 2 + seconds
        self.samples = self.samples / 2 + samples


def choose_formulation(problem: Problem) -> PlainLoop:
    """The fastest way to train a group in one process that equals the reference; see `Cohort.of`.

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


class CpuEngine(Cohort):
    """Trains groups of clients in this process and, once there is enough to do, in worker processes beside it.

    Where work is done is decided by clocks:
    - after `WORTH_WORKERS` seconds of training here workers are started, and this process trains meanwhile;
    - when they have loaded, what takes more than `WORTH_SHARING` is shared as long as that is the faster way.

    How it is done depends on the jobs alone (`make_groups`), and so do the results, to the last bit.
    """

    device = torch.device("cpu")

    def __init__(self, formulation: PlainLoop, *, workers: int, reason: str = "") -> None:
        """Train groups by `formulation`, in up to `workers` processes; `reason` says why there is only one."""
        self._formulation = formulation
        self._workers, self._reason = workers, reason
        self._pool: Pool | None = None
        self._alone, self._together = Pace(), Pace()
        self._have_shared = False

    @property
    def _problem(self) -> Problem:  # type: ignore[override]
        return self._formulation.problem

    @property
    def engine(self) -> str:
        where = f"{self._workers} processes" if self._workers > 1 else "one process"
        because = f", because {self._reason}" if self._reason else ""
        dtype = str(self._problem.layout.dtype).removeprefix("torch.")
        return f"cpu: {where}{because}; {self._formulation.name}; {dtype}"

    def perform(self, work: LocalTraining, jobs: Sequence[Job], take: TakeUpdates) -> None:
        """As `Cohort.perform`, group by group; the same bits from this process and from workers."""
        form = self._formulation
        groups = make_groups(jobs, form.largest_group, self._workers, partial(form.gains, work))
        passes = work.epochs if isinstance(work, LocalTraining) else 1
        left = passes * sum(len(job.samples) for job in jobs)
        for pace in (self._alone, self._together):
            pace.seconds *= REMEMBERED
        try:
            while groups:
                if self._workers > 1 and self._alone.total > WORTH_WORKERS:
                    self._start_pool()
                if len(groups) > 1 and self._gains_by_workers(left):
                    assert self._pool is not None
                    # The first time says nothing of the workers' pace, as they load parts of torch.
                    with self._together.measure(left) if self._have_shared else nullcontext():
                        self._pool.run(work, groups, take, self._train)
                    self._have_shared = True
                else:
                    group = groups.popleft()
                    samples = passes * sum(len(job.samples) for job in group[1])
                    with self._alone.measure(samples):
                        self._train(work, group, take)
                    left -= samples
        except BaseException:
            # Workers in the middle of something (Ctrl-C, a death among them) are of no further use.
            self.close()
            raise

    def evaluate(self, weights: Tensor, inputs: Tensor, labels: Tensor) -> Evaluation:
        problem = self._problem
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

    @cached_property
    def _updates(self) -> Tensor:
        """Room for a group, used again and again: fresh memory costs more than filling it."""
        layout = self._problem.layout
        return torch.empty(self._formulation.largest_group, layout.size, dtype=layout.dtype)

    def _train(self, work: LocalTraining, group: Group, take: TakeUpdates) -> None:
        """One group, in this process."""
        numbers, jobs = group
        updates = self._updates[: len(numbers)]
        with torch_threads(1):  # as in workers: the last bits of sums depend on it
            self._formulation.perform(work, jobs, updates)
        take(numbers, updates)

    def _gains_by_workers(self, samples: int) -> bool:
        """Whether to share so many samples: with workers that are there, and faster by a tenth; both ways are tried."""
        alone, together = float(self._alone), float(self._together)
        faster = not self._together.samples or together < 0.9 * alone < math.inf
        return faster and samples * alone > WORTH_SHARING and self._has_workers()

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
            self._pool, self._have_shared = Pool(self._formulation, self._workers - 1), False
            # One copy of the data is enough: the shared one serves this process too.
            self._formulation = replace(self._formulation, problem=self._pool.problem)


def make_groups(
    jobs: Sequence[Job], largest: int, workers: int, gains: Callable[[Sequence[Job]], bool]
) -> deque[Group]:
    """Clients of one start and of like size together, largest first; as many groups for each worker, where possible.

    The last bits of a batched product depend on who is in it: a group never mixes starts, so that what the
    clients of one method get does not depend on the methods trained beside them. Clients that do not gain from being
    together (`gains`, of some in falling order of their samples) are groups of one.
    """
    groups = [
        group
        for numbers in numbers_by_start(jobs)
        for group in _split(numbers, jobs, largest, workers, gains)
    ]
    groups.sort(key=lambda group: -len(group[1][0].samples))
    return deque(groups)


def _split(
    numbers: list[int],
    jobs: Sequence[Job],
    largest: int,
    workers: int,
    gains: Callable[[Sequence[Job]], bool],
) -> Iterator[Group]:
    """`numbers` in falling order of samples, in a multiple of `workers` pieces of at most `largest`."""
    order = sorted(numbers, key=lambda number: -len(jobs[number].samples))
    mine = [jobs[number] for number in order]
    largest = min(largest, len(order))
    # Those who are too large for any company would keep the others in their group from gaining.
    first = 0
    while first < len(order) and (largest == 1 or not gains(mine[first : first + largest])):
        yield (order[first],), mine[first : first + 1]
        first += 1
    rest = len(order) - first
    count = -(-rest // largest)
    count = min(rest, -(-count // workers) * workers)
    for piece in range(count):
        # As even as can be, the larger ones first.
        end = first + rest // count + (piece < rest % count)
        step = end - first if gains(mine[first:end]) else 1
        for begin in range(first, end, step):
            yield tuple(order[begin : begin + step]), mine[begin : begin + step]
        first = end
