"""The two charts that compare methods: accuracy by round, and the noise left in the aggregate.

`draw_accuracy` and `draw_noise` give matplotlib figures, `accuracy_figure` and `noise_figure` the same as inline SVG.
A method has the same colour in both. Labels come from the user, so none is read as mathematics (`parse_math=False`),
and those in the SVG are set in whatever sans-serif the reader has: widths are only estimated.
"""

from __future__ import annotations

import math
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter
from matplotlib.transforms import blended_transform_factory

from niss.figures import CHART_STYLE, WIDTH, cut_range, grid, line_options, marked, power_of_ten, short
from niss.methods.look import INK, QUIET, Look
from niss.report.canvas import Reading, bands_svg, inline_svg, label_width, rows_svg
from niss.report.table import format_accuracy, format_variance
from niss.runs.folder import MethodResult, ReportInput, looks

# Noise that cancels leaves floating-point rounding behind; below this share of the largest there is no bar.
ROUNDING = 1e-9

# Inches of axes below which names beside the curves leave too little of them.
_LEAST_AXES = 2.6

_VALUE: dict[str, Any] = {"va": "center_baseline", "fontsize": 9}

# Of a run, the part after the first third decides which accuracies the axis shows.
_SETTLED = 3

# A method with an evaluation, its look, and its place in the comparison.
Curve = tuple[MethodResult, Look, int]


def accuracy_figure(report: ReportInput, *, prefix: str = "accuracy", width: float = WIDTH) -> Markup:
    """Inline SVG: one accuracy curve for each method, with its values under the pointer.

    prefix  goes before every id in it, to keep figures on one page apart

    For those who do not see it, its description names where each curve ends.
    """
    figure = draw_accuracy(report, width)
    rounds: dict[int, list[Reading]] = {}
    for method, look in zip(report.methods, looks(report), strict=True):
        for number, value in method.evaluations:
            text = f"{format_accuracy(value)}  {short(method.label)}"
            rounds.setdefault(number, []).append(Reading(text, look.colour, value))
    ends = [
        f"{method.label} {format_accuracy(method.evaluations[-1][1])} at round {method.evaluations[-1][0]}"
        for method in report.methods
        if method.evaluations
    ]
    return inline_svg(
        figure,
        salt="niss-accuracy",
        prefix=prefix,
        title="Test accuracy by round",
        description="Line chart of test accuracy by round. "
        f"The curves end at: {'; '.join(ends) or 'no curve yet'}.",
        overlay=bands_svg(figure, rounds),
    )


def noise_figure(report: ReportInput, *, prefix: str = "noise", width: float = WIDTH) -> Markup:
    """Inline SVG: one bar for each method's measured noise variance, with a mark where theory puts it.

    prefix  as in `accuracy_figure`; the description names all values
    """
    bars = [
        f"{method.label} measured {format_variance(method.aggregate_variance, finished=method.finished)}, "
        f"predicted {format_variance(method.aggregate_variance_predicted, finished=method.finished)}"
        for method in report.methods
    ]
    figure = draw_noise(report, width)
    rows = [
        (
            short(method.label),
            f"measured {format_variance(method.aggregate_variance, finished=method.finished)}",
            f"predicted {format_variance(method.aggregate_variance_predicted, finished=method.finished)}",
        )
        for method in report.methods
    ]
    return inline_svg(
        figure,
        salt="niss-noise",
        prefix=prefix,
        title="Noise variance left in the aggregate, by method",
        description="Bar chart on a logarithmic axis of the noise variance in the aggregate: "
        f"{'; '.join(bars)}.",
        overlay=rows_svg(figure, rows),
    )


