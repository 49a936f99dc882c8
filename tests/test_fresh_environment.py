"""Installed into a fresh environment without torch: plans, ledgers, keys, the tracker and Flower with a numpy app work.

`tests/cli/test_without_extras.py` and `tests/flower/test_installed.py` check the same where torch is only hidden.
"""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

import pytest

from niss.accounting import Charge, LedgerFile, LedgerHeader

ROOT = Path(__file__).parents[1]
# A Flower round of six numpy clients, on the grid in one process that the other tests use.
FLOWER = """
import sys
sys.path.insert(0, sys.argv[1])
import flower.conftest
from flower.grid import FakeGrid
from flower.test_trust import start
strategy = start(FakeGrid(6), rounds=2)
assert [one.survivors for one in strategy.rounds] == [6, 6]
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_a_fresh_environment_without_torch(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python, niss = (str(tmp_path / "venv" / "bin" / name) for name in ("python", "niss"))
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    wanted = (f"{ROOT}[flower,tracker]", "pytest")
    installed = run(python, "-m", "pip", "install", "--quiet", *constraints, *wanted)
    if installed.returncode:
        pytest.skip(f"pip cannot install here: {installed.stderr.strip().splitlines()[-1:]}")
    for package in ("torch", "matplotlib"):
        assert "ModuleNotFoundError" in run(python, "-c", f"import {package}").stderr
    ledger = tmp_path / "ledger.jsonl"
    with LedgerFile.create(ledger, LedgerHeader(run="a run", budgets={"self": 1.0}, delta=1e-5)) as file:
        file.charge(0, 0, {"self": Charge.of(0.5, 0.1)})
    for arguments in (
        ("--help",),
        ("plan", "--participants", "30", "--rounds", "10", "--epsilon", "3", "--json"),
        ("account", str(ledger)),
        ("keys", "new", "--out", str(tmp_path / "identity.key")),
        ("tracker", "--help"),
    ):
        ended = run(niss, *arguments)
        assert ended.returncode == 0, (arguments, ended.stderr)
    ended = run(python, "-c", "import niss.protocol, niss.tracker.serve, niss.accounting, niss.report")
    assert ended.returncode == 0, ended.stderr
    ended = run(python, "-W", "ignore", "-c", FLOWER, str(ROOT / "tests"))
    assert ended.returncode == 0, ended.stderr[-2000:]
    ended = run(niss, "run", "--rounds", "1", "--out", str(tmp_path / "run"))
    assert ended.returncode == 2
    assert "pip install 'niss[train]'" in ended.stderr
