"""The worker processes of a cohort: a pool of `concurrent.futures` whose processes share memory with this one.

The parent (`Pool`) hands out groups of clients and trains some itself; a worker (`_load`, then `_perform` again and
again) trains a group and writes the updates. Data, starts and updates lie in memory that all of them share; what
travels between them is small. A worker ends with its parent, however that ends.
"""

from __future__ import annotations

import io
import math
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd, ForkingPickler
from multiprocessing.synchronize import Barrier
from threading import Thread
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niss.errors import NissError
from niss.learning.cohort import Job, TakeUpdates
from niss.learning.cpu.formulations import PlainLoop
from niss.learning.local import LocalTraining
from niss.randomness import SimStream

_CACHE_LINE = 64
# Groups that a worker may have at once: while the updates of one wait for the parent, it trains the next.
_SLOTS_EACH = 2
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Memory that was given back is needed again a step later: without these, glibc returns it to the
    # kernel, and the page faults of a CNN step cost a tenth of its time.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}

# The numbers of some jobs, and the jobs.
Group = tuple[tuple[int, ...], Sequence[Job]]
# Trains one group, and hands its updates on.
Train = Callable[[LocalTraining, Group, TakeUpdates], None]
# A client of a group as a worker is told of it: the place of its start, the rows of its samples, its stream.
_Client = tuple[int, NDArray[np.int64], SimStream]


class WorkerError(NissError):
    """A worker process ended, or could not begin; the message says which, how and when."""


class CannotLoad(Exception):
    """The module cannot be rebuilt in another process: not an error, but a reason to do without."""


