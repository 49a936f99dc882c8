"""The pictures of the concept pages are those that the code on the pages gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.snippets import ROOT

IMAGES = ROOT / "docs" / "images"


def words(path: Path) -> list[str]:
    """The text in a picture: labels, names and numbers."""
    found = [
        "".join(element.itertext()).strip()
        for element in ElementTree.parse(path).iter()
        if element.tag.endswith("}text")
    ]
    return sorted(found)


@pytest.mark.parametrize(
    ("tool", "pattern", "count"),
    [
        pytest.param("draw_concepts.py", "concept-*.svg", 11, marks=pytest.mark.slow),
        ("draw_states.py", "states-*.svg", 2),
    ],
)
def test_committed_pictures_say_what_the_tools_draw(tmp_path, tool, pattern, count):
    command = [sys.executable, str(ROOT / "tools" / tool), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
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
