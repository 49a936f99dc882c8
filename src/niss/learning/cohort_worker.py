"""What a worker process of the cohort does: take a group of clients, train it, write the updates, ask again.

It lives exactly as long as its connection: when the parent closes it, or dies in any way, the worker ends.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from niss.learning.cohort_engines import Engine, Job, choose_engine
from niss.learning.cohort_memory import SharedMemory
from niss.learning.flat import FlatLayout
from niss.learning.local import LocalTraining
from niss.randomness import SimStream

READY, DONE, FAILED = "ready", "done", "failed"


@dataclass(frozen=True)
class Setup:
    """What a worker is told once; the data themselves lie in shared memory, inputs first, then labels."""

    module: nn.Module
    layout: FlatLayout
    input_dtype: torch.dtype
    input_shape: tuple[int, ...]
    labels_offset: int
    slots: int
    slot_rows: int


@dataclass(frozen=True)
class ClippedStep:
    """The other thing a client can do: one step on clipped per-sample gradients."""

    clip: float
    learning_rate: float


@dataclass(frozen=True)
class Task:
    """A group of clients: number of the start, rows of the samples, stream; and where the updates go."""

    work: LocalTraining | ClippedStep
    clients: tuple[tuple[int, NDArray[np.int64], SimStream], ...]
    starts: int
    slot: int


def perform(engine: Engine, work: LocalTraining | ClippedStep, jobs: list[Job], out: Tensor) -> None:
    """Fill `out` with one update a row: the same in a worker and in the parent."""
    if isinstance(work, LocalTraining):
        engine.train(jobs, work, out)
    else:
        engine.clipped_steps(jobs, work.clip, work.learning_rate, out)


def main() -> None:
    """Serve the connection named on the command line until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    connection, *memories = (int(word) for word in sys.argv[1:])
    with suppress(EOFError, ConnectionError):
        _serve(Connection(connection), *(SharedMemory(descriptor) for descriptor in memories))
    # At once: there is nothing to save, and taking torch down tidily takes longer than a short round.
    os._exit(0)


def _portable(problem: Exception) -> Exception:
    """The exception as the parent can receive it, with where it happened as a note."""
    problem.add_note("in a worker:\n" + "".join(traceback.format_exception(problem)))
    try:
        ForkingPickler.loads(ForkingPickler.dumps(problem))
    except Exception:  # its class takes other arguments than it keeps, or is unknown to others
        return RuntimeError(f"{type(problem).__name__}: {problem}")
    return problem


def _serve(
    connection: Connection[Any, Any], data: SharedMemory, starts: SharedMemory, results: SharedMemory
) -> None:
    try:
        setup: Setup = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
        inputs = data.tensor(setup.input_dtype, setup.input_shape)
        labels = data.tensor(torch.int64, setup.input_shape[:1], offset=setup.labels_offset)
        engine = choose_engine(setup.module, setup.layout, inputs, labels)
    except (EOFError, ConnectionError):
        raise
    except Exception as problem:  # a user's module can fail to load in any way
        connection.send((FAILED, _portable(problem)))
        return
    connection.send((READY, None))
    layout = setup.layout
    updates = results.tensor(layout.dtype, (setup.slots, setup.slot_rows, layout.size))
    while True:
        task: Task = connection.recv()
        weights = starts.rows(layout.dtype, task.starts, layout.size)
        jobs = [
            Job(weights[number], torch.from_numpy(samples), stream)
            for number, samples, stream in task.clients
        ]
        try:
            perform(engine, task.work, jobs, updates[task.slot, : len(jobs)])
        except Exception as problem:
            connection.send((FAILED, _portable(problem)))
        else:
            connection.send((DONE, task.slot))
