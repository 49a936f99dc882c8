"""Whether the tests of this folder could run at all."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from niss.errors import ConfigError


def test_flower_is_installed():
    if find_spec("flwr") is None:
        pytest.skip("Flower is not installed: pip install 'niss[flower]' to run the tests of niss.flower")
    import niss.flower

    assert niss.flower.NissStrategy.__name__ == "NissStrategy"


def test_without_flower_the_error_says_what_to_install(monkeypatch):
    import niss.flower

    def missing(_name):
        raise ModuleNotFoundError("No module named 'flwr'", name="flwr")

    monkeypatch.setattr(niss.flower, "import_module", missing)
    monkeypatch.delitem(vars(niss.flower), "niss_mod", raising=False)
    with pytest.raises(ConfigError, match="not installed") as caught:
        _ = niss.flower.niss_mod
    assert "niss[flower]" in caught.value.hint


ROUND = """
import sys, warnings

warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import flower.conftest
from flower.grid import FakeGrid, global_model
from flwr.serverapp.strategy import FedAvg
from niss.accounting import Plan
from niss.flower import NissStrategy

plan = Plan(clip=0.5, epsilon=8.0, participations=3, neighbours=3, kappa=2.0)
strategy = NissStrategy(FedAvg(), plan=plan)
strategy.start(FakeGrid(), global_model(), num_rounds=1, timeout=1)
assert strategy.rounds[0].survivors == 6
print([name for name in ("torch", "matplotlib", "fastapi", "niss.cli", "niss.learning") if name in sys.modules])
"""


@pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed")
def test_a_round_of_a_numpy_app_loads_neither_torch_nor_matplotlib():
    command = [sys.executable, "-c", ROUND, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
