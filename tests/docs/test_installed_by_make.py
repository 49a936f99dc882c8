"""What `make demo` installs is enough for every command that the README shows, and extras hold what they name."""

from __future__ import annotations

import re
import tomllib

import pytest

from docs.commands import command_lines
from docs.snippets import ROOT, blocks

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
NEEDED = {
    "account": set(),
    "plan": set(),
    "run": {"train"},
    "compare": {"train"},
    "attack": {"train"},
    "ui": {"ui"},
    "up": {"flower", "tracker", "train"},
}
"""The extras that a command needs, besides the package itself."""


def expanded(extra: str) -> set[str]:
    """The extra and every extra of this package that it names."""
    found = {extra}
    for wanted in EXTRAS[extra]:
        if inner := re.fullmatch(r"niss\[([\w,]+)\]", wanted):
            found |= set().union(*(expanded(one) for one in inner[1].split(",")))
    return found


def installed_by_demo() -> set[str]:
    recipe = re.search(r"^\.venv/\.installed:.*\n(?:\t.*\n)+", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", recipe[0])
    return set().union(*(expanded(one) for one in extras.split(",")))


def shown() -> set[str]:
    return {
        words[1]
        for block in blocks(ROOT / "README.md")
        if block.language == "console"
        for words in command_lines(block.text)
        if words[0] == "niss"
    }


def test_the_readme_shows_commands():
    assert {"run", "plan", "ui", "up"} <= shown()


@pytest.mark.parametrize("command", sorted(shown()))
def test_a_command_of_the_readme_has_its_extras_after_make_demo(command):
    assert NEEDED[command] <= installed_by_demo()


def test_all_means_all_that_a_user_runs():
    assert expanded("all") - {"all"} == set(EXTRAS) - {"all", "dev", "docs"}


def test_every_extra_is_listed():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed == set(EXTRAS) - {"dev", "docs"}


def test_a_silent_installation_is_announced():
    """It takes minutes, and `pip --quiet` says nothing meanwhile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    installations = re.findall(r"(?m)^(\t.*)\n\t.*pip install --quiet --constraint.*$", makefile)
    assert len(installations) == 2
    assert all(before.startswith("\t@echo") and "minutes" in before for before in installations)
