"""Every command that the documentation shows exists, with its options, and `make demo` installs what README's need."""

from __future__ import annotations

import re
import tomllib

import pytest

from docs.snippets import ROOT, blocks, command_lines, fault, pages

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
_INLINE = re.compile(r"`(niss [a-z][^`]*)`")
# Words about commands, not commands: a name is cut short or stands for several.
_ABRIDGED = ("…", "|", "COMMAND", "KEY=VALUE", "...")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_blocks_exist(page):
    faults = [
        f"{block}: {' '.join(words)}: {why}"
        for block in blocks(page)
        if block.language in ("bash", "console", "")
        for words in command_lines(block.text)
        if (why := fault(words, TARGETS))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_sentences_exist(page):
    """`niss attack joint` in a sentence: command and options must exist; arguments may be left out."""
    faults = []
    for command in _INLINE.findall(page.read_text(encoding="utf-8")):
        if any(sign in command for sign in _ABRIDGED):
            continue
        for words in command_lines(command):
            why = fault(words, TARGETS)
            if why and "Missing" not in why and "requires an argument" not in why:
                faults.append(f"{command}: {why}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("niss plan --participants 30", None),
        ("niss plan --participant-count 30", "No such option"),
        ("niss plann", "no command"),
        ("niss attack joint --out runs/x; niss reprot runs/x", "no command reprot"),
        ("niss --nonsense run", "no option"),
        ("make tests", "no target tests"),
        ("niss plan --participants many", "not a valid"),
        ("X=$(niss keys show --jsn)", "No such option"),
    ],
)
def test_the_check_itself(line, why):
    found = [one for words in command_lines(line) if (one := fault(words, TARGETS))]
    assert (why is None and not found) or (why is not None and any(why in one for one in found)), found


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
    "new": set(),
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
    recipe = re.search(r"^\.venv/\.installed:.*\n(?:\t.*\n)+", MAKEFILE, re.MULTILINE)
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", recipe[0])
    return set().union(*(expanded(one) for one in extras.split(",")))


def shown() -> set[str]:
    readme = ROOT / "README.md"
    texts = [block.text for block in blocks(readme) if block.language == "console"]
    texts += _INLINE.findall(readme.read_text(encoding="utf-8"))
    return {words[1] for text in texts for words in command_lines(text) if words[0] == "niss"}


def test_every_command_of_the_readme_has_its_extras_after_make_demo():
    assert {"run", "plan", "ui", "up"} <= shown()
    installed = installed_by_demo()
    assert [command for command in sorted(shown()) if not NEEDED[command] <= installed] == []


def test_all_means_all_that_a_user_runs():
    assert expanded("all") - {"all"} == set(EXTRAS) - {"all", "dev", "docs"}


def test_every_extra_is_listed():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed == set(EXTRAS) - {"dev", "docs"}


def test_a_silent_installation_is_announced():
    """It takes minutes, and `pip --quiet` says nothing meanwhile."""
    installations = re.findall(r"(?m)^(\t.*)\n\t.*pip install --quiet --constraint.*$", MAKEFILE)
    assert len(installations) == 2
    assert all(before.startswith("\t@echo") and "minutes" in before for before in installations)
