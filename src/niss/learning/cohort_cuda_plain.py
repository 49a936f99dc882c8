"""The stacked step in plain torch: for float64, for machines without Triton, and for modules of the user's.

All clients are one computation: weights [clients, ...], inputs [clients, batch, ...]. The sum of the clients'
losses is differentiated, which gives each client its own gradient; a diverged client stays alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from niss.learning.cohort_cuda_table import DeviceTable
from niss.learning.flat import FlatLayout
from niss.learning.local import LocalTraining
from niss.learning.models import Mlp

StackedForward = Callable[[dict[str, Tensor], Tensor], Tensor]
"""Weights by name, each [clients, ...], and inputs [clients, batch, ...] to logits [clients, batch, classes]."""


class PlainSteps:
    """SGD steps of many clients, one call of `enqueue` each; fit for capture in a CUDA graph."""

    def __init__(
        self,
        forward: StackedForward,
        layout: FlatLayout,
        inputs: Tensor,
        labels: Tensor,
        table: DeviceTable,
        settings: LocalTraining,
    ) -> None:
        clients = table.sizes.shape[1]
        self._forward = forward
        self._inputs, self._labels, self._table, self._settings = inputs, labels, table, settings
        self._weights = torch.empty((clients, layout.size), dtype=layout.dtype, device=inputs.device)
        self._velocity = torch.zeros_like(self._weights) if settings.momentum else None
        self._views = _stacked_views(layout, self._weights)
        self._velocities = None if self._velocity is None else _stacked_views(layout, self._velocity)
        self._trained = [name for name, flag in zip(layout.names, layout.trainable, strict=True) if flag]
        self._places = torch.arange(table.rows.shape[2], device=inputs.device)

    def load(self, starts: Tensor) -> None:
        """Begin at `starts`, [clients, h] or one vector for all."""
        self._weights.copy_(starts)
        if self._velocity is not None:
            self._velocity.zero_()

    def read(self) -> Tensor:
        """The weights now, [clients, h]; valid until the next `load`."""
        return self._weights

    def finish(self) -> None:
        """Nothing is left over after the last step."""

    def enqueue(self, offset: int) -> None:
        """One step of every client, at `counter + offset`; clients whose batch is empty do not move."""
        step = self._table.counter + offset
        rows = self._table.rows.index_select(0, step)[0].long()
        sizes = self._table.sizes.index_select(0, step)[0]
        counts = self._places < sizes[:, None]
        leaves = {name: view.detach() for name, view in self._views.items()}
        for name in self._trained:
            leaves[name].requires_grad_()
        with torch.enable_grad():
            logits = self._forward(leaves, self._inputs[rows])
            losses = functional.cross_entropy(
                logits.flatten(0, 1), self._labels[rows].flatten(), reduction="none"
            ).view_as(counts)
            scale = losses.new_ones(()) / sizes.clamp(min=1)
            loss = (torch.where(counts, losses, 0.0) * scale[:, None]).sum()
            gradients = torch.autograd.grad(loss, [leaves[name] for name in self._trained], allow_unused=True)
        with torch.no_grad():
            for name, gradient in zip(self._trained, gradients, strict=True):
                if gradient is not None:
                    self._move(name, gradient, sizes > 0)

    def _move(self, name: str, gradient: Tensor, active: Tensor) -> None:
        weight, settings = self._views[name], self._settings
        active = active.view(-1, *(1,) * (weight.ndim - 1))
        direction = gradient
        if settings.weight_decay:
            direction = direction.add(weight, alpha=settings.weight_decay)
        if self._velocities is not None:
            velocity = self._velocities[name]
            direction = direction.add(velocity, alpha=settings.momentum)
            velocity.copy_(torch.where(active, direction, velocity))
        weight.copy_(torch.where(active, weight.sub(direction, alpha=settings.learning_rate), weight))


def _stacked_views(layout: FlatLayout, stack: Tensor) -> dict[str, Tensor]:
    sizes = [torch.Size(shape).numel() for shape in layout.shapes]
    pieces = torch.split(stack, sizes, dim=1)
    return {
        name: piece.view(len(stack), *shape)
        for name, piece, shape in zip(layout.names, pieces, layout.shapes, strict=True)
    }


def stacked_mlp(module: Mlp) -> StackedForward:
    """`Mlp` as batched matrix products."""
    layers = [
        name for name, part in module.named_modules() if isinstance(part, nn.Linear)
    ]  # in the order of the forward pass

    def forward(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        values = inputs.flatten(2)
        for depth, name in enumerate(layers):
            values = _linear(values, weights[f"{name}.weight"], weights[f"{name}.bias"])
            if depth + 1 < len(layers):
                values = values.relu()
        return values

    return forward


def stacked_module(module: nn.Module) -> StackedForward:
    """Any module whose forward pass can be vmapped over its weights; convolutions become grouped ones."""

    def one(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        logits: Tensor = functional_call(module, weights, (inputs,))
        return logits

    return vmap(one)


def _linear(values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias.unsqueeze(1), values, weight.transpose(1, 2))
