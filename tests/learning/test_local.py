from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from niss.errors import ConfigError
from niss.learning import (
    FlatLayout,
    LocalTraining,
    batch_order,
    train_client,
)
from niss.randomness import SimStream
from support.small_images import CLASSES, COUNT, STREAM, samples, small_mlp, with_batchnorm


def with_equal_gradients() -> nn.Module:
    """Two biases that are added: autograd returns one and the same tensor as the gradient of both."""

    class TwoBiases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_mlp()
            self.left = nn.Parameter(torch.zeros(23, CLASSES, dtype=torch.float64))
            self.right = nn.Parameter(torch.zeros(23, CLASSES, dtype=torch.float64))

        def forward(self, images: Tensor) -> Tensor:
            both = self.left + self.right
            logits: Tensor = self.inner(images) + both[: images.shape[0]]
            return logits

    return TwoBiases()


def optim_reference(
    module: nn.Module, images: Tensor, labels: Tensor, settings: LocalTraining, stream: SimStream
) -> None:
    """The same training by torch.optim.SGD, with the permutations taken straight from the stream."""
    optimiser = torch.optim.SGD(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    module.train()
    for epoch in range(settings.epochs):
        order = stream.child("epoch", epoch).generator().permutation(len(labels))
        for first in range(0, len(labels), settings.batch_size):
            batch = torch.as_tensor(order[first : first + settings.batch_size])
            optimiser.zero_grad()
            functional.cross_entropy(module(images[batch]), labels[batch]).backward()
            optimiser.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("build", [small_mlp, with_batchnorm, with_equal_gradients])
def test_equals_torch_sgd(build: Callable[[], nn.Module], momentum: float, weight_decay: float) -> None:
    images, labels = samples()
    settings = LocalTraining(
        epochs=3, batch_size=5, learning_rate=0.1, momentum=momentum, weight_decay=weight_decay
    )
    assert COUNT % settings.batch_size not in (0, 1)
    module = build()
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    kept = start.clone()
    update = train_client(module, layout, start, images, labels, settings, stream=STREAM)

    layout.load(module, start)
    optim_reference(module, images, labels, settings, STREAM)
    expected = layout.flatten(module) - start
    assert float(expected.abs().max()) > 1e-2
    assert float((update - expected).abs().max()) <= 1e-12
    assert torch.equal(start, kept)
    assert update.dtype == torch.float64
    assert not update.requires_grad


def test_tied_parameters_train_as_one() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).double()
    module[3].weight = module[1].weight
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    images, labels = samples()
    settings = LocalTraining(epochs=2, batch_size=5, momentum=0.9, weight_decay=0.01)
    update = train_client(module, layout, start, images, labels, settings, stream=STREAM)
    layout.load(module, start)
    optim_reference(module, images, labels, settings, STREAM)
    assert module[3].weight is module[1].weight
    assert float((update - (layout.flatten(module) - start)).abs().max()) <= 1e-12


def test_unreached_parameters_stay_as_in_torch_sgd() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = small_mlp()
            self.spare = nn.Linear(2, 2).double()

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.used(images)
            return logits

    module = Spare()
    layout = FlatLayout.of(module)
    update = train_client(
        module, layout, layout.flatten(module), *samples(), LocalTraining(weight_decay=0.1), stream=STREAM
    )
    pieces = layout.split(update)
    assert not bool(pieces["spare.weight"].any())
    assert bool(pieces["used.layers.1.weight"].any())


def test_frozen_parameters_stay() -> None:
    module = small_mlp()
    frozen = "layers.1.weight"
    module.get_parameter(frozen).requires_grad_(False)
    layout = FlatLayout.of(module)
    update = train_client(
        module,
        layout,
        layout.flatten(module),
        *samples(),
        LocalTraining(weight_decay=0.1, momentum=0.9),
        stream=STREAM,
    )
    moved = {name: bool(piece.any()) for name, piece in layout.split(update).items()}
    assert moved == {name: name != frozen for name in layout.names}
    assert not bool(update[~layout.trainable_mask()].any())


def test_batch_order_is_one_permutation_per_epoch() -> None:
    settings = LocalTraining(epochs=3, batch_size=5)
    batches = list(batch_order(12, settings, STREAM))
    assert [len(batch) for batch in batches] == [5, 5, 2] * 3
    epochs = [torch.cat(batches[first : first + 3]) for first in (0, 3, 6)]
    for number, epoch in enumerate(epochs):
        assert epoch.dtype == torch.int64
        assert epoch.tolist() == STREAM.child("epoch", number).generator().permutation(12).tolist()
    assert not torch.equal(epochs[0], epochs[1])
    with pytest.raises(ConfigError, match="count"):
        batch_order(0, settings, STREAM)
