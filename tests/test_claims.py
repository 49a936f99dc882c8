"""Claims are rounded up, and in one place."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from niss.claims import best_guess, digits, duration, odds_in_words, printed_claim, rounded_up

SOURCE = Path(__file__).parents[1] / "src" / "niss"
# An epsilon that is formatted where it stands: with a number of digits, or the last ones cut by `toFixed`.
_FORMATTED = re.compile(r"\{[^{}]*(?:epsilon|promised)[^{}]*:\.\d[fge]\}|epsilon[^;\n]*\.toFixed\(")
_LIMITS = "accounting/ledger.py"  # A limit is a setting, shown as its owner wrote it.


@pytest.mark.parametrize(
    ("epsilon", "printed"),
    [(7.9712, "7.98"), (7.97, "7.97"), (3.000000001, "3.00"), (0.0, "0.00"), (2.001, "2.01")],
)
def test_a_claim_is_never_printed_below_its_number(epsilon: float, printed: str) -> None:
    assert rounded_up(epsilon) == printed_claim(epsilon) == printed


def test_what_is_not_finite_is_no_guarantee() -> None:
    assert printed_claim(None) == printed_claim(math.inf) == "no guarantee"


def test_no_file_formats_an_epsilon_on_its_own() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {hit[0]}"
        for path in sorted([*SOURCE.rglob("*.py"), *SOURCE.rglob("*.js"), *SOURCE.rglob("*.j2")])
        if path.relative_to(SOURCE).as_posix() not in (_LIMITS, "claims.py")
        for hit in _FORMATTED.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_best_guess_is_the_bound_of_the_test_between_two_inputs() -> None:
    for epsilon in (0.1, 1.0, 3.0, 8.0):
        for delta in (0.0, 1e-5, 0.01):
            # Both error rates are equal where e^epsilon a + a = 1 - delta.
            wrong = (1.0 - delta) / (1.0 + math.exp(epsilon))
            assert best_guess(epsilon, delta) == pytest.approx(1.0 - wrong, rel=1e-12)
    assert best_guess(800.0, 0.0) == 1.0
    # mu = 1: Phi(1/2), far below what epsilon at delta 1e-5 allows.
    assert best_guess(4.38, 1e-5, mu=1.0) == pytest.approx(0.69146 + 1e-5, abs=1e-5)
    assert best_guess(0.01, 0.0, mu=5.0) == best_guess(0.01, 0.0)


def test_odds_are_rounded_up_and_name_what_is_guessed() -> None:
    assert "at most 95.3 %" in odds_in_words(3.0, 1e-5)
    assert "whether a given client's data went in" in odds_in_words(3.0, 1e-5)
    assert "record" in odds_in_words(3.0, 1e-5, unit="record", relation="replace-one")
    assert "100.0 %" in odds_in_words(40.0, 1e-5)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "–"), (float("inf"), "–"), (0.0, "0"), (0.12345, "0.123"), (1234.56, "1,235")),
        *((99999.0, "99,999"), (123456.0, "1.23e5"), (0.00012345, "1.23e-4"), (-0.5, "-0.5"), (31.0, "31")),
        *((199210, "199,210"), (10**12, "1e12"), (1.5e-10, "1.5e-10")),
    ],
)
def test_numbers_are_written_with_the_digits_that_mean_something(value: float | None, text: str) -> None:
    assert digits(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (89.0, "89 s"), (90.0, "2 min"), (5400.0, "2 h"), (172799.0, "48 h"), (172800.0, "2 days")],
)
def test_durations_are_written_in_a_unit_that_fits(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