def draw_accuracy(report: ReportInput, width: float = WIDTH) -> Figure:
    """One curve for each method that has been evaluated, named at its end with its last accuracy.

    The axis of rounds reaches to the last round planned, so that an unfinished run shows what is missing; that of
    accuracy is cut to where the curves differ, and names those that end below it.
    """
    curves: list[Curve] = [
        (method, look, number)
        for number, (method, look) in enumerate(zip(report.methods, looks(report), strict=True))
        if method.evaluations
    ]
    with mpl.rc_context(CHART_STYLE):
        height = max(3.9, 0.26 * len(curves) + 1.2)
        left, below = 0.72, 0.55
        # The keys and leaders beside the curves take 0.145 of the width of the axes.
        across = (width - left - _name_width(curves)) / 1.145
        beside = across > _LEAST_AXES
        if not beside:
            # Too narrow for names beside the curves: they stand in a list below.
            across, below = width - left - 0.2, 0.62 + 0.19 * len(curves)
            height = 2.9 + below
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((left / width, below / height, across / width, 1 - (below + 0.25) / height))
        longest = max((method.rounds_done for method, _, _ in curves), default=report.rounds or 1)
        axes.set(xlim=(0, max(longest, report.rounds or 1)), ylim=_accuracy_range(curves))
        axes.set(xlabel="Round", ylabel="Test accuracy (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        grid(axes, "y")
        for method, look, number in curves:
            rounds, values = zip(*method.evaluations, strict=True)
            every = max(1, math.ceil(len(rounds) / 7))
            # Markers at shifted rounds, so that curves that lie on each other still show whose they are.
            first = min(number % every, len(rounds) - 1)
            axes.plot(rounds, values, markevery=(first, every), **line_options(look))
        if beside:
            _label_ends(axes, curves, height)
        elif curves:
            _list_below(axes, curves)
        if not curves:
            axes.text(0.5, 0.5, "No evaluation yet", transform=axes.transAxes, ha="center", va="center")
    return figure


def _accuracy_range(curves: list[Curve]) -> tuple[float, float]:
    """From somewhat below the least settled accuracy of the curves that are shown to a little above the best."""
    settled = [
        [value for _, value in method.evaluations[len(method.evaluations) // _SETTLED :]]
        for method, _, _ in curves
    ]
    low, high, _ = cut_range(settled)
    room = max(0.25 * (high - low), 0.02)
    return max(0.0, low - 2 * room), min(1.0, high + 0.4 * room)


def _name(method: MethodResult) -> str:
    return marked(short(method.label), protected=not method.is_unprotected)


def _name_width(curves: list[Curve]) -> float:
    """Inches for the longest name and its accuracy."""
    return 0.25 + 0.077 * (9 + max((len(_name(method)) for method, _, _ in curves), default=0))


def _label_ends(axes: Axes, curves: list[Curve], height: float) -> None:
    """Name each curve at its end, with a thin line from the end to its name and a sample of the curve before it.

    The names are pushed apart where ends meet; `height` of the figure, in inches, tells how close is too close.
    Places to the right of the axes are fractions of their width, hence the mixed coordinates.
    """
    low, high = axes.get_ylim()
    gap = (high - low) * 0.225 / (height - 0.8)
    ranked = sorted(curves, key=lambda item: -item[0].evaluations[-1][1])
    ends = [max(method.evaluations[-1][1], low) for method, _, _ in ranked]
    places = _push_apart(ends, gap, low + gap / 2, high)
    sideways = blended_transform_factory(axes.transAxes, axes.transData)
    beside: dict[str, Any] = {"transform": sideways, "clip_on": False}
    for (method, look, _), place in zip(ranked, places, strict=True):
        end_round, end_value = method.evaluations[-1]
        start = (end_round - axes.get_xlim()[0]) / (axes.get_xlim()[1] - axes.get_xlim()[0])
        below = end_value < low
        if not below:
            axes.plot(
                [start + 0.012, 1.055], [end_value, place], color=QUIET, linewidth=0.5, zorder=1, **beside
            )
        axes.plot([1.06, 1.095, 1.13], [place] * 3, markevery=[1], **line_options(look), **beside)
        name = f"{_name(method)}  {format_accuracy(end_value)}" + (" ↓" if below else "")
        axes.text(1.145, place, name, transform=sideways, parse_math=False, **_VALUE)


def _list_below(axes: Axes, curves: list[Curve]) -> None:
    """The curves with their last accuracies in a list under the axes, the best first."""
    ranked = sorted(curves, key=lambda item: -item[0].evaluations[-1][1])
    keys = [
        Line2D(
            [],
            [],
            label=f"{_name(method)}  {format_accuracy(method.evaluations[-1][1])}",
            **line_options(look),
        )
        for method, look, _ in ranked
    ]
    legend = axes.figure.legend(
        handles=keys, loc="lower left", fontsize=9.5, borderaxespad=0.2, handlelength=3.0
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _push_apart(values: list[float], gap: float, low: float, high: float) -> list[float]:
    """Falling `values` moved down, and up again from below, to lie at least `gap` apart between `low` and `high`.

    Where they cannot all fit, those at the top leave the range.
    """
    places: list[float] = []
    for value in values:
        places.append(min(value, places[-1] - gap) if places else min(value, high))
    floor = low
    for index in range(len(places) - 1, -1, -1):
        places[index] = max(places[index], floor)
        floor = places[index] + gap
    return places


def draw_noise(report: ReportInput, width: float = WIDTH) -> Figure:
    """A bar for each method's measured variance on a logarithmic axis, and a mark at the predicted one.

    Where noise cancels exactly only rounding is left, many powers of ten below the rest (see `ROUNDING`): it is
    written out instead of drawn, and so is that a method adds none.
    """
    measured = [method.aggregate_variance for method in report.methods]
    predicted = [method.aggregate_variance_predicted for method in report.methods]
    known = [value for value in (*measured, *predicted) if value]
    drawn = [value for value in known if value > ROUNDING * max(known)]
    with mpl.rc_context(CHART_STYLE):
        count = len(report.methods)
        height = 0.34 * count + 1.15
        figure = Figure(figsize=(width, height))
        left = label_width(report.methods) / width
        room = 0.89 if width == WIDTH else 0.84
        axes = figure.add_axes((left, 0.6 / height, room - left, 1 - 1.0 / height))
        axes.set_ylim(count - 0.4, -0.6)
        axes.set_yticks(range(count), [short(method.label) for method in report.methods], parse_math=False)
        axes.tick_params(axis="y", length=0)
        unit = "squared parameter units, " if width == WIDTH else ""
        axes.set_xlabel(f"Noise variance in the aggregated update ({unit}log scale)", **_label_place(width))
        if drawn:
            _logarithmic(axes, drawn)
            grid(axes, "x")
            upright: dict[str, Any] = {"marker": "|", "markersize": 11, "markeredgewidth": 2, "linestyle": ""}
            bar = Patch(facecolor=QUIET, label="measured")
            mark = Line2D([], [], color=INK, linewidth=2, label="predicted", **upright)
            above: dict[str, Any] = {"bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.1}
            axes.legend(handles=[bar, mark], loc="lower right", ncols=2, fontsize=9, **above)
        else:
            axes.xaxis.set_major_locator(NullLocator())
        for place, (method, look) in enumerate(zip(report.methods, looks(report), strict=True)):
            _bar(axes, place, method, look.colour, max(drawn, default=0.0))
    return figure


def _label_place(width: float) -> dict[str, Any]:
    """Where a long label of the x axis ends: at the end of the axis where there is little room beside it."""
    return {} if width == WIDTH else {"loc": "right"}


def _logarithmic(axes: Axes, drawn: list[float]) -> None:
    """Decades around the variances that are drawn, of which at most eight or so are labelled."""
    first, last = math.floor(math.log10(min(drawn)) - 0.5), math.ceil(math.log10(max(drawn)) + 0.1)
    axes.set_xscale("log")
    axes.set_xlim(10.0**first, 10.0**last)
    step = max(1, (last - first) // 7)
    axes.xaxis.set_major_locator(FixedLocator([10.0**power for power in range(first, last + 1, step)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(power_of_ten))


def _bar(axes: Axes, place: int, method: MethodResult, colour: str, largest: float) -> None:
    """The row of one method; `largest` is the largest variance in the chart."""
    measured, predicted = method.aggregate_variance, method.aggregate_variance_predicted
    ends = [value for value in (measured, predicted) if value and value > ROUNDING * largest]
    if not ends:
        text = f"none beyond rounding ({format_variance(measured)})" if measured else "none"
        if measured is None and not method.finished:
            text = "not measured yet"
        sideways = blended_transform_factory(axes.transAxes, axes.transData)
        axes.text(0.012, place, text, transform=sideways, **_VALUE)
        return
    if measured in ends:
        axes.barh(place, measured, height=0.56, color=colour)
    if predicted in ends:
        axes.plot([predicted] * 2, [place - 0.4, place + 0.4], color=INK, linewidth=2, solid_capstyle="butt")
    beside: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(format_variance(measured), (max(ends), place), **beside, **_VALUE)
