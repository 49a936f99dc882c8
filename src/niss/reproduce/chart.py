"""The figures: the paper's Figure 3 with bands over seeds, and accuracy over epsilon beyond it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from niss.report.accuracy_chart import LINE_STYLES, MARKERS
from niss.report.canvas import INK, QUIET, RULE, SERIES, STYLE, as_png
from niss.report.files import write_atomically
from niss.reproduce.beyond import BEYOND
from niss.reproduce.figure3 import FIGURE_3
from niss.reproduce.panels import PANELS, X_VALUES, Panel
from niss.reproduce.results import Cell, Result, read_results, select, spread
from niss.reproduce.sensitivity import NBAFL
from niss.reproduce.settings import METHODS

X_COLOURS = (INK, *SERIES)
_MEANINGS = {0.0: "X = 0 (as FedAvg)", 1.0: "X = 1 (as DP-FedAvg)"}


def draw_figure_3(results: dict[str, Result], reading: str = NBAFL.name) -> Figure:
    """Eight panels, datasets in rows, models and splits in columns: mean over seeds, band from worst to best."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 5.4))
        grid = figure.subplots(2, 4, squeeze=False)
        for number, panel in enumerate(_layout()):
            axes = grid[number // 4][number % 4]
            _panel(axes, panel, results.get(panel.name), reading)
            if number % 4 == 0:
                axes.set_ylabel("Test accuracy")
            if number >= 4:
                axes.set_xlabel("Round")
        handles = [Line2D([], [], label=_meaning(x), **_line(number)) for number, x in enumerate(X_VALUES)]
        figure.legend(handles=handles, loc="lower center", ncols=len(handles))
        figure.subplots_adjust(left=0.065, right=0.985, top=0.94, bottom=0.17, hspace=0.32, wspace=0.3)
    return figure


def _layout() -> list[Panel]:
    return sorted(
        PANELS, key=lambda panel: (panel.dataset != "mnist", panel.model != "mlp", panel.split != "iid")
    )


def _meaning(x: float) -> str:
    return _MEANINGS.get(x, f"X = {x:g}")


def _panel(axes: Axes, panel: Panel, result: Result | None, reading: str) -> None:
    axes.set_title(panel.title, fontsize=9.5)
    _style(axes)
    shown = (
        [(number, select(result, x=x, reading=reading)) for number, x in enumerate(X_VALUES)]
        if result
        else []
    )
    for number, cells in shown:
        if cells:
            _band(axes, cells, number)
    if not any(cells for _, cells in shown):
        axes.text(0.5, 0.5, "not measured yet", transform=axes.transAxes, ha="center", color=QUIET)
    axes.set_ylim(0.0, 1.0)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _line(number: int) -> dict[str, Any]:
    """The look of the curve of that number, the same in plots and legends."""
    return {
        "color": X_COLOURS[number],
        "linestyle": LINE_STYLES[number % len(LINE_STYLES)],
        "linewidth": 1.4,
    }


def _style(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.grid(axis="y", color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)


def _band(axes: Axes, cells: Sequence[Cell], number: int) -> None:
    # Seeds may have been evaluated at different rounds: only those that all have are shown.
    curves = [dict(cell.curve) for cell in cells]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[at] for curve in curves] for at in rounds]
    means = [sum(column) / len(column) for column in values]
    axes.plot(rounds, means, **_line(number))
    if len(cells) > 1:
        axes.fill_between(
            rounds,
            [min(c) for c in values],
            [max(c) for c in values],
            color=X_COLOURS[number],
            alpha=0.18,
            linewidth=0,
        )


def draw_beyond(results: dict[str, Result]) -> Figure:
    """Accuracy over epsilon for every method, one panel a setting, nobody colluding or dropping out."""
    with mpl.rc_context(STYLE):
        rows = max(1, math.ceil(len(results) / 4))
        figure = Figure(figsize=(11.0, 2.5 * rows + 0.8))
        grid = figure.subplots(rows, 4, squeeze=False)
        for number in range(4 * rows):
            axes = grid[number // 4][number % 4]
            if number < len(results):
                name = list(results)[number]
                _setting(axes, name, results[name])
            else:
                axes.set_axis_off()
        handles = [
            Line2D([], [], marker=MARKERS[number], label=name, **_line(number))
            for number, name in enumerate(METHODS)
        ]
        figure.legend(handles=handles, loc="lower center", ncols=len(handles))
        below = 0.75 / (2.5 * rows + 0.8)
        figure.subplots_adjust(left=0.065, right=0.985, top=0.93, bottom=below + 0.1, hspace=0.45, wspace=0.3)
    return figure


def _setting(axes: Axes, name: str, result: Result) -> None:
    axes.set_title(name, fontsize=9.5)
    _style(axes)
    for number, method in enumerate(METHODS):
        cells = select(result, method=method, variant="none")
        style = _line(number)
        if cells and cells[0].labels["epsilon"] is None:
            axes.axhline(spread([cell.accuracy for cell in cells]).mean, **style)
            continue
        epsilons = sorted({cell.labels["epsilon"] for cell in cells})
        found = [
            spread([c.accuracy for c in cells if c.labels["epsilon"] == epsilon]) for epsilon in epsilons
        ]
        axes.errorbar(
            epsilons,
            [one.mean for one in found],
            yerr=[one.deviation for one in found],
            marker=MARKERS[number],
            markersize=4,
            capsize=2,
            **style,
        )
    axes.set_xscale("log")
    axes.set_xticks([1, 3, 8], ["1", "3", "8"])
    axes.minorticks_off()
    axes.set_ylim(0.0, 1.0)
    axes.set_xlabel("ε over the whole training")


def write_figures(folder: Path) -> list[Path]:
    """Draws what there is results for, into the results folder."""
    written = []
    if figure_3 := read_results(folder, FIGURE_3):
        written.append(write_atomically(folder / "figure-3.png", as_png(draw_figure_3(figure_3))))
    if beyond := read_results(folder, BEYOND):
        written.append(write_atomically(folder / "beyond.png", as_png(draw_beyond(beyond))))
    return written
