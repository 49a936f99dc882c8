"""The wheel alone, in a fresh environment and outside of any checkout: the app of `niss up` is in it, and runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "flower_app"


def run(*command: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**kept, "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    built = run(sys.executable, *build, folder=folder)
    if built.returncode:
        pytest.skip(f"pip cannot build here: {built.stderr.strip().splitlines()[-1:]}")
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_built_in_app_is_in_the_wheel_as_it_is_in_the_examples(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            name.removeprefix("niss/local/app/"): archive.read(name)
            for name in archive.namelist()
            if name.startswith("niss/local/app/")
        }
    files = [path for path in EXAMPLE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(EXAMPLE).as_posix(): path.read_bytes() for path in files}
    packed = {name: data for name, data in packed.items() if "__pycache__" not in name}
    assert packed == expected
    assert "pyproject.toml" in packed


@pytest.mark.slow
def test_niss_up_outside_of_a_checkout(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python, niss = (tmp_path / "venv" / "bin" / name for name in ("python", "niss"))
    constraints = ("--constraint", ROOT / "constraints.txt")
    wanted = f"niss[flower,tracker] @ {wheel.as_uri()}"
    installed = run(python, "-m", "pip", "install", "--quiet", *constraints, wanted, folder=tmp_path)
    if installed.returncode:
        pytest.skip(f"pip cannot install here: {installed.stderr.strip().splitlines()[-1:]}")
    # The app learns with torch, which is a gigabyte and is borrowed from this environment, after everything else.
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("torch is not installed")
    site = run(python, "-c", "import site; print(site.getsitepackages()[0])", folder=tmp_path).stdout.strip()
    (Path(site) / "borrowed.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    where = run(
        python, "-c", "import niss, flwr; print(niss.__file__, flwr.__file__)", folder=tmp_path
    ).stdout
    assert where.count(site) == 2, where
    ended = run(
        niss, "up", "--nodes", "3", "--rounds", "1", "--set", "colluders=0", "--json", folder=tmp_path
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    report = json.loads(ended.stdout)
    assert [one["survivors"] for one in report["rounds"]] == [3]
    assert report["statement"]["epsilon_joint"] > 0.0
    assert set(report["metrics"]["server"]) == {"0", "1"}
