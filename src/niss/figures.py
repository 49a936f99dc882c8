"""What all figures share: type and colours, curves in the look of their method, and variants for dark pages.

Importing this module loads matplotlib. Only its object interface is used, so that no display is needed and nothing
global changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from niss.methods import look_of as look_of
from niss.methods.look import INK, QUIET, RULE, SERIES, LineStyle, Look

# matplotlib types these keys differently from release to release.
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.linewidth": 0.8,
}

# Of curves that are told apart by their number alone.
LINES: tuple[LineStyle, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (3, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")

# On dark pages; the colours of the series are those of `report/style.css`.
_GROUND = "#16171a"
_DARK = dict(
    zip(
        SERIES,
        (
            "#3d9fdb", "#ee7a2b", "#1fb98d", "#d992b9", "#e69f00", "#6cc0ee",
            "#a98be0", "#c0905f", "#a3b83c", "#f0668f",
        ),
        strict=True,
    )
) | {INK: "#e8e8ec", "#000000": "#e8e8ec", QUIET: "#a0a0aa", RULE: "#3c3d44", "#ffffff": _GROUND}  # fmt: skip
_COLOURED = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def marked(label: str, *, protected: bool) -> str:
    """The label of a curve, which says where nobody is protected."""
    return label if protected else f"{label} (unprotected)"


def numbered(number: int) -> Look:
    """The look of a curve that belongs to no method."""
    return Look(SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)], LINES[number % len(LINES)])


def line_options(look: Look, *, width: float = 1.6, size: float = 4.5) -> dict[str, Any]:
    """What `Axes.plot`, `errorbar` and `Line2D` take, so that a curve and its legend look alike."""
    return {
        "color": look.colour,
        "linestyle": look.line,
        "linewidth": width,
        "marker": look.marker,
        "markersize": size,
        "markerfacecolor": "white" if look.hollow else look.colour,
    }


def cut_range(curves: Sequence[Sequence[float]]) -> tuple[float, float, set[int]]:
    """The part of an axis in which curves differ: its ends, and the numbers of the curves that lie below it.

    A curve is left out where it lies below all others and they, together, fill less than two fifths of the axis that it
    would need. Whoever draws names it and its values at the lower edge.
    """
    shown = {number: values for number, values in enumerate(curves) if len(values)}
    while len(shown) > 2:
        lowest = min(shown, key=lambda number: max(shown[number]))
        others = [value for number, values in shown.items() if number != lowest for value in values]
        whole = max(others) - min(shown[lowest])
        if max(shown[lowest]) >= min(others) or max(others) - min(others) > 0.4 * whole:
            break
        del shown[lowest]
    values = [value for values in shown.values() for value in values] or [0.0, 1.0]
    below = {number for number, one in enumerate(curves) if len(one) and number not in shown}
    return min(values), max(values), below


def grid(axes: Axes, axis: Any = "both") -> None:
    """Thin lines across the chart at the ticks of `axis`, behind what is drawn."""
    axes.grid(axis=axis, color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)


def png(figure: Figure, *, style: dict[Any, Any] = STYLE, dark: bool = False) -> bytes:
    """A picture on white, or for a dark page on nothing; the same bytes each time.

    dark  changes the colours of the figure for good, so draw it again for a light one

    No software is named in it, so that any release of matplotlib that draws alike gives the same bytes.
    """
    if dark:
        _darken(figure)
    ground: dict[str, Any] = {"transparent": True} if dark else {"facecolor": "white"}
    content = BytesIO()
    with mpl.rc_context(style):
        figure.savefig(content, format="png", dpi=160, metadata={"Software": None}, **ground)
    return content.getvalue()


def _darken(figure: Figure) -> None:
    # Ticks are made when a figure is first drawn.
    figure.canvas.draw()
    artists = figure.findobj()
    # The box behind a text is not among them.
    artists += [box for one in artists if isinstance(one, Text) and (box := one.get_bbox_patch()) is not None]
    for artist in artists:
        for name in _COLOURED:
            getter, setter = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
            if getter is not None and setter is not None and (changed := _dark(getter())) is not None:
                setter(changed)


def _dark(colour: Any) -> Any:
    """The colour, or colours of a collection, for a dark page; None where it stays."""
    if colour is None or (isinstance(colour, str) and colour in ("none", "auto", "inherit")):
        return None
    if getattr(colour, "ndim", 1) == 2:
        return [_dark(one) or one for one in colour]
    red, green, blue, alpha = to_rgba(colour)
    found = _DARK.get(to_hex((red, green, blue)))
    return None if found is None else to_rgba(found, alpha)
