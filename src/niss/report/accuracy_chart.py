"""The accuracy curves: one for each method, named at its end."""

from __future__ import annotations

import math

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from matplotlib.transforms import blended_transform_factory

from niss.report.canvas import POINTS_PER_INCH, QUIET, RULE, STYLE, WIDTH, colours, label_width, short
from niss.report.hover import Band, PlotArea, Reading
from niss.report.source import MethodResult, ReportInput
from niss.report.table import format_accuracy

LINE_STYLES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    "-",
    (0, (5, 1.6)),
    (0, (1.2, 1.4)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (3, 1.2)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

Shown = list[tuple[MethodResult, str, int]]


def draw_accuracy(report: ReportInput) -> Figure:
    shown = [
        (method, colour, number)
        for number, (method, colour) in enumerate(zip(report.methods, colours(report), strict=True))
        if method.evaluations
    ]
    with mpl.rc_context(STYLE):
        height = max(3.9, 0.26 * len(shown) + 1.2)
        figure = Figure(figsize=(WIDTH, height))
        left = 0.72
        # The keys and leaders beside the curves take 0.145 of the width of the axes.
        width = (WIDTH - left - label_width((method for method, _, _ in shown), extra=7)) / 1.145
        axes = figure.add_axes((left / WIDTH, 0.55 / height, width / WIDTH, 1 - 0.8 / height))
        longest = max((method.rounds_done for method, _, _ in shown), default=report.rounds or 1)
        axes.set_xlim(0, max(longest, report.rounds or 1))
        axes.set_ylim(0, _upper_accuracy(shown))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        axes.set_xlabel("Round")
        axes.set_ylabel("Test accuracy (%)")
        axes.grid(axis="y", color=RULE, linewidth=0.7)
        axes.set_axisbelow(True)
        for method, colour, number in shown:
            _curve(axes, method, colour, number)
        _label_ends(axes, shown, height)
        if not shown:
            axes.text(0.5, 0.5, "No evaluation yet", transform=axes.transAxes, ha="center", va="center")
    return figure


def accuracy_bands(figure: Figure, report: ReportInput) -> tuple[PlotArea, list[Band]]:
    """Where the axes of a drawn figure lie, and what each evaluated round reads."""
    axes = figure.axes[0]
    scale = POINTS_PER_INCH / figure.dpi
    tall = figure.get_figheight() * POINTS_PER_INCH

    def place(number: float, value: float) -> tuple[float, float]:
        x, y = axes.transData.transform((number, value))
        return float(x) * scale, tall - float(y) * scale

    (first, last), (low, high) = axes.get_xlim(), axes.get_ylim()
    (left, bottom), (right, top) = place(first, low), place(last, high)
    rounds: dict[int, list[tuple[float, Reading]]] = {}
    for method, colour in zip(report.methods, colours(report), strict=True):
        for number, value in method.evaluations:
            text = f"{format_accuracy(value)}  {short(method.label)}"
            rounds.setdefault(number, []).append((value, Reading(text, colour, *place(number, value))))
    bands = [
        Band(
            f"Round {number}",
            place(number, low)[0],
            tuple(reading for _, reading in sorted(found, key=lambda pair: -pair[0])),
        )
        for number, found in sorted(rounds.items())
    ]
    return PlotArea(left, top, right, bottom), bands


def _upper_accuracy(shown: Shown) -> float:
    highest = max((value for method, _, _ in shown for _, value in method.evaluations), default=1.0)
    return min(1.0, 0.1 * math.ceil(10 * highest + 0.2)) or 1.0


def _curve(axes: Axes, method: MethodResult, colour: str, number: int) -> None:
    rounds, values = zip(*method.evaluations, strict=True)
    every = max(1, math.ceil(len(rounds) / 7))
    axes.plot(
        rounds,
        values,
        color=colour,
        linestyle=LINE_STYLES[number % len(LINE_STYLES)],
        linewidth=1.6,
        marker=MARKERS[number % len(MARKERS)],
        markersize=4.2,
        # Markers at shifted rounds, so that curves that lie on each other still show whose they are.
        markevery=(min(number % every, len(rounds) - 1), every),
        clip_on=False,
    )


def _label_ends(axes: Axes, shown: Shown, height: float) -> None:
    """Names each curve at its end, pushed apart where the ends meet, with a leader and a key."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.225 / (height - 0.8)
    ranked = sorted(shown, key=lambda item: -item[0].evaluations[-1][1])
    places = _spread([method.evaluations[-1][1] for method, _, _ in ranked], gap, low + gap / 2, high)
    sideways = blended_transform_factory(axes.transAxes, axes.transData)
    for (method, colour, number), place in zip(ranked, places, strict=True):
        end_round, end_value = method.evaluations[-1]
        start = (end_round - axes.get_xlim()[0]) / (axes.get_xlim()[1] - axes.get_xlim()[0])
        axes.plot(
            [start + 0.012, 1.055],
            [end_value, place],
            color=QUIET,
            linewidth=0.5,
            transform=sideways,
            clip_on=False,
            zorder=1,
        )
        axes.plot(
            [1.06, 1.095, 1.13],
            [place] * 3,
            color=colour,
            linestyle=LINE_STYLES[number % len(LINE_STYLES)],
            linewidth=1.6,
            marker=MARKERS[number % len(MARKERS)],
            markersize=4.2,
            markevery=[1],
            transform=sideways,
            clip_on=False,
        )
        axes.text(
            1.145,
            place,
            f"{short(method.label)}  {format_accuracy(end_value)}",
            transform=sideways,
            va="center_baseline",
            fontsize=9,
            parse_math=False,
        )


def _spread(values: list[float], gap: float, low: float, high: float) -> list[float]:
    """Falling `values` moved as little as needed to lie `gap` apart between `low` and `high`."""
    places: list[float] = []
    for value in values:
        places.append(min(value, places[-1] - gap) if places else min(value, high))
    floor = low
    for index in range(len(places) - 1, -1, -1):
        places[index] = max(places[index], floor)
        floor = places[index] + gap
    return places
