"""Rates of the canary test and the epsilon they prove: the figure of `audit`."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from niss.attacks.drawing import INK, LINES, MARKERS, SERIES, STYLE, grid, new_figure
from niss.attacks.findings import Findings


def draw_audit(findings: Findings) -> Figure | None:
    """Left: true- over false-positive rates beside what the claim allows; right: claims and proof per case."""
    if not findings.rows:
        return None
    with mpl.rc_context(STYLE):
        figure = new_figure(3.9)
        rates, claims = figure.subplots(1, 2)
        _draw_rates(rates, findings)
        _draw_claims(claims, findings)
    return figure


def _draw_rates(axes: Axes, findings: Findings) -> None:
    for number, (name, curve) in enumerate(findings.curves["rates"].items()):
        x = curve["false_positive"]
        axes.plot(x, curve["most"], color=SERIES[number], linestyle=LINES[number], linewidth=1.6)
        axes.plot(
            x,
            curve["true_positive"],
            linestyle="none",
            color=SERIES[number],
            marker=MARKERS[number],
            markersize=4.5,
            markevery=(2 * number, 6),
            label=name,
        )
    axes.plot(x, x, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e-4, top=1.6)
    axes.set_xlabel("False-positive rate")
    axes.set_ylabel("True-positive rate")
    axes.legend(fontsize=9, title="points: measured\nlines: most the claim allows", title_fontsize=9)
    grid(axes)


def _draw_claims(axes: Axes, findings: Findings) -> None:
    rows = findings.rows
    places = np.arange(len(rows))[::-1]
    most = max([row["proved"] for row in rows] + [row["joint"] for row in rows if np.isfinite(row["joint"])])
    edge = 1.25 * most
    axes.barh(places, [row["proved"] for row in rows], height=0.42, color=SERIES[5], label="proved at least")
    for place, row in zip(places, rows, strict=True):
        finite = bool(np.isfinite(row["joint"]))
        axes.plot(
            [row["joint"] if finite else edge],
            [place],
            marker="D" if finite else ">",
            color=SERIES[0],
            markersize=8,
            linestyle="none",
            clip_on=False,
        )
        axes.plot([row["marginal"]], [place], marker="|", color=SERIES[1], markersize=22, markeredgewidth=3)
    axes.plot([], [], "D", color=SERIES[0], label="joint claim (▸: none)")
    axes.plot([], [], "|", color=SERIES[1], markersize=12, markeredgewidth=3, label="marginal claim (paper)")
    axes.set_xlim(0.0, edge)
    axes.set_ylim(-1.3, len(rows) - 0.4)
    axes.set_yticks(places, [row["case"].replace(", ", ",\n") for row in rows])
    axes.set_xlabel("ε at the plan's δ")
    axes.legend(loc="lower right", fontsize=9)
    axes.grid(axis="x", color="#d3d3d8", linewidth=0.7)
    axes.set_axisbelow(True)
