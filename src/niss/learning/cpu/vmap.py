"""Many clients of a user's own module at once, by `torch.func`: where that works and is worth it on a CPU.

The weights of all clients are stacked, [clients, ...], and the gradient of one client's loss is vmapped over them.
It is worth it for modules of small products, where the price of a call exceeds that of its arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils.flop_counter import FlopCounterMode

from niss.learning.cohort import Job, Problem, why_not_stacked
from niss.learning.cpu.formulations import GroupLoop, group_batches
from niss.learning.local import (
    FlatLayout,
    LocalTraining,
    in_mode,
    require_logits,
    sample_losses,
    sgd_step,
    velocity_like,
)
from niss.learning.stackable import as_function

# Layers of few and small products, where one call for many clients saves time. Convolutions are faster one client at
# a time, and so is torch's LSTM, which has a kernel of its own (stacked: 0.4 to 1.2 times its speed); Dropout and
# BatchNorm draw or keep something that stacked clients would share.
_WORTHWHILE = (
    nn.Linear, nn.Bilinear, nn.Flatten, nn.Unflatten, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.Softplus,
    nn.GroupNorm, nn.Embedding, nn.GRU, nn.RNN, nn.modules.linear.NonDynamicallyQuantizableLinear,
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.ReLU6,
)  # fmt: skip

# vmap has a price of its own: at a step 8 clients gain 1.2 to 2.2 times on the plain loop, 4 hardly, 2 lose a fifth.
WORTH_STACKING = 6
# Where a call of torch has more arithmetic than this, or keeps more, its price matters no longer, and what is stacked
# leaves the cache. Measured: GRU and LSTM gain up to 0.34 million, and lose with 16 clients above; factorisation gains
# 1.45 times with batches of 20 and loses a tenth with 64.
MOST_OPERATIONS = 350_000
MOST_KEPT_BYTES = 128 * 2**10
# Tensors that a forward pass keeps, from which on it is long: then the slopes of all clients are taken at once by plain
# autograd, whose calls cost less (GRU 1.9 times as fast as the loop, by torch.func 1.2). In a short pass torch.func has
# the better layouts (factorisation in batches of 10: 1.7, by plain autograd 1.2).
LONG = 200

# Of the trial of stacked clients: float32 stays far below it.
_TOLERANCE = 1e-3

_Parameters = dict[str, Tensor]
_Gradients = Callable[[_Parameters, _Parameters, Tensor, Tensor, Tensor], _Parameters]


def why_not(problem: Problem) -> str | None:
    """None where stacking clients gains and equals the plain loop; otherwise one reason, in words."""
    for part in problem.module.modules():
        if not list(part.children()) and type(part) not in _WORTHWHILE:
            return f"{type(part).__name__} gains nothing from stacking on a CPU, or cannot be stacked"
    trial = VmapGroups(replace(problem, module=copy.deepcopy(problem.module)))

    def train(jobs: Sequence[Job], settings: LocalTraining) -> Tensor:
        updates = torch.empty((len(jobs), problem.layout.size), dtype=problem.layout.dtype)
        trial.perform(settings, jobs, updates)
        return updates

    return why_not_stacked(trial.problem, train, tolerance=_TOLERANCE)


class VmapGroups(GroupLoop):
    """Local training of a group as one computation; the jobs of a group share their start."""

    @property
    def name(self) -> str:
        return f"vmap groups of {WORTH_STACKING} to {self.largest_group} where that gains, else a plain loop"

    def gains(self, work: LocalTraining, jobs: Sequence[Job]) -> bool:
        """For local training: at least `WORTH_STACKING` clients at the average step, and calls with little to do."""
        steps = [-(-len(job.samples) // work.batch_size) for job in jobs]
        if sum(steps) < WORTH_STACKING * steps[0]:
            return False
        width = min(work.batch_size, len(jobs[0].samples))
        if width not in self._passes:
            self._passes[width] = _forward_pass(self.problem, width)
        calls, kept, operations = self._passes[width]
        return operations <= MOST_OPERATIONS * calls and kept <= MOST_KEPT_BYTES * calls

    @cached_property
    def _passes(self) -> dict[int, tuple[int, int, int]]:
        return {}

    @cached_property
    def _gradients(self) -> _Gradients:
        return _stacked_gradients(self.problem)

    def perform(self, work: LocalTraining, jobs: Sequence[Job], out: Tensor) -> None:
        if len(jobs) == 1:
            super().perform(work, jobs, out)
            return
        module, layout = self.problem.module, self.problem.layout
        inputs, labels = self.problem.inputs, self.problem.labels
        schedule = group_batches(jobs, work, layout.dtype)
        everyone, common = _stack(layout, [job.start for job in jobs])
        velocities = {name: velocity_like(part, work) for name, part in everyone.items()}
        # Without seed or restored buffers: `why_not` let in no layer that draws or remembers anything.
        with in_mode(module, training=True):
            for number, working in enumerate(schedule.working):
                rows = schedule.rows[number, :working]
                weights = {name: part[:working] for name, part in everyone.items()}
                share = schedule.weights[number, :working, :, 0]
                slopes = self._gradients(weights, common, inputs[rows], labels[rows], share)
                with torch.no_grad():
                    for name, slope in slopes.items():
                        velocity = velocities[name]
                        sgd_step(weights[name], None if velocity is None else velocity[:working], slope, work)
        with torch.no_grad():
            for client, job in enumerate(jobs):
                out[client] = job.start
                for name, part in layout.split(out[client]).items():
                    if name in everyone:
                        part.copy_(everyone[name][client])
                out[client].sub_(job.start)


def _forward_pass(problem: Problem, width: int) -> tuple[int, int, int]:
    """Of a forward pass of `width` samples: how many tensors it keeps for the way back, their bytes without those of
    parameters, and the operations of its products."""
    own = {part.untyped_storage().data_ptr() for part in problem.module.parameters()}
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(0 if tensor.untyped_storage().data_ptr() in own else tensor.nbytes)
        return tensor

    rows = torch.arange(width) % len(problem.labels)
    with (
        in_mode(problem.module, training=True),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        FlopCounterMode(display=False) as products,
    ):
        problem.module(problem.inputs[rows])
    return len(kept), sum(kept), products.get_total_flops()


def _stack(layout: FlatLayout, starts: Sequence[Tensor]) -> tuple[_Parameters, _Parameters]:
    """Every trained parameter of all clients, [clients, ...] by name; and what is not trained, once for them all."""
    parts = [layout.split(start.detach()) for start in starts]
    trained = [name for name, flag in zip(layout.names, layout.trainable, strict=True) if flag]
    everyone = {name: torch.stack([own[name] for own in parts]) for name in trained}
    return everyone, {name: part for name, part in parts[0].items() if name not in everyone}


def _stacked_gradients(problem: Problem) -> _Gradients:
    """Gradients of each client's loss, sum_i share_i * cross-entropy_i over its batch, with all clients stacked."""
    forward, highest_label = as_function(problem.module), int(problem.labels.max())

    def batch_loss(
        weights: _Parameters, common: _Parameters, images: Tensor, labels: Tensor, share: Tensor
    ) -> Tensor:
        logits = require_logits(
            forward(weights | common, images), shape=labels.shape, highest_label=highest_label
        )
        return (sample_losses(logits, labels) * share).sum()

    places = (0, None, 0, 0, 0)
    if _forward_pass(problem, 1)[0] < LONG:
        return vmap(grad(batch_loss), in_dims=places)
    losses = vmap(batch_loss, in_dims=places)

    def gradients(weights: _Parameters, *rest: Any) -> _Parameters:
        # No client's loss depends on another's weights: the slopes of the sum are those of each.
        leaves = [part.detach().requires_grad_() for part in weights.values()]
        with torch.enable_grad():
            total = losses(dict(zip(weights, leaves, strict=True)), *rest).sum()
        slopes = torch.autograd.grad(total, leaves, materialize_grads=True)
        return dict(zip(weights, slopes, strict=True))

    return gradients
