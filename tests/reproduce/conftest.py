"""A small slice of each experiment on the embedded data, from scratch, in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.reproduce.design import Setting, find_setting
from experiments.reproduce.paper import find_panel

SMALL = {
    "data.clients": 20,
    "data.samples_per_client": 60,
    "training.participants": 6,
    "training.epochs": 1,
    "training.learning_rate": 0.1,
    "training.workers": 1,
    "model.hidden": [16],
}


@pytest.fixture
def slice_settings() -> dict[str, object]:
    """What makes a panel small, as keyword arguments."""
    return {"rounds": 3, "device": "cpu", "overrides": SMALL}


@pytest.fixture
def panel():
    return find_panel("mnist-mini-mlp-iid")


@pytest.fixture
def small_setting() -> Setting:
    return replace(find_setting("mnist-mini-iid-client-10-of-40"), images=10, rounds=2)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    return {"out": tmp_path / "results", "work": tmp_path / "work"}
