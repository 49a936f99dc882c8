"""Every benchmark runs to its end with its smallest settings; what it measures then means nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
# Those with a flag are programs; the others are what they have in common.
BENCHMARKS = sorted(path.stem for path in FOLDER.glob("*.py") if "command_line(" in path.read_text())
# Only what is installed anyway: rivals have versions of their own.
MORE = {"simulation": ["--models", "mlp", "logistic", "--only", "plain", "niss"]}


def test_the_programs_are_found() -> None:
    assert {"flower", "noise", "planner", "protocol", "simulation", "tracker"} < set(BENCHMARKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "harness"])
def test_it_runs(name: str, tmp_path: Path) -> None:
    if name == "gpu_simulation":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    kept = tmp_path / "numbers.json"
    command = [
        sys.executable,
        str(FOLDER / f"{name}.py"),
        "--quick",
        "--json",
        str(kept),
        *MORE.get(name, []),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    tables = json.loads(kept.read_text())["tables"]
    assert tables
    assert all(tables.values()), "no table is empty"


def test_every_number_of_the_page_was_measured() -> None:
    """The tables of a claim show a part of what is kept beside them, digit for digit."""
    sections = (FOLDER / "README.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) >= 10
    for section in sections:
        programs = set(re.findall(r"(\w+)\.py", section))
        assert programs <= set(BENCHMARKS)
        kept = "".join((FOLDER / "measured" / f"{name}.json").read_text() for name in programs)
        shown = [line for line in section.splitlines() if line.startswith("|")]
        numbers = numbers_in("\n".join(shown))
        assert len(numbers) >= 4
        assert numbers - numbers_in(kept) == set(), section.splitlines()[0]


def numbers_in(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text))
