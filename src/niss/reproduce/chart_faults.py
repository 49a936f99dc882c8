"""What colluders and dropouts cost calibrated NISS: accuracy over epsilon, between a trusted server and DP-FedAvg."""

from __future__ import annotations

import math

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from niss.report.canvas import STYLE
from niss.reproduce.chart_beyond import draw_points, epsilon_axis, in_order, setting_title
from niss.reproduce.chart_style import MARKERS, accuracy_axis, accuracy_limits, curve_look
from niss.reproduce.results import Result, select
from niss.reproduce.settings import METHODS, VARIANTS

FAULTS = "faults"
_COLUMNS = 4
_METHOD = "niss-planned"
_LOOKS = list(METHODS)
# Without faults in the looks that the methods have in the other figures.
_CURVES = (
    ("dp-fedavg", "none", "dp-fedavg", _LOOKS.index("dp-fedavg")),
    ("central-dp", "none", "central-dp", _LOOKS.index("central-dp")),
    (_METHOD, "none", "niss", _LOOKS.index(_METHOD)),
    (_METHOD, "collusion", "niss, a fifth collude", 3),
    (_METHOD, "repair", "niss, a tenth drop out, repaired", 4),
    (_METHOD, "tolerate", "niss, a tenth drop out, tolerated", 0),
)


def with_faults(results: dict[str, Result]) -> dict[str, Result]:
    """Those settings in which clients drop out."""
    dropping = [name for name, variant in VARIANTS.items() if variant.dropout]
    return {
        name: result
        for name, result in results.items()
        if any(select(result, method=_METHOD, variant=variant) for variant in dropping)
    }


def draw_faults(results: dict[str, Result]) -> Figure:
    """A panel for each setting in which clients drop out."""
    shown = in_order(with_faults(results).values())
    rows, columns = max(1, math.ceil(len(shown) / _COLUMNS)), max(1, min(_COLUMNS, len(shown)))
    height = 2.6 * rows + 0.75
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.4, 2.75 * columns), height))
        grid = figure.subplots(rows, columns, squeeze=False)
        for number, axes in enumerate(grid.flat):
            if number >= len(shown):
                axes.set_visible(False)
                continue
            _panel(axes, shown[number])
            if number % columns == 0:
                axes.set_ylabel("Test accuracy")
        handles = [
            Line2D([], [], marker=MARKERS[look], label=words, **curve_look(look))
            for _, _, words, look in _CURVES
        ]
        figure.legend(handles=handles, loc="lower center", ncols=3)
        figure.subplots_adjust(
            left=0.075, right=0.985, top=1.0 - 0.3 / height, bottom=1.1 / height, hspace=0.5, wspace=0.3
        )
    return figure


def _panel(axes: Axes, result: Result) -> None:
    axes.set_title(setting_title(result), fontsize=9.5)
    accuracy_axis(axes)
    shown: list[float] = []
    for method, variant, _, look in _CURVES:
        shown += draw_points(axes, select(result, method=method, variant=variant), "epsilon", look)
    epsilon_axis(axes)
    accuracy_limits(axes, shown)
