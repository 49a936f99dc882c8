"""The gallery runs as it is copied: each example in a folder of its own, with its picture and what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from matplotlib.image import imread

EXAMPLES = Path(__file__).parents[2] / "examples"
# What is printed of each, as patterns with a percentage in them, and the least it has to be.
LEAST = {
    "people_digits": {r"niss: .* (\S+) %": 75.0, r"no privacy +(\S+) %": 85.0},
    "silos_tables": {r"niss: .* (\S+) %": 85.0, r"curator .* (\S+) %": 85.0},
    "lora_messages": {r"^niss +(\S+)%": 75.0, r"^fedavg +(\S+)%": 85.0},
    "flower_numpy": {r"(\S+)% of the digits after 5 rounds": 70.0},
}
needs = {
    "flower_numpy": pytest.mark.skipif(
        find_spec("ray") is None, reason="needs pip install 'flwr[simulation]'"
    ),
    "lora_messages": pytest.mark.skipif(find_spec("flwr_datasets") is None, reason="needs flwr-datasets"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[needs[name], pytest.mark.slow] if name in needs else []) for name in LEAST],
)
def test_it_runs_learns_and_draws(name, tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'niss[dev]'")
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for pattern, least in LEAST[name].items():
        (found,) = re.findall(pattern, done.stdout, re.MULTILINE)
        assert float(found) > least, pattern
    drawn, kept = (imread(folder / f"{name}.png") for folder in (tmp_path, EXAMPLES / "pictures"))
    assert drawn.shape == kept.shape
    assert (drawn != drawn[0, 0]).any(axis=2).mean() > 0.01


@pytest.mark.parametrize("name", LEAST)
def test_it_is_short(name):
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) < 60
