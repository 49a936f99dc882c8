"""Strips of recovered pictures over iterations, with the loss beneath: the figure of `dlg` and `joint`."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from niss.attacks.drawing import INK, QUIET, STYLE, grid, line, new_figure, points, show_picture, two_parts
from niss.attacks.findings import Findings

_SHOWN = 5


def draw_strips(findings: Findings) -> Figure | None:
    """One row per case (original, frames, PSNR), loss curves below; for `joint` also the sweep over tau^2."""
    frames = findings.pictures.get("frames", {})
    if not frames:
        return None
    sweep = findings.curves.get("sweep")
    with mpl.rc_context(STYLE):
        rows = len(frames)
        figure = new_figure(1.22 * rows + 3.0)
        upper, lower = two_parts(figure, (1.22 * rows + 0.25, 2.75))
        axes = upper.subplots(rows, _SHOWN + 2, squeeze=False)
        scores = {row["case"]: row for row in findings.rows}
        for strip, (name, shown) in zip(axes, frames.items(), strict=True):
            _draw_strip(strip, name, findings.pictures["original"], shown, scores.get(name))
        below = lower.subplots(1, 2 if sweep else 1, squeeze=False)[0]
        _draw_losses(below[0], findings)
        if sweep:
            _draw_sweep(below[1], findings)
    return figure


def _draw_strip(
    strip: list[Axes],
    name: str,
    original: np.ndarray,
    shown: list[tuple[int, np.ndarray]],
    row: dict[str, object] | None,
) -> None:
    label = strip[0]
    label.set_axis_off()
    label.text(1.0, 0.62, _broken(name), ha="right", va="center", fontsize=10, transform=label.transAxes)
    if row is not None:
        text = f"{row['psnr']:.1f} dB"
        label.text(
            1.0, 0.16, text, ha="right", va="center", fontsize=10, color=QUIET, transform=label.transAxes
        )
    show_picture(strip[1], original, "original")
    chosen = [shown[place] for place in np.unique(np.linspace(0, len(shown) - 1, _SHOWN).astype(int))]
    for place, axes in enumerate(strip[2:]):
        if place < len(chosen):
            show_picture(axes, chosen[place][1], f"iter. {chosen[place][0]}")
        else:
            axes.set_axis_off()


def _broken(name: str) -> str:
    """A name over two lines where it has a comma."""
    return name.replace(", ", ",\n")


def _draw_losses(axes: Axes, findings: Findings) -> None:
    for number, (name, losses) in enumerate(findings.curves["losses"].items()):
        line(axes, np.arange(1, len(losses) + 1), losses, number, name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("Iteration")
    axes.set_ylabel("DLG loss")
    grid(axes)
    axes.legend(fontsize=9)


def _draw_sweep(axes: Axes, findings: Findings) -> None:
    sweep = findings.curves["sweep"]
    line(axes, sweep["tau2"], sweep["predicted"], 0, "accountant", marks=False)
    points(axes, sweep["tau2"], sweep["measured"], 1, "measured")
    axes.axvline(findings.curves["calibrated_tau2"], color=INK, linewidth=1.0, linestyle=":")
    axes.text(
        findings.curves["calibrated_tau2"],
        0.03,
        "calibrated ",
        ha="right",
        va="bottom",
        fontsize=9,
        transform=axes.get_xaxis_transform(),
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("Distortion τ²")
    axes.set_ylabel("Error ÷ update (joint)")
    grid(axes)
    axes.legend(fontsize=9)
