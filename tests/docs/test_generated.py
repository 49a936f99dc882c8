"""What tools write into the documentation is what they would write now, and nothing in the code is missing from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import niss
from docs.snippets import ROOT

IMAGES = ROOT / "docs" / "images"
_READ = re.compile(
    r"""(?:environ|environment)(?:\.get\(|\[)["'](?P<name>[A-Z_]+)["']|envvar=["'](?P<other>[A-Z_]+)["']"""
)


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")


def run_tool(name: str, *arguments: str | Path) -> None:
    command = [sys.executable, ROOT / "tools" / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def words(path: Path) -> list[str]:
    """The text in a picture: labels, names and numbers."""
    found = (element for element in ElementTree.parse(path).iter() if element.tag.endswith("}text"))
    return sorted("".join(element.itertext()).strip() for element in found)


def test_the_reference_is_current():
    run_tool("write_reference.py", "--check")


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


@pytest.mark.parametrize(
    ("tool", "pattern", "count"),
    [
        pytest.param("draw_concepts.py", "concept-*.svg", 11, marks=pytest.mark.slow),
        ("draw_states.py", "states-*.svg", 2),
    ],
)
def test_committed_pictures_say_what_the_tools_draw(tmp_path, tool, pattern, count):
    run_tool(tool, tmp_path)
    drawn = {path.name: words(path) for path in tmp_path.glob(pattern)}
    assert len(drawn) == count
    assert drawn == {path.name: words(path) for path in IMAGES.glob(pattern)}


@pytest.mark.parametrize("path", sorted(IMAGES.glob("*.svg")), ids=lambda path: path.name)
def test_pictures_suit_light_and_dark_pages_and_load_nothing(path):
    text = path.read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in text
    assert "<title>" in text
    assert 'xlink:href="http' not in text
    assert "@import" not in text
