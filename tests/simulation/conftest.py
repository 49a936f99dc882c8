"""A small federation on made-up data: quick to train, real in every other respect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from niss.randomness import SimStream

Pair = tuple[np.ndarray, np.ndarray]


def blobs(count: int, name: str) -> Pair:
    """Three well-separated classes in five dimensions."""
    generator = SimStream(7).child("blobs", name).generator()
    centres = 3.0 * SimStream(7).child("centres").generator().standard_normal((3, 5))
    labels = generator.integers(0, 3, count)
    inputs = centres[labels] + generator.standard_normal((count, 5))
    return inputs.astype(np.float32), labels.astype(np.int64)


@pytest.fixture
def datasets() -> list[Pair]:
    return [blobs(6 + number % 3, f"client {number}") for number in range(12)]


@pytest.fixture
def held_out() -> Pair:
    return blobs(200, "test")


@pytest.fixture
def linear() -> nn.Module:
    module = nn.Linear(5, 3)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()
    return module


@pytest.fixture
def given(datasets: list[Pair], held_out: Pair, linear: nn.Module) -> dict[str, Any]:
    """What a run is given besides its config."""
    return {"model": linear, "clients": datasets, "test": held_out}
