"""What the charts share: colours, type, and turning a matplotlib figure into SVG or PNG.

Colours are those of Okabe and Ito, told apart by most colour-blind readers; line styles and markers
tell the curves apart in black and white. Only matplotlib's object interface is used, so that nothing
here touches pyplot's global state.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from niss.report.source import MethodResult, ReportInput

INK = "#1c1c1f"
RULE = "#d3d3d8"
QUIET = "#7d7d86"
# Without Okabe and Ito's yellow, which is lost on white; the unprotected baseline takes the ink.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# In the page the figures take the colours of the light or the dark theme.
THEME = {INK: "currentColor", RULE: "var(--rule)", QUIET: "var(--quiet)"} | {
    colour: f"var(--series-{number}, {colour})" for number, colour in enumerate(SERIES, start=1)
}
WIDTH = 7.4
# matplotlib writes SVG in points.
POINTS_PER_INCH = 72.0

# matplotlib types these keys differently from release to release.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "legend.frameon": False,
}


def colours(report: ReportInput) -> list[str]:
    """One colour for each method, the same in both figures."""
    chosen, used = [], 0
    for method in report.methods:
        if method.is_private:
            chosen.append(SERIES[used % len(SERIES)])
            used += 1
        else:
            chosen.append(INK)
    return chosen


def short(label: str, most: int = 26) -> str:
    line = " ".join(label.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def label_width(methods: Iterable[MethodResult], extra: int = 0) -> float:
    """Inches that hold the longest label and `extra` more signs, in whatever sans-serif the reader has."""
    return 0.25 + 0.077 * (extra + max((len(short(method.label)) for method in methods), default=0))


def as_svg(figure: Figure, *, salt: str) -> str:
    buffer = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": salt}), warnings.catch_warnings():
        # The reader's fonts draw the text, so it does not matter which signs matplotlib's own font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def as_png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
