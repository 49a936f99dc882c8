"""Small images of a few classes, and models that are quick to train on them, in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from niss.learning import ImageSamples, build_model
from niss.randomness import SimStream

STREAM = SimStream(3)
COUNT, CLASSES = 23, 4
SHAPE = ImageSamples((1, 4, 4))


def samples(count: int = COUNT, seed: int = 5) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 4, 4, dtype=torch.float64, generator=source)
    return images, torch.randint(CLASSES, (count,), generator=source)


def small_mlp() -> nn.Module:
    return build_model("mlp", samples=SHAPE, classes=CLASSES, stream=STREAM, hidden=(7,)).double()


def with_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double()


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)).double()
