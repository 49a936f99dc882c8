"""What the figures beyond the paper share: the look of a contestant, panels of accuracies, and their arrangement.

Figures are as wide as a page's text, three panels side by side, so that they can be read at half that width. A panel's
axis is cut to where methods differ; one that lies far below the others is named at the lower edge, with its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reproduce.chart_paper import STYLE, accuracy_axis
from experiments.reproduce.design import EPSILONS, METHODS
from experiments.reproduce.results import Cell, Spread, spread
from niss.figures import cut_range, line_options, look_of, marked
from niss.methods.look import Look, distinct

COLUMNS = 3
WIDTH, ROW = 7.6, 2.5
# Those of the planner keep the look of their method; one with a strength of its own takes another.
_NAMES = sorted(METHODS, key=lambda name: METHODS[name].kappa is not None)
LOOKS = dict(
    zip(
        _NAMES,
        distinct(
            look_of(METHODS[name].kind, protected=METHODS[name].private and not METHODS[name].printed)
            for name in _NAMES
        ),
        strict=True,
    )
)


def named(name: str) -> str:
    """A contestant in a legend, which says where it protects nobody."""
    method = METHODS[name]
    return marked(name, protected=method.private and not method.printed)


@dataclass(frozen=True)
class Curve:
    """Accuracies of a contestant at some places of the axis; no places: one accuracy, the same everywhere."""

    name: str
    look: Look
    places: Sequence[float]
    values: Sequence[Spread]


def over(cells: Sequence[Cell], label: str, name: str, look: Look) -> list[Curve]:
    """The accuracies of these cells over a label; no curve where there are no cells."""
    places = sorted({cell.labels[label] for cell in cells if cell.labels[label] is not None})
    if not cells:
        return []
    groups: list[Any] = list(places) or [None]
    values = [spread([cell.accuracy for cell in cells if cell.labels[label] == place]) for place in groups]
    return [Curve(name, look, places, values)]


def draw_curves(axes: Axes, curves: Sequence[Curve]) -> None:
    """Means and deviations over seeds, on an axis that is cut to where they differ."""
    accuracy_axis(axes)
    low, high, below = cut_range([[one.mean for one in curve.values] for curve in curves])
    for curve in (one for number, one in enumerate(curves) if number not in below):
        options = line_options(curve.look, width=1.7, size=5.5)
        if curve.places:
            means, deviations = zip(*((one.mean, one.deviation) for one in curve.values), strict=True)
            axes.errorbar(curve.places, means, yerr=deviations, capsize=2, **options)
        else:
            axes.axhline(curve.values[0].mean, **options | {"marker": ""})
    room = max(0.1 * (high - low), 0.5 * (0.02 - (high - low)), 0.003)
    names = [curves[number] for number in sorted(below)]
    # Room at the lower edge for those that are only named.
    axes.set_ylim(max(0.0, low - room - 0.16 * len(names) * (high - low + 2 * room)), min(1.0, high + room))
    for line, curve in enumerate(names):
        numbers = ", ".join(f"{100 * one.mean:.0f}" for one in curve.values)
        axes.text(
            0.98,
            0.03 + 0.12 * line,
            f"↓ {curve.name}: {numbers} %",
            transform=axes.transAxes,
            color=curve.look.colour,
            ha="right",
            fontsize=9,
            # On the ground of the page, so that no curve runs through it.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )


def epsilon_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.minorticks_off()
    axes.set_xlim(EPSILONS[0] / 1.25, EPSILONS[-1] * 1.25)


def panels(
    titles: Sequence[str],
    draw: Callable[[Axes, int], None],
    *,
    across: str,
    up: str,
    legend: Iterable[tuple[str, Look]],
    foot: float = 0.0,
) -> Figure:
    """A panel for each title, row by row, and a legend below; `foot` inches stay free at the bottom for more."""
    columns = 2 if len(titles) == 4 else min(COLUMNS, len(titles)) or 1
    rows = math.ceil(len(titles) / columns) or 1
    handles = [Line2D([], [], label=name, **line_options(look, width=1.7, size=6)) for name, look in legend]
    lines = math.ceil(len(handles) / (2 if len(handles) == 4 else COLUMNS))
    lower = 0.62 + 0.24 * lines + foot
    height = ROW * rows + lower
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height))
        grid = figure.subplots(rows, columns, squeeze=False)
        figure.subplots_adjust(
            left=0.125, right=0.985, top=1.0 - 0.45 / height, bottom=(lower + 0.12) / height, hspace=0.42, wspace=0.36
        )  # fmt: skip
        for axes in grid.flat[len(titles) :]:
            axes.set_visible(False)
        for number, (axes, title) in enumerate(zip(grid.flat, titles, strict=False)):
            axes.set_title(title, fontsize=10.5, pad=5)
            draw(axes, number)
            if number % columns == 0:
                axes.set_ylabel(up)
            if number + columns >= len(titles):
                axes.set_xlabel(across)
        figure.legend(
            handles=handles,
            loc="lower center",
            bbox_to_anchor=(0.53, foot / height),
            ncols=2 if len(handles) == 4 else COLUMNS,
            columnspacing=1.2,
            handlelength=2.6,
        )
    return figure
