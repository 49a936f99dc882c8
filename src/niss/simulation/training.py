"""The engine that trains the clients of all methods of a round as one cohort."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from niss.errors import ConfigError
from niss.learning import ClippedStep, Cohort, Evaluation, Job, LocalTraining, choose_device
from niss.learning.cohort import available_cores
from niss.settings import to_values
from niss.simulation.config import Config
from niss.simulation.materials import Materials
from niss.simulation.ranks import ALONE, Ranks, require_same
from niss.simulation.uploads import Seats, Uploads, make_uploads
from niss.version import __version__

Done = Callable[[int], None]
"""Called now and then while clients train, with the number of clients that were finished since the last call."""

TOGETHER_BYTES = 512 * 2**20
"""Methods are trained together as long as their updates fit into this much memory of the processor."""


ALL_GPUS = "cuda:all"


class Trainer(AbstractContextManager["Trainer"]):
    """Trains clients on the engine that `config` chooses; owns the worker processes, or the place on the device.

    The training examples are handed over to it by `materials.clients`. How clients train may change from call to
    call (`train(config=...)`); model, data and engine stay. Where there are several `ranks`, this one trains its part.
    """

    def __init__(self, config: Config, materials: Materials, ranks: Ranks = ALONE) -> None:
        training = config.training
        self.ranks, self._row_bytes = ranks, materials.start.nbytes
        device, workers = _device(training.device, ranks), training.workers
        if workers is None and ranks.several:
            workers = max(available_cores() // ranks.local_count, 1)
        self._cohort = Cohort(
            copy.deepcopy(materials.module),
            materials.layout,
            *materials.clients.hand_over(),
            device=device,
            workers=workers,
            tf32=training.tf32,
            plain=training.engine == "plain",
        )
        self._room = self._cohort.room_for_updates or TOGETHER_BYTES
        if ranks.several:
            facts = require_same(
                ranks,
                own_room=self._room,
                settings=zlib.crc32(json.dumps(to_values(config)).encode()),
                data=zlib.crc32(json.dumps(materials.data).encode()),
                weights=zlib.crc32(materials.start.numpy().tobytes()),
                device=device.partition(":")[0],
                version=__version__,
            )
            self._room = min(facts["own_room"])
        self._test: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @property
    def engine(self) -> str:
        """How the clients are trained, in one line."""
        if not self.ranks.several:
            return self._cohort.engine
        return (
            f"{self._cohort.engine}; on each of {self.ranks.count} ranks, which is equal to one process up to the "
            "order of summation"
        )

    def train(
        self, requests: Sequence[Sequence[Job]], config: Config, done: Done | None = None
    ) -> list[Uploads]:
        """The updates of each request, a row for each of its jobs, all trained as one cohort as `config` says.

        The rows stay where they were made: in the memory of the processor or of the device. With several ranks they
        are those of the jobs that are dealt to this one.
        """
        jobs = [job for request in requests for job in request]
        mine = self.ranks.deal([len(job.samples) for job in jobs])
        if self.ranks.several:
            self.ranks.note(_digest_of(jobs))
            done = _in_proportion(done, len(jobs), mine.size)
        rows = self._cohort.train_in_place([jobs[job] for job in mine], local_work(config), progress=done)
        ends = np.cumsum([0] + [len(request) for request in requests])
        seats = [
            Seats(int(end - start), mine[(mine >= start) & (mine < end)] - start)
            for start, end in pairwise(ends)
        ]
        parts = torch.split(rows, [one.mine.size for one in seats])
        return [make_uploads(part, one) for part, one in zip(parts, seats, strict=True)]

    def together(self, config: Config) -> int:
        """How many methods to train at once: at least one, and as many as have room for their updates."""
        rows = -(-config.training.participants // self.ranks.count)
        return max(1, self._room // (self._row_bytes * rows))

    def evaluate(self, weights: Tensor, inputs: Tensor, labels: Tensor) -> Evaluation:
        """Accuracy and loss of the model with these weights; each rank looks at its part of the examples."""
        if not self.ranks.several:
            return self._cohort.evaluate(weights, inputs, labels)
        if self._test is None or self._test[0] is not inputs or self._test[1] is not labels:
            part = self.ranks.seats(len(labels)).mine
            self._test = (inputs, labels, inputs[part], labels[part])
        found = np.zeros(2)
        if count := len(self._test[3]):
            seen = self._cohort.evaluate(weights, *self._test[2:])
            found = count * np.array([seen.accuracy, seen.loss])
        (summed,) = self.ranks.pool(found)
        right, loss = summed.tolist()
        return Evaluation(round(right) / len(labels), loss / len(labels), len(labels))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cohort.close()


def local_work(config: Config) -> LocalTraining | ClippedStep:
    """What a client does in a round: local epochs, or one step with this clip and rate (unit record).

    Methods whose local work is the same, on the same cohort, are trained together.
    """
    training, privacy = config.training, config.privacy
    if privacy.unit == "record":
        return ClippedStep(privacy.clip, training.learning_rate)
    return LocalTraining(
        epochs=training.epochs,
        batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )


def _device(wanted: str, ranks: Ranks) -> str:
    """The device of this rank: on a machine with several GPUs each of its ranks has its own."""
    device = choose_device(wanted, field="training.device")
    if device == "cpu":
        return device
    found = torch.cuda.device_count()
    if not ranks.several:
        if wanted == ALL_GPUS and found > 1:
            raise ConfigError(
                f"{found} GPUs need a process each, and this is one process",
                field="training.device",
                hint=f"use the command niss run, or start this program with: torchrun --nproc-per-node {found}",
            )
        return device
    # A launcher may have given each process a GPU of its own, which is then the only one that it sees.
    number = 0 if found == 1 else ranks.local_rank
    if number >= found:
        raise ConfigError(
            f"there are {ranks.local_count} ranks on this machine and {found} GPUs",
            field="training.device",
            hint="start as many processes as there are GPUs, or train with training.device=cpu",
        )
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def _digest_of(jobs: Sequence[Job]) -> int:
    """Of who trains from which weights, on how much data and with which random numbers."""
    digest = zlib.crc32(np.array([[len(job.samples), job.stream.torch_seed()] for job in jobs]).tobytes())
    for start in {id(job.start): job.start for job in jobs}.values():
        digest = zlib.crc32(start.numpy().tobytes(), digest)
    return digest


def _in_proportion(done: Done | None, clients: int, mine: int) -> Done | None:
    """Told of this rank's clients, tells `done` of so many of all: the ranks are about equally far."""
    if done is None:
        return None
    finished = told = 0

    def count(more: int) -> None:
        nonlocal finished, told
        finished += more
        newly = finished * clients // mine - told
        told += newly
        done(newly)

    return count
