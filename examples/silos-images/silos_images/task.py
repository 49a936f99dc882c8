"""The task: which digit is it? A small convolutional network, and pictures that are dealt out to a few silos."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from niss.data import load_dataset, partition
from niss.randomness import SimStream


def make_model() -> nn.Module:
    """Two convolutions and a linear layer, 5,258 numbers; tanh keeps gradients short (Papernot et al. 2021).

    Without batch normalisation and dropout: what a record contributes must not depend on the others.
    """
    model = nn.Sequential(
        nn.AvgPool2d(2),
        nn.Conv2d(1, 8, 3),
        nn.Tanh(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(400, 10),
    )
    start = torch.Generator().manual_seed(1)
    for part in model.parameters():
        nn.init.uniform_(part, -0.1, 0.1, generator=start)
    return model


@cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load_dataset("mnist-mini")  # Part of the package: nothing is fetched.
    # Scaled by what is known of pictures, not by what these ones show: statistics of private data are not public.
    train, test = (
        torch.from_numpy(images).float() / 127.5 - 1.0 for images in (data.train_images, data.test_images)
    )
    return train, torch.from_numpy(data.train_labels), test, torch.from_numpy(data.test_labels)


def silo_data(number: int, silos: int) -> tuple[Tensor, Tensor]:
    """The part of the training digits that belongs to one of so many silos; with few of some digits in each."""
    images, labels, _, _ = _digits()
    stream = SimStream(seed=1).child("split")
    parts = partition(labels.numpy(), clients=silos, split="dirichlet", alpha=1.0, stream=stream)
    mine = torch.from_numpy(parts[number])
    return images[mine], labels[mine]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """The share of the test digits that the model names rightly."""
    _, _, images, labels = _digits()
    return float((model(images).argmax(dim=1) == labels).float().mean())
