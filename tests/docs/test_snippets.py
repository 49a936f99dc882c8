"""Every Python and bash block of the documentation runs, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.snippets import ROOT, RUNNABLE, Block, blocks, pages

PAGES = [page for page in pages() if any(block.runs for block in blocks(page))]
QUICK = [page for page in PAGES if any(block.runs and not block.slow for block in blocks(page))]
SLOW = [page for page in PAGES if any(block.runs and block.slow for block in blocks(page))]


_LONGEST_SECONDS = 1200
# What a checkout holds and commands may read; what they write goes beside it.
_CHECKOUT = (
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "src",
    "examples",
    "docs",
    "tests",
    "tools",
)


def make_checkout(folder: Path) -> None:
    """A folder like a checkout after `make`: links to the sources, and a .venv that counts as installed."""
    for name in _CHECKOUT:
        (folder / name).symlink_to(ROOT / name)
    pretend_installed(folder)


def pretend_installed(folder: Path) -> None:
    """A .venv that counts as installed: the environment of the tests."""
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    for marker in (".installed", ".installed-dev"):
        (folder / ".venv" / marker).touch()


def run_page(page: Path, folder: Path, names: dict[str, Any], *, slow: bool) -> int:
    """Run the blocks of a page in order in a folder like a checkout, and compare outputs; returns how many were run."""
    make_checkout(folder)
    with contextlib.chdir(folder):
        return run_blocks(page, names, slow=slow)


def run_blocks(page: Path, names: dict[str, Any], *, slow: bool) -> int:
    """The same in the working folder."""
    count, printed = 0, None
    for block in blocks(page):
        if block.is_output:
            if printed is not None:
                assert _trimmed(printed) == _trimmed(block.text), f"{block}: prints\n{printed}"
        elif block.runs and (slow or not block.slow):
            printed = _run(block, names)
            count += 1
        elif block.runs:
            printed = None
    return count


def _run(block: Block, names: dict[str, Any]) -> str:
    if block.language == "python":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, str(block), "exec"), names)  # noqa: S102  (the documentation's own code)
        return printed.getvalue()
    return run_command(block.text, str(block))


def run_command(text: str, where: str) -> str:
    """What commands print that are typed in a shell; they have to end well."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env={
            # Test runners set the width of their own terminal.
            **{name: value for name, value in os.environ.items() if name != "COLUMNS"},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=_LONGEST_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{where}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def own_model_and_data() -> dict[str, Any]:
    """A small module, a hundred clients of eight samples each, and a test set."""
    import torch

    torch.manual_seed(1)

    def samples(count: int) -> tuple[Any, Any]:
        inputs = torch.randn(count, 6)
        return inputs, (inputs.sum(dim=1) > 0).long()

    return {
        "my_module": torch.nn.Sequential(torch.nn.Linear(6, 2)),
        "my_clients": [samples(8) for _ in range(100)],
        "my_test": samples(50),
    }


# What stands for the reader's own things in a page: `my_module`, `my_clients`.
PLACEHOLDERS = {"README.md": own_model_and_data}


def _name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", QUICK, ids=_name)
def test_quick_blocks_run(page, tmp_path):
    assert run_page(page, tmp_path, PLACEHOLDERS.get(_name(page), dict)(), slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=_name)
def test_all_blocks_run(page, tmp_path):
    assert run_page(page, tmp_path, PLACEHOLDERS.get(_name(page), dict)(), slow=True)


@pytest.mark.parametrize("page", pages(), ids=_name)
def test_marks_are_known_and_say_why(page):
    """A mistyped mark would leave a block unrun, or run, without anyone noticing."""
    for block in blocks(page):
        for mark in block.marks:
            kind = mark.partition(":")[0]
            if kind in ("result", "table", "end"):
                continue
            assert kind in ("not run", "slow", "output"), f"{block}: unknown mark {mark!r}"
        assert block.not_run is None or len(block.not_run) > 5, f"{block}: say why it is not run"
        assert not block.slow or block.language in RUNNABLE, f"{block}: only what is run can be slow"


def test_the_tutorial_runs_whole():
    """Nothing of the tutorial is left out: a newcomer types every line of it."""
    tutorial = blocks(ROOT / "docs" / "tutorial.md")
    assert [str(block) for block in tutorial if block.language != "text" and not block.runs] == []
    assert sum(block.runs for block in tutorial) >= 6


def test_blocks_are_found():
    counted = {_name(page): sum(block.runs for block in blocks(page)) for page in PAGES}
    assert sum(counted.values()) >= 25, counted
