"""What silos do in a round where records are hidden: each sums the clipped gradients of a batch that it drew in secret.

    x_k = - sum over the batch of  g_i min(1, C / ||g_i||)

by `niss.records`, as on a node of a real federation, at the weights of the global model. The server divides the sum of
all silos by the planned batch and steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from niss.learning import FlatLayout, Job
from niss.learning.cohort import numbers_by_start
from niss.learning.cuda.program import tf32_products
from niss.learning.local import torch_threads
from niss.records import Records, clipped_sums

# Jobs, by number among those of one start, and the records of each that are computed together.
_Piece = tuple[range, list[NDArray[np.int64]]]


@dataclass(frozen=True)
class RecordStep:
    """One sum over a secret batch, with the clip of single records."""

    clip: float


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
        self._trained, self._tf32 = layout.trainable_mask().nonzero()[:, 0], tf32
        self.name = f"{device}: clipped gradients of records, {workers} thread{'s' if workers > 1 else ''}"

    @cached_property
    def _records(self) -> list[Records]:
        """One for each thread: calling a module leaves traces in it."""
        return [Records(copy.deepcopy(self._module), self._examples) for _ in range(self._workers)]

    def train(self, jobs: Sequence[Job], work: RecordStep, progress: Callable[[int], None]) -> Tensor:
        """A row for each job: the sum over its samples, negated, since the server adds; zero where nothing trains."""
        device = self._examples[0].device
        rows = torch.zeros((len(jobs), self._layout.size), dtype=self._layout.dtype, device=device)
        trained = self._trained.to(device)
        with tf32_products(self._tf32):
            free: SimpleQueue[Records] = SimpleQueue()
            for records in self._records:
                free.put(records)
            chunk = self._records[0].engine.chunk

            def sums(task: tuple[Any, _Piece]) -> Tensor:
                weights, (_, batches) = task
                records = free.get()
                try:
                    with torch_threads(1):
                        found: Tensor = clipped_sums(records, weights, batches, work.clip)
                    return found
                finally:
                    free.put(records)

            with ThreadPoolExecutor(self._workers) as pool:
                results = []
                for numbers in numbers_by_start(jobs):
                    weights = jobs[numbers[0]].start[self._trained].double().numpy()
                    pieces = list(_pieces([jobs[number].samples.numpy() for number in numbers], chunk))
                    results.append((numbers, pieces, pool.map(sums, [(weights, piece) for piece in pieces])))
                for numbers, pieces, found in results:
                    totals = self._records[0].engine.zeros(len(numbers))
                    for (some, _), part in zip(pieces, found, strict=True):
                        totals[some.start : some.stop] += part
                    places = torch.tensor(numbers, device=device)
                    rows[places[:, None], trained] = totals.neg_().to(rows.dtype)
                    progress(len(numbers))
        return rows


def _pieces(batches: Sequence[NDArray[np.int64]], chunk: int) -> Iterator[_Piece]:
    """All batches, one after the other, in pieces of `chunk` records: which batches are in it, and their parts."""
    ends = np.cumsum([len(batch) for batch in batches])
    for start in range(0, int(ends[-1]), chunk):
        stop = min(start + chunk, int(ends[-1]))
        first, last = (int(np.searchsorted(ends, place, side="right")) for place in (start, stop - 1))
        parts = []
        for number in range(first, last + 1):
            before = int(ends[number]) - len(batches[number])
            parts.append(batches[number][max(start - before, 0) : stop - before])
        yield range(first, last + 1), parts
