"""Where optional packages are not installed: what works without them, and what says which one to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.terminals import Ended, run_python

HIDING = """
import sys

hidden = sys.argv.pop(1).split(",")

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
from niss.cli import main
main()
"""


def without(packages: str, *arguments: str, cwd: Path) -> Ended:
    """`niss ARGUMENTS` as if the packages were not installed."""
    home = str(cwd)
    return run_python(HIDING, packages, *arguments, cwd=cwd, XDG_STATE_HOME=home, XDG_CONFIG_HOME=home)


@pytest.mark.parametrize(
    ("package", "line", "purpose", "requirement"),
    [
        ("torch", "run --rounds 1", "trains models", "'niss[train]'"),
        ("torch", "compare --rounds 1", "trains models", "'niss[train]'"),
        ("torch", "attack dlg", "trains models", "'niss[train]'"),
        ("torch", "attack invert", "trains models", "'niss[train]'"),
        ("matplotlib", "plan --participants 12 --plot x.png", "draws figures", "matplotlib"),
        ("fastapi", "ui --no-open --port 0", "serves HTTP", "'niss[tracker,ui]'"),
    ],
)
def test_a_command_says_what_to_install(
    tmp_path: Path, package: str, line: str, purpose: str, requirement: str
) -> None:
    done = without(package, *line.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-2:] == [
        f"error: this command {purpose} and needs {package}",
        f"hint: pip install {requirement}",
    ]
    assert done.stdout == ""


@pytest.mark.parametrize(
    "line",
    [
        *("--help", "run --help", "attack --help", "tracker --help", "reproduce --help"),
        *(
            "reproduce readings",
            "plan --participants 12",
            "data list",
            "keys new --out my.key",
            "reproduce figure-3 --dry-run",
        ),
    ],
)
def test_what_trains_and_draws_nothing_needs_neither_torch_nor_matplotlib(tmp_path: Path, line: str) -> None:
    hidden = "matplotlib" if "figure-3" in line else "torch,matplotlib,flwr,fastapi"
    done = without(hidden, *line.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_runs_are_read_without_torch_and_matplotlib(tmp_path: Path) -> None:
    small = "--rounds 1 --clients 20 --participants 5 --set data.samples_per_client=4 --set model.hidden=[4]"
    assert without("none", "run", *small.split(), "--out", "r", "-q", cwd=tmp_path).returncode == 0
    for line in ("account r", "account r --csv a.csv", "export r --csv m.csv"):
        done = without("torch,matplotlib", *line.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.csv").exists()
    assert (tmp_path / "m.csv").exists()


def test_another_missing_module_is_a_crash(tmp_path: Path) -> None:
    done = without("rich.table,scipy", "plan", "--participants", "12", cwd=tmp_path)
    assert done.returncode == 1
    assert "niss crashed: ModuleNotFoundError" in done.stderr


def test_python_m_niss(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "niss", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == __import__("niss").__version__


@pytest.mark.parametrize("arguments", [["reproduce"], ["reproduce", "figure-3", "--dry-run"], ["verify"]])
def test_experiments_are_said_to_be_elsewhere(tmp_path: Path, arguments: list[str]) -> None:
    """As in an environment into which niss was installed: its files are far from any checkout."""
    code = (
        "import sys, niss.cli.experiments as r; from pathlib import Path; "
        f"r.__file__ = {str(tmp_path / 'site' / 'experiments.py')!r}; "
        "from niss.cli import main; main()"
    )
    done = run_python(code, *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    error, hint = done.stderr.splitlines()[-2:]
    assert error == "error: the experiments are not part of the installed package"
    assert "clone the repository" in hint


def test_experiments_are_found_around_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from niss.cli import experiments

    checkout = tmp_path / "checkout"
    (checkout / "experiments" / "reproduce").mkdir(parents=True)
    (checkout / "experiments" / "reproduce" / "__init__.py").touch()
    (checkout / "docs").mkdir()
    monkeypatch.setattr(experiments, "__file__", str(tmp_path / "site" / "experiments.py"))
    monkeypatch.chdir(checkout / "docs")
    assert experiments.find_checkout() is None
    (checkout / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert experiments.find_checkout() is None
    (checkout / "pyproject.toml").write_text('[project]\nname = "niss"\n')
    assert experiments.find_checkout() == checkout
