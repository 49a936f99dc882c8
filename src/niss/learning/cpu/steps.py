"""The plain loop over a group of clients, and what the faster ways share: their schedule and their SGD step.

The step is torch.optim.SGD's, as in `local.train_client`: g <- g + weight_decay w; v <- momentum v + g; w <- w -
learning_rate v. It is written twice, for a gradient that is there and for one that is a product of two matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from niss.learning.cohort import BatchTable, Job, Problem, Work
from niss.learning.local import LocalTraining

# Weights of one group: what stays in the cache of a core. Half or twice as much costs a few percent.
GROUP_BYTES = 6 * 2**20
# Clients of one group at most, however small the model: more gain nothing, and leave workers without a group.
MOST_CLIENTS = 16


@dataclass(frozen=True)
class PlainLoop:
    """A formulation of the work of a group, in one process: here the reference, one client at a time.

    The others inherit from it, and fall back on it for work they have no better way for. `reason` is why the
    module is trained by no faster one.
    """

    problem: Problem
    reason: str = ""

    @property
    def name(self) -> str:
        """The formulation in a few words."""
        return f"plain loop, one client at a time, because {self.reason}"

    @property
    def largest_group(self) -> int:
        """How many clients to train at once, at most."""
        return 1

    def gains(self, work: Work, jobs: Sequence[Job]) -> bool:  # noqa: ARG002
        """Whether these clients, in falling order of their samples, are trained faster together than one by one.

        By what does not change between a run and its resumption, never by a clock: the last bits depend on it.
        """
        return True

    def perform(self, work: Work, jobs: Sequence[Job], out: Tensor) -> None:
        """Row g of `out` becomes the update of job g; jobs come in falling order of their samples."""
        for row, job in zip(out, jobs, strict=True):
            row.copy_(self.problem.update_of(job, work))


class GroupLoop(PlainLoop):
    """A formulation that gains from many clients at once, as long as their weights fit into the cache."""

    @property
    def largest_group(self) -> int:
        layout = self.problem.layout
        return min(MOST_CLIENTS, max(1, GROUP_BYTES // (layout.size * layout.dtype.itemsize)))


@dataclass(frozen=True)
class Schedule:
    """The steps of a group: a `BatchTable` as tensors.

    Nobody is padded in time: clients stand in falling order of their number of steps, so that those still at
    work at a step are the first `working[step]`. What fills a short batch has weight zero, and repeats a sample
    of the batch: then whatever a zero multiplies is finite if the batch itself is.
    """

    # [steps, clients, width] int64: row numbers of the data.
    rows: Tensor
    # [steps, clients, width, 1]: what each sample counts in the mean of its batch, 1 / size or 0.
    weights: Tensor
    # How many clients still have a batch, step by step.
    working: tuple[int, ...]


def make_schedule(jobs: Sequence[Job], settings: LocalTraining, dtype: torch.dtype) -> Schedule:
    """The schedule of jobs given in falling order of size; `dtype` is that of the weights."""
    table = BatchTable(jobs, settings)
    for _ in table.fill():
        pass
    sizes = torch.from_numpy(table.sizes)[:, :, None]
    real = torch.arange(table.width) < sizes
    weights = real.to(dtype) / sizes.clamp(min=1).to(dtype)
    working = tuple((table.sizes > 0).sum(axis=1).tolist())
    return Schedule(torch.from_numpy(table.rows).long(), weights[..., None], working)


def velocity_like(weights: Tensor, settings: LocalTraining) -> Tensor | None:
    """Zeros, from which `v <- momentum * v + g` gives `v = g` at first; None without momentum."""
    return weights.new_zeros(weights.shape) if settings.momentum else None


def step(weights: Tensor, velocity: Tensor | None, gradient: Tensor, settings: LocalTraining) -> None:
    """`weights` takes one step of `train_client`'s SGD along `gradient`, in place."""
    if settings.weight_decay:
        # Not in place: autograd may hand out one tensor for two parameters.
        gradient = gradient.add(weights, alpha=settings.weight_decay)
    if velocity is not None:
        gradient = velocity.mul_(settings.momentum).add_(gradient)
    weights.add_(gradient, alpha=-settings.learning_rate)


def step_by_product(
    weights: Tensor, velocity: Tensor | None, left: Tensor, right: Tensor, settings: LocalTraining
) -> None:
    """The same for the gradient `left @ right` (of one client, or of many stacked), which is never formed:

    w <- (1 - learning_rate * weight_decay) w - learning_rate * left @ right    without momentum.
    """
    if velocity is None:
        decay = 1.0 - settings.learning_rate * settings.weight_decay
        _add_product(weights)(left, right, beta=decay, alpha=-settings.learning_rate)
        return
    _add_product(velocity)(left, right, beta=settings.momentum, alpha=1.0)
    if settings.weight_decay:
        velocity.add_(weights, alpha=settings.weight_decay)
    weights.add_(velocity, alpha=-settings.learning_rate)


def _add_product(total: Tensor) -> Callable[..., Tensor]:
    """total <- beta total + alpha left @ right, of one client or of many stacked."""
    return total.baddbmm_ if total.ndim == 3 else total.addmm_
