"""No sentence of a statement contradicts another, repeats it, or speaks of a claim where there is none."""

from __future__ import annotations

from dataclasses import replace

from niss.accounting import Statement
from session.scene import Scene


def statement(*, private: bool = True, **plan: int) -> Statement:
    scene = Scene.of(False, rounds=1, private=private, kept=False)
    scene.plan = replace(scene.plan, **plan)
    return scene.play().session.books.statement


def caveats(*, private: bool = True, **plan: int) -> str:
    return " ".join(statement(private=private, **plan).caveats)


def test_without_a_guarantee_nothing_is_said_about_its_delta() -> None:
    said = caveats(private=False)
    assert "of delta" not in said
    assert "the claim is" not in said
    assert "of delta, which is part of it; the claim is" in caveats()


def test_colluders_are_counted_or_not_but_not_both() -> None:
    said = caveats()
    assert "are not counted here" in said
    assert "colluders are counted" not in said
    said = caveats(collusion=0.25)
    assert "colluders are counted as if they were placed after it was drawn" in said
    assert "are not counted here" not in said
    assert "fixed before" not in statement(collusion=0.25).words


def test_what_everyone_took_on_trust_is_said_of_everyone() -> None:
    assert "All 4 clients took on trust: the server's key, the beacon" in caveats()


def test_that_taking_part_is_not_hidden_is_said_once() -> None:
    made = statement()
    assert " ".join((made.words, *made.caveats)).count("took part") == 1


def test_a_round_that_was_charged_is_not_counted_as_skipped() -> None:
    books = Scene.of(False, rounds=1, private=True, kept=False).play().session.books
    books.skip(1, "nobody came")
    books.lose(replace(books.charges[0], round=3), "the server ended")
    assert "Rounds that were skipped: 1; the last because nobody came." in books.statement.caveats
