"""How a method is drawn: one colour, marker and line, the same in reports, results, attacks and documentation.

Colours are those of Okabe and Ito, told apart by most colour-blind readers, without their yellow, which is lost on
white, and with four more for long comparisons; markers and dashes tell curves apart in black and white. A method that
protects nobody has a hollow marker and a dotted line. What draws is in `niss.figures`; nothing here loads matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

INK, RULE, QUIET = "#1c1c1f", "#d3d3d8", "#6f6f78"
SERIES = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a4fb5", "#8a5a2c", "#5f7400", "#b3003c",
)  # fmt: skip
BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, PURPLE, BROWN, OLIVE, CRIMSON = SERIES

# "-", or lengths of strokes and gaps as matplotlib takes them.
LineStyle = str | tuple[int, tuple[float, ...]]
SOLID: LineStyle = "-"
DASHED: LineStyle = (0, (5, 1.6))
SHORT: LineStyle = (0, (3, 1.2))
DASH_DOT: LineStyle = (0, (6, 1.5, 1.2, 1.5))
DOTTED: LineStyle = (0, (1.2, 1.4))


@dataclass(frozen=True)
class Look:
    """A colour of `SERIES` or `INK`, a marker as matplotlib names them, a line, and whether the marker is hollow."""

    colour: str
    marker: str
    line: LineStyle = SOLID
    hollow: bool = False

    def unprotected(self) -> Look:
        """The same method where it guarantees nothing: paler where there is a paler colour, dotted and hollow."""
        return replace(self, colour=_PALER.get(self.colour, self.colour), line=DOTTED, hollow=True)


_PALER = {BLUE: SKY}
_SPARE = (
    Look(OLIVE, "h", SHORT),
    Look(CRIMSON, "d", DASH_DOT),
    Look(BROWN, "8", DASHED),
    Look(SKY, ">", SHORT),
    Look(PURPLE, "*", DASH_DOT),
    Look(GREEN, "H", DASHED),
)


def distinct(looks: Iterable[Look]) -> list[Look]:
    """The looks as given; where one comes again, as with one method in two variants, a spare look in its place."""
    wanted, found = list(looks), list[Look]()
    spare = [look for look in _SPARE if look.colour not in {one.colour for one in wanted}] or list(_SPARE)
    for look in wanted:
        # With more variants than spare looks they come round again.
        found.append(look if look not in found else spare[0])
        if found[-1] is spare[0]:
            spare.append(spare.pop(0))
    return found