class Pool:
    """Worker processes with one torch thread each; they start at once, `is_ready` when all have loaded.

    Any error ends the whole pool, as does `close`, or dropping it: a finalizer ends the processes with the object.
    `problem` is that of the formulation, with its data in shared memory, for the parent's own use.
    """

    def __init__(self, formulation: PlainLoop, workers: int) -> None:
        """Start so many workers, each to train groups by `formulation`."""
        problem, self._layout = formulation.problem, formulation.problem.layout
        memories = inputs, labels, self._starts, results = tuple(SharedMemory() for _ in range(4))
        self.problem = replace(
            problem, inputs=inputs.hold(problem.inputs), labels=labels.hold(problem.labels)
        )
        self._updates = _slots(results, formulation, workers)
        without_data = replace(problem, inputs=problem.inputs[:0].clone(), labels=problem.labels[:0].clone())
        packed = io.BytesIO()
        torch.save(replace(formulation, problem=without_data), packed)
        context = _WorkerContext()
        told = (packed.getvalue(), len(problem.labels), workers, memories, context.Barrier(workers))
        executor = ProcessPoolExecutor(workers, context, initializer=_load, initargs=told)
        self._executor, self._processes = executor, context.workers
        self.close = weakref.finalize(self, _end, os.getpid(), executor, self._processes, memories)
        try:
            # As many as there are workers, and each of them waits for all: every worker gets one.
            self._loading = {executor.submit(_say_loaded) for _ in range(workers)}
        except BaseException:
            self.close()
            raise

    def is_ready(self, timeout: float | None = 0.0) -> bool:
        """Whether every worker has loaded; waits up to `timeout` seconds for them (None: as long as needed).

        Raises `CannotLoad` where one of them cannot.
        """
        loaded, self._loading = wait(self._loading, timeout)
        try:
            for task in loaded:
                task.result()
        except BrokenProcessPool:
            raise self._lost("while starting") from None
        return not self._loading

    def run(self, work: LocalTraining, groups: deque[Group], take: TakeUpdates, train: Train) -> None:
        """Empty `groups`, largest first, together with this process, which trains one at a time by `train`.

        `take` gets each group's updates as they arrive. As long as there are groups enough for everybody, workers have
        their next ones before they are done with the last: this process looks after them only between groups of its
        own. Raises what a worker raised, and `WorkerError` where one died.
        """
        try:
            self._share(work, groups, take, train)
        except BrokenProcessPool:
            raise self._lost("while training") from None

    def _share(self, work: LocalTraining, groups: deque[Group], take: TakeUpdates, train: Train) -> None:
        places, workers = self._share_starts(groups), len(self._processes)
        free = list(range(len(self._updates)))
        # Of each group that is with a worker, the slot of its updates and the numbers of its jobs.
        away: dict[Future[None], tuple[int, tuple[int, ...]]] = {}
        while groups or away:
            # One for each worker, then a second one where there is enough for all; the last is for this process.
            while free and len(groups) > (1 if len(away) < workers else workers + 1):
                slot, (numbers, jobs) = free.pop(), groups.popleft()
                clients = [(places[id(job.start)], job.samples.numpy(), job.stream) for job in jobs]
                away[self._executor.submit(_perform, work, clients, len(places), slot)] = (slot, numbers)
            if groups:
                train(work, groups.popleft(), take)
            done, _ = wait(away, 0.0 if groups else None, FIRST_COMPLETED)
            for task in done:
                task.result()
                slot, numbers = away.pop(task)
                take(numbers, self._updates[slot, : len(numbers)])
                free.append(slot)

    def _share_starts(self, groups: deque[Group]) -> dict[int, int]:
        """Put every distinct start into shared memory once; the place of each by its identity."""
        distinct = {id(job.start): job.start for _, jobs in groups for job in jobs}
        shared = self._starts.vectors(self._layout.dtype, len(distinct), self._layout.size)
        for row, start in zip(shared, distinct.values(), strict=True):
            row.copy_(start.detach())
        return {identity: place for place, identity in enumerate(distinct)}

    def _lost(self, when: str) -> WorkerError:
        """What to raise for a worker that is gone: which one, and how."""
        self._executor.shutdown()  # it ends the workers that are left, with SIGTERM
        themselves = [worker for worker in self._processes if worker.exitcode != -signal.SIGTERM]
        gone = (themselves or self._processes)[0]
        code = gone.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        number, count = self._processes.index(gone) + 1, len(self._processes)
        return WorkerError(
            f"worker {number} of {count} (process {gone.pid}) {how} {when}",
            hint="most often the machine ran out of memory: use fewer workers, or workers = 1 for none",
        )


def _slots(results: SharedMemory, formulation: PlainLoop, workers: int) -> Tensor:
    """The updates of the groups that workers have at once, [slots, clients, size]."""
    layout = formulation.problem.layout
    return results.tensor(layout.dtype, (_SLOTS_EACH * workers, formulation.largest_group, layout.size))


def _end(
    owner: int, executor: ProcessPoolExecutor, processes: list[BaseProcess], memories: Sequence[SharedMemory]
) -> None:
    """End the workers: they hold nothing worth saving. A fork of the parent leaves them alone."""
    for memory in memories:
        memory.close()
    if os.getpid() == owner:
        for process in processes:
            if process.pid is not None:
                process.kill()
        executor.shutdown(cancel_futures=True)


class _Worker(SpawnProcess):
    """A fresh interpreter with this one's `sys.path`, not a fork: torch's threads do not survive one."""

    def start(self) -> None:
        with _inherited():
            super().start()


class _WorkerContext(SpawnContext):
    """Makes workers and knows each before it starts: an interrupt may come before its executor does."""

    def __init__(self) -> None:
        self.workers: list[BaseProcess] = []

    def Process(self, *args: Any, **settings: Any) -> BaseProcess:  # type: ignore[override]
        self.workers.append(_Worker(*args, **settings))
        return self.workers[-1]


