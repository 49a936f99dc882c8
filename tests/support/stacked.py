"""Clients of one problem, trained stacked on the processor, to be compared with the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from niss.learning import Job, LocalTraining
from niss.learning.cohort import BatchTable, Problem
from niss.learning.cuda.program import DeviceTable, PlainSteps, stacked_module
from niss.randomness import SimStream


def make_jobs(task: Problem, sizes: Sequence[int]) -> list[Job]:
    """A client for each of these numbers of samples, which groups want in falling order; all from one start."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    start = task.layout.flatten(task.module)
    return [
        Job(start, torch.arange(end - size, end), SimStream(number))
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def run_stacked(task: Problem, jobs: Sequence[Job], work: LocalTraining, **options: bool) -> PlainSteps:
    """The steps that a CUDA graph would hold, one by one; `options` are those of `stacked_module`."""
    table = BatchTable(jobs, work)
    resident = DeviceTable(table.steps + 1, len(jobs), table.width, torch.device("cpu"))
    for _ in table.fill():
        pass
    resident.write(table, 0, table.steps)
    steps = PlainSteps(stacked_module(task.module, **options), task, resident, work)
    steps.load(torch.stack([job.start for job in jobs]))
    with torch.no_grad():
        for offset in range(table.steps):
            steps.enqueue(offset)
    return steps


def assert_learned_alike(found: Tensor, expected: Tensor) -> None:
    """Equal up to rounding in float64, and not because nothing was learned."""
    assert float(expected.abs().max()) > 1e-3, "nothing was learned, so nothing is compared"
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
