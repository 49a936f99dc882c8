"""How numbers are written for a reader, in one place: claims rounded up, others with the digits that mean something.

A claim may be too weak, never too strong, so every printed epsilon goes through `rounded_up`: statements, tables,
reports, pages and the headlines of attacks all show the same digits for the same number. Any other number goes through
`digits`, a share through `percent`, a time through `duration`; what a claim means to an attacker says `odds_in_words`.
"""

from __future__ import annotations

import math

NO_GUARANTEE = "no guarantee"
NOT_APPLICABLE = "–"
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


def digits(value: float | None, count: int = 3) -> str:
    """A whole number as it is; any other with so many digits that mean something, and all of those before the point.

    >>> digits(199210), digits(0.12345), digits(0.00014312), digits(1e-5), digits(1234.56, 2)
    ('199,210', '0.123', '1.43e-4', '1e-5', '1,235')
    """
    if value is None or not math.isfinite(value):
        return NOT_APPLICABLE
    if isinstance(value, int) and abs(value) < 1e9:
        return f"{value:,}"
    if value and not 1e-3 <= abs(value) < 1e5:
        mantissa, power = f"{value:.{count - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(power)}"
    return f"{value:,.{max(count, len(str(int(abs(value)))))}g}"


def percent(share: float | None) -> str:
    """A share, such as 0.8214, in tenths of a percent: "82.1 %"."""
    return NOT_APPLICABLE if share is None else f"{100 * share:.1f} %"


def duration(seconds: float | None) -> str:
    """In the largest unit of which there are at least one and a half."""
    if seconds is None:
        return NOT_APPLICABLE
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= (2.0 if unit == "days" else 1.5) * length:
            return f"{round(seconds / length)} {unit}"
    return f"{round(seconds)} s"


def best_guess(epsilon: float, delta: float, mu: float | None = None) -> float:
    """How often the best attacker is right about a fair coin flip, at most.

    Under (epsilon, delta)-DP no test between two neighbouring inputs is right more often than
    `(e^epsilon + delta) / (1 + e^epsilon)`; under mu-GDP more often than `Phi(mu / 2)` (Dong, Roth, Su 2022), to which
    delta is added for what the Gaussian does not cover. Both hold where mu is known: the smaller one counts.

    >>> best_guess(0.0, 0.0), round(best_guess(3.0, 1e-5), 3)
    (0.5, 0.953)
    """
    from statistics import NormalDist  # Loads more than the command line needs to show its help.

    bound = (1.0 + delta * math.exp(-epsilon)) / (1.0 + math.exp(-epsilon))
    if mu is not None and math.isfinite(mu):
        bound = min(bound, NormalDist().cdf(mu / 2.0) + delta)
    return min(bound, 1.0)


def odds_in_words(
    epsilon: float, delta: float, mu: float | None = None, *, unit: str = "client", relation: str = "zero-out"
) -> str:
    """What an epsilon means to someone who has to guess, as a sentence; the percentage is rounded up.

    mu              of the same claim, where it is Gaussian: the bound is then much closer
    unit, relation  what is hidden, as in `Plan`
    """
    guess = _GUESSES.get((unit, relation), "which of two values a given record had")
    percent = math.ceil(1000.0 * best_guess(epsilon, delta, mu) - 1e-9) / 10.0
    return (
        f"An attacker who has to guess {guess}, both being equally likely beforehand, is right at most "
        f"{min(percent, 100.0):.1f} % of the time; a coin is right 50 %."
    )