@contextmanager
def _inherited() -> Iterator[None]:
    """Inside, what a process inherits is as workers want it: their environment, no interrupts (Ctrl-C is the parent's
    to handle), and no main script, which would be run again."""
    main, before = sys.modules["__main__"], {name: os.environ.get(name) for name in _ENVIRONMENT}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Loaded:
    """What a worker has once `_load` is through: the formulation or why there is none, and the shared memory."""

    formulation: PlainLoop | CannotLoad
    starts: SharedMemory
    updates: Tensor
    everyone: Barrier


def _load(
    packed: bytes, samples: int, workers: int, memories: tuple[SharedMemory, ...], everyone: Barrier
) -> None:
    """Make this process a worker: of so many `workers`, with so many `samples` in shared memory."""
    os.dup2(2, 1)  # standard output is for results: what a worker prints goes beside it
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    inputs, labels, _Loaded.starts, results = memories
    _Loaded.everyone = everyone
    try:
        form: PlainLoop = torch.load(io.BytesIO(packed), weights_only=False)
    except Exception as error:  # a user's module can fail to load in any way
        _Loaded.formulation = CannotLoad(f"{type(error).__name__}: {error}")
        return
    problem = form.problem
    shared_inputs = inputs.tensor(problem.inputs.dtype, (samples, *problem.inputs.shape[1:]))
    shared_labels = labels.tensor(problem.labels.dtype, (samples, *problem.labels.shape[1:]))
    _Loaded.formulation = replace(form, problem=replace(problem, inputs=shared_inputs, labels=shared_labels))
    _Loaded.updates = _slots(results, form, workers)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


def _say_loaded() -> None:
    """Return when every worker has come here; raise `CannotLoad` where this one has nothing to train."""
    if isinstance(_Loaded.formulation, CannotLoad):
        raise _Loaded.formulation
    _Loaded.everyone.wait()


def _perform(work: LocalTraining, clients: Sequence[_Client], starts: int, slot: int) -> None:
    """Train a group and write its updates into this slot; `starts` is how many there are in shared memory now."""
    form = _Loaded.formulation
    assert isinstance(form, PlainLoop)
    layout = form.problem.layout
    weights = _Loaded.starts.vectors(layout.dtype, starts, layout.size)
    jobs = [Job(weights[place], torch.from_numpy(samples), stream) for place, samples, stream in clients]
    try:
        form.perform(work, jobs, _Loaded.updates[slot, : len(jobs)])
    except Exception as error:
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:  # its class takes other arguments than it keeps: the parent could not read it
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise


class SharedMemory:
    """A nameless file whose descriptor a child process gets with it; `tensor` works on either side.

    There is nothing to unlink: even after `kill -9` of every process the kernel takes it back. Other than in /dev/shm,
    there is room for as much as the machine has.
    """

    def __init__(self) -> None:
        self._descriptor = _nameless_file()
        self._map: mmap.mmap | None = None

    def __getstate__(self) -> Any:
        return DupFd(self._descriptor)

    def __setstate__(self, descriptor: Any) -> None:
        self._descriptor, self._map = descriptor.detach(), None

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor on this memory; others see what is written into it. It grows as needed and never shrinks."""
        size = math.prod(shape) * dtype.itemsize
        if self._map is None or len(self._map) < size:
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
            self._map = mmap.mmap(self._descriptor, 0)
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape)).view(shape)

    def hold(self, values: Tensor) -> Tensor:
        """A copy of `values` on this memory."""
        return self.tensor(values.dtype, tuple(values.shape)).copy_(values.detach())

    def vectors(self, dtype: torch.dtype, count: int, length: int) -> Tensor:
        """`count` vectors, each of which begins on a cache line, as a tensor of its own does.

        Products round differently from other addresses: without this, a worker's last bits would differ.
        """
        padded = -(-length * dtype.itemsize // _CACHE_LINE) * _CACHE_LINE // dtype.itemsize
        return self.tensor(dtype, (count, padded))[:, :length]

    def close(self) -> None:
        """Give the descriptor back; tensors still in use keep their memory."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("niss-cohort")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
