"""What a run or a ledger shows as charts (`niss.charts`): accuracy, noise, and what was spent.

What is spent jumps when a round is charged, so ledgers are drawn in steps, and every epsilon is printed rounded up:
a chart must not promise more than the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niss.charts import Chart, Curves, Mark, Rows, Series, marked, points, short
from niss.claims import digits, rounded_up
from niss.errors import ConfigError
from niss.files import write_output
from niss.methods.look import DOTTED, INK, QUIET, SERIES, Look
from niss.report.summary import format_variance, noise_of
from niss.runs.folder import MethodResult, ReportInput, looks

if TYPE_CHECKING:
    from niss.report.ledger import Spending

# Noise that cancels leaves floating-point rounding behind; below this share of the largest nothing is drawn.
ROUNDING = 1e-9
_MEASURED, _PREDICTED = "in a round, measured", "in a round, predicted"
_IN_MODEL = "in the model after the last round, predicted"
# Of what is spent after each round.
_STEPS: dict[str, Any] = {
    **{"across": "Round", "head": "Round", "least": 0.0, "start": 0.0, "step": True, "values": "claim"}
}
_WORST, _MEDIAN = Look(SERIES[1], ""), Look(SERIES[0], "", DOTTED)


def save_charts(path: Path, charts: Sequence[Chart]) -> Path:
    """Draw into a .png or .svg file, by its extension, and return `path`; `ConfigError` for any other."""
    from niss.svg import sheet

    kind = path.suffix.lower()
    if kind == ".svg":
        return write_output(path, sheet(charts).encode())
    if kind != ".png":
        raise ConfigError(
            f"{path.name!r} ends in neither .png nor .svg", field="--plot", hint="for example chart.png"
        )
    from niss.figures import png

    return write_output(path, png(sheet(charts)))


def accuracy_chart(report: ReportInput) -> Curves:
    """One curve for each method that has been evaluated, named at its end with its last accuracy.

    The axis of rounds reaches to the last round planned, so that an unfinished run shows what is missing; that of
    accuracy from 0 to 100 %, so that distances are what they look like.
    """
    series = [
        Series(
            _name(method), look, [(float(number), value) for number, value in method.evaluations], marks=True
        )
        for method, look in zip(report.methods, looks(report), strict=True)
        if method.evaluations
    ]
    done = max((method.rounds_done for method in report.methods), default=0)
    return accuracy_curves(series, max(done, report.rounds or 1))


def accuracy_curves(series: list[Series], rounds: int) -> Curves:
    """Accuracy over so many rounds, on an axis from 0 to 100 %: nothing is cut off."""
    return Curves(
        title="Test accuracy by round",
        across="Round",
        up="Test accuracy (%)",
        series=series,
        head="Round",
        least=0.0,
        most=1.0,
        start=0.0,
        end=float(rounds),
        values="percent",
        ends=True,
        empty="No evaluation yet",
    )


def _name(method: MethodResult) -> str:
    return marked(short(method.label), protected=not method.is_unprotected)


def noise_chart(report: ReportInput) -> Rows:
    """For each method a bar for the noise in the model, and marks for that in a round, on a logarithmic axis.

    Where noise cancels exactly only rounding is left, many powers of ten below the rest (see `ROUNDING`): it is
    written out instead of drawn, and so is that a method adds none.
    """
    found = [noise_of(one) for one in report.methods]
    least = ROUNDING * max((value for one in found for value in one if value), default=0.0)
    rows, notes = [], []
    for method, look, variances in zip(report.methods, looks(report), found, strict=True):
        kinds = zip((_MEASURED, _PREDICTED, _IN_MODEL), (Look(INK, "o"), Look(INK, "|"), look), strict=True)
        marks = [
            Mark(name, mark, value, format_variance(value), bar=name == _IN_MODEL)
            for (name, mark), value in zip(kinds, variances, strict=True)
            if value and value > least
        ]
        rows.append((method.label, marks))
        notes.append("" if marks else _no_mark(method))
    return Rows(
        title="Noise in a round and in the model, by method",
        across="Variance of the noise in each parameter (log scale)",
        rows=rows,
        log=True,
        notes=tuple(notes),
    )


def _no_mark(method: MethodResult) -> str:
    measured = method.aggregate_variance
    if measured is None and not method.finished:
        return "not measured yet"
    return f"none beyond rounding ({format_variance(measured)})" if measured else "none"


def spending_charts(spendings: Sequence[Spending]) -> list[Curves]:
    """Epsilon of the clients over the rounds, a chart for each method, all on the same axes.

    Few clients have a line each; of many the spread between least and most is filled. Median and most are taken in each
    round by itself, so they need not follow one client. Without a method there is one chart, which says so.
    """
    if not spendings:
        return [
            Curves(title="Epsilon spent", up="ε spent", series=[], empty="no finite ε was spent", **_STEPS)
        ]
    highest = max((max(float(one.most[-1]), one.budget or 0.0) for one in spendings), default=1.0)
    last = max((one.rounds[-1] for one in spendings), default=1)
    charts = []
    for one in spendings:
        series = [
            Series("each client", Look(QUIET, ""), points(one.rounds, line), thin=True) for line in one.lines
        ]
        if not one.lines:
            spread = list(zip(one.least.tolist(), one.most.tolist(), strict=True))
            area = Look(SERIES[0], "")
            median = points(one.rounds, one.median)
            series.append(Series("all clients", area, median, line=False, spread=spread, thin=True))
        series.append(Series("median client", _MEDIAN, points(one.rounds, one.median)))
        series.append(Series("worst-off client", _WORST, points(one.rounds, one.most)))
        charts.append(
            Curves(
                title=f"{short(one.label)}: ε {rounded_up(float(one.most[-1]))} spent at most",
                up=f"ε spent (δ = {digits(one.delta)})",
                series=series,
                levels={} if one.budget is None else {f"budget of {rounded_up(one.budget)}": one.budget},
                most=1.15 * highest or 1.0,
                end=float(last),
                **_STEPS,
            )
        )
    return charts
