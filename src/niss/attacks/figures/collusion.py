"""The sweeps over rho and tau^2, measured beside the accountant's prediction: the figure of `collude`."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from niss.attacks.drawing import LINES, QUIET, SERIES, STYLE, grid, new_figure, points
from niss.attacks.findings import Findings

_AXES = {"rho": "Colluding part of the neighbours, ρ", "tau2": "Distortion τ², all neighbours collude"}


def draw_collusion(findings: Findings) -> Figure | None:
    """Left: over rho; right: over tau^2 at rho = 1; from above the recovered part, the error and the PSNR."""
    if not findings.rows:
        return None
    with mpl.rc_context(STYLE):
        figure = new_figure(8.4)
        axes = figure.subplots(3, 2, sharey="row", sharex="col")
        for column, over in enumerate(("rho", "tau2")):
            rows = [
                row for row in findings.rows if row["sweep"] == over or (over == "tau2" and row["rho"] == 1.0)
            ]
            _draw(axes[0, column], rows, over, "fraction", "predicted_fraction")
            _draw(axes[1, column], rows, over, "error", "predicted_error")
            _draw(axes[2, column], rows, over, "psnr", "predicted_psnr")
            axes[2, column].set_xlabel(_AXES[over])
            axes[2, column].axhline(
                findings.curves["blind_guess_psnr"], color=QUIET, linewidth=1.0, linestyle=":"
            )
        # Where the accountant promises nothing its line leaves the figure at the top.
        axes[2, 0].set_ylim(0.0, 85.0)
        axes[1, 0].set_yscale("log")
        axes[0, 0].set_ylabel("Recovered part")
        axes[1, 0].set_ylabel("Error ÷ update")
        axes[2, 0].set_ylabel("PSNR of the picture, dB")
        axes[2, 0].annotate(
            "an even grey",
            (0.02, findings.curves["blind_guess_psnr"]),
            xytext=(0, 3),
            textcoords="offset points",
            color=QUIET,
            fontsize=9,
        )
        axes[0, 0].legend(*axes[0, 0].get_legend_handles_labels(), loc="center left", fontsize=9)
    return figure


def _draw(axes: Axes, rows: list[dict[str, Any]], over: str, measured: str, predicted: str) -> None:
    kinds = list(dict.fromkeys(row["distortion"] for row in rows))
    for number, kind in enumerate(kinds):
        own = sorted((row for row in rows if row["distortion"] == kind), key=lambda row: float(row[over]))
        x = [row[over] for row in own]
        axes.plot(
            x,
            [row[predicted] for row in own],
            color=SERIES[number],
            linestyle=LINES[number],
            linewidth=1.6,
            label=f"{kind}, accountant",
        )
        points(axes, x, [row[measured] for row in own], number, f"{kind}, attack")
    if over == "tau2":
        axes.set_xscale("log")
    grid(axes)
