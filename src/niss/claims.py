"""How a claim is written for a reader: rounded up, in one place, and in an attacker's odds.

A claim may be too weak, never too strong, so every printed epsilon goes through `rounded_up`: statements, tables,
reports, pages and the headlines of attacks all show the same digits for the same number.
"""

from __future__ import annotations

import math
from statistics import NormalDist

NO_GUARANTEE = "no guarantee"
_FORGIVEN = (
    1e-6  # Hundredths of a hundredth: what calibration leaves above a round target is no reason to round up.
)
_GUESSES = {
    ("client", "zero-out"): "whether a given client's data went in",
    ("client", "replace-one"): "which of two sets of data a given client had",
    ("record", "zero-out"): "whether a given record was among the data",
}


def rounded_up(epsilon: float) -> str:
    """An epsilon with two decimals, never below the number itself (a rounding error of 1e-8 apart).

    >>> rounded_up(7.9712), rounded_up(3.000000001)
    ('7.98', '3.00')
    """
    return f"{math.ceil(epsilon * 100.0 - _FORGIVEN) / 100.0:.2f}"


def printed_claim(epsilon: float | None) -> str:
    """The same, or that there is no guarantee where there is no finite epsilon."""
    return NO_GUARANTEE if epsilon is None or not math.isfinite(epsilon) else rounded_up(epsilon)


def best_guess(epsilon: float, delta: float, mu: float | None = None) -> float:
    """How often the best attacker is right about a fair coin flip, at most.

    Under (epsilon, delta)-DP no test between two neighbouring inputs is right more often than
    `(e^epsilon + delta) / (1 + e^epsilon)`; under mu-GDP more often than `Phi(mu / 2)` (Dong, Roth, Su 2022), to which
    delta is added for what the Gaussian does not cover. Both hold where mu is known: the smaller one counts.

    >>> best_guess(0.0, 0.0), round(best_guess(3.0, 1e-5), 3)
    (0.5, 0.953)
    """
    bound = (1.0 + delta * math.exp(-epsilon)) / (1.0 + math.exp(-epsilon))
    if mu is not None and math.isfinite(mu):
        bound = min(bound, NormalDist().cdf(mu / 2.0) + delta)
    return min(bound, 1.0)


def best_guess_percent(epsilon: float, delta: float, mu: float | None = None) -> str:
    """The same in per cent, rounded up to a tenth."""
    percent = math.ceil(1000.0 * best_guess(epsilon, delta, mu) - 1e-9) / 10.0
    return f"{min(percent, 100.0):.1f} %"


def odds_in_words(
    epsilon: float, delta: float, mu: float | None = None, *, unit: str = "client", relation: str = "zero-out"
) -> str:
    """What an epsilon means to someone who has to guess, as a sentence; the percentage is rounded up.

    mu              of the same claim, where it is Gaussian: the bound is then much closer
    unit, relation  what is hidden, as in `Plan`
    """
    guess = _GUESSES.get((unit, relation), "which of two values a given record had")
    return (
        f"An attacker who has to guess {guess}, both being equally likely beforehand, is right at most "
        f"{best_guess_percent(epsilon, delta, mu)} of the time; a coin is right 50 %."
    )
