"""Refusals of the cohort: each names the job that cannot be used, before any work starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niss.errors import ConfigError
from niss.learning.cohort_engines import Job
from niss.learning.flat import FlatLayout


def require_jobs(jobs: Sequence[Job], layout: FlatLayout, available: int) -> None:
    """Refuse starts that are no vector of the model, and samples that are no rows of the data."""
    seen: set[int] = set()
    for number, job in enumerate(jobs):
        if id(job.start) not in seen:
            seen.add(id(job.start))
            _require_start(job, layout, f"jobs[{number}].start")
        _require_rows(job, available, f"jobs[{number}].samples")


def checked_out(
    out: NDArray[np.floating[Any]] | None, rows: int, layout: FlatLayout
) -> NDArray[np.floating[Any]]:
    """`out` if it can take the updates; a new array where none is given."""
    dtype = torch.empty(0, dtype=layout.dtype).numpy().dtype
    shape = (rows, layout.size)
    if out is None:
        return np.empty(shape, dtype=dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.writeable:
        raise ConfigError(
            f"must be a writable {dtype} array of shape {shape}, not {out.dtype} of {out.shape}",
            field="out",
            hint="leave it out to get a new array",
        )
    return out


def _require_start(job: Job, layout: FlatLayout, field: str) -> None:
    start = job.start
    if start.ndim != 1 or start.shape[0] != layout.size:
        raise ConfigError(
            f"must be 1-D of length {layout.size}, not of shape {tuple(start.shape)}",
            field=field,
            hint="layout.flatten(module) makes such a vector",
        )
    if start.dtype != layout.dtype or start.device.type != "cpu":
        raise ConfigError(
            f"must be {layout.dtype} on the CPU, not {start.dtype} on {start.device}",
            field=field,
            hint=f"start.to('cpu', {layout.dtype})",
        )


def _require_rows(job: Job, available: int, field: str) -> None:
    samples = job.samples
    if samples.ndim != 1 or samples.dtype != torch.int64:
        raise ConfigError(
            f"must be a 1-D int64 tensor of row numbers, not {samples.dtype} of shape {tuple(samples.shape)}",
            field=field,
        )
    if not len(samples):
        raise ConfigError("no samples", field=field, hint="leave clients without data out of the round")
    lowest, highest = samples.aminmax()
    if int(lowest) < 0 or int(highest) >= available:
        wrong = int(lowest) if int(lowest) < 0 else int(highest)
        raise ConfigError(
            f"row {wrong} does not exist, the data have rows 0 to {available - 1}",
            field=field,
            hint="samples are row numbers into the inputs the cohort was made with",
        )
