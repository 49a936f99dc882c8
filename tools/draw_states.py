"""Draw the protocol's state machines, from their tables, as pictures for the site.

Usage: python tools/draw_states.py [docs/images]
"""

from __future__ import annotations

from enum import Enum

from docs_pictures import MUTED, ORANGE, arrow, box, canvas, folder, save, words

from niss.protocol.client import CLIENT_TABLE
from niss.protocol.server import SERVER_TABLE

_GAP = 1.25
# Where curves leave the boxes.
_EDGE = 1.05


def draw(table: dict[tuple[Enum, str], Enum], name: str, title: str) -> None:
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
            arrow(axes, (0.0, height[state] - 0.32), (0.0, height[following] + 0.32))
            words(axes, 0.1, middle, label, ha="left")
            continue
        side, colour = (1.0, MUTED) if step > 0 else (-1.0, ORANGE)
        # The longer of two curves starts and ends a little outside the shorter one.
        shift = 0.07 * (abs(step) - 2)
        start, end = (side * _EDGE, height[state] + shift), (side * _EDGE, height[following] - shift)
        arrow(axes, start, end, colour, bend=-0.45)
        place, anchor = side * (_EDGE + 0.23 * abs(step) + 0.12), "left" if side > 0 else "right"
        words(axes, place, middle, label, ha=anchor, color=colour)
    for state in states:
        again = f"\nagain on {', '.join(kept[state])}" if state in kept else ""
        box(axes, 0.0, height[state], state.value + again, pad=0.4, fontsize=9.5)
    axes.set_xlim(-2.9, 2.9)
    axes.set_ylim(height[states[-1]] - 0.55, 0.5)
    axes.set_axis_off()
    save(figure, folder() / name, title)


if __name__ == "__main__":
    draw(CLIENT_TABLE, "states-client.svg", "The states of a client")
    draw(SERVER_TABLE, "states-server.svg", "The states of the server")
