"""Draws the share graph of a round: all of a small round, one client and its neighbours of a large one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

import numpy as np

from niss.report.round_graph import RoundGraph

GRAPH_TITLE = "Share graph of a round"
# So many seats fit on a circle with their numbers.
MOST_WHOLE = 36
MOST_AROUND = 28
_WIDE, _TALL = 450.0, 450.0
_MIDDLE = (_WIDE / 2, _TALL / 2)
_RING = 200.0
_NODE = 15.0


@dataclass(frozen=True)
class Picture:
    """What is drawn: the seats and their places, and the words that say what was left out."""

    places: dict[int, tuple[float, float]]
    whole: bool
    around: int


def choose_picture(shown: RoundGraph) -> Picture:
    """All seats on a circle, or the seat to look at in the middle with (some of) its neighbours around it."""
    graph = shown.graph
    if graph.size <= MOST_WHOLE:
        return Picture(_circle(list(range(graph.size))), whole=True, around=graph.size)
    neighbours = [int(seat) for seat in graph.neighbours(shown.centre)]
    picked = neighbours
    if len(neighbours) > MOST_AROUND:
        marked = [seat for seat in neighbours if seat in shown.colluders or seat in shown.dropped]
        others = [seat for seat in neighbours if seat not in set(marked)]
        marked = _evenly(marked, MOST_AROUND // 2)
        picked = sorted([*marked, *_evenly(others, MOST_AROUND - len(marked))])
    return Picture({shown.centre: _MIDDLE} | _circle(picked), whole=False, around=len(neighbours))


def round_graph_svg(shown: RoundGraph) -> str:
    """Inline SVG, in the colours of the page."""
    picture = choose_picture(shown)
    edges: dict[int, list[int]] = {}
    for sender, receiver in zip(shown.graph.senders.tolist(), shown.graph.receivers.tolist(), strict=True):
        if sender in picture.places and receiver in picture.places:
            edges.setdefault(sender, []).append(receiver)
    groups = "\n".join(_seat(shown, picture, seat, edges.get(seat, [])) for seat in picture.places)
    return (
        f'<svg class="graph" viewBox="0 0 {_WIDE:.0f} {_TALL:.0f}" role="img" '
        f'aria-label="{escape(describe_round_graph(shown))}">\n<title>{GRAPH_TITLE}</title>\n{groups}\n</svg>'
    )


def describe_round_graph(shown: RoundGraph) -> str:
    """The figure in words, for those who do not see it."""
    graph, picture = shown.graph, choose_picture(shown)
    centre = shown.clients[shown.centre]
    parts = [
        f"Drawing of the share graph of round {shown.round} of {shown.label}: {graph.size} participants, "
        f"{graph.senders.size} shares sent in all."
    ]
    if not picture.whole:
        sent = int(np.count_nonzero(graph.senders == shown.centre))
        got = int(np.count_nonzero(graph.receivers == shown.centre))
        parts.append(f"Client {centre} in the middle sends {sent} shares and receives {got}.")
    for seats, name in ((shown.colluders, "assumed to collude"), (shown.dropped, "dropped out")):
        if seats:
            named = ", ".join(shown.clients[seat] for seat in sorted(seats)[:12])
            more = f" and {len(seats) - 12} more" if len(seats) > 12 else ""
            parts.append(f"{name.capitalize()}: clients {named}{more}.")
    return " ".join(parts)


def graph_caption(shown: RoundGraph) -> str:
    """What the reader must know to read the drawing rightly."""
    picture = choose_picture(shown)
    drawn = len(picture.places) - 1
    said = [f"Round {shown.round} of {shown.label}: {shown.graph.size} participants."]
    if picture.whole:
        said.append(
            "Every line is a noise share, sent one way or both; point at a client to see where its go."
        )
    else:
        client = shown.clients[shown.centre]
        few = "all" if drawn == picture.around else f"{drawn} of the"
        said.append(
            f"Shown is client {client}, the worst-off of that round, and {few} {picture.around} clients it "
            "shares noise with: solid lines are shares it sends, dashed ones those it receives. "
            "Every other participant has neighbours of its own in the same way."
        )
    said.append(_origin(shown))
    if shown.assumed:
        said.append(_collusion(shown))
    if shown.dropped:
        said.append(f"{_count(len(shown.dropped), 'client')} dropped out of this round, hollow and crossed.")
    return " ".join(said)


def _origin(shown: RoundGraph) -> str:
    if shown.origin is not None:
        source = "seed of the run" if shown.origin == "seed" else "recorded beacon of the round"
        return f"The graph is drawn again from the {source}, and is the one that was used."
    return "The beacon of this round is not in its record, so this is another graph, made in the same way."


def _collusion(shown: RoundGraph) -> str:
    most = _count(shown.assumed, "participant")
    if not shown.colluders:
        return f"The guarantee assumes that up to {most} collude with the server; who does is not known."
    return (
        f"The guarantee assumes that up to {most} collude with the server; the squares are the set found to "
        f"be worst for client {shown.clients[shown.centre]}, not clients seen to collude."
    )


def graph_legend(shown: RoundGraph) -> str:
    """The signs of the drawing in words, beside it."""
    signs = [("honest", "client")]
    if not choose_picture(shown).whole:
        signs.insert(0, ("centre", "the client looked at"))
    if shown.colluders:
        signs.append(("colluder", "assumed to collude with the server"))
    if shown.dropped:
        signs.append(("dropped", "dropped out"))
    items = "".join(
        f'<li><svg viewBox="-10 -10 20 20" aria-hidden="true"><g class="seat {kind}">{_sign(kind, 8.0)}</g></svg>'
        f"{escape(words)}</li>"
        for kind, words in signs
    )
    return f'<ul class="legend">{items}</ul>'


def _seat(shown: RoundGraph, picture: Picture, seat: int, receivers: list[int]) -> str:
    """One client with the shares it sends, so that pointing at it can bring them out."""
    x, y = picture.places[seat]
    lines = "".join(
        _line(picture.places[seat], picture.places[receiver], _share_kind(shown, picture, seat, receiver))
        for receiver in receivers
    )
    kind = _kind(shown, picture, seat)
    name = f"client {shown.clients[seat]}" + _remark(kind)
    return (
        f'<g class="seat {kind}">{lines}<g transform="translate({x:.1f} {y:.1f})"><title>{escape(name)}</title>'
        f'{_sign(kind, _NODE)}<text dy=".35em">{escape(shown.clients[seat])}</text></g></g>'
    )


def _share_kind(shown: RoundGraph, picture: Picture, sender: int, receiver: int) -> str:
    if picture.whole:
        return "share"
    if sender == shown.centre:
        return "share sent"
    return "share received" if receiver == shown.centre else "share beside"


def _kind(shown: RoundGraph, picture: Picture, seat: int) -> str:
    if seat in shown.colluders:
        return "colluder"
    if seat in shown.dropped:
        return "dropped"
    return "centre" if seat == shown.centre and not picture.whole else "honest"


def _remark(kind: str) -> str:
    return {"colluder": ", assumed to collude", "dropped": ", dropped out"}.get(kind, "")


def _sign(kind: str, size: float) -> str:
    if kind == "colluder":
        return f'<rect x="{-size}" y="{-size}" width="{2 * size}" height="{2 * size}"/>'
    if kind == "dropped":
        reach = 0.7 * size
        return f'<circle r="{size}"/><path class="cross" d="M{-reach:.1f} {-reach:.1f}L{reach:.1f} {reach:.1f}"/>'
    return f'<circle r="{size}"/>'


def _line(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    """From rim to rim, bent a little to its right, so that both directions can be told apart."""
    wide, tall = end[0] - start[0], end[1] - start[1]
    length = math.hypot(wide, tall) or 1.0
    along, across = (wide / length, tall / length), (-tall / length, wide / length)
    gap, bend = _NODE + 2.0, 0.06 * length
    first = (start[0] + gap * along[0], start[1] + gap * along[1])
    last = (end[0] - gap * along[0], end[1] - gap * along[1])
    middle = ((first[0] + last[0]) / 2 + bend * across[0], (first[1] + last[1]) / 2 + bend * across[1])
    return (
        f'<path class="{kind}" d="M{first[0]:.1f} {first[1]:.1f}Q{middle[0]:.1f} {middle[1]:.1f} '
        f'{last[0]:.1f} {last[1]:.1f}"/>'
    )


def _circle(seats: list[int]) -> dict[int, tuple[float, float]]:
    turn = 2.0 * math.pi / max(len(seats), 1)
    return {
        seat: (_MIDDLE[0] + _RING * math.sin(place * turn), _MIDDLE[1] - _RING * math.cos(place * turn))
        for place, seat in enumerate(seats)
    }


def _evenly(seats: list[int], most: int) -> list[int]:
    if len(seats) <= most:
        return seats
    return [seats[place * len(seats) // most] for place in range(most)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
