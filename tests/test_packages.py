"""Wheel and sdist: they hold what they must and nothing else, build from one another, and install into a fresh venv."""

from __future__ import annotations

import subprocess
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What a wheel needs beside its modules: data that the code reads, and the app of `niss up` and `niss new`.
NEEDED = (
    "niss/py.typed",
    "niss/randomness/normal_table.f64le",
    "niss/report/style.css",
    "niss/report/templates/graph.svg.j2",
    "niss/ui/assets/style.css",
    "niss/local/app/pyproject.toml",
    "niss/local/app/flower_app/task.py",
)
OUTSIDE = (
    "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "NOTICE", "SECURITY.md",
    "constraints.txt", "mkdocs.yml", "pyproject.toml", "docs/index.md", "tests/test_packages.py", "tools/check_site.py",
)  # fmt: skip
BUILD = (
    "import sys, hatchling.build as b; print(b.build_sdist(sys.argv[1])); print(b.build_wheel(sys.argv[1]))"
)


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=900, check=False
    )


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that can build."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    installed = run(python, "-m", "pip", "install", "--quiet", "hatchling>=1.25")
    if installed.returncode:
        pytest.skip(f"pip cannot install here: {installed.stderr.strip().splitlines()[-1:]}")
    return python


@pytest.fixture(scope="module")
def built(python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    done = run(python, "-c", BUILD, folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    sdist, wheel = done.stdout.split()
    return folder / sdist, folder / wheel


@pytest.mark.slow
def test_they_hold_what_they_must(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    held = names(wheel)
    modules = {
        f"niss/{path.relative_to(ROOT / 'src' / 'niss')}" for path in (ROOT / "src" / "niss").rglob("*.py")
    }
    assert set(NEEDED) | modules <= held
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == {"niss"}
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert set(OUTSIDE) <= inside
    assert not [
        name for name in inside if name.startswith(("build/", ".venv", "runs/")) or "__pycache__" in name
    ]


@pytest.mark.slow
def test_the_wheel_of_the_sdist_is_that_of_the_checkout(
    python: Path, built: tuple[Path, Path], tmp_path: Path
) -> None:
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    done = run(python, "-c", BUILD, tmp_path, cwd=source)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / done.stdout.split()[1]) == names(wheel)


@pytest.mark.slow
def test_the_wheel_installs_and_runs(python: Path, built: tuple[Path, Path], tmp_path: Path) -> None:
    installed = run(
        python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", built[1]
    )
    assert installed.returncode == 0, installed.stderr
    niss = python.parent / "niss"
    for arguments in (
        ("--version",),
        ("plan", "--participants", "30", "--rounds", "10", "--epsilon", "3", "--json"),
        ("new", "my-app"),
        ("keys", "new", "--out", "identity.key"),
    ):
        done = run(niss, *arguments, cwd=tmp_path)
        assert done.returncode == 0, (arguments, done.stderr)
    assert (tmp_path / "my-app" / "my_app" / "task.py").is_file()
    # What needs an extra says which.
    done = run(niss, "run", "--rounds", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert "niss[train]" in done.stderr
