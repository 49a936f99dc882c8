"""Draws the share graph of a round: all of a small round, one client and its neighbours of a large one.

Clients are called by their seat, their place in the round, from 0. Everything is drawn in SVG by a template, in the
classes that style.css gives colours to; a client and the shares it sends are one group, so that pointing at the
client brings them out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from niss.report.round_graph import RoundGraph
from niss.report.templates import render

# So many seats fit on a circle with their numbers; of a larger round, one client is shown.
MOST_WHOLE = 36

# At most so many neighbours of that client.
MOST_AROUND = 28

_SIZE = 450.0
_MIDDLE = (_SIZE / 2, _SIZE / 2)
_RING = 200.0
_RADIUS = 15.0
_MOST_NAMED = 12
_REMARKS = {"colluder": ", assumed to collude", "dropped": ", dropped out"}

Point = tuple[float, float]


@dataclass(frozen=True)
class Picture:
    """What is drawn: the seats and where they lie.

    `whole` says whether that is the whole round; else `around` is how many neighbours the client in the middle has.
    """

    places: dict[int, Point]
    whole: bool
    around: int


def choose_picture(round_graph: RoundGraph) -> Picture:
    """All seats on a circle, or the seat to look at in the middle with (some of) its neighbours around it.

    Where not all neighbours fit, up to half of the places go to colluders and dropped clients, so that the drawing
    shows what it is about, and the others are spread evenly over the rest.
    """
    graph = round_graph.graph
    if graph.size <= MOST_WHOLE:
        return Picture(_circle(list(range(graph.size))), whole=True, around=graph.size)
    neighbours = [int(seat) for seat in graph.neighbours(round_graph.centre)]
    chosen = neighbours
    if len(neighbours) > MOST_AROUND:
        marked = [seat for seat in neighbours if seat in round_graph.colluders or seat in round_graph.dropped]
        others = [seat for seat in neighbours if seat not in set(marked)]
        marked = _evenly(marked, MOST_AROUND // 2)
        chosen = sorted([*marked, *_evenly(others, MOST_AROUND - len(marked))])
    return Picture({round_graph.centre: _MIDDLE} | _circle(chosen), whole=False, around=len(neighbours))


def _circle(seats: list[int]) -> dict[int, Point]:
    turn = 2.0 * math.pi / max(len(seats), 1)
    return {
        seat: (_MIDDLE[0] + _RING * math.sin(place * turn), _MIDDLE[1] - _RING * math.cos(place * turn))
        for place, seat in enumerate(seats)
    }


def _evenly(seats: list[int], most: int) -> list[int]:
    if len(seats) <= most:
        return seats
    return [seats[place * len(seats) // most] for place in range(most)]


def round_graph_svg(round_graph: RoundGraph) -> Markup:
    """Inline SVG, in the colours of the page; `graph_caption` and `graph_legend` go with it.

    Of a large round only shares between the seats that are drawn appear.
    """
    picture = choose_picture(round_graph)
    shares: dict[int, list[tuple[str, str]]] = {seat: [] for seat in picture.places}
    graph = round_graph.graph
    for sender, receiver in zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True):
        if sender in picture.places and receiver in picture.places:
            path = _share_path(picture.places[sender], picture.places[receiver])
            shares[sender].append((_share_kind(round_graph, picture, sender, receiver), path))
    seats = []
    for seat, (x, y) in picture.places.items():
        kind, client = _seat_kind(round_graph, picture, seat), round_graph.clients[seat]
        seats.append(
            {
                "kind": kind,
                "client": client,
                "title": f"client {client}{_REMARKS.get(kind, '')}",
                "at": f"{x:.1f} {y:.1f}",
                "shares": shares[seat],
            }
        )
    return render(
        "graph.svg.j2",
        size=f"{_SIZE:.0f}",
        radius=_RADIUS,
        description=_describe(round_graph, picture),
        seats=seats,
    )


def graph_caption(round_graph: RoundGraph) -> Markup:
    """What the reader must know to read the drawing rightly, as HTML on one line."""
    words = render("graph_caption.html.j2", round_graph=round_graph, picture=choose_picture(round_graph))
    return Markup(" ").join(words.split())


def graph_legend(round_graph: RoundGraph) -> list[tuple[str, str]]:
    """The signs that occur in the drawing, each a kind of seat and its meaning.

    A kind is the CSS class of the sign, and what the template draws it by: centre, honest, colluder or dropped.
    """
    signs = [
        ("centre", "the client looked at", not choose_picture(round_graph).whole),
        ("honest", "client", True),
        ("colluder", "assumed to collude with the server", bool(round_graph.colluders)),
        ("dropped", "dropped out", bool(round_graph.dropped)),
    ]
    return [(kind, meaning) for kind, meaning, occurs in signs if occurs]


def _describe(round_graph: RoundGraph, picture: Picture) -> str:
    """The drawing in words, for those who do not see it; of many marked clients the first few by name."""
    graph = round_graph.graph
    parts = [
        f"Drawing of the share graph of round {round_graph.round} of {round_graph.label}: {graph.size} participants, "
        f"{graph.senders.size} shares sent in all."
    ]
    if not picture.whole:
        sent = int(np.count_nonzero(graph.senders == round_graph.centre))
        received = int(np.count_nonzero(graph.receivers == round_graph.centre))
        client = round_graph.clients[round_graph.centre]
        parts.append(f"Client {client} in the middle sends {sent} shares and receives {received}.")
    for seats, name in ((round_graph.colluders, "Assumed to collude"), (round_graph.dropped, "Dropped out")):
        if seats:
            named = ", ".join(round_graph.clients[seat] for seat in sorted(seats)[:_MOST_NAMED])
            more = f" and {len(seats) - _MOST_NAMED} more" if len(seats) > _MOST_NAMED else ""
            parts.append(f"{name}: clients {named}{more}.")
    return " ".join(parts)


def _share_kind(round_graph: RoundGraph, picture: Picture, sender: int, receiver: int) -> str:
    """The CSS classes of a share: around one client, whether it sends, receives or has no part in it."""
    if picture.whole:
        return "share"
    if sender == round_graph.centre:
        return "share sent"
    return "share received" if receiver == round_graph.centre else "share beside"


def _seat_kind(round_graph: RoundGraph, picture: Picture, seat: int) -> str:
    """The CSS class of a seat, which also decides its sign."""
    if seat in round_graph.colluders:
        return "colluder"
    if seat in round_graph.dropped:
        return "dropped"
    return "centre" if seat == round_graph.centre and not picture.whole else "honest"


def _share_path(start: Point, end: Point) -> str:
    """The path of a share in SVG, a quadratic curve from the rim of one sign to the rim of the other.

    It is bent a little to its right, so that the two directions between a pair can be told apart.
    """
    wide, tall = end[0] - start[0], end[1] - start[1]
    length = math.hypot(wide, tall) or 1.0
    along, across = (wide / length, tall / length), (-tall / length, wide / length)
    gap, bend = _RADIUS + 2.0, 0.06 * length
    first = (start[0] + gap * along[0], start[1] + gap * along[1])
    last = (end[0] - gap * along[0], end[1] - gap * along[1])
    middle = ((first[0] + last[0]) / 2 + bend * across[0], (first[1] + last[1]) / 2 + bend * across[1])
    return f"M{first[0]:.1f} {first[1]:.1f}Q{middle[0]:.1f} {middle[1]:.1f} {last[0]:.1f} {last[1]:.1f}"
