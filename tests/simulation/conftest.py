"""A small federation on made-up data: quick to train, real in every other respect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from support.ranks import blank_linear, blobs

Pair = tuple[np.ndarray, np.ndarray]


@pytest.fixture
def datasets() -> list[Pair]:
    return [blobs(6 + number % 3, f"client {number}") for number in range(12)]


@pytest.fixture
def held_out() -> Pair:
    return blobs(200, "test")


@pytest.fixture
def linear() -> nn.Module:
    return blank_linear()


@pytest.fixture
def given(datasets: list[Pair], held_out: Pair, linear: nn.Module) -> dict[str, Any]:
    """What a run is given besides its config."""
    return {"model": linear, "clients": datasets, "test": held_out}
