"""Epsilon per client over the rounds: a panel for each method, below the line that was promised."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from niss.report.canvas import INK, QUIET, RULE, SERIES, STYLE, WIDTH, short
from niss.report.ledger_rows import rounded_up
from niss.report.spending import Spending

_COLUMNS = 2
_PANEL = 2.3


def draw_spending(spendings: list[Spending]) -> Figure:
    columns = min(_COLUMNS, len(spendings))
    rows = -(-len(spendings) // columns)
    highest = max(max(float(one.most[-1]), one.budget or 0.0) for one in spendings)
    last = max(one.rounds[-1] for one in spendings)
    with mpl.rc_context(STYLE):
        height = _PANEL * rows + 0.75
        figure = Figure(figsize=(WIDTH, height))
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        figure.subplots_adjust(
            left=0.085, right=0.98, top=1 - 0.62 / height, bottom=0.5 / height, hspace=0.28, wspace=0.08
        )
        for place, axes in enumerate(grid.flat):
            if place >= len(spendings):
                axes.set_visible(False)
                continue
            axes.set_xlim(0, last)
            axes.set_ylim(0, 1.12 * highest or 1.0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
            axes.grid(axis="y", color=RULE, linewidth=0.7)
            axes.set_axisbelow(True)
            # With an odd number of panels the one above the gap carries the numbers of the axis.
            if place + columns >= len(spendings):
                axes.set_xlabel("Round")
                axes.tick_params(labelbottom=True)
            if place % columns == 0:
                axes.set_ylabel("ε spent")
            _panel(axes, spendings[place])
        figure.legend(
            handles=_keys(any(one.lines for one in spendings), any(not one.lines for one in spendings)),
            loc="upper left",
            bbox_to_anchor=(0.075, 1.0),
            ncols=5,
            fontsize=9,
            borderaxespad=0.2,
            columnspacing=1.4,
            handlelength=1.8,
        )
    return figure


def describe_spending(spendings: list[Spending]) -> str:
    """The figure in words, for those who do not see it."""
    said = [
        f"{one.label}: the worst-off client spent {rounded_up(float(one.most[-1]))}, "
        f"the median client {rounded_up(float(one.median[-1]))}"
        + ("" if one.budget is None else f", of a budget of {rounded_up(one.budget)}")
        for one in spendings
    ]
    return f"Step charts of epsilon spent by round, one for each method. {'; '.join(said)}."


def _panel(axes: Axes, one: Spending) -> None:
    rounds = np.asarray(one.rounds, dtype=np.float64)
    title = f"{short(one.label)}: ε {rounded_up(float(one.most[-1]))} spent at most"
    axes.set_title(title, loc="left", fontsize=9.5, parse_math=False)
    if one.lines:
        for line in one.lines:
            axes.step(rounds, line, where="post", color=QUIET, linewidth=0.5, alpha=0.7)
    else:
        axes.fill_between(
            rounds, one.least, one.most, step="post", color=SERIES[0], alpha=0.18, linewidth=0.0
        )
    axes.step(rounds, one.median, where="post", color=SERIES[0], linewidth=1.6, linestyle=(0, (1.4, 1.2)))
    axes.step(rounds, one.most, where="post", color=SERIES[1], linewidth=1.6, clip_on=False)
    if one.budget is not None:
        axes.axhline(one.budget, color=INK, linestyle=(0, (4, 2)), linewidth=1.2)


def _keys(lines: bool, spread: bool) -> list[Line2D | Patch]:
    keys: list[Line2D | Patch] = [
        Line2D([], [], color=INK, linestyle=(0, (4, 2)), linewidth=1.2, label="budget"),
        Line2D([], [], color=SERIES[1], linewidth=1.6, label="worst-off client"),
        Line2D([], [], color=SERIES[0], linewidth=1.6, linestyle=(0, (1.4, 1.2)), label="median client"),
    ]
    if lines:
        keys.append(Line2D([], [], color=QUIET, linewidth=0.7, label="each client"))
    if spread:
        keys.append(Patch(facecolor=SERIES[0], alpha=0.18, label="all clients"))
    return keys
