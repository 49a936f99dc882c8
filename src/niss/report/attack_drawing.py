"""The shapes that charts of attacks have: curves over a count or a setting, and rows with marks on a common axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from niss.figures import line_options
from niss.methods.look import DASHED, DOTTED, Look
from niss.report.canvas import (
    INK,
    QUIET,
    STYLE,
    WIDTH,
    Reading,
    bands_svg,
    inline_svg,
    power_of_ten,
    rows_svg,
    rule,
    short,
)

# Of a long curve on a logarithmic axis, so many places can be read off.
_MOST_PLACES = 60


@dataclass(frozen=True)
class Series:
    """A curve or, where `line` is False, points; `marks` puts markers on a curve."""

    name: str
    look: Look
    points: list[tuple[float, float]]
    line: bool = True
    marks: bool = False


@dataclass(frozen=True)
class Curves:
    """Series over a common axis.

    log     the axes that are logarithmic: "", "x", "y" or "xy"
    ticks   names of the places 0, 1, ... on the x axis, where it is no scale
    levels  horizontal lines by name; `limits` are vertical ones
    head    what a card under the pointer is headed with, before the place
    least   where the y axis begins, and `most` where it ends; None: with the values
    """

    title: str
    across: str
    up: str
    series: list[Series]
    log: str = ""
    ticks: tuple[str, ...] = ()
    levels: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    head: str = ""
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Mark:
    """A value in a row: drawn as a marker, or as a bar from 0; `text` stands for it under the pointer."""

    name: str
    look: Look
    value: float
    text: str
    bar: bool = False


@dataclass(frozen=True)
class Rows:
    """Rows by name with their marks; `level` is a vertical line with a name."""

    title: str
    across: str
    rows: list[tuple[str, list[Mark]]]
    level: tuple[str, float] | None = None
    nothing: float | None = None


Chart = Curves | Rows


def chart_svg(chart: Chart, width: float, prefix: str) -> Markup:
    """A chart as inline SVG with its values under the pointer; `prefix` goes before its ids."""
    if isinstance(chart, Rows):
        figure = draw_rows(chart, width)
        lines = [
            (short(name, 40), *(f"{mark.name}: {mark.text}" for mark in marks)) for name, marks in chart.rows
        ]
        overlay = rows_svg(figure, lines)
        said = "; ".join(": ".join((line[0], ", ".join(line[1:]))) for line in lines)
    else:
        figure = draw_curves(chart, width)
        overlay = bands_svg(figure, _readings(chart), head=lambda place: _head(chart, place))
        said = "; ".join(f"{one.name} ends at {one.points[-1][1]:.3g}" for one in chart.series)
    return inline_svg(
        figure,
        salt=f"niss-{prefix}",
        prefix=prefix,
        title=chart.title,
        description=f"{chart.title}. {said}.",
        overlay=overlay,
    )


def _head(chart: Curves, place: float) -> str:
    return f"{chart.head} {chart.ticks[int(place)] if chart.ticks else f'{place:.4g}'}"


def _readings(chart: Curves) -> dict[float, list[Reading]]:
    """What stands under the pointer, place by place; of a long curve, places that are evenly spaced on its axis."""
    found: dict[float, list[Reading]] = {}
    for one in chart.series:
        for x, y in one.points:
            found.setdefault(x, []).append(Reading(f"{y:.3g}  {short(one.name, 34)}", one.look.colour, y))
    places = sorted(found)
    if len(places) > _MOST_PLACES and "x" in chart.log:
        wanted = np.geomspace(places[0], places[-1], _MOST_PLACES)
        places = [places[at] for at in np.unique(np.searchsorted(places, wanted).clip(max=len(places) - 1))]
    return {place: found[place] for place in places}


def draw_curves(chart: Curves, width: float = WIDTH) -> Figure:
    """The series over their axis, and their names below it."""
    keys = [_key(one.name, one.look, line=one.line, marks=one.marks or not one.line) for one in chart.series]
    keys += [_key(name, Look(QUIET, "", DOTTED)) for name in chart.levels]
    keys += [_key(name, Look(QUIET, "", DASHED)) for name in chart.limits]
    with mpl.rc_context(STYLE):
        figure, axes = _figure(2.6, width, keys, left=0.85)
        for one in chart.series:
            options = line_options(one.look) | ({} if one.line else {"linestyle": "none"})
            if one.line and not one.marks:
                options["marker"] = ""
            # Spaced along the drawn curve, so that markers do not crowd.
            every: dict[str, Any] = (
                {"markevery": 0.06 if not one.line else 0.12} if len(one.points) > 12 else {}
            )
            axes.plot(*zip(*one.points, strict=True), **options, **every)
        for axis in chart.log:
            _logarithmic(
                axes, axis, [point["xy".index(axis)] for one in chart.series for point in one.points]
            )
        for level in chart.levels.values():
            axes.axhline(level, color=QUIET, linewidth=1.6, linestyle=DOTTED)
        for limit in chart.limits.values():
            axes.axvline(limit, color=QUIET, linewidth=1.6, linestyle=DASHED)
        if chart.ticks:
            axes.set_xticks(range(len(chart.ticks)), chart.ticks)
        axes.set(xlabel=chart.across, ylabel=chart.up)
        axes.set_ylim(bottom=chart.least, top=chart.most)
        rule(axes, "y")
    return figure


def draw_rows(chart: Rows, width: float = WIDTH) -> Figure:
    """A row for each name with its marks, the first on top; what the marks stand for is below the axis."""
    looks: dict[str, Mark] = {}
    for _, marks in chart.rows:
        for mark in marks:
            looks.setdefault(mark.name, mark)
    keys = [
        Line2D([], [], color=QUIET, linewidth=6.0, label=name)
        if mark.bar
        else _key(name, mark.look, line=False)
        for name, mark in looks.items()
    ]
    if chart.level is not None:
        keys.append(_key(chart.level[0], Look(INK, "", DASHED)))
    most = 26 if width < WIDTH else 40
    names = [short(name, most) for name, _ in chart.rows]
    with mpl.rc_context(STYLE):
        left = 0.25 + 0.077 * max(map(len, names))
        figure, axes = _figure(0.3 * len(names) + 0.3, width, keys, left=left)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.tick_params(axis="y", length=0)
        if chart.level is not None:
            axes.axvline(chart.level[1], color=INK, linewidth=1.2, linestyle=DASHED)
        for place, (_, marks) in enumerate(chart.rows):
            single = [mark for mark in marks if not mark.bar]
            for mark in marks:
                if mark.bar:
                    axes.barh(place, mark.value, height=0.6, color=mark.look.colour, alpha=0.6)
            for number, mark in enumerate(single):
                # One above the other, so that none hides another.
                at = place + 0.26 * (number - (len(single) - 1) / 2)
                axes.plot([mark.value], [at], **line_options(mark.look, size=5.5) | {"linestyle": "none"})
        axes.set_xlim(0.0, 1.08 * max(mark.value for _, marks in chart.rows for mark in marks))
        if chart.nothing is not None:
            ticks = [tick for tick in axes.get_xticks() if tick < 0.9 * chart.nothing]
            axes.set_xticks([*ticks, chart.nothing], [*(f"{tick:g}" for tick in ticks), "no\nguarantee"])
        axes.set_xlabel(chart.across)
        rule(axes, "x")
    return figure


def _figure(height: float, width: float, keys: Sequence[Line2D], *, left: float) -> tuple[Figure, Axes]:
    """A figure with axes of that height in inches, and room below them for the keys."""
    columns = 2 if width == WIDTH else 1
    below = 0.75 + 0.19 * math.ceil(len(keys) / columns)
    whole = height + below + 0.2
    figure = Figure(figsize=(width, whole))
    axes = figure.add_axes((left / width, below / whole, 1 - (left + 0.25) / width, height / whole))
    if keys:
        legend = figure.legend(
            handles=keys, loc="lower left", ncols=columns, fontsize=9.5, borderaxespad=0.2, handlelength=3.0
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure, axes


def _key(name: str, look: Look, *, line: bool = True, marks: bool = False) -> Line2D:
    options = line_options(look) | ({} if line else {"linestyle": "none"})
    return Line2D([], [], label=short(name, 44), **options | ({} if marks or not line else {"marker": ""}))


def _logarithmic(axes: Axes, which: str, values: list[float]) -> None:
    """Powers of ten, and what lies between them where there are few."""
    getattr(axes, f"set_{which}scale")("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    wide = max(values) > 100 * min(values)
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=7))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, _position: int | None = None) -> str:
    if 1e-3 <= value < 1e5:
        return f"{value:,.6g}"
    whole = math.isclose(math.log10(value), round(math.log10(value)), abs_tol=1e-9)
    return power_of_ten(value) if whole else f"{value:.3g}"
