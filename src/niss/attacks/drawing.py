"""What the figures of attacks share: colours, type, strips of pictures, curves, and saving without a display.

Methods have the look that `niss.methods` gives them, other curves the colour and marker of their number. Two figures
stand here because two attacks each draw them: `draw_strips` and `draw_steps`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import isfinite
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes as Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Figure
from matplotlib.figure import SubFigure
from numpy.typing import NDArray

from niss import figures
from niss.attacks.experiment import Findings, Row
from niss.figures import grid as grid
from niss.figures import look_of as look_of
from niss.files import SHARED, write_atomically
from niss.methods import METHODS
from niss.methods.look import INK as INK
from niss.methods.look import QUIET as QUIET
from niss.methods.look import RULE as RULE
from niss.methods.look import SERIES as SERIES

WIDTH = 7.4

# How many of the pictures on the way a strip shows.
_FRAMES, _STEPS = 5, 6

STYLE: dict[Any, Any] = {**figures.STYLE, "font.size": 12.0, "legend.fontsize": 11.0}


def style() -> AbstractContextManager[None]:
    """The type and colours of these figures, for as long as the context lasts."""
    return mpl.rc_context(STYLE)


def new_figure(height: float) -> Figure:
    """An empty figure of the common width; `height` in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def two_parts(figure: Figure, ratios: tuple[float, float], *, beside: bool = False) -> list[SubFigure]:
    """An upper and a lower part, or a left and a right one."""
    parts: Any = (
        figure.subfigures(1, 2, width_ratios=ratios)
        if beside
        else figure.subfigures(2, 1, height_ratios=ratios)
    )
    return list(parts)


def save(figure: Figure, path: Path, *, dark: bool = False) -> Path:
    """Write a PNG on white, or for a dark page, whole or not at all; returns its path."""
    write_atomically(path, figures.png(figure, style=STYLE, dark=dark), mode=SHARED)
    return path


def show_picture(axes: Axes, pixels: NDArray[np.float64], title: str = "") -> None:
    """A picture [C, H, W], cut to [0, 1], without ticks."""
    cut = np.clip(np.nan_to_num(pixels, nan=0.5), 0.0, 1.0)
    if len(cut) == 1:
        axes.imshow(cut[0], cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
    else:
        axes.imshow(cut.transpose(1, 2, 0), interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(True)
        side.set_color(RULE)
    if title:
        axes.set_title(title, fontsize=10, pad=3)


def method_line(method: str, protected: bool = True) -> dict[str, Any]:
    """How the curve of a method is drawn, everywhere alike."""
    return figures.line_options(look_of(method, protected=protected), width=1.8, size=6.5)


def line(axes: Axes, x: Any, y: Any, number: int, label: str, *, marks: bool = True) -> None:
    """A curve in the style of its number."""
    look = figures.numbered(number)
    axes.plot(
        x,
        y,
        color=look.colour,
        linestyle=look.line,
        linewidth=1.8,
        marker=look.marker if marks else None,
        markersize=5.5,
        # Spaced along the drawn curve, so that a logarithmic axis does not crowd them.
        markevery=0.12 if marks else None,
        label=label,
    )


def points(axes: Axes, x: Any, y: Any, number: int, label: str) -> None:
    """Measurements in the style of their number, without a line."""
    look = figures.numbered(number)
    axes.plot(
        x,
        y,
        linestyle="none",
        color=look.colour,
        marker=look.marker,
        markersize=6.5,
        label=label,
    )


def label_axes(axes: Axes, x: str, y: str, *, log: str = "") -> None:
    """Name both axes and rule them; `log` lists those that are logarithmic ("x", "y", "xy")."""
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    grid(axes)


def draw_label(axes: Axes, name: str, row: Row | None, *, places: tuple[float, float]) -> None:
    """The name of a strip of pictures, over two lines where it has a comma, and below it the PSNR of its row.

    `places` are the heights of both in the axes.
    """
    axes.set_axis_off()
    at: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 10, "transform": axes.transAxes}
    axes.text(1.0, places[0], name.replace(", ", ",\n"), **at)
    if row is not None:
        axes.text(1.0, places[1], f"{row['psnr']:.1f} dB", color=QUIET, **at)


def draw_losses(axes: Axes, findings: Findings, name: str) -> None:
    """The loss of each case over the iterations; `name` is that of the loss."""
    promised = {row["case"]: row["epsilon_joint"] for row in findings.rows}
    for number, (case, losses) in enumerate(findings.curves["losses"].items()):
        steps = np.arange(1, len(losses) + 1)
        if case in METHODS:
            protected = isfinite(promised[case])
            named = figures.marked(case, protected=protected)
            axes.plot(steps, losses, markevery=0.12, label=named, **method_line(case, protected))
        else:
            line(axes, steps, losses, number, case)
    label_axes(axes, "Iteration", name, log="xy")
    axes.legend(fontsize=9)


def draw_grey_line(axes: Axes, findings: Findings, *, named: bool = True) -> None:
    """The PSNR of an even grey, below which nothing was learned."""
    level = findings.curves["blind_guess_psnr"]
    axes.axhline(level, color=QUIET, linewidth=1.1, linestyle=":")
    if named:
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "bottom"}
        axes.text(0.98, level, "an even grey", color=QUIET, fontsize=11, ha="right", **place)


