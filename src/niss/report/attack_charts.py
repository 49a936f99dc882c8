"""The charts of an attack as inline SVG, drawn from what `attack.json` holds, with values under the pointer.

There are two shapes: curves over a count or a setting, and rows with marks on a common axis. Which of them an attack
has stands in `KINDS`. The file may come from anywhere, so numbers that are missing or not finite are left out, and a
chart without any is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from niss.claims import NO_GUARANTEE, rounded_up
from niss.figures import line_options, look_of, marked, numbered
from niss.files import JsonObject
from niss.methods import METHODS
from niss.methods.look import DASHED, DOTTED, GREEN, Look
from niss.report.canvas import (
    INK,
    QUIET,
    STYLE,
    WIDTH,
    Reading,
    bands_svg,
    in_two_widths,
    inline_svg,
    power_of_ten,
    rows_svg,
    rule,
    short,
)

# Of a long curve on a logarithmic axis, so many places can be read off.
_MOST_PLACES = 60
# Where a claim is missing, its mark stands so far beyond the largest value.
_BEYOND = 1.2


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


@dataclass(frozen=True)
class Drawn:
    """A chart for the page, in two widths."""

    title: str
    svg: Mapping[str, Markup]


def draw_attack(values: JsonObject, prefix: str) -> list[Drawn]:
    """The charts of an attack; `prefix` keeps their ids apart from those of others on the page."""
    charts = charts_of(values)
    return [
        Drawn(
            chart.title,
            in_two_widths(lambda width, name, chart=chart: _svg(chart, name, width), f"{prefix}-{number}"),  # type: ignore[misc]
        )
        for number, chart in enumerate(charts, start=1)
    ]


def shows_pictures(attack: str) -> bool:
    """Whether the figure of the attack holds more than its charts: pictures that were recovered, or what is unknown."""
    return attack not in KINDS or KINDS[attack][1]


def charts_of(values: JsonObject) -> list[Chart]:
    """The charts that there are numbers for."""
    makers = KINDS.get(str(values.get("attack")), ((), False))[0]
    found: list[Chart] = []
    for make in makers:
        try:
            charts = list(make(values))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            # The file was cut short, or is not ours; what it holds stands in the table.
            continue
        found += (one for one in charts if (one.series if isinstance(one, Curves) else one.rows))
    return found


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _pairs(x: Iterable[Any], y: Iterable[Any], log: str = "") -> list[tuple[float, float]]:
    """The points of which both numbers are known, and can stand on their axes."""
    pairs = [(_number(a), _number(b)) for a, b in zip(x, y, strict=False)]
    return [
        (a, b)
        for a, b in pairs
        if a is not None and b is not None and (a > 0 or "x" not in log) and (b > 0 or "y" not in log)
    ]


def _kept(series: Iterable[Series]) -> list[Series]:
    return [one for one in series if one.points]


def _losses(values: JsonObject, name: str) -> Iterator[Chart]:
    claims = {row["case"]: _number(row.get("epsilon_joint")) for row in values["rows"]}
    series = []
    for number, (case, losses) in enumerate(values["curves"]["losses"].items()):
        look, words = numbered(number), str(case)
        if case in METHODS:
            protected = claims.get(case) is not None
            look, words = look_of(case, protected=protected), marked(case, protected=protected)
        points = _pairs(range(1, len(losses) + 1), losses, "xy")
        series.append(Series(words, look, points, marks=True))
    yield Curves(f"{name} by iteration", "Iteration", name, _kept(series), "xy", head="Iteration")


def _dlg_losses(values: JsonObject) -> Iterator[Chart]:
    return _losses(values, "DLG loss")


def _mismatches(values: JsonObject) -> Iterator[Chart]:
    return _losses(values, "Mismatch, 1 − cosine")


def _against(x: list[Any], predicted: list[Any], measured: list[Any], log: str, *, by: str) -> list[Series]:
    return _kept(
        [
            Series(by, numbered(0), _pairs(x, predicted, log)),
            Series("measured", numbered(1), _pairs(x, measured, log), line=False),
        ]
    )


def _sweep(values: JsonObject) -> Iterator[Chart]:
    sweep = values["curves"]["sweep"]
    chosen = _number(values["curves"].get("calibrated_tau2"))
    series = _against(sweep["tau2"], sweep["predicted"], sweep["measured"], "xy", by="accountant")
    limits = {} if not chosen else {"calibrated": chosen}
    title = "Error of the joint estimate over the distortion τ²"
    yield Curves(title, "Distortion τ²", "Error ÷ update", series, "xy", limits=limits, head="τ²")


def _steps(values: JsonObject, key: str, across: str, head: str) -> Iterator[Chart]:
    rows = [row for row in values["rows"] if row.get("error") is not None]
    counts = [row[key] for row in rows]
    allowed = _number(values["curves"].get("allowed_rounds"))
    limits = {} if allowed is None or allowed <= 0 else {"the ledger refuses more": allowed}
    errors = _against(
        counts, [row["predicted_error"] for row in rows], [row["error"] for row in rows], "xy", by="predicted"
    )
    yield Curves(
        f"Error of the estimate by {head.lower()}",
        across,
        "Error ÷ update",
        errors,
        "xy",
        (),
        {},
        limits,
        head,
    )
    psnr = _kept(
        [Series("recovered", numbered(2), _pairs(counts, [row["psnr"] for row in rows], "x"), marks=True)]
    )
    yield Curves(
        f"Quality of the picture by {head.lower()}",
        across,
        "PSNR, dB",
        psnr,
        "x",
        (),
        _grey(values),
        limits,
        head,
    )


def _grey(values: JsonObject) -> dict[str, float]:
    level = _number(values["curves"].get("blind_guess_psnr"))
    return {} if level is None else {"an even grey": level}


def _rounds(values: JsonObject) -> Iterator[Chart]:
    return _steps(values, "rounds", "Rounds with the same model", "Rounds")


def _answers(values: JsonObject) -> Iterator[Chart]:
    return _steps(values, "answers", "Answers to the same round", "Answers")


def _collusion(values: JsonObject) -> Iterator[Chart]:
    for over, words, head in (("rho", "Colluding neighbours, %", "ρ, %"), ("tau2", "Distortion τ²", "τ²")):
        rows = [
            row for row in values["rows"] if row["sweep"] == over or (over == "tau2" and row["rho"] == 1.0)
        ]
        places = sorted({number for row in rows if (number := _number(row[over])) is not None})
        ticks = tuple(f"{100 * place:.3g}" if over == "rho" else f"{place:.3g}" for place in places)
        for key, up, log in (("error", "Error ÷ update", "y"), ("psnr", "PSNR of the picture, dB", "")):
            series = []
            for number, kind in enumerate(dict.fromkeys(row["distortion"] for row in rows)):
                own = sorted(
                    (row for row in rows if row["distortion"] == kind), key=lambda row: float(row[over])
                )
                at = [places.index(float(row[over])) for row in own]
                look = numbered(number)
                predicted = _pairs(at, [row.get(f"predicted_{key}") for row in own], log)
                series.append(Series(f"{kind}: accountant", look, predicted))
                series.append(
                    Series(
                        f"{kind}: attack", look, _pairs(at, [row.get(key) for row in own], log), line=False
                    )
                )
            levels = _grey(values) if key == "psnr" else {}
            title = f"{up.partition(',')[0]} over {'colluders' if over == 'rho' else 'the distortion τ²'}"
            yield Curves(title, words, up, _kept(series), log, ticks, levels, head=head)


def _rates(values: JsonObject) -> Iterator[Chart]:
    rows = {row["case"]: row for row in values["rows"]}
    series, chance = [], list[float]()
    for case, curve in values["curves"]["rates"].items():
        look = look_of(rows[case]["method"], protected=_number(rows[case].get("joint")) is not None)
        alarms = curve["false_positive"]
        series.append(Series(f"{case}: allowed at most", look, _pairs(alarms, curve["most"], "xy")))
        found = _pairs(alarms, curve["true_positive"], "xy")
        series.append(Series(f"{case}: measured", look, found, line=False))
        chance += (x for x, _ in found)
    ends = [(x, x) for x in (min(chance), max(chance))] if chance else []
    series.append(Series("guessing", Look(QUIET, "", DOTTED), ends))
    title = "Canaries found by false alarms"
    yield Curves(title, "False alarms", "Canaries found", _kept(series), "xy", head="False alarms")


def _claims(values: JsonObject) -> Iterator[Chart]:
    known = [
        number for row in values["rows"] for key in ("proved", "joint") if (number := _number(row.get(key)))
    ]
    nothing = _BEYOND * max(known, default=1.0)
    rows, missing = [], False
    for row in values["rows"]:
        joint, marginal, proved = (_number(row.get(key)) for key in ("joint", "marginal", "proved"))
        look = look_of(row["method"], protected=joint is not None)
        marks = (
            [] if proved is None else [Mark("proved by the audit", look, proved, f"{proved:.2f}", bar=True)]
        )
        if marginal is not None:
            marks.append(
                Mark("claimed, marginal view", Look(INK, "D", hollow=True), marginal, rounded_up(marginal))
            )
        words = NO_GUARANTEE if joint is None else rounded_up(joint)
        marks.append(Mark("claimed, joint view", Look(INK, "d"), nothing if joint is None else joint, words))
        missing = missing or joint is None
        rows.append((str(row["case"]), marks))
    title = "What is claimed, and what the audit proves"
    yield Rows(title, "ε at the plan’s δ", rows, nothing=nothing if missing else None)


def _ratios(values: JsonObject) -> Iterator[Chart]:
    off, on, exact = numbered(1), numbered(0), Look(numbered(0).colour, "D")
    rows: dict[str, list[Mark]] = {}
    for row in values["rows"]:
        ratio, rule_is = _number(row["ratio"]), row.get("rule")
        if ratio is None:
            continue
        name, look = {"off": ("server, rule off", off), "on": ("server, rule on", on)}.get(
            rule_is, ("statistic, exact", exact)
        )
        words = f"{ratio:.3f}"
        marks = rows.setdefault(str(row["attack"]), [])
        marks.append(Mark(name, look, ratio, words))
        measured, claimed = _number(row.get("measured")), _number(row.get("claimed"))
        if measured is not None and claimed:
            share = measured / claimed
            marks.append(Mark("statistic, measured", Look(GREEN, "s", hollow=True), share, f"{share:.3f}"))
    yield Rows(
        "What each attack reaches of the charge",
        "μ reached ÷ μ charged",
        list(rows.items()),
        ("charged", 1.0),
    )


def _left(values: JsonObject) -> Iterator[Chart]:
    rows: dict[str, list[Mark]] = {}
    for row in values["rows"]:
        left, epsilon = _number(row["left"]), _number(row.get("epsilon"))
        if left is not None:
            look = numbered(0 if row["rule"] == "on" else 1)
            spent = NO_GUARANTEE if epsilon is None else f"ε {rounded_up(epsilon)}"
            mark = Mark(f"rule {row['rule']}", look, left, f"{left:.2f}, {spent}")
            rows.setdefault(f"“{row['story']}”", []).append(mark)
    title = "Noise left by what the server tells the committee"
    yield Rows(title, "Noise variance left ÷ charged", list(rows.items()), ("charged", 1.0))


Maker = Callable[[JsonObject], Iterator[Chart]]
# The charts of each attack, and whether its figure shows pictures besides.
KINDS: dict[str, tuple[tuple[Maker, ...], bool]] = {
    "audit": ((_rates, _claims), False),
    "average": ((_rounds,), True),
    "carried": ((_ratios,), False),
    "collude": ((_collusion,), False),
    "dlg": ((_dlg_losses,), True),
    "fake-dropout": ((_left,), False),
    "invert": ((_mismatches,), True),
    "joint": ((_dlg_losses, _sweep), True),
    "rerun": ((_answers,), True),
}


def _svg(chart: Chart, prefix: str, width: float) -> Markup:
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
