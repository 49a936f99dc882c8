"""The charts of an attack, from what `attack.json` holds.

Which of them an attack has stands in `KINDS`. The file may come from anywhere, so numbers that are missing or not
finite are left out, and a chart without any is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup

from niss.claims import NO_GUARANTEE, rounded_up
from niss.figures import look_of, marked, numbered
from niss.files import JsonObject
from niss.methods import METHODS
from niss.methods.look import DOTTED, GREEN, Look
from niss.report.attack_drawing import Chart, Curves, Mark, Rows, Series, chart_svg
from niss.report.canvas import INK, QUIET, in_two_widths

# Where a claim is missing, its mark stands so far beyond the largest value.
_BEYOND = 1.2


@dataclass(frozen=True)
class Drawn:
    """A chart for the page, in two widths."""

    title: str
    svg: Mapping[str, Markup]


def draw_attack(values: JsonObject, prefix: str) -> list[Drawn]:
    """The charts of an attack; `prefix` keeps their ids apart from those of others on the page."""
    return [
        Drawn(chart.title, in_two_widths(partial(chart_svg, chart), f"{prefix}-{number}"))
        for number, chart in enumerate(charts_of(values), start=1)
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
    for over, words, head in (("rho", "Colluding neighbours", "Colluding"), ("tau2", "Distortion τ²", "τ²")):
        rows = [
            row for row in values["rows"] if row["sweep"] == over or (over == "tau2" and row["rho"] == 1.0)
        ]
        places = sorted({number for row in rows if (number := _number(row[over])) is not None})
        ticks = tuple(f"{100 * place:.3g} %" if over == "rho" else _rounded(place) for place in places)
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
            # Where the accountant promises nothing its line leaves the chart.
            measured = [y for one in series if not one.line for _, y in one.points]
            least, most = (0.4 * min(measured), None) if log else (0.0, 1.15 * max(measured))
            yield Curves(title, words, up, _kept(series), log, ticks, levels, {}, head, least, most)


def _rounded(value: float) -> str:
    """One digit, such as 4e-6."""
    return f"{value:.1g}".replace("e-0", "e-")


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
