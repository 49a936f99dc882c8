"""The worker processes of a cohort, from both sides.

The parent (`Pool`) starts them, feeds them groups of clients and notices when one dies. A worker (`main`) takes a
group, trains it, writes the updates and asks again; it lives exactly as long as its connection: when the parent
closes it, or dies in any way, the worker ends. Data, starts and updates lie in memory that all of them share;
what travels through the connections is small.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niss.errors import NissError
from niss.learning.cohort import Job, Problem, Take, Work
from niss.learning.cpu.steps import PlainLoop
from niss.randomness import SimStream

# What a worker answers: (_READY, None) once, then (_DONE, slot) or (_FAILED, exception) for each task.
_READY, _DONE, _FAILED = "ready", "done", "failed"
_CACHE_LINE = 64

# A worker fills one slot while the updates in the other wait for the parent.
_SLOTS_EACH = 2
# What a connection holds before a sender waits for the reader, with room to spare.
_UNREAD_BYTES = 2**16
# Paths first: a worker must find the modules that the parent's module is made of.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from niss.learning.cpu.pool import main; main()"
)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Memory that was given back is needed again a step later: without these, glibc returns it to the
    # kernel, and the page faults of a CNN step cost a tenth of its time.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}

_Link: TypeAlias = "Connection[Any, Any]"
# The numbers of some jobs, and the jobs.
Group = tuple[tuple[int, ...], Sequence[Job]]
# Trains one group, and hands its updates on.
Train = Callable[[Work, Group, Take], None]


class WorkerError(NissError):
    """A worker process ended, or could not begin; the message says which, how and when."""


class CannotLoad(Exception):
    """The module cannot be rebuilt in another process: not an error, but a reason to do without."""


@dataclass(frozen=True)
class Setup:
    """What a worker is told once; the data themselves lie in shared memory, inputs first, then labels."""

    # How to train, for a problem whose inputs and labels have no rows.
    formulation: PlainLoop
    # How many rows both have in shared memory.
    samples: int
    labels_offset: int
    # How many groups of updates there is room for.
    slots: int


@dataclass(frozen=True)
class Task:
    """A group of clients to train, and where the updates go.

    clients  of each: the place of its start in shared memory, the rows of its samples, its stream
    starts   how many starts lie in shared memory now: they may be more than when the worker last looked
    slot     which slot of the shared results takes the updates, a row for each client
    """

    work: Work
    clients: tuple[tuple[int, NDArray[np.int64], SimStream], ...]
    starts: int
    slot: int


class Pool:
    """Worker processes with one torch thread each; they start at once, `is_ready` when all have loaded.

    Any error ends the whole pool, as does `close`, or dropping it: a finalizer ends the processes with the object.
    `problem` is that of the formulation, with its data in shared memory, for the parent's own use.
    """

    def __init__(self, formulation: PlainLoop, workers: int) -> None:
        """Start so many workers, each to train groups by `formulation`."""
        problem, rows = formulation.problem, formulation.largest_group
        self._layout = layout = problem.layout
        self._data, self._starts, self._results = (SharedMemory() for _ in range(3))
        self._memories = (self._data, self._starts, self._results)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[_Link] = []
        self.close = weakref.finalize(
            self, _end, os.getpid(), self._processes, self._connections, self._memories
        )
        self._waiting: set[_Link] = set()
        self.problem, offset = _share(self._data, problem)
        slots = _SLOTS_EACH * workers
        self._results.resize(slots * rows * layout.size * layout.dtype.itemsize)
        self._updates = self._results.tensor(layout.dtype, (slots, rows, layout.size))
        without_data = replace(problem, inputs=problem.inputs[:0].clone(), labels=problem.labels[:0].clone())
        packed = io.BytesIO()
        alone = replace(formulation, problem=without_data)
        torch.save(Setup(alone, len(problem.labels), offset, slots), packed)
        for _ in range(workers):
            self._start_worker(packed.getvalue())

    def _start_worker(self, setup: bytes) -> None:
        """A fresh interpreter with this one's `sys.path`, not a fork: torch's threads do not survive one, and a
        user's main script would be run again by multiprocessing's spawn."""
        ours, theirs = Pipe()
        self._connections.append(ours)
        descriptors = [theirs.fileno(), *(memory.descriptor for memory in self._memories)]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is for results: what a worker prints goes beside it
                env=os.environ | _ENVIRONMENT,
                process_group=0,  # Ctrl-C reaches the parent alone
            )
        self._processes.append(process)
        self._waiting.add(ours)
        self._send(ours, setup)

    def is_ready(self, timeout: float | None = 0.0) -> bool:
        """Whether every worker has loaded; waits up to `timeout` seconds for each (None: as long as needed).

        Raises `CannotLoad` where one of them cannot.
        """
        while self._waiting and (answered := wait(self._waiting, timeout)):
            for connection in cast("list[_Link]", answered):
                self._receive(connection)
                self._waiting.discard(connection)
        return not self._waiting

    def run(self, work: Work, groups: deque[Group], take: Take, train: Train) -> None:
        """Empty `groups`, largest first, together with this process, which trains one at a time by `train`.

        `take` gets each group's updates as they arrive. As long as there are groups enough for everybody, a worker has
        its next one before it is done with the last: this process looks after it only between groups of its own.
        Raises what a worker raised, with where it happened as a note, and `WorkerError` where one died.
        """
        places = self._share_starts(groups)
        # Of each worker the slot and the numbers of what it has to do, at most two.
        busy: dict[_Link, deque[tuple[int, tuple[int, ...]]]] = {link: deque() for link in self._connections}

        def hand_out(worker: int, connection: _Link) -> None:
            numbers, jobs = groups.popleft()
            clients = tuple((places[id(job.start)], job.samples.numpy(), job.stream) for job in jobs)
            slot = busy[connection][0][0] ^ 1 if busy[connection] else _SLOTS_EACH * worker
            busy[connection].append((slot, numbers))
            self._send(connection, Task(work, clients, len(places), slot))

        while groups or any(busy.values()):
            # One for each worker, then a second one where there is enough for all; the last is for this process.
            for already, kept in ((0, 1), (1, len(busy) + 1)):
                for worker, (connection, tasks) in enumerate(busy.items()):
                    if len(tasks) == already and len(groups) > kept and _fits_behind(already, groups[0]):
                        hand_out(worker, connection)
            if groups:
                train(work, groups.popleft(), take)
            waiting = [link for link, tasks in busy.items() if tasks]
            for connection in cast("list[_Link]", wait(waiting, 0.0 if groups or not waiting else None)):
                self._receive(connection)
                slot, numbers = busy[connection].popleft()
                take(numbers, self._updates[slot, : len(numbers)])

    def _share_starts(self, groups: deque[Group]) -> dict[int, int]:
        """Put every distinct start into shared memory once; the place of each by its identity."""
        distinct = {id(job.start): job.start for _, jobs in groups for job in jobs}
        shared = self._starts.rows(self._layout.dtype, len(distinct), self._layout.size)
        for row, start in zip(shared, distinct.values(), strict=True):
            row.copy_(start.detach())
        return {identity: place for place, identity in enumerate(distinct)}

    def _send(self, connection: _Link, message: bytes | Task) -> None:
        try:
            connection.send(message)
        except (BrokenPipeError, ConnectionError):
            raise self._lost(connection) from None

    def _receive(self, connection: _Link) -> None:
        """Take one answer of a worker: that it is ready, or done with its task, or what went wrong there."""
        try:
            answer, content = connection.recv()
        except (EOFError, ConnectionError):
            raise self._lost(connection) from None
        if answer == _FAILED:
            if connection in self._waiting:
                raise CannotLoad(f"{type(content).__name__}: {content}")
            raise content
        assert answer == _DONE or connection in self._waiting

    def _lost(self, connection: _Link) -> WorkerError:
        """What to raise for a worker that is gone: a connection only ever breaks because its worker ended."""
        number = self._connections.index(connection)
        process = self._processes[number]
        code = process.wait(timeout=10.0)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        doing = "while starting" if connection in self._waiting else "while training"
        return WorkerError(
            f"worker {number + 1} of {len(self._processes)} (process {process.pid}) {how} {doing}",
            hint="most often the machine ran out of memory: use fewer workers, or workers = 1 for none",
        )


def _fits_behind(already: int, group: Group) -> bool:
    """Whether a connection takes the rows of `group` behind so many tasks that its worker has not read yet."""
    return not already or sum(job.samples.nbytes for job in group[1]) <= _UNREAD_BYTES


def _share(memory: SharedMemory, problem: Problem) -> tuple[Problem, int]:
    """The problem with inputs and labels copied into `memory`, and the byte where the labels begin."""
    inputs, labels = problem.inputs, problem.labels
    offset = -(-inputs.nbytes // _CACHE_LINE) * _CACHE_LINE
    memory.resize(offset + labels.nbytes)
    shared_inputs = memory.tensor(inputs.dtype, tuple(inputs.shape)).copy_(inputs.detach())
    shared_labels = memory.tensor(labels.dtype, tuple(labels.shape), offset=offset).copy_(labels)
    return replace(problem, inputs=shared_inputs, labels=shared_labels), offset


def _end(
    owner: int,
    processes: list[subprocess.Popen[bytes]],
    connections: list[_Link],
    memories: tuple[SharedMemory, ...],
) -> None:
    """End the workers: they hold nothing worth saving. A fork of the parent leaves them alone."""
    for connection in connections:
        connection.close()
    for memory in memories:
        memory.close()
    if os.getpid() != owner:
        return
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def main() -> None:
    """The worker: serve the connection named on the command line until it closes.

    The arguments are file descriptors: of the connection, then of the shared data, starts and results.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    connection, *memories = (int(word) for word in sys.argv[1:])
    with suppress(EOFError, ConnectionError):
        _serve(Connection(connection), *(SharedMemory(descriptor) for descriptor in memories))
    # At once: there is nothing to save, and taking torch down tidily takes longer than a short round.
    os._exit(0)


