"""The task: which digit is it? A linear model on small pictures, about what few clients can learn in private."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from niss.data import load_dataset, partition
from niss.randomness import SimStream

METRICS = {"accuracy": (0.0, 1.0)}
"""What clients may report inside their noisy uploads, with its range; server and clients agree on it."""


def make_model() -> nn.Module:
    """28 x 28 pixels averaged to 14 x 14, then one linear layer from zero: 1,970 numbers to learn."""
    linear = nn.Linear(14 * 14, 10)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), linear)


@cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load_dataset("mnist-mini")  # Part of the package: nothing is fetched.
    train, test = (
        torch.from_numpy(images).float() / 255.0 for images in (data.train_images, data.test_images)
    )
    return train, torch.from_numpy(data.train_labels), test, torch.from_numpy(data.test_labels)


def client_data(number: int, clients: int) -> tuple[Tensor, Tensor]:
    """The part of the training digits that belongs to one of so many clients."""
    images, labels, _, _ = _digits()
    parts = partition(labels.numpy(), clients=clients, split="iid", stream=SimStream(seed=1).child("split"))
    mine = torch.from_numpy(parts[number])
    return images[mine], labels[mine]


def held_out(data: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What a client trains on, and the fifth of its digits that it keeps for tests."""
    images, labels = data
    kept = len(labels) // 5
    return (images[kept:], labels[kept:]), (images[:kept], labels[:kept])


def train(
    model: nn.Module, data: tuple[Tensor, Tensor], *, epochs: int, rate: float, batch: int, seed: int
) -> float:
    """A few epochs of SGD; returns the mean loss of the last one."""
    images, labels = data
    order = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    total = 0.0
    for _ in range(epochs):
        total = 0.0
        for chosen in torch.randperm(len(labels), generator=order).split(batch):
            optimiser.zero_grad()
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimiser.step()
            total += float(loss.detach()) * len(chosen)
    return total / len(labels)


def accuracy(model: nn.Module) -> float:
    """The share of the test digits, which belong to nobody, that the model names rightly."""
    _, _, images, labels = _digits()
    return accuracy_on(model, (images, labels))


@torch.no_grad()
def accuracy_on(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """The share of these digits that the model names rightly."""
    images, labels = data
    return float((model(images).argmax(dim=1) == labels).float().mean())
