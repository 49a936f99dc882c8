"""The worker processes of a cohort, seen from the parent: start them, feed them, notice when one dies."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor, nn

from niss.errors import NissError
from niss.learning.cohort_engines import Job
from niss.learning.cohort_memory import SharedMemory
from niss.learning.cohort_worker import DONE, FAILED, ClippedStep, Setup, Task
from niss.learning.flat import FlatLayout
from niss.learning.local import LocalTraining

_SLOTS_EACH = 2
"""A worker fills one slot while the parent empties the other."""
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from niss.learning.cohort_worker import main; main()"
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

Rows = tuple[int, ...]
Group = tuple[Rows, Sequence[Job]]


class WorkerError(NissError):
    """A worker process ended, or could not begin."""


class CannotLoad(Exception):
    """The module cannot be rebuilt in another process: not an error, but a reason to do without."""


class Pool:
    """Worker processes with one torch thread each; they start at once, `is_ready` when all have loaded.

    Data, starts and results are in shared memory. Any error ends the whole pool.
    """

    def __init__(
        self, module: nn.Module, layout: FlatLayout, inputs: Tensor, labels: Tensor, workers: int, rows: int
    ) -> None:
        self._layout = layout
        self._data, self._starts, self._results = (SharedMemory() for _ in range(3))
        self._memories = (self._data, self._starts, self._results)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection[Any, Any]] = []
        self.close = weakref.finalize(
            self, _end, os.getpid(), self._processes, self._connections, self._memories
        )
        self._waiting: set[Connection[Any, Any]] = set()
        self.inputs, self.labels, offset = _share(self._data, inputs, labels)
        slots = _SLOTS_EACH * workers
        item = torch.empty(0, dtype=layout.dtype).element_size()
        self._results.resize(slots * rows * layout.size * item)
        self._updates = self._results.tensor(layout.dtype, (slots, rows, layout.size))
        setup = Setup(module, layout, inputs.dtype, tuple(inputs.shape), offset, slots, rows)
        packed = io.BytesIO()
        torch.save(setup, packed)
        for _ in range(workers):
            self._start_worker(packed.getvalue())

    def _start_worker(self, setup: bytes) -> None:
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
            for connection in map(_as_connection, answered):
                self._receive(connection)
                self._waiting.discard(connection)
        return not self._waiting

    def run(
        self,
        work: LocalTraining | ClippedStep,
        groups: deque[Group],
        take: Callable[[Rows, Tensor], None],
    ) -> None:
        """Empty `groups`, largest first; `take(rows, updates)` gets each result as it arrives."""
        numbers = self._share_starts(groups)
        busy: dict[Connection[Any, Any], tuple[int, Rows]] = {}
        for worker, connection in enumerate(self._connections):
            if groups:
                self._hand_out(connection, work, groups, numbers, _SLOTS_EACH * worker, busy)
        while busy:
            for connection in map(_as_connection, wait(busy)):
                self._receive(connection)
                slot, rows = busy.pop(connection)
                if groups:
                    self._hand_out(connection, work, groups, numbers, slot ^ 1, busy)
                take(rows, self._updates[slot, : len(rows)])

    def _share_starts(self, groups: deque[Group]) -> dict[int, int]:
        """Put every distinct start into shared memory once; the number of each by its identity."""
        distinct = {id(job.start): job.start for _, jobs in groups for job in jobs}
        shared = self._starts.rows(self._layout.dtype, len(distinct), self._layout.size)
        for row, start in zip(shared, distinct.values(), strict=True):
            row.copy_(start.detach())
        return {identity: number for number, identity in enumerate(distinct)}

    def _hand_out(
        self,
        connection: Connection[Any, Any],
        work: LocalTraining | ClippedStep,
        groups: deque[Group],
        numbers: dict[int, int],
        slot: int,
        busy: dict[Connection[Any, Any], tuple[int, Rows]],
    ) -> None:
        rows, jobs = groups.popleft()
        clients = tuple((numbers[id(job.start)], job.samples.numpy(), job.stream) for job in jobs)
        busy[connection] = (slot, rows)
        self._send(connection, Task(work, clients, len(numbers), slot))

    def _send(self, connection: Connection[Any, Any], message: bytes | Task) -> None:
        try:
            if isinstance(message, bytes):
                connection.send_bytes(message)
            else:
                connection.send(message)
        except (BrokenPipeError, ConnectionError):
            raise self._lost(connection) from None

    def _receive(self, connection: Connection[Any, Any]) -> None:
        try:
            answer, content = connection.recv()
        except (EOFError, ConnectionError):
            raise self._lost(connection) from None
        if answer == FAILED:
            if connection in self._waiting:
                raise CannotLoad(f"{type(content).__name__}: {content}")
            raise content
        assert answer == DONE or connection in self._waiting

    def _lost(self, connection: Connection[Any, Any]) -> WorkerError:
        number = self._connections.index(connection)
        process = self._processes[number]
        code = process.wait(timeout=10.0)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        doing = "while starting" if connection in self._waiting else "while training"
        return WorkerError(
            f"worker {number + 1} of {len(self._processes)} (process {process.pid}) {how} {doing}",
            hint="most often the machine ran out of memory: use fewer workers, or workers = 1 for none",
        )


def _as_connection(waited_for: object) -> Connection[Any, Any]:
    assert isinstance(waited_for, Connection)
    return waited_for


def _share(memory: SharedMemory, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
    """Inputs and labels copied into `memory`, and where the labels begin."""
    offset = -(-inputs.numel() * inputs.element_size() // 64) * 64
    memory.resize(offset + labels.numel() * labels.element_size())
    shared_inputs = memory.tensor(inputs.dtype, tuple(inputs.shape))
    shared_labels = memory.tensor(labels.dtype, tuple(labels.shape), offset=offset)
    shared_inputs.copy_(inputs.detach())
    shared_labels.copy_(labels)
    return shared_inputs, shared_labels, offset


def _end(
    owner: int,
    processes: list[subprocess.Popen[bytes]],
    connections: list[Connection[Any, Any]],
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
