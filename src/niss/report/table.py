"""The table of results as formatted strings, the same for the page and for the terminal.

Numbers have the digits that mean something after one run: accuracies a tenth of a percent, variances three digits,
epsilons two decimals, rounded up (`niss.claims`). What is not a number says why: see `WORDS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from niss.claims import NO_GUARANTEE, rounded_up
from niss.report.run_folder import MethodResult, ReportInput

NOT_APPLICABLE = "–"
NO_NOISE = "none"
NOT_PRIVATE = "not private"
SERVER_TRUSTED = "server trusted"
UNFINISHED = "unfinished"

# What stands in a cell that holds no number.
WORDS = (NOT_APPLICABLE, NO_NOISE, NO_GUARANTEE, NOT_PRIVATE, UNFINISHED)

HEADER = (
    "Method",
    "κ",
    "τ²",
    "Accuracy",
    "Noise variance, measured",
    "Noise variance, predicted",
    "ε, joint view",
    "ε, marginal view",
)


Item = TypeVar("Item")


class SummaryTable(NamedTuple):
    """A header, and rows of as many cells; the first cell of a row names it.

    Unpacks as `header, rows = summary_rows(report)`.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def evenly_spaced(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the items, the first and the last among them: more points of a curve than that help nobody."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(place * last / (most - 1))] for place in range(most)]


def summary_rows(report: ReportInput) -> SummaryTable:
    """One row for each method, in the order of the folder.

    Of an unfinished method the accuracy is that of its last evaluation, and says so; its epsilons are not known yet.
    """
    return SummaryTable(HEADER, tuple(_row(method) for method in report.methods))


def _row(method: MethodResult) -> tuple[str, ...]:
    accuracy = NOT_APPLICABLE if method.accuracy is None else format_accuracy(method.accuracy)
    if method.accuracy is not None and not method.finished:
        accuracy += f" (round {method.evaluations[-1][0]})"
    return (
        method.label,
        _plain(method.kappa),
        _plain(method.tau2),
        accuracy,
        format_variance(method.aggregate_variance, finished=method.finished),
        format_variance(method.aggregate_variance_predicted, finished=method.finished),
        format_epsilon(method, method.epsilon_joint),
        format_epsilon(method, method.epsilon_marginal),
    )


def _plain(value: float | None) -> str:
    return NOT_APPLICABLE if value is None else f"{value:.3g}"


def format_accuracy(accuracy: float) -> str:
    """A share of examples, such as 0.8214, in percent: "82.1 %"."""
    return f"{100 * accuracy:.1f} %"


def format_variance(variance: float | None, *, finished: bool = True) -> str:
    """A finished method without a variance adds no noise; of an unfinished one it is only not known yet."""
    if variance is None and not finished:
        return NOT_APPLICABLE
    return f"{variance:.3g}" if variance else NO_NOISE


def format_epsilon(method: MethodResult, epsilon: float | None) -> str:
    """An epsilon, with a word where it does not hold against the server.

    A missing one means three things: nothing to protect with, nothing proven, or not known yet.
    """
    if not method.is_private:
        return NOT_PRIVATE
    if epsilon is not None:
        return f"{rounded_up(epsilon)}, {SERVER_TRUSTED}" if method.trusts_the_server else rounded_up(epsilon)
    return NO_GUARANTEE if method.finished else UNFINISHED
