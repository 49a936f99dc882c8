"""Wheel and sdist: they hold what they must and nothing else, build from one another, and work outside of a checkout.

`tests/cli/test_without_extras.py` and `tests/flower/test_installed.py` check the same where torch is only hidden.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from niss.accounting import Charge, LedgerFile, LedgerHeader

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
APPS = {"niss/local/app/": "flower_app", "niss/local/silos_app/": "silos-images"}
# What a wheel needs beside its modules: data that the code reads, and the apps of `niss up` and `niss new`.
NEEDED = (
    "niss/py.typed",
    "niss/randomness/normal_table.f64le",
    "niss/report/style.css",
    "niss/report/templates/run.html.j2",
    "niss/ui/assets/style.css",
    *(f"{app}pyproject.toml" for app in APPS),
    "niss/local/app/flower_app/task.py",
    "niss/local/silos_app/silos_images/task.py",
)
OUTSIDE = (
    "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "NOTICE", "SECURITY.md",
    "constraints.txt", "mkdocs.yml", "pyproject.toml", "docs/index.md", "tests/test_packages.py", "tools/site_hooks.py",
)  # fmt: skip
BUILD = (
    "import sys, hatchling.build as b; print(b.build_sdist(sys.argv[1])); print(b.build_wheel(sys.argv[1]))"
)
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
PLAN = ("plan", "--participants", "30", "--rounds", "10", "--epsilon", "3", "--json")


def run(*command: str | Path, cwd: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    given = [str(part) for part in command]
    limits = {"capture_output": True, "text": True, "timeout": 900, "check": False}
    return subprocess.run(given, cwd=cwd, env=kept | changes, **limits)


def good(*command: str | Path, cwd: Path | None = None, **changes: str) -> str:
    """What a command prints that must end well."""
    done = run(*command, cwd=cwd, **changes)
    assert done.returncode == 0, (command, done.stderr[-3000:])
    return done.stdout


def install(folder: Path, *wanted: str) -> tuple[Path, Path]:
    """Python and niss of a fresh environment that has what is wanted."""
    venv.create(folder / "venv", with_pip=True)
    python, niss = (folder / "venv" / "bin" / name for name in ("python", "niss"))
    constraints = ("--constraint", ROOT / "constraints.txt")
    installed = run(python, "-m", "pip", "install", "--quiet", *constraints, *wanted)
    if installed.returncode:
        pytest.skip(f"pip cannot install here: {installed.stderr.strip().splitlines()[-1:]}")
    return python, niss


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that can build."""
    return install(tmp_path_factory.mktemp("fresh"), "hatchling>=1.25")[0]


@pytest.fixture(scope="module")
def built(python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    sdist, wheel = good(python, "-c", BUILD, folder, cwd=ROOT).split()
    return folder / sdist, folder / wheel


def test_they_hold_what_they_must(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    held = names(wheel)
    source = ROOT / "src" / "niss"
    assert set(NEEDED) | {f"niss/{path.relative_to(source)}" for path in source.rglob("*.py")} <= held
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == {"niss"}
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert set(OUTSIDE) <= inside
    assert not [
        name for name in inside if name.startswith(("build/", ".venv", "runs/")) or "__pycache__" in name
    ]


@pytest.mark.parametrize("app", APPS)
def test_a_built_in_app_is_in_the_wheel_as_it_is_in_the_examples(built: tuple[Path, Path], app: str) -> None:
    example = ROOT / "examples" / APPS[app]
    with zipfile.ZipFile(built[1]) as archive:
        inside = [name for name in archive.namelist() if name.startswith(app) and "__pycache__" not in name]
        packed = {name.removeprefix(app): archive.read(name) for name in inside}
    files = [path for path in example.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert packed == {path.relative_to(example).as_posix(): path.read_bytes() for path in files}
    assert "pyproject.toml" in packed


def test_the_wheel_of_the_sdist_is_that_of_the_checkout(
    python: Path, built: tuple[Path, Path], tmp_path: Path
) -> None:
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    made = good(python, "-c", BUILD, tmp_path, cwd=source).split()[1]
    assert names(tmp_path / made) == names(wheel)


def test_the_wheel_installs_and_runs(built: tuple[Path, Path], tmp_path: Path) -> None:
    _, niss = install(tmp_path, str(built[1]))
    for arguments in (("--version",), PLAN, ("new", "my-app"), ("keys", "new", "--out", "identity.key")):
        good(niss, *arguments, cwd=tmp_path)
    assert (tmp_path / "my-app" / "my_app" / "task.py").is_file()
    # What needs an extra says which.
    done = run(niss, "run", "--rounds", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert "niss[train]" in done.stderr


def test_niss_up_outside_of_a_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    python, niss = install(tmp_path, f"niss[flower,tracker] @ {built[1].as_uri()}")
    # The app learns with torch, which is a gigabyte and is borrowed from this environment, after everything else.
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("torch is not installed")
    place = {"cwd": tmp_path, "HOME": str(tmp_path)}
    site = good(python, "-c", "import site; print(site.getsitepackages()[0])", **place).strip()
    (Path(site) / "borrowed.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    where = good(python, "-c", "import niss, flwr; print(niss.__file__, flwr.__file__)", **place)
    assert where.count(site) == 2, where
    flags = ("--nodes", "3", "--rounds", "1", "--set", "collusion=0", "--json")
    report = json.loads(good(niss, "up", *flags, **place))
    assert [one["survivors"] for one in report["rounds"]] == [3]
    assert report["statement"]["epsilon_joint"] > 0.0
    assert set(report["metrics"]["server"]) == {"0", "1"}


def test_a_fresh_environment_without_torch(tmp_path: Path) -> None:
    """Plans, ledgers, keys, the tracker and Flower with a numpy app work."""
    python, niss = install(tmp_path, f"{ROOT}[flower,tracker]", "pytest")
    for package in ("torch", "matplotlib"):
        assert "ModuleNotFoundError" in run(python, "-c", f"import {package}").stderr
    ledger = tmp_path / "ledger.jsonl"
    with LedgerFile.create(ledger, LedgerHeader(run="a run", budgets={"self": 1.0}, delta=1e-5)) as file:
        file.charge(0, 0, {"self": Charge.of(0.5, 0.1)})
    keys = ("keys", "new", "--out", tmp_path / "identity.key")
    for arguments in (("--help",), PLAN, ("account", ledger), keys, ("tracker", "--help")):
        good(niss, *arguments)
    good(python, "-c", "import niss.protocol, niss.tracker.serve, niss.accounting, niss.report")
    good(python, "-W", "ignore", "-c", FLOWER, ROOT / "tests")
    ended = run(niss, "run", "--rounds", "1", "--out", tmp_path / "run")
    assert ended.returncode == 2
    assert "pip install 'niss[train]'" in ended.stderr
