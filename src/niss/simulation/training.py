"""Who has which examples, and the engine that trains the clients of all methods of a round on them as one cohort."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niss.errors import ConfigError
from niss.learning import Cohort, Evaluation, Job, LocalTraining, choose_device
from niss.learning.cohort import available_cores
from niss.settings import to_values
from niss.simulation.config import Config
from niss.simulation.ranks import ALONE, Ranks, require_same
from niss.simulation.silos import RecordStep, SiloSums
from niss.simulation.uploads import Seats, Uploads, make_uploads
from niss.version import __version__

if TYPE_CHECKING:
    from niss.simulation.inputs import Inputs

Examples = tuple[Tensor, Tensor]
"""Inputs and labels, one label per input."""

Work = LocalTraining | RecordStep
"""What a client does in a round."""

Done = Callable[[float], None]
"""Called now and then while clients train, with the number of clients that were finished since the last call: of all
ranks, which are about equally far."""

TOGETHER_BYTES = 512 * 2**20
"""Methods are trained together as long as their updates fit into this much memory of the processor."""


ALL_GPUS = "cuda:all"


class Clients:
    """Who has which examples of the training data.

    sizes     the number of examples of each client
    examples  all of them; None where other `Clients` of the same data hold them
    rows      of the examples, those of one client after the other; None: they lie in that order
    """

    def __init__(self, sizes: Sequence[int], examples: Examples | None, rows: Tensor | None = None) -> None:
        self.sizes: NDArray[np.int64] = np.array(sizes, dtype=np.int64)
        self._ends, self._examples, self._rows = np.cumsum(self.sizes), examples, rows

    def __len__(self) -> int:
        return len(self.sizes)

    def hand_over(self) -> Examples:
        """The inputs and labels of all clients, once: whoever trains on them need not share the memory."""
        if self._examples is None:
            raise ValueError("the examples of these clients were handed over before")
        examples, self._examples = self._examples, None
        return examples

    def samples(self, client: int) -> Tensor:
        """The rows of the training data that this client has, in its own order."""
        end = int(self._ends[client])
        start = end - int(self.sizes[client])
        return torch.arange(start, end) if self._rows is None else self._rows[start:end]


class Trainer(AbstractContextManager["Trainer"]):
    """Trains clients on the engine that `config` chooses; owns the worker processes, or the place on the device.

    The training examples are handed over to it by `inputs.clients`. How clients train may change from call to
    call; model, data and engine stay. Where there are several `ranks`, this one trains its part.
    """

    def __init__(self, config: Config, inputs: Inputs, ranks: Ranks = ALONE) -> None:
        training = config.training
        self.ranks, self._row_bytes = ranks, inputs.start.nbytes
        device, workers = _device(training.device, ranks), training.workers
        if workers is None and ranks.several:
            workers = max(available_cores() // ranks.local_count, 1)
        examples = inputs.clients.hand_over()
        self._silos = None
        if config.privacy.unit == "record":
            cores = (workers or available_cores()) if device == "cpu" else 1
            self._silos = SiloSums(
                inputs.module, inputs.layout, examples, device=device, workers=cores, tf32=training.tf32
            )
        self._cohort = Cohort.of(
            copy.deepcopy(inputs.module),
            inputs.layout,
            *examples,
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
                data=zlib.crc32(json.dumps(inputs.data).encode()),
                weights=zlib.crc32(inputs.start.numpy().tobytes()),
                device=device.partition(":")[0],
                version=__version__,
            )
            self._room = min(facts["own_room"])
        self._test: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @property
    def engine(self) -> str:
        """How the clients are trained, in one line."""
        name = self._cohort.engine if self._silos is None else self._silos.name
        if not self.ranks.several:
            return name
        return (
            f"{name}; on each of {self.ranks.count} ranks, which is equal to one process up to the "
            "order of summation"
        )

    def train(self, requests: Sequence[Sequence[Job]], work: Work, done: Done | None = None) -> list[Uploads]:
        """The updates of each request, a row for each of its jobs, all trained as one cohort by the same work.

        The rows stay where they were made: in the memory of the processor or of the device. With several ranks they
        are those of the jobs that are dealt to this one.
        """
        jobs = [job for request in requests for job in request]
        mine = np.arange(len(jobs))
        if self.ranks.several:
            mine = self.ranks.deal([len(job.samples) for job in jobs])
            self.ranks.note(_digest_of(jobs))

        def progress(finished: int) -> None:
            if done is not None:
                done(finished * len(jobs) / mine.size)

        own = [jobs[job] for job in mine]
        if isinstance(work, RecordStep):
            assert self._silos is not None
            rows = self._silos.train(own, work, progress)
        else:
            rows = self._cohort.train(own, work, progress=progress)
        ends = np.cumsum([0] + [len(request) for request in requests])
        seats = [
            Seats(int(end - start), mine[(mine >= start) & (mine < end)] - start)
            for start, end in pairwise(ends)
        ]
        parts = torch.split(rows, [each.mine.size for each in seats])
        return [make_uploads(part, each) for part, each in zip(parts, seats, strict=True)]

    def together(self, participants: int) -> int:
        """How many methods with so many participants to train at once: at least one, and as many as have room for
        their updates.
        """
        rows = -(-participants // self.ranks.count)
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

    def __exit__(self, *_: object) -> None:
        self._cohort.close()


def local_work(config: Config) -> Work:
    """What a client does in a round; methods whose local work is the same, on the same cohort, are trained together."""
    if config.privacy.unit == "record":
        return RecordStep(config.privacy.clip)
    return LocalTraining(**{one.name: getattr(config.training, one.name) for one in fields(LocalTraining)})


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
    number = 0 if found == 1 else ranks.local_number
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