def _show_some(
    places: Any, original: NDArray[np.float64], frames: list[tuple[int, NDArray[np.float64]]], title: str
) -> None:
    """The original, then pictures on the way from first to last, as many as there are places; `title` takes a count."""
    show_picture(places[0], original, "original")
    count = len(places) - 1
    chosen = [frames[at] for at in np.unique(np.linspace(0, len(frames) - 1, count).astype(int))]
    for axes, (number, picture) in zip(places[1:], chosen, strict=False):
        show_picture(axes, picture, title.format(number))
    for axes in places[1 + len(chosen) :]:
        axes.set_axis_off()


def draw_strips(findings: Findings) -> Figure | None:
    """The figure of `dlg` and `joint`: one row per case (original, frames, PSNR), the losses below.

    Where the findings have a sweep over tau^2, it stands beside the losses.
    """
    frames = findings.pictures.get("frames", {})
    if not frames:
        return None
    sweep = findings.curves.get("sweep")
    with style():
        rows = len(frames)
        figure = new_figure(1.22 * rows + 3.0)
        upper, lower = two_parts(figure, (1.22 * rows + 0.25, 2.75))
        strips = upper.subplots(rows, _FRAMES + 2, squeeze=False)
        scores = {row["case"]: row for row in findings.rows}
        for strip, (name, shown) in zip(strips, frames.items(), strict=True):
            draw_label(strip[0], name, scores.get(name), places=(0.62, 0.16))
            _show_some(strip[1:], findings.pictures["originals"][0], shown, "iter. {}")
        below = lower.subplots(1, 2 if sweep else 1, squeeze=False)[0]
        draw_losses(below[0], findings, "DLG loss")
        if sweep:
            _draw_sweep(below[1], sweep, findings.curves["calibrated_tau2"])
    return figure


def _draw_sweep(axes: Axes, sweep: dict[str, list[float]], calibrated: float) -> None:
    """The error of the joint estimate over tau^2, measured and predicted, and the tau^2 that calibration gives."""
    line(axes, sweep["tau2"], sweep["predicted"], 0, "accountant", marks=False)
    points(axes, sweep["tau2"], sweep["measured"], 1, "measured")
    axes.axvline(calibrated, color=INK, linewidth=1.0, linestyle=":")
    at: dict[str, Any] = {
        "ha": "right",
        "va": "bottom",
        "fontsize": 9,
        "transform": axes.get_xaxis_transform(),
    }
    axes.text(calibrated, 0.03, "calibrated ", **at)
    label_axes(axes, "Distortion τ²", "Error ÷ update (joint)", log="xy")
    axes.legend(fontsize=9)


def draw_steps(findings: Findings, key: str, title: str) -> Figure | None:
    """The figure of `average` and `rerun`: pictures, the error (measured and predicted) and the PSNR over a count.

    key     the count in the rows
    title   its name on the axis
    """
    steps = findings.pictures.get("steps", [])
    if not steps:
        return None
    rows = [row for row in findings.rows if row.get("error") is not None]
    counts = [row[key] for row in rows]
    with style():
        figure = new_figure(5.0)
        upper, lower = two_parts(figure, (1.45, 3.4))
        _show_some(upper.subplots(1, _STEPS + 1), findings.pictures["originals"][0], steps, "{:,}")
        errors, ratios = lower.subplots(1, 2)
        line(errors, counts, [row["predicted_error"] for row in rows], 0, "predicted", marks=False)
        points(errors, counts, [row["error"] for row in rows], 1, "measured")
        label_axes(errors, title, "Error ÷ update", log="xy")
        line(ratios, counts, [row["psnr"] for row in rows], 2, "recovered")
        ratios.set_ylim(bottom=min(*(row["psnr"] for row in rows), findings.curves["blind_guess_psnr"]) - 1.5)
        draw_grey_line(ratios, findings)
        label_axes(ratios, title, "PSNR of the picture, dB", log="x")
        if "allowed_rounds" in findings.curves:
            limit = findings.curves["allowed_rounds"]
            for axes in (errors, ratios):
                axes.set_xlim(counts[0] / 1.6, counts[-1] * 1.6)
                axes.axvspan(limit * 1.3, counts[-1] * 1.6, color=QUIET, alpha=0.12, linewidth=0)
            place: dict[str, Any] = {
                "transform": errors.get_xaxis_transform(),
                "color": QUIET,
                "fontsize": 11,
            }
            errors.text(limit * 1.5, 0.04, "refused by the ledger", **place)
        errors.legend(loc="upper right")
    return figure
