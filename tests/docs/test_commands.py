"""Every `niss` and `make` command that the documentation shows exists, with its options."""

from __future__ import annotations

import re

import pytest

from docs.commands import command_lines, fault
from docs.snippets import ROOT, blocks, pages

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
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
