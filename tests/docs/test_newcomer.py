"""A newcomer: clones, types the README from top to bottom, then the tutorial, and trains on data of their own.

All of it in one clone, so that a folder that one page leaves is in nobody's way on the next. Only the installation is
not repeated here: `tests/test_packages.py` has it.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.snippets import ROOT, blocks
from docs.test_snippets import own_model_and_data, pretend_installed, run_blocks, run_command

README = ROOT / "README.md"
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+\S*")


def typed() -> Iterator[str]:
    """The commands of the README, in order."""
    for block in blocks(README):
        if block.language == "console":
            yield from (line[2:] for line in block.text.splitlines() if line.startswith("$ "))


def look_at_the_pages() -> None:
    """`niss ui`, on a port of its own and without opening a browser, until Ctrl-C."""
    command = [sys.executable, "-m", "niss", "ui", "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as served:
        try:
            address = next(found[0] for line in served.stdout if (found := _ADDRESS.search(line)))
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert b"niss" in answer.read()
        finally:
            served.send_signal(signal.SIGINT)
            served.wait(timeout=60)
    assert served.returncode in (0, 130)


@pytest.mark.slow
def test_a_newcomer_gets_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "niss"
    cloned = subprocess.run(
        ["git", "clone", "--quiet", str(ROOT), str(clone)], capture_output=True, check=False
    )
    if cloned.returncode:
        pytest.skip(f"not a repository of git: {cloned.stderr.decode()}")
    pretend_installed(clone)
    monkeypatch.setenv("PYTHONPATH", str(clone / "src"))
    with contextlib.chdir(clone):
        for command in typed():
            if command.startswith("niss ui"):
                look_at_the_pages()
            else:
                run_command(command, f"README.md: {command}")
        assert run_blocks(ROOT / "docs" / "tutorial.md", {}, slow=True) >= 6
        names = own_model_and_data()
        assert run_blocks(README, names, slow=True) == 1
        assert names["result"].epsilon <= 8.0
        assert Path("runs/my-model/model.safetensors").is_file()
        for page in ("runs/demo", "runs/first", "runs/mine", "runs/silos", "runs/tutorial-silos"):
            assert (clone / page / "report.html").is_file(), page
