"""A chart as a value: what an experiment or an attack returns, `attack.json` keeps, and `niss.figures` draws.

Nothing here loads matplotlib. Curves that belong to a method have its look (`niss.methods.look_of`), others that of
their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from niss.methods.look import INK, QUIET, SERIES, LineStyle, Look

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Of curves that are told apart by their number alone.
LINES: tuple[LineStyle, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (3, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
# What a chart that was read from a file may ask matplotlib for.
_KNOWN_MARKERS = (*MARKERS, "", "d", "h", "H", "8", "X", "p", "<", ">", "*")


@dataclass(frozen=True)
class Series:
    """A curve or, where `line` is False, points; `marks` puts markers on a curve.

    spread  of each point the least and the most: bars at the markers, or a band along a curve without them
    """

    name: str
    look: Look
    points: list[tuple[float, float]]
    line: bool = True
    marks: bool = False
    spread: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Series over a common axis.

    across  what the x axis shows; `up` is that of the y axis
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


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows by name with their marks on a common axis.

    level    a vertical line, by name
    nothing  the place on the axis that stands for no guarantee
    """

    title: str
    across: str
    rows: list[tuple[str, list[Mark]]]
    level: tuple[str, float] | None = None
    nothing: float | None = None


Chart = Curves | Rows


@dataclass(frozen=True)
class Strip:
    """Pictures [C, H, W] side by side, each with what stands above it; `note` stands below the name of the strip."""

    name: str
    pictures: list[tuple[str, NDArray[np.float64]]]
    note: str = ""


def numbered(number: int) -> Look:
    """The look of a curve that belongs to no method."""
    return Look(SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)], LINES[number % len(LINES)])


def marked(label: str, *, protected: bool) -> str:
    """The label of a curve, which says where nobody is protected."""
    return label if protected else f"{label} (unprotected)"


def finite(value: Any) -> float | None:
    """A number that has a place on an axis; None for anything else."""
    known = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def points(x: Iterable[Any], y: Iterable[Any], log: str = "") -> list[tuple[float, float]]:
    """The pairs of which both numbers are finite, and above 0 where their axis is logarithmic."""
    pairs = [(finite(a), finite(b)) for a, b in zip(x, y, strict=False)]
    return [
        (a, b)
        for a, b in pairs
        if a is not None and b is not None and (a > 0 or "x" not in log) and (b > 0 or "y" not in log)
    ]


def measured_against(
    by: str, x: Sequence[Any], predicted: Sequence[Any], measured: Sequence[Any], log: str = "xy"
) -> list[Series]:
    """A line for what `by` predicts, and points for what was measured."""
    return [
        Series(by, numbered(0), points(x, predicted, log)),
        Series("measured", numbered(1), points(x, measured, log), line=False),
    ]


def shown(charts: Iterable[Chart]) -> list[Chart]:
    """The charts without series that have no point, and without those that have nothing left."""
    found: list[Chart] = []
    for chart in charts:
        if isinstance(chart, Curves):
            chart = replace(chart, series=[one for one in chart.series if one.points])
        else:
            chart = replace(chart, rows=[(name, marks) for name, marks in chart.rows if marks])
        if chart.series if isinstance(chart, Curves) else chart.rows:
            found.append(chart)
    return found


def charts_to_json(charts: Iterable[Chart]) -> list[dict[str, Any]]:
    """Charts as JSON can hold them."""
    return [asdict(chart) for chart in charts]


def charts_from_json(values: Any) -> list[Chart]:
    """What `charts_to_json` gave; a chart of another shape, or with nothing to draw, is left out.

    The file may come from anywhere: a look that is none of ours becomes a plain one.
    """
    from pydantic import TypeAdapter, ValidationError

    adapter: TypeAdapter[Chart] = TypeAdapter(Chart)
    found: list[Chart] = []
    for value in values if isinstance(values, list) else ():
        try:
            found.append(_trusted(adapter.validate_python(value)))
        except ValidationError:
            continue
    return [chart for chart in shown(found) if _drawable(chart)]


def _trusted(chart: Chart) -> Chart:
    """The chart with looks that matplotlib knows."""

    def known(look: Look) -> Look:
        fine = look.colour in (*SERIES, INK, QUIET) and look.marker in _KNOWN_MARKERS
        dashes = look.line if isinstance(look.line, str) else look.line[1]
        lines = dashes in LINES if isinstance(dashes, str) else all(0.0 < one < 100.0 for one in dashes)
        return look if fine and lines else Look(QUIET, "o")

    if isinstance(chart, Curves):
        return replace(chart, series=[replace(one, look=known(one.look)) for one in chart.series])
    rows = [(name, [replace(mark, look=known(mark.look)) for mark in marks]) for name, marks in chart.rows]
    return replace(chart, rows=rows)


def _drawable(chart: Chart) -> bool:
    """Whether every number has a place on its axis."""
    if isinstance(chart, Rows):
        numbers = [mark.value for _, marks in chart.rows for mark in marks]
        return all(map(math.isfinite, numbers)) and max(numbers) > 0.0
    places = [point for one in chart.series for point in one.points]
    named = not chart.ticks or all(x in range(len(chart.ticks)) for x, _ in places)
    lines = (
        *chart.levels.values(),
        *chart.limits.values(),
        *(end for one in chart.series for pair in one.spread for end in pair),
    )
    named = named and all(len(one.spread) in (0, len(one.points)) for one in chart.series)
    known = all(len(points([x], [y], chart.log)) == 1 for x, y in places) and all(map(math.isfinite, lines))
    return known and named and chart.log in ("", "x", "y", "xy")
