"""All clients of a round at once, close to what the machine can do, and equal to one after another.

`train` gives what `train_client` gives for each client alone, up to floating-point rounding, on any number
of workers. Every process uses one torch thread: threads inside an operation collapse as soon as anything
else runs on the machine, processes do not.
"""

from __future__ import annotations

import io
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from niss.errors import ConfigError
from niss.learning.checks import require_real, require_samples, require_whole
from niss.learning.cohort_checks import checked_out, require_jobs
from niss.learning.cohort_engines import Engine, Job, PlainEngine, choose_engine, numbers_by_start
from niss.learning.cohort_pool import CannotLoad, Group, Pool, WorkerError
from niss.learning.cohort_worker import ClippedStep, perform
from niss.learning.evaluate import Evaluation, evaluate
from niss.learning.flat import FlatLayout
from niss.learning.local import LocalTraining

if TYPE_CHECKING:
    from niss.learning.cohort_cuda import CudaCohort

__all__ = ["Cohort", "Job", "WorkerError", "open_cohort"]

PATIENCE = 0.5
"""Seconds of training in this process after which worker processes, seconds to start, are worth it."""
Updates = NDArray[np.floating[Any]]
Progress = Callable[[int], None]


class Cohort:
    """Trains many clients of one module on the CPU; a context manager.

    Work begins in this process. Once it has taken `PATIENCE` seconds, over all calls, worker processes are
    started; this process goes on until they have loaded, then they take over for good. So small work never
    waits for them, and nothing has to be guessed beforehand. The module is scratch space.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: FlatLayout,
        inputs: Tensor,
        labels: Tensor,
        *,
        workers: int | None = None,
        plain: bool = False,
    ) -> None:
        if workers is not None:
            require_whole(workers, field="workers", at_least=1)
        require_samples(inputs, labels)
        inputs = inputs.detach().contiguous()
        self._module, self._layout = module, layout
        self._inputs, self._labels = inputs, labels
        self._engine: Engine = (
            PlainEngine(module, layout, inputs, labels, reason="it was asked for")
            if plain
            else choose_engine(module, layout, inputs, labels)
        )
        self._workers = 1 if plain else available_cores() if workers is None else workers
        self._reason = ""
        if self._workers > 1 and (reason := _why_alone(module)):
            self._workers, self._reason = 1, reason
        self._pool: Pool | None = None
        self._seconds_alone = 0.0

    @property
    def engine(self) -> str:
        """How the clients are trained, in one line."""
        where = f"{self._workers} workers" if self._workers > 1 else "one process"
        because = f", because {self._reason}" if self._reason else ""
        dtype = str(self._layout.dtype).removeprefix("torch.")
        return f"cpu: {where}{because}; {self._engine.name}; {dtype}"

    def train(
        self,
        jobs: Sequence[Job],
        settings: LocalTraining,
        *,
        out: Updates | None = None,
        progress: Progress | None = None,
    ) -> Updates:
        """Row i is `train_client` of job i: its update, [len(jobs), layout.size], in `out` where given.

        `progress` is called with the number of clients newly done.
        """
        return self._perform(settings, jobs, out, progress)

    def clipped_steps(
        self,
        jobs: Sequence[Job],
        *,
        clip: float,
        learning_rate: float,
        out: Updates | None = None,
        progress: Progress | None = None,
    ) -> Updates:
        """Row i is `clipped_gradient_step` of job i, without a stream: in eval() mode, nothing drawn."""
        require_real(clip, field="clip", low_allowed=False)
        require_real(learning_rate, field="learning_rate", low_allowed=False)
        return self._perform(ClippedStep(clip, learning_rate), jobs, out, progress)

    def evaluate(self, weights: Tensor, inputs: Tensor, labels: Tensor) -> Evaluation:
        """`evaluate` of the module with these weights."""
        self._layout.load(self._module, weights)
        return evaluate(self._module, inputs, labels)

    def start(self) -> None:
        """Start the workers now and wait until they have loaded, instead of when they are worth it."""
        if self._workers > 1:
            self._start_pool()
            self._has_workers(timeout=None)

    def close(self) -> None:
        """End the workers. A later call works again, and may start new ones."""
        if self._pool is not None:
            self._inputs, self._labels = self._pool.inputs, self._pool.labels
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _perform(
        self,
        work: LocalTraining | ClippedStep,
        jobs: Sequence[Job],
        out: Updates | None,
        progress: Progress | None,
    ) -> Updates:
        require_jobs(jobs, self._layout, len(self._labels))
        result = checked_out(out, len(jobs), self._layout)

        def take(rows: tuple[int, ...], updates: Tensor) -> None:
            result[list(rows)] = updates.numpy()
            if progress is not None:
                progress(len(rows))

        groups = make_groups(jobs, self._engine.largest_group, self._workers)
        try:
            self._perform_alone(work, groups, take)
            if groups:
                assert self._pool is not None
                self._pool.run(work, groups, take)
        except BaseException:
            # Workers in the middle of something (Ctrl-C, a death among them) are of no further use.
            self.close()
            raise
        return result

    def _perform_alone(
        self,
        work: LocalTraining | ClippedStep,
        groups: deque[Group],
        take: Callable[[tuple[int, ...], Tensor], None],
    ) -> None:
        """Empty `groups` in this process, until there are workers to do it."""
        while groups:
            if self._workers > 1 and self._seconds_alone > PATIENCE:
                self._start_pool()
            if self._has_workers():
                return
            rows, jobs = groups.popleft()
            updates = torch.empty(len(rows), self._layout.size, dtype=self._layout.dtype)
            began = time.perf_counter()
            with _one_thread():
                perform(self._engine, work, list(jobs), updates)
            self._seconds_alone += time.perf_counter() - began
            take(rows, updates)

    def _has_workers(self, timeout: float | None = 0.0) -> bool:
        try:
            return self._pool is not None and self._pool.is_ready(timeout)
        except CannotLoad as problem:
            self.close()
            self._workers, self._reason = 1, f"workers cannot load the module ({problem})"
            return False

    def _start_pool(self) -> None:
        if self._pool is None:
            self._pool = Pool(
                self._module,
                self._layout,
                self._inputs,
                self._labels,
                self._workers,
                self._engine.largest_group,
            )
            # One copy of the data is enough: the shared one serves this process too.
            self._inputs, self._labels = self._pool.inputs, self._pool.labels
            self._engine = choose_engine(self._module, self._layout, self._inputs, self._labels)


def open_cohort(
    module: nn.Module,
    layout: FlatLayout,
    inputs: Tensor,
    labels: Tensor,
    *,
    device: str = "cpu",
    workers: int | None = None,
    tf32: bool = False,
    plain: bool = False,
) -> Cohort | CudaCohort:
    """The cohort for a device: "cpu", or "cuda" with what a GPU needs installed.

    `plain` asks for the reference loop, in this process, whatever the module.
    """
    if device == "cpu" or plain:
        return Cohort(module, layout, inputs, labels, workers=workers, plain=plain)
    if device.partition(":")[0] != "cuda":
        raise ConfigError(f"no device is called {device!r}", field="device", hint="use 'cpu' or 'cuda'")
    if not torch.cuda.is_available():
        raise ConfigError(
            "no CUDA device is available",
            field="device",
            hint="use 'cpu', or install a torch with CUDA on a machine with a GPU",
        )
    from niss.learning.cohort_cuda import CudaCohort

    return CudaCohort(module, layout, inputs, labels, device=device, tf32=tf32)


def available_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def make_groups(jobs: Sequence[Job], largest: int, workers: int) -> deque[Group]:
    """Clients of one start and of like size together, largest first; as many groups for each worker, where possible.

    The last bits of a batched product depend on who is in it: a group never mixes starts, so that what the
    clients of one method get does not depend on the methods trained beside them.
    """
    rows = [group for numbers in numbers_by_start(jobs) for group in _split(numbers, jobs, largest, workers)]
    rows.sort(key=lambda group: -len(jobs[group[0]].samples))
    return deque((numbers, [jobs[number] for number in numbers]) for numbers in rows)


def _split(numbers: list[int], jobs: Sequence[Job], largest: int, workers: int) -> list[tuple[int, ...]]:
    order = sorted(numbers, key=lambda number: -len(jobs[number].samples))
    count = -(-len(order) // largest)
    count = min(len(order), -(-count // workers) * workers)
    return [tuple(piece.tolist()) for piece in np.array_split(np.array(order, dtype=np.int64), count)]


def _why_alone(module: nn.Module) -> str:
    """Why the module cannot be sent to other processes; empty where it can."""
    if os.name == "nt":
        return "workers need a POSIX system"
    for part in module.modules():
        if type(part).__module__ == "__main__":
            return f"{type(part).__name__} is defined in the main script, which workers cannot import"
    try:
        torch.save(module, io.BytesIO())
    except Exception as problem:  # a user's module can refuse in any way
        return f"the module cannot be pickled ({type(problem).__name__})"
    return ""


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
