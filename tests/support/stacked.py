"""Clients of one problem, and their updates compared with the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from niss.learning import Job
from niss.learning.cohort import Problem
from niss.learning.local import LocalTraining
from niss.randomness import SimStream


def make_jobs(task: Problem, sizes: Sequence[int], starts: Sequence[Tensor] = ()) -> list[Job]:
    """A client for each of these numbers of samples, from these starts in turn, or from the weights of the module."""
    starts = starts or [task.layout.flatten(task.module)]
    rows = torch.arange(len(task.labels)).split([*sizes, len(task.labels) - sum(sizes)])
    return [
        Job(starts[number % len(starts)], rows[number], SimStream(number)) for number in range(len(sizes))
    ]


def two_starts(task: Problem) -> list[Tensor]:
    """The weights of the module, and others in what is trained."""
    start = task.layout.flatten(task.module)
    return [start, torch.where(task.layout.trainable_mask(), 1.5 * start, start)]


def assert_as_the_reference(
    task: Problem, jobs: Sequence[Job], work: LocalTraining, rows: Iterable[Tensor]
) -> None:
    """Equal up to rounding in float64, and not because nothing was learned."""
    for found, job in zip(rows, jobs, strict=True):
        expected = task.update_of(job, work)
        assert float(expected.abs().max()) > 1e-3, "nothing was learned, so nothing is compared"
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
