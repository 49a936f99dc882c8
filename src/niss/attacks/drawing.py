"""What the figures of attacks share: colours, type, a strip of pictures, and saving without a display.

Colours are those of Okabe and Ito, told apart by most colour-blind readers; line styles and markers tell the
curves apart in black and white. Only matplotlib's object interface is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from numpy.typing import NDArray

INK, QUIET, RULE = "#1c1c1f", "#6f6f78", "#d3d3d8"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (3, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
WIDTH = 7.4

# matplotlib types these keys differently from release to release.
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 11.0,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 10.0,
}


def new_figure(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def two_parts(figure: Figure, ratios: tuple[float, float], *, beside: bool = False) -> list[SubFigure]:
    """An upper and a lower part, or a left and a right one."""
    made: Any = (
        figure.subfigures(1, 2, width_ratios=ratios)
        if beside
        else figure.subfigures(2, 1, height_ratios=ratios)
    )
    return list(made)


def save(figure: Figure, path: Path) -> Path:
    """A PNG on white; a reader never sees half of it."""
    partial = path.with_suffix(".tmp")
    with mpl.rc_context(STYLE):
        figure.savefig(partial, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return partial.replace(path)


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


def line(axes: Axes, x: Any, y: Any, number: int, label: str, *, marks: bool = True) -> None:
    """A curve in the style of its number."""
    axes.plot(
        x,
        y,
        color=SERIES[number % len(SERIES)],
        linestyle=LINES[number % len(LINES)],
        linewidth=1.8,
        marker=MARKERS[number % len(MARKERS)] if marks else None,
        markersize=5.5,
        # Spaced along the drawn curve, so that a logarithmic axis does not crowd them.
        markevery=0.12 if marks else None,
        label=label,
    )


def points(axes: Axes, x: Any, y: Any, number: int, label: str) -> None:
    """Measurements in the style of their number, without a line."""
    axes.plot(
        x,
        y,
        linestyle="none",
        color=SERIES[number % len(SERIES)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=6.5,
        label=label,
    )


def grid(axes: Axes) -> None:
    axes.grid(color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)
