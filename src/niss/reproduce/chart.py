"""The figures, drawn from the result files: the paper's Figure 3 with bands over seeds, and all others.

This module loads matplotlib; what runs experiments must not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from niss.report.canvas import STYLE, as_png
from niss.report.files import write_atomically
from niss.reproduce.beyond import BEYOND, SCALE
from niss.reproduce.chart_beyond import draw_beyond, draw_scale
from niss.reproduce.chart_faults import FAULTS, draw_faults, with_faults
from niss.reproduce.chart_leaks import draw_figure_4
from niss.reproduce.chart_style import COLOURS, QUIET, accuracy_axis, accuracy_limits, curve_look
from niss.reproduce.figure3 import FIGURE_3
from niss.reproduce.leaks import FIGURE_4
from niss.reproduce.panels import PANELS, X_VALUES, Panel
from niss.reproduce.results import Cell, Result, read_results, select
from niss.reproduce.sensitivity import NBAFL
from niss.reproduce.tables_leaks import leaks_in_order

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
        handles = [
            Line2D([], [], label=_meaning(x), **curve_look(number)) for number, x in enumerate(X_VALUES)
        ]
        figure.legend(handles=handles, loc="lower center", ncols=len(handles))
        figure.subplots_adjust(left=0.075, right=0.985, top=0.94, bottom=0.17, hspace=0.32, wspace=0.3)
    return figure


def _layout() -> list[Panel]:
    return sorted(
        PANELS, key=lambda panel: (panel.dataset != "mnist", panel.model != "mlp", panel.split != "iid")
    )


def _meaning(x: float) -> str:
    return _MEANINGS.get(x, f"X = {x:g}")


def _panel(axes: Axes, panel: Panel, result: Result | None, reading: str) -> None:
    axes.set_title(panel.title, fontsize=9.5)
    accuracy_axis(axes)
    by_x = {x: select(result, x=x, reading=reading) if result else [] for x in X_VALUES}
    heights = [
        height for number, cells in enumerate(by_x.values()) if cells for height in _band(axes, cells, number)
    ]
    if not heights:
        axes.text(0.5, 0.5, "not measured yet", transform=axes.transAxes, ha="center", color=QUIET)
    accuracy_limits(axes, heights)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _band(axes: Axes, cells: Sequence[Cell], number: int) -> list[float]:
    """Draws mean and band; returns the accuracies that should be in sight, which the first tenth need not be."""
    # Seeds may have been evaluated at different rounds: only those that all have are shown.
    curves = [dict(cell.curve) for cell in cells]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[at] for curve in curves] for at in rounds]
    means = [sum(column) / len(column) for column in values]
    axes.plot(rounds, means, **curve_look(number))
    if len(cells) > 1:
        low, high = [min(column) for column in values], [max(column) for column in values]
        axes.fill_between(rounds, low, high, color=COLOURS[number], alpha=0.18, linewidth=0)
    end = max(rounds, default=0)
    return [value for at, column in zip(rounds, values, strict=True) if at > 0.1 * end for value in column]


def write_figures(folder: Path, work: Path | None = None) -> list[Path]:
    """Draws what there is results for, into the results folder.

    Figure 4 shows recovered pictures, which only the folder `work` of its runs holds; without them it stays as it is.
    """
    trained: dict[str, Callable[[dict[str, Result]], Figure]] = {
        FIGURE_3: draw_figure_3,
        BEYOND: draw_beyond,
        SCALE: draw_scale,
    }
    written = []
    for name, draw in trained.items():
        if found := read_results(folder, name):
            written.append(write_atomically(folder / f"{name}.png", as_png(draw(found))))
    if found := with_faults(read_results(folder, BEYOND)):
        written.append(write_atomically(folder / f"{FAULTS}.png", as_png(draw_faults(found))))
    leaks = leaks_in_order(folder)
    figure = draw_figure_4(leaks, work) if leaks and work is not None else None
    if figure is not None:
        written.append(write_atomically(folder / f"{FIGURE_4}.png", as_png(figure)))
    return written
