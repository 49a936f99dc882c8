"""Records of modules of many kinds, small and in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learning.test_stacked_modules import CLASSES, LOOPED, MODULES
from niss.learning import ImageSamples, TokenSamples, build_model, seeded_torch
from niss.randomness import SimStream
from niss.records import Records, clipped_rows

NO_CUDA = not torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(NO_CUDA, reason="no CUDA device"))]
"""Where gradients are computed: a CUDA device has a captured graph for it."""


def each_of(records: Records, weights: np.ndarray, rows: np.ndarray, clip: float) -> np.ndarray:
    """The clipped gradients of these records, without those that only fill chunks up."""
    return np.concatenate([some[:real] for some, real in clipped_rows(records, weights, rows, clip)])


class Tied(nn.Module):
    """One table for reading and writing, and one linear layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        values = torch.tanh(self.inner(torch.tanh(self.inner(self.table(tokens)))))
        return values @ self.table.weight.t()


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, dilation=1, groups=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


def _embedded() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(7, 4, padding_idx=2), nn.Conv1d(6, 3, 2), nn.Flatten(), nn.Linear(9, CLASSES)
    )


class LastState(nn.Module):
    """Logits from the last state of a recurrent layer of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.output = nn.GRU(3, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.output(self.layer(images[:, 0])[0][:, -1])
        return found


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: build_model("mlp", samples=ImageSamples((2, 4, 3)), classes=CLASSES, stream=SimStream(1)),
    "cnn": _convolutions,
    "low-rank": MODULES["adapted"],
    "mixes": LOOPED["mixing"][0],
    "gru": LastState,
}
TOKENS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "embedded": _embedded,
    "encoder": MODULES["attention"],
    "transformer": lambda: build_model(
        "transformer", samples=TokenSamples(6, 7), classes=7, stream=SimStream(1), width=8, layers=1, heads=2
    ),
}
KINDS = (*IMAGES, *TOKENS)


def make_records(kind: str, count: int = 12, *, seed: int = 3, **settings: object) -> Records:
    """Records of a module of that kind, in float64 unless `dtype` says otherwise; `device` is that of the module."""
    dtype, device = settings.pop("dtype", torch.float64), settings.pop("device", "cpu")
    generator = np.random.default_rng(seed)
    with seeded_torch(SimStream(0)):
        module = (IMAGES | TOKENS)[kind]()
    if kind in IMAGES:
        labels = generator.integers(CLASSES, size=count)
        inputs = generator.normal(size=(count, 2, 4, 3)) * generator.exponential(2.0, size=(count, 1, 1, 1))
    else:
        inputs = generator.integers(7, size=(count, 6))
        labels = inputs[:, 0] % CLASSES if kind == "embedded" else np.roll(inputs, -1, axis=1) % CLASSES
    return Records(module.to(device, dtype), (inputs, labels), **settings)
