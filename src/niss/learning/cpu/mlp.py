"""Many clients of an MLP at once: batched products, a backward pass by hand, updates in place.

For layer l of every client, with a_0 the inputs and z_l = a_{l-1} W_l^T + b_l, a_l = relu(z_l):

    delta_L = (softmax(z_L) - onehot(y)) * weight,   delta_{l-1} = (delta_l W_l) * [a_{l-1} > 0],
    grad W_l = delta_l^T a_{l-1},                    grad b_l = sum over the batch of delta_l,

`weight` being one over the size of the batch. Clients never meet in any of these: one that diverges
leaves the others alone. Gradients are never formed: each product is added to the weights at once
(`steps.step_by_product`), and all activations of a step are written into the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from niss.learning.clipped import ClippedStep, clipped_mlp_step
from niss.learning.cohort import Job, Work
from niss.learning.cpu.steps import GroupLoop, Schedule, make_schedule, step_by_product, velocity_like
from niss.learning.flat import FlatLayout
from niss.learning.local import LocalTraining

_relu_backward = torch.ops.aten.threshold_backward.grad_input


@dataclass(frozen=True)
class _Layer:
    """One linear layer of every client in the group, and what flows through it."""

    weights: Tensor  # [clients, out, in]
    biases: Tensor  # [clients, 1, out]
    weights_velocity: Tensor | None
    biases_velocity: Tensor | None
    output: Tensor  # [clients, batch, out]
    delta: Tensor  # [clients, batch, out]

    def first(self, clients: int) -> _Layer:
        """Views of the first so many clients."""
        return _Layer(
            *(None if part is None else part[:clients] for part in vars(self).values())  # type: ignore[arg-type]
        )


class MlpGroups(GroupLoop):
    """`Mlp` as built: local training in groups, the clipped step client by client by ghost norms."""

    @property
    def name(self) -> str:
        return f"MLP groups of up to {self.largest_group}"

    @torch.no_grad()
    def perform(self, work: Work, jobs: Sequence[Job], out: Tensor) -> None:
        layout, labels = self.problem.layout, self.problem.labels
        inputs = self.problem.inputs.flatten(1)
        if isinstance(work, ClippedStep):
            for row, job in zip(out, jobs, strict=True):
                row.copy_(clipped_mlp_step(layout, inputs, labels, job.start.detach(), job.samples, work))
            return
        schedule = make_schedule(jobs, work, layout.dtype)
        everyone = _layers(layout, jobs, schedule.rows.shape[2], work)
        _run(everyone, schedule, inputs, labels, work)
        for client, job in enumerate(jobs):
            parts = list(layout.split(out[client]).values())
            for weights, biases, layer in zip(parts[::2], parts[1::2], everyone, strict=True):
                weights.copy_(layer.weights[client])
                biases.copy_(layer.biases[client, 0])
            out[client].sub_(job.start)


def _layers(layout: FlatLayout, jobs: Sequence[Job], width: int, settings: LocalTraining) -> list[_Layer]:
    """The layers of all clients at their starts; the layout is weight, bias, weight, bias and so on."""
    parts = [list(layout.split(job.start.detach()).values()) for job in jobs]
    layers = []
    for number in range(0, len(layout.names), 2):
        weights = torch.stack([own[number] for own in parts])
        biases = torch.stack([own[number + 1] for own in parts]).unsqueeze(1)
        velocities = velocity_like(weights, settings), velocity_like(biases, settings)
        output, delta = (weights.new_empty(len(jobs), width, weights.shape[1]) for _ in range(2))
        layers.append(_Layer(weights, biases, *velocities, output, delta))
    return layers


def _run(
    everyone: list[_Layer], schedule: Schedule, inputs: Tensor, labels: Tensor, settings: LocalTraining
) -> None:
    """All steps of the schedule, in place; at each step the clients that still have a batch, and no other.

    everyone        the layers of all clients of the group, changed in place
    inputs, labels  the data of all clients, [all, features] and [all]
    """
    targets = labels[schedule.rows].unsqueeze(-1)
    minus_one = everyone[-1].delta.new_full((1, 1, 1), -1.0)
    clients, width = schedule.rows.shape[1:]
    batch = inputs.new_empty(clients, width, inputs.shape[1])
    ones = everyone[0].biases.new_ones(clients, 1, width)
    working = 0
    for number, now_working in enumerate(schedule.working):
        if now_working != working:
            working = now_working
            layers = [layer.first(working) for layer in everyone]
            images = batch[:working]
            rows_of_batch = images.view(-1, inputs.shape[1])
            ones_now, minus_now = ones[:working], minus_one.expand(working, width, 1)
        rows = schedule.rows[number, :working]
        torch.index_select(inputs, 0, rows.view(-1), out=rows_of_batch)
        _forward(layers, images)
        last = layers[-1]
        torch.softmax(last.output, 2, out=last.delta)
        last.delta.scatter_add_(2, targets[number, :working], minus_now)
        last.delta.mul_(schedule.weights[number, :working])
        _backward(layers, images, ones_now, settings)


def _forward(layers: list[_Layer], images: Tensor) -> None:
    """Every layer's `output` from `images` [clients, batch, features]: behind its ReLU, but for the last one."""
    below = images
    for layer in layers[:-1]:
        torch.baddbmm(layer.biases, below, layer.weights.transpose(1, 2), out=layer.output)
        below = functional.relu_(layer.output)
    last = layers[-1]
    torch.baddbmm(last.biases, below, last.weights.transpose(1, 2), out=last.output)


def _backward(layers: list[_Layer], images: Tensor, ones: Tensor, settings: LocalTraining) -> None:
    """From the delta of the last layer: every layer steps as soon as the one below has its delta."""
    for layer, below in zip(reversed(layers[1:]), reversed(layers[:-1]), strict=True):
        torch.bmm(layer.delta, layer.weights, out=below.delta)
        _relu_backward(below.delta, below.output, 0, grad_input=below.delta)
        _step(layer, below.output, ones, settings)
    _step(layers[0], images, ones, settings)


def _step(layer: _Layer, below: Tensor, ones: Tensor, settings: LocalTraining) -> None:
    """One layer moves; the sum over the batch in its bias is a product with `ones`."""
    step_by_product(layer.weights, layer.weights_velocity, layer.delta.transpose(1, 2), below, settings)
    step_by_product(layer.biases, layer.biases_velocity, ones, layer.delta, settings)
