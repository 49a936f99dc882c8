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

from niss.learning.clipped import ClippedStep, clipped_gradient_steps
from niss.learning.cohort import Job, Problem, Work
from niss.learning.cpu.formulations import GroupLoop, group_batches
from niss.learning.local import (
    FlatLayout,
    in_mode,
    mean_loss,
    require_logits,
    sample_losses,
    sgd_step,
    trainable_parameters,
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

# Gradients of samples that are computed at once. For 20 samples a client it gains 1.3 to 3.6 times; in 64 MiB it loses.
CHUNK_BYTES = 8 * 2**20
_SMALLEST_CHUNK, _LARGEST_CHUNK = 24, 256

_Parameters = dict[str, Tensor]
_Gradients = Callable[[_Parameters, _Parameters, Tensor, Tensor, Tensor], _Parameters]


def why_not(problem: Problem) -> str | None:
    """None where stacked clients equal the plain loop; otherwise one reason, in words.

    Layers and buffers are looked at, and the gradients of two clients compared with autograd's on a copy.
    """
    module = problem.module
    for part in module.modules():
        if not list(part.children()) and type(part) not in _WORTHWHILE:
            return f"{type(part).__name__} gains nothing from stacking on a CPU, or cannot be stacked"
    if len(list(module.modules())) < len(list(module.named_modules(remove_duplicate=False))):
        # functional_call then leaves its tensors behind in the module (torch 2.13).
        return "a layer has two names"
    trial = replace(problem, module=copy.deepcopy(module))
    try:
        same = _same_gradients(trial)
    except Exception as error:  # whatever a user's forward raises under vmap
        return f"its forward cannot be stacked ({type(error).__name__})"
    pairs = zip(module.buffers(), trial.module.buffers(), strict=True)
    if not all(torch.equal(before, after) for before, after in pairs):
        return "its forward pass changes its buffers"
    return None if same else "stacking changes its gradients"


class VmapGroups(GroupLoop):
    """Local training of a group as one computation, and its clipped steps; the jobs of a group share their start."""

    @property
    def name(self) -> str:
        return f"vmap groups of {WORTH_STACKING} to {self.largest_group} where that gains, else a plain loop"

    def gains(self, work: Work, jobs: Sequence[Job]) -> bool:
        """For local training: at least `WORTH_STACKING` clients at the average step, and small batches."""
        if isinstance(work, ClippedStep):
            return True
        steps = [-(-len(job.samples) // work.batch_size) for job in jobs]
        width = min(work.batch_size, len(jobs[0].samples))
        return sum(steps) >= WORTH_STACKING * steps[0] and self._is_light(width)

    def _is_light(self, width: int) -> bool:
        """Whether a call of torch has little to do in a step of `width` samples."""
        if width not in self._counted:
            self._counted[width] = _has_light_calls(self.problem, width)
        return self._counted[width]

    @cached_property
    def _counted(self) -> dict[int, bool]:
        return {}

    @cached_property
    def _is_long(self) -> bool:
        return _is_long(self.problem)

    def perform(self, work: Work, jobs: Sequence[Job], out: Tensor) -> None:
        if isinstance(work, ClippedStep):
            self._clip(work, jobs, out)
            return
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
            gradients = _stacked_gradients(self.problem, long=self._is_long)
            for number, working in enumerate(schedule.working):
                rows = schedule.rows[number, :working]
                weights = {name: part[:working] for name, part in everyone.items()}
                share = schedule.weights[number, :working, :, 0]
                slopes = gradients(weights, common, inputs[rows], labels[rows], share)
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

    def _clip(self, work: ClippedStep, jobs: Sequence[Job], out: Tensor) -> None:
        """All samples of the group in chunks whose gradients stay in the cache; one client at a time where that is
        too few to gain."""
        layout = self.problem.layout
        chunk = CHUNK_BYTES // (layout.size * layout.dtype.itemsize)
        if chunk < _SMALLEST_CHUNK:
            super().perform(work, jobs, out)
            return
        start, samples, chunk = jobs[0].start, [job.samples for job in jobs], min(chunk, _LARGEST_CHUNK)
        out.copy_(clipped_gradient_steps(self.problem, start, samples, work, chunk=chunk))


def _has_light_calls(problem: Problem, width: int) -> bool:
    """By the products of a forward pass and what it keeps for the way back, for each tensor that it keeps."""
    with FlopCounterMode(display=False) as products:
        kept = _kept(problem, width)
    operations = products.get_total_flops()
    return operations <= MOST_OPERATIONS * len(kept) and sum(kept) <= MOST_KEPT_BYTES * len(kept)


def _is_long(problem: Problem) -> bool:
    return len(_kept(problem, 1)) >= LONG


def _kept(problem: Problem, width: int) -> list[int]:
    """The bytes of each tensor that a forward pass of `width` samples keeps for the way back; 0 for parameters."""
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
    ):
        problem.module(problem.inputs[rows])
    return kept


def _stack(layout: FlatLayout, starts: Sequence[Tensor]) -> tuple[_Parameters, _Parameters]:
    """Every trained parameter of all clients, [clients, ...] by name; and what is not trained, once for them all."""
    parts = [layout.split(start.detach()) for start in starts]
    trained = [name for name, flag in zip(layout.names, layout.trainable, strict=True) if flag]
    everyone = {name: torch.stack([own[name] for own in parts]) for name in trained}
    return everyone, {name: part for name, part in parts[0].items() if name not in everyone}


def _stacked_gradients(problem: Problem, *, long: bool) -> _Gradients:
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
    if not long:
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


def _same_gradients(problem: Problem) -> bool:
    """Two clients against autograd: on a batch of three, and on one of two, padded, so that mixing shows."""
    module, layout, inputs, labels = problem.module, problem.layout, problem.inputs, problem.labels
    last = len(labels) - 1
    rows = torch.tensor([[last, 0, last // 2], [0, last, 0]])
    share = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]], dtype=layout.dtype)
    start = layout.flatten(module)
    with in_mode(module, training=True), torch.enable_grad():
        gradients = _stacked_gradients(problem, long=_is_long(problem))
        stacked = gradients(*_stack(layout, [start, start]), inputs[rows], labels[rows], share)
        parameters = trainable_parameters(module)
        for client, count in enumerate((3, 2)):
            own = rows[client, :count]
            loss = mean_loss(module(inputs[own]), labels[own])
            expected = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for name, slope in zip(parameters, expected, strict=True):
                if slope is None or not torch.allclose(stacked[name][client], slope, rtol=1e-3, atol=1e-6):
                    return False
    return True
