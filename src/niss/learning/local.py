"""What a client does in a round: some epochs of minibatch SGD from the global model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import LongTensor, Tensor, nn
from torch.nn import functional

from niss.errors import ConfigError
from niss.learning.checks import require_logits, require_real, require_samples, require_whole
from niss.learning.flat import FlatLayout
from niss.learning.scratch import batch_statistics_layers, in_mode, kept_buffers
from niss.learning.seeding import seeded_torch
from niss.randomness import SimStream


@dataclass(frozen=True)
class LocalTraining:
    """Local SGD: `epochs` passes in batches of `batch_size`; the update rule is torch.optim.SGD's."""

    epochs: int = 5
    batch_size: int = 10
    learning_rate: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require_whole(self.epochs, field="epochs", at_least=1)
        require_whole(self.batch_size, field="batch_size", at_least=1)
        require_real(self.learning_rate, field="learning_rate", low_allowed=False)
        require_real(self.momentum, field="momentum", high=1.0)
        require_real(self.weight_decay, field="weight_decay")


def batch_order(count: int, settings: LocalTraining, stream: SimStream) -> Iterator[LongTensor]:
    """The sample numbers of each batch, epoch after epoch: the one source of order for every engine.

    Epoch e runs through `stream.child("epoch", e).generator().permutation(count)` in pieces of
    `batch_size`; the last piece of an epoch may be short.
    """
    require_whole(count, field="count", at_least=1)
    return _batches(count, settings, stream)


def _batches(count: int, settings: LocalTraining, stream: SimStream) -> Iterator[LongTensor]:
    for epoch in range(settings.epochs):
        permutation = stream.child("epoch", epoch).generator().permutation(count)
        order = torch.from_numpy(permutation.astype(np.int64, copy=False))
        for batch in torch.split(order, settings.batch_size):
            yield cast(LongTensor, batch)


def train_client(
    module: nn.Module,
    layout: FlatLayout,
    start: Tensor,
    images: Tensor,
    labels: Tensor,
    settings: LocalTraining,
    *,
    stream: SimStream,
) -> Tensor:
    """Train from `start` on one client's samples; returns the update w_end - start as a new vector.

    Each step takes the gradient g of the mean cross-entropy over its batch, in train() mode, and
    moves the trainable parameters w as torch.optim.SGD does:

        g <- g + weight_decay * w;    v <- momentum * v + g  (v = g at first);    w <- w - learning_rate * v

    The result depends on the arguments alone: batches come from `batch_order(count, settings, stream)`,
    draws inside the module (Dropout) from `stream.child("torch")`, and torch's global generator is left
    undisturbed. The module is scratch space: its vector is overwritten, its other buffers and its mode
    are restored. Floating buffers moved by the forward pass (BatchNorm) are part of the update; frozen
    parameters have update zero. A diverged run returns non-finite entries; the caller decides.
    """
    highest_label = require_samples(images, labels)
    layout.load(module, start)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(
            "has no trainable parameters", field="model", hint="set requires_grad on what shall be trained"
        )
    velocities: list[Tensor | None] = [None] * len(parameters)
    with (
        kept_buffers(module, layout),
        in_mode(module, training=True),
        seeded_torch(stream.child("torch")),
        torch.enable_grad(),
    ):
        for batch in batch_order(labels.shape[0], settings, stream):
            logits = require_logits(
                _forward(module, images[batch]), rows=batch.shape[0], highest_label=highest_label
            )
            loss = functional.cross_entropy(logits, labels[batch])
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            _sgd_step(parameters, gradients, velocities, settings)
    return layout.flatten(module).sub_(start.detach())


def _forward(module: nn.Module, batch: Tensor) -> object:
    try:
        return module(batch)
    except ValueError as problem:
        # BatchNorm cannot train on a single value per channel, as a short last batch of one can be.
        if batch.shape[0] == 1 and (layers := batch_statistics_layers(module)):
            raise ConfigError(
                f"leaves a batch of one sample, which {layers[0]!r} cannot train on",
                field="batch_size",
                hint="use another batch size, or GroupNorm in place of BatchNorm",
            ) from problem
        raise


@torch.no_grad()
def _sgd_step(
    parameters: list[nn.Parameter],
    gradients: tuple[Tensor | None, ...],
    velocities: list[Tensor | None],
    settings: LocalTraining,
) -> None:
    """One step of torch.optim.SGD, in place; a parameter the loss does not reach is left alone."""
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient is None:
            continue
        direction = gradient
        if settings.weight_decay:
            direction = direction.add(parameter, alpha=settings.weight_decay)
        if settings.momentum:
            velocity = velocities[index]
            # The clone: autograd may hand out one tensor for two parameters, and v is changed in place.
            direction = (
                direction.clone() if velocity is None else velocity.mul_(settings.momentum).add_(direction)
            )
            velocities[index] = direction
        parameter.add_(direction, alpha=-settings.learning_rate)
