"""The reference pages are what the code says, and nothing in the code is missing from them."""

from __future__ import annotations

import re
import subprocess
import sys

import niss
from docs.snippets import ROOT

REFERENCE = ROOT / "docs" / "reference"
_READ = re.compile(
    r"""(?:environ|environment)(?:\.get\(|\[)["'](?P<name>[A-Z_]+)["']|envvar=["'](?P<other>[A-Z_]+)["']"""
)


def page(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


def test_the_pages_are_current():
    command = [sys.executable, str(ROOT / "tools" / "write_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_public_name_has_an_entry():
    entries = set(re.findall(r"^### niss\.(\w+)$", page("python.md"), re.MULTILINE))
    assert entries == set(niss.__all__) - {"__version__"}


def test_every_variable_that_is_read_is_listed():
    found = set()
    for path in (ROOT / "src" / "niss").rglob("*.py"):
        for hit in _READ.finditer(path.read_text(encoding="utf-8")):
            found.add(hit["name"] or hit["other"])
    # PATH is passed on to the programs that `niss up` starts.
    missing = {name for name in found - {"PATH"} if f"`{name}`" not in page("environment.md")}
    assert {"NISS_DATA", "XDG_CACHE_HOME"} <= found
    assert missing == set()
