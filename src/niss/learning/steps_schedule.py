"""Which samples a group of clients sees at each step, when all of them step together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from niss.learning.local import LocalTraining, batch_order
from niss.randomness import SimStream


@dataclass(frozen=True)
class Schedule:
    """The steps of a group: client g takes `batch_order` of its own samples, one batch a step.

    Nobody is padded in time: clients stand in falling order of their number of steps, so that those
    still at work at a step are the first `working[step]`. A batch shorter than `width` repeats its own
    first sample with weight zero: then whatever a zero multiplies is finite if the batch itself is.
    """

    rows: Tensor
    """[steps, clients, width] int64: row numbers of the data."""
    weights: Tensor
    """[steps, clients, width, 1]: what each sample counts in the mean of its batch, 1 / size or 0."""
    working: tuple[int, ...]


def steps_of(count: int, settings: LocalTraining) -> int:
    """How many SGD steps a client with `count` samples takes."""
    return settings.epochs * -(-count // settings.batch_size)


def make_schedule(
    samples: Sequence[Tensor], streams: Sequence[SimStream], settings: LocalTraining, dtype: torch.dtype
) -> Schedule:
    """The schedule of clients given in falling order of size."""
    counts = [len(own) for own in samples]
    steps = [steps_of(count, settings) for count in counts]
    width = min(settings.batch_size, max(counts))
    rows = torch.zeros(max(steps), len(counts), width, dtype=torch.int64)
    weights = torch.zeros(max(steps), len(counts), width, 1, dtype=dtype)
    for client, (own, stream) in enumerate(zip(samples, streams, strict=True)):
        batches = steps[client] // settings.epochs
        whole_epochs = replace(settings, batch_size=counts[client])  # the order is the same, the pieces fewer
        order = own[torch.stack(list(batch_order(counts[client], whole_epochs, stream)))]
        last = order[:, (batches - 1) * width]
        padded = last[:, None].repeat(1, batches * width)
        padded[:, : counts[client]] = order
        sizes = torch.full((batches,), width)
        sizes[-1] = counts[client] - (batches - 1) * width
        real = torch.arange(width) < sizes[:, None]
        weight = real.to(dtype) / sizes[:, None].to(dtype)
        rows[: steps[client], client] = padded.view(-1, width)
        weights[: steps[client], client, :, 0] = weight.repeat(settings.epochs, 1)
    working = tuple(sum(own > number for own in steps) for number in range(max(steps)))
    return Schedule(rows, weights, working)
