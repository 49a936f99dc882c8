"""The noise bars: what each method leaves in the aggregate, measured, with a mark where theory puts it."""

from __future__ import annotations

import math

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import blended_transform_factory

from niss.report.canvas import INK, QUIET, RULE, STYLE, WIDTH, colours, label_width, short
from niss.report.source import MethodResult, ReportInput
from niss.report.table import format_variance

# Noise that cancels leaves floating-point rounding behind; below this share of the largest it is no bar.
ROUNDING = 1e-9


def draw_noise(report: ReportInput) -> Figure:
    with mpl.rc_context(STYLE):
        count = len(report.methods)
        height = 0.34 * count + 1.15
        figure = Figure(figsize=(WIDTH, height))
        left = label_width(report.methods) / WIDTH
        axes = figure.add_axes((left, 0.6 / height, 0.89 - left, 1 - 1.0 / height))
        axes.set_ylim(count - 0.4, -0.6)
        axes.set_yticks(range(count), [short(method.label) for method in report.methods], parse_math=False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("Noise variance in the aggregated update (squared parameter units, log scale)")
        drawn = _drawn_variances(report)
        if drawn:
            _logarithmic(axes, drawn)
            axes.grid(axis="x", color=RULE, linewidth=0.7)
            axes.set_axisbelow(True)
            axes.legend(
                handles=[
                    Patch(facecolor=QUIET, label="measured"),
                    Line2D(
                        [],
                        [],
                        color=INK,
                        linewidth=2,
                        marker="|",
                        markersize=11,
                        linestyle="",
                        label="predicted",
                        markeredgewidth=2,
                    ),
                ],
                loc="lower right",
                bbox_to_anchor=(1.0, 1.0),
                ncols=2,
                fontsize=9,
                borderaxespad=0.1,
            )
        else:
            axes.xaxis.set_major_locator(NullLocator())
        for place, (method, colour) in enumerate(zip(report.methods, colours(report), strict=True)):
            _bar(axes, place, method, colour, max(drawn, default=0.0))
    return figure


def _drawn_variances(report: ReportInput) -> list[float]:
    known = [
        value
        for method in report.methods
        for value in (method.aggregate_variance, method.aggregate_variance_predicted)
        if value
    ]
    return [value for value in known if value > ROUNDING * max(known)]


def _logarithmic(axes: Axes, drawn: list[float]) -> None:
    first, last = math.floor(math.log10(min(drawn)) - 0.5), math.ceil(math.log10(max(drawn)) + 0.1)
    axes.set_xscale("log")
    axes.set_xlim(10.0**first, 10.0**last)
    step = max(1, (last - first) // 7)
    axes.xaxis.set_major_locator(FixedLocator([10.0**power for power in range(first, last + 1, step)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_power_of_ten))


def _power_of_ten(value: float, _position: int | None = None) -> str:
    return "10" + str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _bar(axes: Axes, place: int, method: MethodResult, colour: str, largest: float) -> None:
    measured, predicted = method.aggregate_variance, method.aggregate_variance_predicted
    ends = [value for value in (measured, predicted) if value and value > ROUNDING * largest]
    if not ends:
        text = f"none beyond rounding ({format_variance(measured)})" if measured else "none"
        if measured is None and not method.finished:
            text = "not measured yet"
        sideways = blended_transform_factory(axes.transAxes, axes.transData)
        axes.text(0.012, place, text, transform=sideways, va="center_baseline", fontsize=9)
        return
    if measured in ends:
        axes.barh(place, measured, height=0.56, color=colour)
    if predicted in ends:
        axes.plot([predicted] * 2, [place - 0.4, place + 0.4], color=INK, linewidth=2, solid_capstyle="butt")
    axes.annotate(
        format_variance(measured),
        (max(ends), place),
        xytext=(6, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=9,
        annotation_clip=False,
    )
