"""Several processes train a run together: the same as one process up to the order of summation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import niss
from support.federation import small_config
from support.ranks import materials, play

EPSILON = {"privacy": {"epsilon": 20.0, "clip": 1.0}}
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {"methods": [{"name": "fedavg"}]},
    "dp-fedavg": {"methods": [{"name": "dp-fedavg"}]},
    "niss": {"methods": [{"name": "niss", "neighbours": 3}]},
}


def settings(name: str) -> dict[str, Any]:
    return small_config(**CASES[name]).model_dump(mode="json", exclude_none=True)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case with two ranks, and with one process."""
    folder = tmp_path_factory.mktemp("ranks")
    play([{"do": "run", "config": settings(name), "out": str(folder / "two" / name)} for name in CASES], folder)
    for name in CASES:
        niss.run(niss.make_config(settings(name)), out=folder / "one" / name, **materials())
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(played: Path, name: str) -> None:
    one, two = played / "one" / name, played / "two" / name
    expected, found = load_file(one / "checkpoint.safetensors"), load_file(two / "checkpoint.safetensors")
    for part, values in expected.items():
        np.testing.assert_allclose(found[part], values, rtol=1e-10, atol=1e-10, err_msg=part)
