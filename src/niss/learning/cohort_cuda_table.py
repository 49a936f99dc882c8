"""The batches of many clients as one table [steps, clients, batch], filled while the device already trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niss.learning.local import LocalTraining
from niss.randomness import SimStream


class TrainingJob(Protocol):
    """One client to be trained: where it starts, which rows of the data are its own, its stream."""

    @property
    def start(self) -> Tensor: ...
    @property
    def samples(self) -> Tensor: ...
    @property
    def stream(self) -> SimStream: ...


class BatchTable:
    """Row numbers and true sizes of every batch of every client, in the order of `batch_order`.

    `rows[s, k]` are the data rows of client k's batch of step s and `sizes[s, k]` how many of them count.
    A short batch is filled up with its own first row, so that filling it cannot bring in a value the
    batch does not have; a finished client has size 0 and its first sample's row. The same client trained from
    several starts, as in a comparison, has its batches drawn once.
    """

    def __init__(self, jobs: Sequence[TrainingJob], settings: LocalTraining) -> None:
        self._jobs = jobs
        self._settings = settings
        self._samples = [job.samples.numpy() for job in jobs]
        seen: dict[tuple[SimStream, int], int] = {}
        self._drawn_for = np.array(
            [seen.setdefault((job.stream, job.samples.data_ptr()), k) for k, job in enumerate(jobs)]
        )
        self._repeats = np.flatnonzero(self._drawn_for != np.arange(len(jobs)))
        counts = np.array([len(samples) for samples in self._samples])
        self.width = int(min(settings.batch_size, counts.max()))
        self._per_epoch = -(-counts // self.width)
        self.steps = int(self._per_epoch.max()) * settings.epochs
        self.rows: NDArray[np.int32] = np.empty((self.steps, len(jobs), self.width), dtype=np.int32)
        self.sizes: NDArray[np.int32] = np.zeros((self.steps, len(jobs)), dtype=np.int32)

    def fill(self) -> Iterator[int]:
        """Draw the orders epoch after epoch; yields how many leading steps are complete so far."""
        for client, samples in enumerate(self._samples):
            self.rows[:, client] = samples[0]
        shortest = int(self._per_epoch.min())
        for epoch in range(self._settings.epochs):
            for client in np.unique(self._drawn_for).tolist():
                self._fill_epoch(client, self._jobs[client].stream, epoch)
            if self._repeats.size:
                first = self._drawn_for[self._repeats]
                self.rows[:, self._repeats] = self.rows[:, first]
                self.sizes[:, self._repeats] = self.sizes[:, first]
            yield self.steps if epoch + 1 == self._settings.epochs else shortest * (epoch + 1)

    def _fill_epoch(self, client: int, stream: SimStream, epoch: int) -> None:
        samples, batches = self._samples[client], int(self._per_epoch[client])
        order = samples[stream.child("epoch", epoch).generator().permutation(len(samples))]
        first = epoch * batches
        whole, rest = divmod(len(samples), self.width)
        steps = slice(first, first + whole)
        self.rows[steps, client] = order[: whole * self.width].reshape(whole, self.width)
        self.sizes[steps, client] = self.width
        if rest:
            self.rows[first + whole, client, :rest] = order[-rest:]
            self.rows[first + whole, client, rest:] = order[-rest]
            self.sizes[first + whole, client] = rest


class DeviceTable:
    """The table as a captured graph reads it: fixed addresses, room for `capacity` steps, a step counter.

    Steps that were never written have size 0: nobody moves in them.
    """

    def __init__(self, capacity: int, clients: int, width: int, device: torch.device) -> None:
        self.capacity = capacity
        self.rows = torch.zeros((capacity, clients, width), dtype=torch.int32, device=device)
        self.sizes = torch.zeros((capacity, clients), dtype=torch.int32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)

    def restart(self) -> None:
        self.counter.zero_()
        self.sizes.zero_()

    def write(self, table: BatchTable, first: int, last: int) -> None:
        self.rows[first:last].copy_(torch.from_numpy(table.rows[first:last]))
        self.sizes[first:last].copy_(torch.from_numpy(table.sizes[first:last]))
