"""Who has which examples, and the engine that trains the clients of all methods of a round on them as one cohort.

Where records are hidden, a silo sums the clipped gradients of a batch that it drew in secret, at the weights of the
global model, by `niss.records`, as on a node of a real federation:

    x_k = - sum over the batch of  g_i min(1, C / ||g_i||)

The server divides the sum of all silos by the planned batch and steps.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from niss.errors import ConfigError
from niss.learning import Cohort, Evaluation, FlatLayout, Job, LocalTraining, choose_device
from niss.learning.cohort import available_cores, numbers_by_start
from niss.learning.cuda.program import tf32_products
from niss.learning.local import torch_threads
from niss.records import Records
from niss.settings import to_values
from niss.simulation import Config
from niss.simulation.ranks import ALONE, Ranks, require_same
from niss.simulation.uploads import Seats, Uploads, make_uploads
from niss.version import __version__

if TYPE_CHECKING:
    from niss.simulation.inputs import Inputs


Examples = tuple[Tensor, Tensor]
"""Inputs and labels, one label per input."""


@dataclass(frozen=True)
class RecordStep:
    """One sum over a secret batch, with the clip of single records."""

    clip: float


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

    @property
    def examples(self) -> Examples:
        """The inputs and labels of all clients, until they are handed over."""
        if self._examples is None:
            raise ValueError("the examples of these clients were handed over before")
        return self._examples

    def hand_over(self) -> Examples:
        """The inputs and labels of all clients, once: whoever trains on them need not share the memory."""
        examples, self._examples = self.examples, None
        return examples

    def samples(self, client: int) -> Tensor:
        """The rows of the training data that this client has, in its own order."""
        end = int(self._ends[client])
        start = end - int(self.sizes[client])
        return torch.arange(start, end) if self._rows is None else self._rows[start:end]


class SiloSums:
    """Computes the sums of all silos of all methods of a round, on all cores or on the device.

    module, layout  what is trained, and how its entries lie in the vectors of jobs
    examples        inputs and labels of all silos, on the processor
    device          where gradients are computed, and rows stay that are float32
    workers         threads on the processor; each has a module of its own
    tf32            whether a GPU may compute its products in TF32

    The batches of silos that start from the same weights are one list of records, cut into chunks; a thread computes
    a chunk, with a sum for each silo in it. What comes out depends on the jobs alone, to the last bit.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: FlatLayout,
        examples: tuple[Tensor, Tensor],
        *,
        device: str,
        workers: int,
        tf32: bool = False,
    ) -> None:
        self._module, self._layout, self._workers = copy.deepcopy(module).eval().to(device), layout, workers
        self._examples = (examples[0].to(device), examples[1].to(device))
        self.trained, self._tf32 = layout.trainable_mask().nonzero()[:, 0], tf32
        self.name = f"{device}: clipped gradients of records, {workers} thread{'s' if workers > 1 else ''}"

    @cached_property
    def _records(self) -> list[Records]:
        """One for each thread: calling a module leaves traces in it."""
        return [Records(copy.deepcopy(self._module), self._examples) for _ in range(self._workers)]

    def of(self, samples: Tensor) -> Records:
        """The records with these rows of the examples, and a module of their own."""
        examples = tuple(part[samples.to(part.device)] for part in self._examples)
        return Records(copy.deepcopy(self._module), (examples[0], examples[1]))

    def train(self, jobs: Sequence[Job], work: RecordStep, progress: Callable[[int], None]) -> Tensor:
        """A row for each job: the sum over its samples, negated, since the server adds; zero where nothing trains."""
        device = self._examples[0].device
        rows = torch.zeros((len(jobs), self._layout.size), dtype=self._layout.dtype, device=device)
        trained = self.trained.to(device)
        with tf32_products(self._tf32):
            free: SimpleQueue[Records] = SimpleQueue()
            for records in self._records:
                free.put(records)

            def sums(weights: NDArray[np.float64], rows: NDArray[np.int64], counts: list[int]) -> Tensor:
                records = free.get()
                try:
                    with torch_threads(1):
                        found: Tensor = records.engine.sums(weights, rows, counts, work.clip)
                        return found.clone()  # The next sums of these records may overwrite it.
                finally:
                    free.put(records)

            with ThreadPoolExecutor(self._workers) as pool:
                results = []
                for numbers in numbers_by_start(jobs):
                    weights = jobs[numbers[0]].start[self.trained].double().numpy()
                    batches = [jobs[number].samples.numpy() for number in numbers]
                    chunks = list(self._records[0].shared_chunks(batches))
                    parts = [pool.submit(sums, weights, rows, counts) for rows, _, counts in chunks]
                    results.append((numbers, chunks, parts))
                for numbers, chunks, parts in results:
                    totals = self._records[0].engine.zeros(len(numbers))
                    for (_, first, counts), part in zip(chunks, parts, strict=True):
                        totals[first : first + len(counts)] += part.result()
                    places = torch.tensor(numbers, device=device)
                    rows[places[:, None], trained] = totals.neg_().to(rows.dtype)
                    progress(len(numbers))
        return rows


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

    def records(self, samples: Tensor) -> Records:
        """A silo's records, those rows of the data, for a node to train on."""
        assert self._silos is not None
        return self._silos.of(samples)

    @property
    def trained(self) -> NDArray[np.int64]:
        """Which entries of the vectors of jobs have a gradient in those."""
        assert self._silos is not None
        return self._silos.trained.numpy()

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
