"""Markdown tables, and numbers over seeds as words."""

from __future__ import annotations

from collections.abc import Sequence

from niss.reproduce.records import Spread, spread
from niss.reproduce.results import Cell

MISSING = "not measured yet"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)) -> str:
    """A Markdown table: columns of words to the left, numbers to the right."""
    rule = ["---" if number in words else "---:" for number in range(len(header))]
    lines = [header, rule, *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def or_missing(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)) -> str:
    """The table, or a line that says that nothing is measured yet."""
    return markdown(header, rows, words=words) if rows else MISSING + "\n"


def percent(value: Spread | None) -> str:
    """Mean and deviation over seeds."""
    if value is None:
        return MISSING
    deviation = f" ± {100 * value.deviation:.1f}" if value.count > 1 else ""
    return f"{100 * value.mean:.1f}{deviation} %"


def decibels(value: Spread | None) -> str:
    """Mean and deviation over seeds."""
    if value is None:
        return MISSING
    deviation = f" ± {value.deviation:.1f}" if value.count > 1 else ""
    return f"{value.mean:.1f}{deviation} dB"


def short(value: float, digits: int = 2) -> str:
    """So many digits that count, without an exponent where there need be none."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10.0**digits else f"{rounded:.{digits}g}"


def points(value: Spread | None) -> str:
    return MISSING if value is None else f"{100 * value.mean:.1f}"


def settled(cells: Sequence[Cell]) -> Spread | None:
    """Accuracy over the last tenth of the rounds, over seeds."""
    return spread([cell.settled for cell in cells]) if cells else None


def final(cells: Sequence[Cell]) -> Spread | None:
    """Accuracy after the last round, over seeds."""
    return spread([cell.accuracy for cell in cells]) if cells else None
