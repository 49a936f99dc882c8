"""Draws charts as pictures, with matplotlib: the two shapes of `niss.charts`, and variants for dark pages.

Importing this module loads matplotlib. Only its object interface is used, so that no display is needed and nothing
global changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from niss.charts import Chart, Curves, Key, Rows, Strip, log_tick, short
from niss.methods.look import DASHED, DOTTED, INK, QUIET, RULE, SERIES, Look

# matplotlib types these keys differently from release to release.
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.linewidth": 0.8,
}
# Of charts; the text of an SVG is set in the reader's fonts.
CHART_STYLE: dict[Any, Any] = {**STYLE, "svg.fonttype": "none", "font.size": 9.5}

# Inches. For a phone a chart is drawn narrower, in letters as large; on a sheet two such stand side by side.
WIDTH, NARROW = 7.4, 4.7
# Of a picture, and of the name beside a strip of them.
_PICTURE, _NAME = 1.12, 1.35

# On dark pages; the colours of the series are those of `report/style.css`.
_GROUND = "#16171a"
_DARK = dict(
    zip(
        SERIES,
        (
            "#3d9fdb", "#ee7a2b", "#1fb98d", "#d992b9", "#e69f00", "#6cc0ee",
            "#a98be0", "#c0905f", "#a3b83c", "#f0668f",
        ),
        strict=True,
    )
) | {INK: "#e8e8ec", "#000000": "#e8e8ec", QUIET: "#a0a0aa", RULE: "#3c3d44", "#ffffff": _GROUND}  # fmt: skip
_COLOURED = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def line_options(look: Look, *, width: float = 1.6, size: float = 4.5) -> dict[str, Any]:
    """What `Axes.plot`, `errorbar` and `Line2D` take, so that a curve and its legend look alike."""
    return {
        "color": look.colour,
        "linestyle": look.line,
        "linewidth": width,
        "marker": look.marker,
        "markersize": size,
        "markerfacecolor": "white" if look.hollow else look.colour,
    }


def grid(axes: Axes, axis: Any = "both") -> None:
    """Thin lines across the chart at the ticks of `axis`, behind what is drawn."""
    axes.grid(axis=axis, color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)


def png(figure: Figure, *, dark: bool = False) -> bytes:
    """A picture on white, or for a dark page on nothing; the same bytes each time.

    dark  changes the colours of the figure for good, so draw it again for a light one

    No software is named in it, so that any release of matplotlib that draws alike gives the same bytes.
    """
    if dark:
        _darken(figure)
    ground: dict[str, Any] = {"transparent": True} if dark else {"facecolor": "white"}
    content = BytesIO()
    with mpl.rc_context(CHART_STYLE):
        figure.savefig(content, format="png", dpi=160, metadata={"Software": None}, **ground)
    return content.getvalue()


def _darken(figure: Figure) -> None:
    # Ticks are made when a figure is first drawn.
    figure.canvas.draw()
    artists = figure.findobj()
    # The box behind a text is not among them.
    artists += [box for one in artists if isinstance(one, Text) and (box := one.get_bbox_patch()) is not None]
    for artist in artists:
        for name in _COLOURED:
            getter, setter = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
            if getter is not None and setter is not None and (changed := _dark(getter())) is not None:
                setter(changed)


def _dark(colour: Any) -> Any:
    """The colour, or colours of a collection, for a dark page; None where it stays."""
    if colour is None or (isinstance(colour, str) and colour in ("none", "auto", "inherit")):
        return None
    if getattr(colour, "ndim", 1) == 2:
        return [_dark(one) or one for one in colour]
    red, green, blue, alpha = to_rgba(colour)
    found = _DARK.get(to_hex((red, green, blue)))
    return None if found is None else to_rgba(found, alpha)


Box = tuple[float, float, float, float]
"""A part of a figure in inches: left, bottom, width, height."""


def draw_sheet(charts: Sequence[Chart], strips: Sequence[Strip], *, keys_once: bool = False) -> Figure:
    """Pictures and charts on one sheet: the strips above, the charts below, two side by side where there are more.

    keys_once  all keys stand together at the foot, and of more than eight charts three are side by side
    """
    columns = min(len(charts), 3 if keys_once and len(charts) > 8 else 2) or 1
    width = WIDTH if columns == 1 else 2 * NARROW
    rows = [charts[start : start + columns] for start in range(0, len(charts), columns)]
    titles = (
        0.0
        if len(charts) < 2 and not keys_once
        else 0.15 + 0.15 * max(one.title.count("\n") + 1 for one in charts)
    )
    heights = [
        max(_height(one, width / columns, keyed=not keys_once) for one in row) + titles for row in rows
    ]
    strip_heights = [_strip_height(one, width) for one in strips]
    keys = {key.get_label(): key for chart in charts for key in _keys(chart)} if keys_once else {}
    foot = 0.1 + 0.19 * math.ceil(len(keys) / 3) if keys else 0.0
    with mpl.rc_context(CHART_STYLE):
        bottom = sum(heights) + sum(strip_heights) + 0.1 + foot
        figure = Figure(figsize=(width, bottom))
        for strip, height in zip(strips, strip_heights, strict=True):
            bottom -= height
            _draw_strip(figure, strip, (0.0, bottom, width, height))
        for row, height in zip(rows, heights, strict=True):
            bottom -= height
            for number, chart in enumerate(row):
                box = (number * width / columns, bottom, width / columns, height - titles)
                axes = _draw(figure, chart, box, keyed=not keys_once)
                if titles:
                    axes.set_title(chart.title, loc="left", fontsize=9.5)
        if keys:
            figure.legend(handles=list(keys.values()), loc="lower center", ncols=3, handlelength=3.0)
    return figure


def _keys(chart: Chart) -> list[Line2D]:
    """The keys of a chart as samples; levels are named here too, since their lines bear no names."""
    levels = (
        [Key(name, Look(QUIET, "", DOTTED), "line") for name in chart.levels]
        if isinstance(chart, Curves)
        else []
    )
    samples = []
    for name, look, kind in (*chart.legend(), *levels):
        options = line_options(look) | _upright(look)
        if kind == "bar":
            options = {"color": QUIET, "linewidth": 6.0}
        elif kind in ("marks", "band"):
            options |= {"linestyle": "none"}
        elif kind == "line":
            options |= {"marker": ""}
        samples.append(Line2D([], [], label=short(name, 44), **options))
    return samples


def _upright(look: Look) -> dict[str, Any]:
    """A mark that is a stroke is as high as a bar."""
    return {"markersize": 12, "markeredgewidth": 2} if look.marker == "|" else {}


def _below(chart: Chart, width: float, *, keyed: bool = True) -> tuple[int, float]:
    """The columns of keys under the axes, and the inches that they take with the axis."""
    columns = 2 if width >= WIDTH else 1
    return columns, 0.75 + 0.19 * math.ceil(len(_keys(chart)) / columns) if keyed else 0.55


def _height(chart: Chart, width: float, *, keyed: bool = True) -> float:
    """That of a chart with its keys; in narrow columns the axes are lower."""
    axes = min(2.6, 0.65 * width) if isinstance(chart, Curves) else 0.3 * len(chart.rows) + 0.3
    return axes + _below(chart, width, keyed=keyed)[1] + 0.2


def _draw(figure: Figure, chart: Chart, box: Box, *, keyed: bool = True) -> Axes:
    """The chart in a part of the figure: axes above, and keys below them."""
    (left, bottom, width, height), whole = box, figure.get_size_inches()
    most = 26 if width < WIDTH else 40
    names = [] if isinstance(chart, Curves) else [short(name, most) for name, _ in chart.rows]
    beside = 0.85 if isinstance(chart, Curves) else 0.25 + 0.077 * max(map(len, names), default=0)
    columns, below = _below(chart, width, keyed=keyed)
    axes = figure.add_axes(
        (
            (left + beside) / whole[0],
            (bottom + below) / whole[1],
            (width - beside - (0.7 if isinstance(chart, Rows) and chart.notes else 0.25)) / whole[0],
            (height - below - 0.2) / whole[1],
        )
    )
    if keyed and (keys := _keys(chart)):
        corner: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (left / whole[0], bottom / whole[1])}
        legend = figure.legend(
            handles=keys, **corner, ncols=columns, fontsize=9.5, borderaxespad=0.2, handlelength=3.0
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    _draw_curves(axes, chart) if isinstance(chart, Curves) else _draw_rows(axes, chart, names)
    return axes


def _draw_curves(axes: Axes, chart: Curves) -> None:
    for one in chart.series:
        options = line_options(one.look, width=0.5 if one.thin else 1.6)
        options |= {} if one.line else {"linestyle": "none"}
        if one.thin or (one.line and not one.marks and len(one.points) > 1):
            options["marker"] = ""
        # Spaced along the drawn curve, so that markers do not crowd.
        every: dict[str, Any] = {"markevery": 0.12 if one.line else 0.06} if len(one.points) > 12 else {}
        style: dict[str, Any] = {"drawstyle": "steps-post"} if chart.step else {}
        axes.plot(*zip(*one.points, strict=True), **options, **every, **style)
        if one.spread:
            places = [x for x, _ in one.points]
            low, high = zip(*one.spread, strict=True)
            if one.marks:
                axes.vlines(places, low, high, color=one.look.colour, linewidth=1.4)
            else:
                area: dict[str, Any] = {"alpha": 0.18, "linewidth": 0, "step": "post" if chart.step else None}
                axes.fill_between(places, low, high, color=one.look.colour, **area)
    if not chart.series:
        axes.text(0.5, 0.5, chart.empty, transform=axes.transAxes, ha="center", va="center")
    for axis in chart.log:
        _logarithmic(axes, axis, [point["xy".index(axis)] for one in chart.series for point in one.points])
    for level in chart.levels.values():
        axes.axhline(level, color=QUIET, linewidth=1.6, linestyle=DOTTED)
    for limit in chart.limits.values():
        axes.axvline(limit, color=QUIET, linewidth=1.6, linestyle=DASHED)
    if chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), chart.ticks)
    axes.set(xlabel=chart.across, ylabel=chart.up)
    axes.set_ylim(bottom=chart.least, top=chart.most)
    if chart.start is not None or chart.end is not None:
        axes.set_xlim(left=chart.start, right=chart.end)
    if chart.head == "Round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    if chart.values == "percent":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: chart.tick(value, "y")))
    grid(axes, "y")


def _draw_rows(axes: Axes, chart: Rows, names: list[str]) -> None:
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.tick_params(axis="y", length=0)
    if chart.level is not None:
        axes.axvline(chart.level[1], color=INK, linewidth=1.2, linestyle=DASHED)
    if chart.log:
        axes.set_xscale("log")
    for place, (_, marks) in enumerate(chart.rows):
        single = [mark for mark in marks if not mark.bar]
        for mark in marks:
            if mark.bar:
                axes.barh(place, mark.value, height=0.6, color=mark.look.colour, alpha=0.6)
        for number, mark in enumerate(single):
            # One above the other, so that none hides another.
            at = place + 0.26 * (number - (len(single) - 1) / 2)
            options = line_options(mark.look, size=5.5) | {"linestyle": "none"} | _upright(mark.look)
            axes.plot([mark.value], [at], **options)
    axes.set_xlim(*chart.range())
    if chart.log:
        _logarithmic(axes, "x", list(chart.range()))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: log_tick(value, powers=True)))
    if not any(marks for _, marks in chart.rows):
        axes.xaxis.set_major_locator(NullLocator())
    for place, note in enumerate(chart.notes):
        end = max((mark.value for mark in chart.rows[place][1]), default=chart.range()[0])
        beside: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(note, (end, place), **beside, va="center_baseline", fontsize=9)
    if chart.nothing is not None:
        ticks = [tick for tick in axes.get_xticks() if tick < 0.9 * chart.nothing]
        axes.set_xticks([*ticks, chart.nothing], [*(f"{tick:g}" for tick in ticks), "no\nguarantee"])
    axes.set_xlabel(chart.across)
    grid(axes, "x")


def _picture_side(strip: Strip, width: float) -> float:
    return min(_PICTURE, (width - _NAME - 0.1) / max(len(strip.pictures), 1))


def _strip_height(strip: Strip, width: float) -> float:
    """That of its pictures with what stands above them."""
    lines = max((caption.count("\n") + 1 for caption, _ in strip.pictures), default=1)
    return max(_PICTURE + 0.22, _picture_side(strip, width) + 0.1 + 0.145 * lines)


def _draw_strip(figure: Figure, strip: Strip, box: Box) -> None:
    """The name of a strip, over two lines where it has a comma, and its pictures beside it."""
    (_, bottom, width, _), whole = box, figure.get_size_inches()
    at: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 9.5}
    side = _picture_side(strip, width)
    middle = bottom + side / 2
    place = (_NAME - 0.1) / whole[0]
    figure.text(
        place, (middle + (0.18 if strip.note else 0.0)) / whole[1], strip.name.replace(", ", ",\n"), **at
    )
    figure.text(place, (middle - 0.25) / whole[1], strip.note, color=QUIET, **at)
    for number, (caption, pixels) in enumerate(strip.pictures):
        left = _NAME + number * side
        axes = figure.add_axes(
            (left / whole[0], bottom / whole[1], (side - 0.06) / whole[0], (side - 0.06) / whole[1])
        )
        show_picture(axes, pixels, caption)


def show_picture(axes: Axes, pixels: NDArray[np.float64], title: str = "") -> None:
    """A picture [C, H, W], cut to [0, 1], without ticks."""
    cut = np.clip(np.nan_to_num(pixels, nan=0.5), 0.0, 1.0)
    if len(cut) == 1:
        axes.imshow(cut[0], cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
    else:
        axes.imshow(cut.transpose(1, 2, 0), interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(True)
        side.set_color(RULE)
    axes.set_title(title, fontsize=9, pad=2)


def _logarithmic(axes: Axes, which: str, values: list[float]) -> None:
    """Powers of ten, and what lies between them where there are few."""
    getattr(axes, f"set_{which}scale")("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    wide = max(values) > 100 * min(values)
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=7))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _position: log_tick(value)))
