"""Whether the tests of this folder could run at all."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
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


RELEASES = ("1.41.0", "1.42.0")
"""Those of Flower that niss is tested with; the constraints name one, and here the others have their turn."""
DEPLOYED = "tests/flower/test_deployment.py::test_an_app_that_fails_says_nothing_and_evaluation_is_refused"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed")
@pytest.mark.parametrize("release", RELEASES)
def test_the_tests_of_flower_pass_with_other_releases_of_it(release, tmp_path):
    """In an environment with another Flower above everything that is installed here.

    Without its dependencies: 1.42 asks for a certifi that was newer than the package index on the day it came out.
    """
    if version("flwr") == release:
        pytest.skip("all other tests run with this one")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    home = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    (home / "beneath.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    install = [python, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", f"flwr=={release}"]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
    if installed.returncode:
        pytest.skip(f"flwr {release} cannot be had here: {installed.stderr.strip().splitlines()[-1]}")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home), str(root / "src")])}
    found = [python, "-W", "ignore", "-c", "from importlib.metadata import version; print(version('flwr'))"]
    assert subprocess.check_output(found, env=environment, text=True).strip() == release
    for selected in (["tests/flower", "tests/ported"], ["-m", "slow", DEPLOYED]):
        command = [python, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *selected]
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=1800, check=False
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
