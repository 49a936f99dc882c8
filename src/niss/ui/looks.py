"""The look of a method, as the charts of the pages take it."""

from __future__ import annotations

from niss.methods.look import SERIES, Look

# Of a curve on the page, in its units; looks give dashes in widths of the line.
_LINE_WIDTH = 2.2


def drawn(look: Look) -> dict[str, str]:
    """The colour of the method in every figure, as the pages name it, and its dashes."""
    colour = f"series-{SERIES.index(look.colour) + 1}" if look.colour in SERIES else "ink"
    strokes = look.line[1] if isinstance(look.line, tuple) else ()
    return {"colour": colour, "dash": " ".join(f"{_LINE_WIDTH * length:g}" for length in strokes)}
