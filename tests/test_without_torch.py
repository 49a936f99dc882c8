"""Planning, accounting, keys, protocol, tracker, and Flower with a numpy app need neither torch nor matplotlib."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEDGER = Path(__file__).parent / "compatibility" / "written_by_0_1" / "node" / "ledger.jsonl"
HEAVY = ("torch", "matplotlib", "PIL", "threadpoolctl", "safetensors", "tensorboard")
HIDE = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""
COMMAND = HIDE + "from niss.cli import main\nmain()\n"
# A Flower round of six numpy clients, on the grid in one process that the other tests use.
FLOWER = """
import sys
sys.path.insert(0, sys.argv[1])
import flower.conftest
from flower.grid import FakeGrid
from flower.test_trust import start
strategy = start(FakeGrid(6), rounds=2)
assert [one.survivors for one in strategy.rounds] == [6, 6]
assert not {"torch", "matplotlib"} & set(sys.modules)
"""
NEEDS_NO_TORCH = [
    ("plan", "--participants", "30", "--rounds", "10", "--epsilon", "3", "--json"),
    ("account", str(LEDGER)),
    ("keys", "new", "--out", "{tmp}/identity.key"),
    ("data", "list"),
    ("--help",),
    ("run", "--help"),
    ("tracker", "--help"),
]


def run(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("arguments", NEEDS_NO_TORCH, ids=lambda arguments: " ".join(arguments[:2]))
def test_commands_that_train_nothing(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ended = run("-c", COMMAND, *(one.format(tmp=tmp_path) for one in arguments))
    assert ended.returncode == 0, ended.stderr
    if "--json" in arguments:
        assert json.loads(ended.stdout)


def test_a_command_that_trains_says_what_to_install(tmp_path: Path) -> None:
    ended = run("-c", COMMAND, "run", "--preset", "demo", "--out", str(tmp_path / "run"))
    assert ended.returncode == 2
    assert "niss[train]" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_flower_with_a_numpy_app() -> None:
    pytest.importorskip("flwr", reason="Flower is not installed")
    ended = run("-W", "ignore", "-c", HIDE + FLOWER, str(ROOT / "tests"))
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.slow
def test_a_fresh_environment_without_torch(tmp_path: Path) -> None:
    """Installed for real, with the extras for Flower and the tracker: pip brings no torch, and everything works."""
    pytest.importorskip("flwr", reason="Flower is not installed")
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    installed = run(
        "-m",
        "pip",
        "install",
        "--quiet",
        *constraints,
        f"{ROOT}[flower,tracker]",
        "hypothesis",
        "pytest",
        python=python,
    )
    if installed.returncode:
        pytest.skip(f"no packages can be had here: {installed.stderr.strip().splitlines()[-1:]}")
    absent = run("-c", "import torch", python=python), run("-c", "import matplotlib", python=python)
    assert all("ModuleNotFoundError" in one.stderr for one in absent)
    niss = str(home / "bin" / "niss")
    for arguments in NEEDS_NO_TORCH:
        named = [one.format(tmp=tmp_path) for one in arguments]
        ended = subprocess.run([niss, *named], capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, (named, ended.stderr)
    ended = run("-W", "ignore", "-c", FLOWER, str(ROOT / "tests"), python=python)
    assert ended.returncode == 0, ended.stderr[-2000:]
    ended = run("-c", "import niss.protocol, niss.tracker.serve, niss.accounting", python=python)
    assert ended.returncode == 0, ended.stderr
    assert os.path.lexists(tmp_path / "identity.key")
