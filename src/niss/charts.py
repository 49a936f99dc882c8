"""A chart as a value: what a run, a plan or an attack returns and `attack.json` keeps.

`niss.svg` draws it, and `niss.figures` makes a picture of that. Nothing here loads matplotlib. Curves that belong to
a method have its look (`niss.methods.look_of`), others that of their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from annotated_types import Ge, Le

from niss.claims import digits, percent, rounded_up
from niss.methods.look import DASHED, INK, QUIET, SERIES, LineStyle, Look
from niss.settings import OneOf

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Item = TypeVar("Item")

# Of curves that are told apart by their number alone.
LINES: tuple[LineStyle, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (3, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
# A number that has a place on an axis: beyond, differences are no numbers any more. Files are checked against it.
Number = Annotated[float, Ge(-1e100), Le(1e100)]
Place = tuple[Number, Number]


class Key(NamedTuple):
    """A name with its look and the kind of its sample: line, marks, both, bar or band."""

    name: str
    look: Look
    kind: Literal["line", "marks", "both", "bar", "band"]


@dataclass(frozen=True)
class Series:
    """A curve or, where `line` is False, points; `marks` puts markers on a curve.

    spread  of each point the least and the most: bars at the markers, or a band along a curve without them
    thin    one of many, drawn faintly, or a band alone where it is no line; its values are not read off
    """

    name: str
    look: Look
    points: list[Place]
    line: bool = True
    marks: bool = False
    spread: list[Place] = field(default_factory=list)
    thin: bool = False

    def key(self, name: str) -> Key:
        """Its sample, under that name."""
        if self.line:
            return Key(name, self.look, "both" if self.marks else "line")
        return Key(name, self.look, "band" if self.thin else "marks")


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Series over a common axis.

    across  what the x axis shows; `up` is that of the y axis
    log     the axes that are logarithmic: "", "x", "y" or "xy"
    ticks   names of the places 0, 1, ... on the x axis, where it is no scale
    levels  horizontal lines by name; `limits` are vertical ones
    head    what a card under the pointer is headed with, before the place
    least   where the y axis begins, and `most` where it ends; None: with the values
    start   where the x axis begins, and `end` where it ends
    step    a value holds until the next place
    values  how they are written: to three digits, as a share in percent, or as a claim, rounded up
    ends    curves are named where they end, with their last values, as far as there is room
    empty   what is said where there is no series
    """

    title: str
    across: str
    up: str
    series: list[Series]
    log: Annotated[str, OneOf(lambda: ("", "x", "y", "xy"))] = ""
    ticks: tuple[str, ...] = ()
    levels: dict[str, Number] = field(default_factory=dict)
    limits: dict[str, Number] = field(default_factory=dict)
    head: str = ""
    least: Number | None = None
    most: Number | None = None
    start: Number | None = None
    end: Number | None = None
    step: bool = False
    values: Literal["plain", "percent", "claim"] = "plain"
    ends: bool = False
    empty: str = ""

    def written(self, value: float) -> str:
        """A value as it is read off."""
        if self.values == "percent":
            return percent(value)
        return rounded_up(value) if self.values == "claim" else digits(value)

    def tick(self, value: float, axis: str) -> str:
        """What stands at a place of an axis, "x" or "y"."""
        if self.values == "percent" and axis == "y":
            return f"{100 * value:.4g} %"
        return log_tick(value) if axis in self.log else f"{value:.6g}"

    def named(self, one: Series) -> str:
        """The name of a curve, with its last value where curves are named at their ends."""
        return short(one.name, 44) + (f"  {self.written(one.points[-1][1])}" if self.ends else "")

    def place(self, value: float) -> str:
        """A place on the x axis, as a card is headed with it."""
        return f"{self.head} {self.ticks[int(value)] if self.ticks else f'{value:.4g}'}".strip()

    def legend(self) -> list[Key]:
        """Each name once; where curves are to be named at their ends, the one that ends highest first."""
        ranked = sorted(self.series, key=lambda one: -one.points[-1][1]) if self.ends else self.series
        named = {self.named(one): one for one in ranked}
        keys = [one.key(name) for name, one in named.items()]
        return keys + [Key(name, Look(QUIET, "", DASHED), "line") for name in self.limits]


