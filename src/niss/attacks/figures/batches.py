"""Recovered batches beneath their originals, with the mismatch over iterations: the figure of `invert`."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from niss.attacks.drawing import QUIET, STYLE, grid, line, new_figure, show_picture, two_parts
from niss.attacks.findings import Findings

_SHOWN = 6


def draw_batches(findings: Findings) -> Figure | None:
    """A row of originals, a row per method, and the loss curves at the right or below."""
    recovered = findings.pictures.get("recovered", {})
    if not recovered:
        return None
    originals = findings.pictures["original"][:_SHOWN]
    scores = {row["case"]: row for row in findings.rows}
    count, rows = len(originals), len(recovered) + 1
    beside = count <= 2
    with mpl.rc_context(STYLE):
        if beside:
            figure = new_figure(1.3 * rows)
            pictures, curves = two_parts(figure, (1.0 + 1.2 * count, 4.4), beside=True)
        else:
            figure = new_figure(1.15 * rows + 2.6)
            pictures, curves = two_parts(figure, (1.15 * rows, 2.6))
        axes = pictures.subplots(rows, count + 1, squeeze=False)
        for strip, (name, shown) in zip(axes, [("original", originals), *recovered.items()], strict=True):
            strip[0].set_axis_off()
            strip[0].text(1.0, 0.6, name, ha="right", va="center", fontsize=10, transform=strip[0].transAxes)
            if name in scores:
                text = f"{scores[name]['psnr']:.1f} dB"
                strip[0].text(
                    1.0, 0.3, text, ha="right", va="center", color=QUIET, transform=strip[0].transAxes
                )
            for one, place in zip(shown, strip[1:], strict=False):
                show_picture(place, one)
        below = curves.subplots()
        for number, (name, losses) in enumerate(findings.curves["losses"].items()):
            line(below, np.arange(1, len(losses) + 1), losses, number, name)
        below.set_xscale("log")
        below.set_yscale("log")
        below.set_xlabel("Iteration")
        below.set_ylabel("Mismatch, 1 − cosine")
        grid(below)
        below.legend()
    return figure