def _portable(problem: Exception) -> Exception:
    """The exception as the parent can receive it, with where it happened as a note.

    One that cannot be pickled and read again arrives as a RuntimeError with its name and message.
    """
    problem.add_note("in a worker:\n" + "".join(traceback.format_exception(problem)))
    try:
        ForkingPickler.loads(ForkingPickler.dumps(problem))
    except Exception:  # its class takes other arguments than it keeps, or is unknown to others
        return RuntimeError(f"{type(problem).__name__}: {problem}")
    return problem


def _serve(connection: _Link, data: SharedMemory, starts: SharedMemory, results: SharedMemory) -> None:
    """Load what the parent sends first, then perform its tasks; errors travel back instead of ending the worker."""
    try:
        setup: Setup = torch.load(io.BytesIO(connection.recv()), weights_only=False)
        problem = setup.formulation.problem
        inputs, labels = (
            data.tensor(empty.dtype, (setup.samples, *empty.shape[1:]), offset=offset)
            for empty, offset in ((problem.inputs, 0), (problem.labels, setup.labels_offset))
        )
        formulation = replace(setup.formulation, problem=replace(problem, inputs=inputs, labels=labels))
    except (EOFError, ConnectionError):
        raise
    except Exception as error:  # a user's module can fail to load in any way
        connection.send((_FAILED, _portable(error)))
        return
    connection.send((_READY, None))
    layout = problem.layout
    updates = results.tensor(layout.dtype, (setup.slots, formulation.largest_group, layout.size))
    while True:
        task: Task = connection.recv()
        weights = starts.rows(layout.dtype, task.starts, layout.size)
        jobs = [
            Job(weights[number], torch.from_numpy(samples), stream)
            for number, samples, stream in task.clients
        ]
        try:
            formulation.perform(task.work, jobs, updates[task.slot, : len(jobs)])
        except Exception as error:
            connection.send((_FAILED, _portable(error)))
        else:
            connection.send((_DONE, task.slot))


class SharedMemory:
    """A nameless file whose descriptor child processes inherit; `resize` and `tensor` work on either side.

    There is nothing to unlink: even after `kill -9` of every process the kernel takes it back.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _nameless_file() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def resize(self, size: int) -> None:
        """Make room for `size` bytes (it never shrinks); tensors made before keep their old map."""
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, size)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], *, offset: int = 0) -> Tensor:
        """A tensor on this memory, from byte `offset` on; others see what is written into it."""
        size = os.fstat(self.descriptor).st_size
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self.descriptor, size)
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

    def rows(self, dtype: torch.dtype, count: int, length: int) -> Tensor:
        """`count` vectors, making room where needed; each begins on a cache line, as a tensor of its own does.

        Products round differently from other addresses: without this, a worker's last bits would differ.
        """
        padded = -(-length * dtype.itemsize // _CACHE_LINE) * _CACHE_LINE // dtype.itemsize
        self.resize(count * padded * dtype.itemsize)
        return self.tensor(dtype, (count, padded))[:, :length]

    def close(self) -> None:
        """Give the descriptor back; tensors still in use keep their memory."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("niss-cohort")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
