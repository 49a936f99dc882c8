"""Roles and their words: on scenes with all that the real files have, and on the real package where it can be had."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest

from niss.data.plays import (
    FEWEST_CHARACTERS,
    VOCABULARY,
    by_client,
    next_tokens,
    role_samples,
    roles,
    speeches,
)


def said(text: str, play: str = "a_play") -> list[tuple[str, str]]:
    return list(speeches(play, textwrap.dedent(text)))


CAPITALS = """\
    THE PLAY

    by William Shakespeare



    PERSONS REPRESENTED.

    AARON, a Moor.
    BRUTUS.

    AARON.
    Not yet spoken.

    ACT I.

    SCENE I. Rome. Before the Capitol.

    The street.

    [Enter AARON and
    BRUTUS.]

    AARON.
    First   line,
      second line.

    [Exit BRUTUS.]

    The same speech goes on.

    BRUTUS. [Aside.]
    Who [to himself] speaks?
    [He turns; the noise
    grows.] Speak!

    Aaron.
    Small letters this time.

    AARON AND BRUTUS.
    Together.

    ALL.
    All of us.

    FIRST and SECOND LORDS.
    Both of us.

    BRUTUS. On the same line.

    AARON
    Without a full stop.

    SCENE II.

    A room in the palace.

    1. CITIZEN.
    Number one.
    BRUTUS.
    No blank line before me.

    FIRST CITIZEN.
    Number one again.

    SONG.

    Tra la la.

    Enter BRUTUS, mad.

    MRS. PAGE.
    [Enter a servant [with a letter] and stops.] Here!

    BRUTUS.
    {Kneeling.] Never [the bracket is forgotten

    AARON.
    At last.

    THE END
"""


def test_speeches_of_a_play_that_prints_its_speakers_in_capitals():
    assert said(CAPITALS) == [
        ("AARON", "First line,\nsecond line."),
        ("AARON", "The same speech goes on."),
        ("BRUTUS", "Who speaks?\nSpeak!"),
        ("AARON", "Small letters this time."),
        ("BRUTUS", "On the same line."),
        ("AARON", "Without a full stop."),
        ("FIRST CITIZEN", "Number one."),
        ("BRUTUS", "No blank line before me."),
        ("FIRST CITIZEN", "Number one again."),
        ("FIRST CITIZEN", "Tra la la."),
        ("MRS PAGE", "Here!"),
        ("BRUTUS", "Never"),
        ("AARON", "At last."),
    ]


ABBREVIATIONS = """\
    HAMLET, PRINCE OF DENMARK

    Hamlet, Son to the former.
    Two Clowns, Grave-diggers.

    Act I.

    Scene I. A churchyard.

    1 Clown.
    Is she to be buried?

    Ham.
    Why?

    Hor. and Mar.
    My lord!

    Hor.
    So. It is.

    Farewell, my lord.

    I Player.
    A speech.

    Ham. Good, good.

    I Play.
    Another.

    For.
    Where is this sight?

    Fort.
    Let four captains
"""


def test_speeches_of_a_play_that_prints_abbreviations_and_has_variants():
    assert said(ABBREVIATIONS, "hamlet") == [
        ("FIRST CLOWN", "Is she to be buried?"),
        ("HAM", "Why?"),
        ("HOR", "So. It is."),
        ("HOR", "Farewell, my lord."),
        ("FIRST PLAY", "A speech."),
        ("HAM", "Good, good."),
        ("FIRST PLAY", "Another."),
        ("FORT", "Where is this sight?"),
        ("FORT", "Let four captains"),
    ]


def test_roles_are_those_of_modern_plays_with_enough_characters():
    long, short = "x" * FEWEST_CHARACTERS, "x" * (FEWEST_CHARACTERS - 1)
    text = f"ACT I.\n\nTITUS.\n{long}\n\nMARCUS.\n{short}\n\nAARON.\n{short}\n\nAARON.\nmore{'3' * 50}\n".encode()
    files = {
        "tragedy_of_titus_gut.txt": text,
        "titus_gut_f.txt": text,
        "sonnets_gut.txt": text,
        "metadata.txt": text,
    }
    found = roles(files)
    assert list(found) == [("titus", "TITUS"), ("titus", "AARON")]
    assert found["titus", "AARON"] == short + "\nmore"  # digits are not in the vocabulary


def test_samples_are_pieces_with_the_next_character_and_the_last_are_for_the_test():
    inputs, labels = next_tokens(np.arange(10), 3)
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert labels.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert next_tokens(np.arange(9), 3)[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    for few in (0, 1, 3):
        assert next_tokens(np.arange(few), 3)[1].shape == (0, 3)
    assert [len(by_client([np.arange(count + 1)], 1)[2]) for count in (2, 5, 10, 12, 13)] == [1, 1, 2, 2, 3]
    train_inputs, _, _, test_labels, owners = by_client([np.arange(10), np.arange(4), 100 + np.arange(7)], 3)
    assert train_inputs.tolist() == [[0, 1, 2], [3, 4, 5], [100, 101, 102]]
    assert test_labels.tolist() == [[7, 8, 9], [104, 105, 106]]
    assert owners is not None
    assert owners.tolist() == [0, 0, 1]


def test_the_numbers_of_a_sample_spell_the_text():
    line = 'Who\'s there? "Nay," answer me -- (stand); unfold: yourself! & so on.'
    text = "\n".join([line] * 20)
    inputs, labels, *_ = role_samples({"hamlet_gut.txt": f"ACT I.\n\nBER.\n{text}\n".encode()}, 80)
    spelled, shifted = (
        "".join(VOCABULARY[number] for number in part.reshape(-1)) for part in (inputs, labels)
    )
    assert text.startswith(spelled)
    assert len(spelled) == 80 * len(inputs) > 800
    assert shifted == text[1 : len(shifted) + 1]


def test_the_vocabulary_is_fixed():
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 66
    assert tuple(sorted(VOCABULARY)) == VOCABULARY


def test_wide_misprints_do_not_end_the_text():
    assert said("ACT I.\n\nA LORD.\nCaf\xe9\r\n", "x") == [("A LORD", "Caf\xe9")]
    assert said("") == []
    assert said("\n\n[never closed") == []


@pytest.mark.parametrize("name", ["Exeunt", "Flourish. Enter the KING", "Re-enter ARIEL", "Alarums"])
def test_directions_without_brackets_are_not_spoken(name):
    text = f"ACT I.\n\nKING.\nCome. Exeunt\n\n{name}, and others.\n\nQUEEN.\nEnter, sir, the castle.\n"
    assert said(text) == [("KING", "Come."), ("QUEEN", "Enter, sir, the castle.")]
