"""SVG pictures for the docs that suit light and dark pages: drawn once, coloured by the reader's setting.

matplotlib draws with stand-in colours; in the file they become CSS variables, which a media query sets. The
background is part of the picture, so it is readable wherever it stands.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Stand-in as drawn: (light, dark).
THEME = {
    "#010101": ("#1f2430", "#e6e6ea"),  # ink
    "#020202": ("#6a7080", "#a0a6b5"),  # muted
    "#030303": ("#d8dbe2", "#3a3f4b"),  # lines
    "#040404": ("#ffffff", "#1c1f26"),  # background
    "#050505": ("#2f6fb3", "#6fb1f2"),  # blue
    "#060606": ("#c2571a", "#f2a065"),  # orange
    "#070707": ("#2d8a57", "#66c994"),  # green
    "#080808": ("#eef3fa", "#262d3a"),  # blue, pale
}
IMAGES = Path(__file__).parents[1] / "docs" / "images"
INK, MUTED, LINES, BACK, BLUE, ORANGE, GREEN, PALE = THEME
_NAMES = {colour: f"--c{number}" for number, colour in enumerate(THEME)}

plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "niss",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": LINES,
        "axes.labelcolor": MUTED,
        "axes.facecolor": BACK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "figure.facecolor": BACK,
        "savefig.facecolor": BACK,
    }
)


def canvas(width: float = 7.2, height: float = 3.0) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    return figure, axes


def folder() -> Path:
    """Where the pictures go: what the command names, or where they stand."""
    return Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES


def words(axes: Axes, x: float, y: float, text: str, **more: Any) -> None:
    """A text around a place; it is black and small unless told otherwise."""
    axes.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": 9, **more})


def box(axes: Axes, x: float, y: float, text: str, *, pad: float, fontsize: float) -> None:
    """A text in a box."""
    frame = {"boxstyle": f"round,pad={pad}", "facecolor": PALE, "edgecolor": BLUE}
    words(axes, x, y, text, fontsize=fontsize, bbox=frame)


def arrow(
    axes: Axes,
    start: Any,
    end: Any,
    colour: str = MUTED,
    *,
    bend: float = 0.0,
    shrink: float = 0,
    **more: Any,
) -> None:
    """From one place to another, bent to the side, and ending before both where it shrinks."""
    shape = {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend}", "shrinkA": shrink, "shrinkB": shrink}
    axes.annotate("", xy=end, xytext=start, arrowprops={"color": colour, **shape, **more})


def save(figure: Figure, path: Path, title: str) -> None:
    """Write the figure with themed colours and a title for readers."""
    drawn = io.StringIO()
    figure.savefig(
        drawn,
        format="svg",
        bbox_inches="tight",
        pad_inches=0.15,
        metadata={"Date": None, "Creator": None, "Title": title},
    )
    plt.close(figure)
    text = drawn.getvalue()
    for colour, name in _NAMES.items():
        text = text.replace(colour, f"var({name}, {THEME[colour][0]})")
    light = "".join(f"{_NAMES[colour]}:{pair[0]};" for colour, pair in THEME.items())
    dark = "".join(f"{_NAMES[colour]}:{pair[1]};" for colour, pair in THEME.items())
    style = f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    text = re.sub(r"(<svg [^>]*>)", rf"\1<title>{title}</title>{style}", text, count=1, flags=re.DOTALL)
    text = text.replace("font: 10px 'DejaVu Sans'", "font: 10px 'DejaVu Sans', Verdana, sans-serif")
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(path.name)