@dataclass(frozen=True)
class Mark:
    """A value in a row: drawn as a marker, or as a bar from 0; `text` stands for it under the pointer."""

    name: str
    look: Look
    value: Number
    text: str
    bar: bool = False


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows by name with their marks on a common axis.

    level    a vertical line, by name
    nothing  the place on the axis that stands for no guarantee
    log      whether the axis is logarithmic; bars then begin where it does
    notes    of each row, what is written after its marks, or in their place
    """

    title: str
    across: str
    rows: list[tuple[str, list[Mark]]]
    level: tuple[str, Number] | None = None
    nothing: Number | None = None
    log: bool = False
    notes: tuple[str, ...] = ()

    def legend(self) -> list[Key]:
        """Each name once."""
        marks = {mark.name: mark for _, row in reversed(self.rows) for mark in reversed(row)}
        keys = [
            Key(name, Look(QUIET, ""), "bar") if mark.bar else Key(name, mark.look, "marks")
            for name, mark in reversed(marks.items())
        ]
        return keys + ([Key(self.level[0], Look(INK, "", DASHED), "line")] if self.level is not None else [])

    def read(self, number: int) -> list[str]:
        """A row as it is read off, under its name."""
        name, marks = self.rows[number]
        lines = [f"{mark.name}: {mark.text}" for mark in marks]
        return [short(name, 40), *(lines or self.notes[number : number + 1])]

    def range(self) -> tuple[float, float]:
        """The ends of the axis: from 0 to a little more than the largest mark, or the decades around them."""
        values = [mark.value for _, marks in self.rows for mark in marks]
        if not self.log:
            return 0.0, 1.08 * max(values, default=1.0)
        values = values or [1.0]
        return 10.0 ** math.floor(math.log10(min(values)) - 0.5), 10.0 ** math.ceil(
            math.log10(max(values)) + 0.1
        )


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


def short(label: str, most: int = 26) -> str:
    """A label on one line, cut to `most` characters."""
    line = " ".join(label.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def log_tick(value: float, *, powers: bool = False) -> str:
    """A number on a logarithmic axis, such as 20 or 10⁻⁷, in plain characters; with `powers` every power of ten as one.

    matplotlib's own labels are mathematics, set in a font of its own.
    """
    if 1e-3 <= value < 1e5 and not powers:
        return f"{value:,.6g}"
    power = math.log10(value)
    if not math.isclose(power, round(power), abs_tol=1e-9):
        return f"{value:.3g}"
    return "10" + str(round(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def spread_out(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
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


def evenly_spaced(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the items, the first and the last among them: more points of a curve than that help nobody."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(place * last / (most - 1))] for place in range(most)]


@dataclass(frozen=True)
class Axis:
    """From `low` at pixel `start` to `high` at pixel `end`; values beyond lie at its ends, where `place` is asked."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies, also beyond the ends."""
        if self.log:
            share = math.log(max(value, self.low * 1e-9) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def place(self, value: float) -> float:
        """Where a value lies, at the nearer end where it is beyond."""
        return self.at(min(max(value, self.low), self.high))

    def ticks(self, most: int) -> list[float]:
        """Round numbers along the axis, about `most` of them; powers of ten where it is logarithmic."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            parts = (1, 2, 5) if self.high < 100 * self.low else (1,)
            step = max(1, math.ceil(math.log10(self.high / self.low) / most))
            found = [part * 10.0**power for power in range(first, last + 1, step) for part in parts]
        else:
            raw = (self.high - self.low) / most
            power = 10.0 ** math.floor(math.log10(raw))
            step_size = next(part * power for part in (1, 2, 5, 10) if part * power >= raw * 0.999)
            begin = math.ceil(self.low / step_size - 1e-9)
            end = math.floor(self.high / step_size + 1e-9)
            found = [number * step_size for number in range(begin, end + 1)]
        slack = 1e-6 * (self.high - self.low)
        return [tick for tick in found if self.low - slack <= tick <= self.high + slack]


def axis_ends(
    values: Iterable[float], low: float | None, high: float | None, *, log: bool
) -> tuple[float, float]:
    """The ends of an axis: those that are given, else a little beyond the values."""
    known = [value for value in values if value > 0.0 or not log] or [1.0]
    least, most = min(known), max(known)
    room = (most / least) ** 0.05 if log else 0.05 * (most - least)
    least, most = (least / room, most * room) if log else (least - room, most + room)
    low, high = least if low is None else low, most if high is None else high
    if high > low:
        return low, high
    # A single value: an axis around it.
    return (low / 2.0, low * 2.0) if log else (low - (abs(low) / 2.0 or 1.0), low + (abs(low) / 2.0 or 1.0))


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


def describe(chart: Chart) -> str:
    """The chart in words, for those who do not see it."""
    if isinstance(chart, Rows):
        said = [", ".join(chart.read(number)) for number in range(len(chart.rows))]
    elif not chart.series:
        said = [chart.empty]
    else:
        ends = {one.name: one.points[-1] for one in chart.series if not one.thin}
        said = [f"{name} ends at {chart.written(y)} ({chart.place(x)})" for name, (x, y) in ends.items()]
        said += [f"{name}: {chart.written(level)}" for name, level in chart.levels.items()]
    return f"{chart.title}. {'; '.join(said)}.".replace("\n", " ")


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
    """The chart with looks that can be drawn."""

    def known(look: Look) -> Look:
        dashes = () if isinstance(look.line, str) else look.line[1]
        fine = look.colour in (*SERIES, INK, QUIET) and all(0.0 < one < 100.0 for one in dashes)
        return look if fine else Look(QUIET, "o")

    if isinstance(chart, Curves):
        return replace(chart, series=[replace(one, look=known(one.look)) for one in chart.series])
    rows = [(name, [replace(mark, look=known(mark.look)) for mark in marks]) for name, marks in chart.rows]
    return replace(chart, rows=rows)


def _drawable(chart: Chart) -> bool:
    """Whether every number has a place on its axis."""
    if isinstance(chart, Rows):
        numbers = [mark.value for _, marks in chart.rows for mark in marks]
        fits = len(chart.notes) in (0, len(chart.rows)) and (not chart.log or min(numbers) > 0.0)
        return fits and max(numbers) > 0.0
    places = [point for one in chart.series for point in one.points]
    named = not chart.ticks or all(x in range(len(chart.ticks)) for x, _ in places)
    fits = all(len(one.spread) in (0, len(one.points)) for one in chart.series)
    known = all(len(points([x], [y], chart.log)) == 1 for x, y in places)
    ends = {"y": (chart.least, chart.most), "x": (chart.start, chart.end)}
    axes = all(end is None or end > 0.0 for axis in chart.log for end in ends[axis])
    return named and fits and known and axes
