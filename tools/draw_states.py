"""Draw the protocol's state machines, from their tables, as pictures for the site.

Usage: python tools/draw_states.py [docs/images]
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path

from docs_pictures import BLUE, MUTED, ORANGE, PALE, bare, canvas, save
from matplotlib.axes import Axes

from niss.protocol.client import CLIENT_TABLE
from niss.protocol.server import SERVER_TABLE

ROOT = Path(__file__).parents[1]
_GAP = 1.25
# Where curves leave the boxes.
_EDGE = 1.05


def draw(table: dict[tuple[Enum, str], Enum], path: Path, title: str) -> None:
    """States from top to bottom; steps down the middle, jumps at the right, ways back at the left."""
    states = list(type(next(iter(table.values()))))  # In the order in which they are declared.
    height = {state: -_GAP * number for number, state in enumerate(states)}
    figure, axes = canvas(width=6.4, height=0.95 * len(states) + 0.4)
    kept: dict[Enum, list[str]] = {}
    jumps: dict[tuple[Enum, Enum], list[str]] = {}
    for (state, event), following in table.items():
        if state is following:
            kept.setdefault(state, []).append(event)
        else:
            jumps.setdefault((state, following), []).append(event)
    for (state, following), events in jumps.items():
        step = states.index(following) - states.index(state)
        middle, label = (height[state] + height[following]) / 2, ", ".join(events)
        if step == 1:
            _arrow(axes, (0.0, height[state] - 0.32), (0.0, height[following] + 0.32), MUTED, 0.0)
            axes.text(0.1, middle, label, va="center", fontsize=9)
            continue
        side, colour = (1.0, MUTED) if step > 0 else (-1.0, ORANGE)
        # The longer of two curves starts and ends a little outside the shorter one.
        shift = 0.07 * (abs(step) - 2)
        start, end = (side * _EDGE, height[state] + shift), (side * _EDGE, height[following] - shift)
        _arrow(axes, start, end, colour, -0.45)
        axes.text(
            side * (_EDGE + 0.23 * abs(step) + 0.12),
            middle,
            label,
            va="center",
            ha="left" if side > 0 else "right",
            fontsize=9,
            color=colour,
        )
    for state in states:
        words = state.value + (f"\nagain on {', '.join(kept[state])}" if state in kept else "")
        axes.text(
            0.0,
            height[state],
            words,
            ha="center",
            va="center",
            fontsize=9.5,
            bbox={"boxstyle": "round,pad=0.4", "facecolor": PALE, "edgecolor": BLUE},
        )
    axes.set_xlim(-2.9, 2.9)
    axes.set_ylim(height[states[-1]] - 0.55, 0.5)
    bare(axes)
    save(figure, path, title)


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, bend: float
) -> None:
    axes.annotate(
        "",
        xy=end,
        xytext=start,
        arrowprops={
            "arrowstyle": "-|>",
            "color": colour,
            "connectionstyle": f"arc3,rad={bend}",
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    draw(CLIENT_TABLE, folder / "states-client.svg", "The states of a client")
    draw(SERVER_TABLE, folder / "states-server.svg", "The states of the server")


if __name__ == "__main__":
    main()
