"""What silos do in a round where records are hidden: each sums the clipped gradients of a batch that it drew in secret.

    x_k = - sum over the batch of  g_i min(1, C / ||g_i||)

by `niss.records`, as on a node of a real federation, at the weights of the global model. The server divides the sum of
all silos by the planned batch and steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from niss.learning import FlatLayout, Job
from niss.learning.local import torch_threads
from niss.records import Records, clipped_sum

# Records that are differentiated together: more leave the cache.
_LARGEST_CHUNK = 256
# Deviations by which a batch may be larger than planned before it takes one more chunk.
_ROOM = 3.0


@dataclass(frozen=True)
class RecordStep:
    """One sum over a secret batch, with the clip of single records and the planned batch of the largest silo."""

    clip: float
    planned: float

    @property
    def chunk(self) -> int:
        """Records that are computed together: such that a batch fills few chunks, and fills them well."""
        most = self.planned + _ROOM * math.sqrt(self.planned)
        return math.ceil(most / math.ceil(most / _LARGEST_CHUNK))


class SiloSums:
    """Computes the sums of all silos of all methods of a round, on all cores or on the device.

    module, layout  what is trained, and how its entries lie in the vectors of jobs
    examples        inputs and labels of all silos, on the processor
    device          where gradients are computed
    workers         threads on the processor; each has a module of its own
    """

    def __init__(
        self,
        module: nn.Module,
        layout: FlatLayout,
        examples: tuple[Tensor, Tensor],
        *,
        device: str,
        workers: int,
    ) -> None:
        self._module, self._layout, self._workers = copy.deepcopy(module).eval().to(device), layout, workers
        self._examples = (examples[0].to(device), examples[1].to(device))
        self._trained = layout.trainable_mask()
        self._free: SimpleQueue[Records] | None = None
        self.name = f"{device}: clipped gradients of records, {workers} thread{'s' if workers > 1 else ''}"

    def train(self, jobs: Sequence[Job], work: RecordStep, progress: Callable[[int], None]) -> Tensor:
        """A row for each job: the sum over its samples, negated, since the server adds; zero where nothing trains."""
        rows = torch.zeros((len(jobs), self._layout.size), dtype=self._layout.dtype)
        if self._free is None:
            self._free = SimpleQueue()
            for _ in range(self._workers):
                self._free.put(Records(copy.deepcopy(self._module), self._examples, chunk=work.chunk))
        free = self._free

        def add(number: int) -> None:
            job, records = jobs[number], free.get()
            try:
                with torch_threads(1):
                    weights = job.start[self._trained].double().numpy()
                    total = clipped_sum(records, weights, job.samples.numpy(), work.clip)
            finally:
                free.put(records)
            rows[number, self._trained] = torch.from_numpy(-total).to(rows.dtype)

        # The largest first, so that no thread waits long for the last.
        order = sorted(range(len(jobs)), key=lambda number: -len(jobs[number].samples))
        with ThreadPoolExecutor(self._workers) as pool:
            for _ in pool.map(add, order):
                progress(1)
        return rows
