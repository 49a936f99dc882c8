"""Runs the blocks of a page as a reader would: one folder that looks like a checkout, one set of Python names."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from docs.snippets import ROOT, Block, blocks

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
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    for marker in (".installed", ".installed-dev"):
        (folder / ".venv" / marker).touch()


def run_page(page: Path, folder: Path, names: dict[str, Any], *, slow: bool) -> int:
    """Run the blocks of a page in order and compare outputs; returns how many were run."""
    make_checkout(folder)
    count, printed = 0, None
    with contextlib.chdir(folder):
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
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
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
    assert done.returncode == 0, f"{block}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
