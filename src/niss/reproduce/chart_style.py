"""What the figures of the experiments share: the look of a curve, and axes of accuracies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes

from niss.report.accuracy_chart import LINE_STYLES, MARKERS
from niss.report.canvas import INK, QUIET, RULE, SERIES

COLOURS = (INK, *SERIES)
__all__ = ["COLOURS", "MARKERS", "QUIET", "RULE", "accuracy_axis", "accuracy_limits", "curve_look"]


def curve_look(number: int) -> dict[str, Any]:
    """The look of the curve of that number, the same in plots and legends."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINE_STYLES[number % len(LINE_STYLES)],
        "linewidth": 1.4,
    }


def accuracy_axis(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axes.grid(axis="y", color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)


def accuracy_limits(axes: Axes, shown: Iterable[float]) -> None:
    """From a little below the least to a little above the most, at least ten points high."""
    values = list(shown) or [0.0, 1.0]
    low, high = min(values), max(values)
    room = max(0.06 * (high - low), 0.5 * (0.1 - (high - low)), 0.005)
    axes.set_ylim(max(0.0, low - room), min(1.0, high + room))
