"""The share graph of a round, drawn again from what the run recorded: seed, round, participants and settings.

A simulated round takes its beacon from the seed; a round of the real protocol leaves its beacon, and what that was let
out for, in the metrics. Either way the graph is the one that was used. Where that record is missing or does not fit, a
graph made in the same way stands for it, and is said to.

The participants are those that the ledger charged in its last entry. All of this is public in the protocol: the graph
shows who shares noise with whom, and nothing about any share.

Drawn is all of a small round, or one client and its neighbours of a large one, in SVG by a template of the page, in the
classes that style.css gives colours to. Clients are called by their seat, their place in the round, from 0; a client
and the shares it sends are one group, so that pointing at the client brings them out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from niss.accounting import Plan
from niss.errors import NissError
from niss.graph import GRAPHS, Drawing, ShareGraph
from niss.mechanism.noise import colluders_among
from niss.protocol.agreement import draw_graph
from niss.protocol.keys import LINKS_PER_ROUND
from niss.randomness import SimStream
from niss.runs import RoundRecord
from niss.runs.folder import MethodResult, ReportInput
from niss.runs.privacy import read_ledger
from niss.views import worst_case

_STAND_IN = b"niss.report.example-graph"
# The search for the worst colluders is quick up to here.
_MOST_SEARCHED = 400


@dataclass(frozen=True)
class RoundGraph:
    """Who shared noise with whom in one round of one method.

    clients    the participants by seat, their place in the round from 0; the graph numbers seats
    centre     the seat to look at first: the worst-off client
    colluders  the seats of the worst set found for it, an assumption of the accountant, not something observed
    assumed    how many participants may collude with the server
    dropped    the seats that never uploaded
    origin     where the graph comes from: the "seed", the "beacon" of the protocol, or None where another stands
               for it
    """

    label: str
    round: int
    clients: tuple[str, ...]
    graph: ShareGraph
    centre: int
    colluders: frozenset[int]
    assumed: int
    dropped: frozenset[int]
    origin: Literal["seed", "beacon"] | None


def find_round_graph(report: ReportInput) -> RoundGraph | None:
    """The graph of the last round of the first method that shares noise and has one; None where none has.

    Methods with a guarantee come first. Left out are runs whose clients need different noise, since their graph
    depends on sizes that are not recorded, and runs without a ledger, which names the participants.
    """
    methods = [method for method in report.methods if method.shares_noise]
    for method in sorted(methods, key=lambda one: one.finished and one.epsilon_joint is None):
        # A folder changed by hand or written by another version: the rest of the page still stands.
        with suppress(NissError, KeyError, TypeError, ValueError):
            if (graph := _round_graph(method)) is not None:
                return graph
    return None


def _round_graph(method: MethodResult) -> RoundGraph | None:
    """The graph of the last round that was charged; raises whatever a manifest of another shape leads to.

    Where colluders are assumed and the search is quick, the centre is the client that they harm most; else it is the
    one that was charged most.
    """
    config = method.manifest.get("config")
    if not isinstance(config, Mapping) or not _needs_equal_noise(config):
        return None
    ledger = read_ledger(method)
    if ledger is None or not ledger.entries:
        return None
    entry = ledger.entries[-1]
    clients = sorted(entry.charges, key=int)
    metrics = next((point for point in method.curve if point.round == entry.round), None)
    stream = SimStream(config["seed"]).child("round", entry.round - 1)
    graph, origin = _draw_again(config, [int(client) for client in clients], metrics, stream)
    centre = max(range(len(clients)), key=lambda seat: (entry.charges[clients[seat]].mu2, -seat))
    assumed = colluders_among(config["privacy"].get("collusion", 0.0), len(clients))
    colluders: tuple[int, ...] = ()
    if assumed and graph.size <= _MOST_SEARCHED:
        centre, colluders = _worst_colluders(config, graph, metrics)
    return RoundGraph(
        label=method.label,
        round=entry.round,
        clients=tuple(clients),
        graph=graph,
        centre=centre,
        colluders=frozenset(colluders),
        assumed=assumed,
        dropped=_dropped(config, len(clients), metrics, stream),
        origin=origin,
    )


def _needs_equal_noise(config: Mapping[str, Any]) -> bool:
    """Whether all clients need the same noise, so that they send the same number of shares."""
    return (
        len(config.get("methods", ())) == 1
        and not isinstance(config["privacy"].get("epsilon"), list)
        and config["privacy"].get("unit", "client") == "client"
        and config["training"].get("weights", "equal") == "equal"
    )


def _draw_again(
    config: Mapping[str, Any], members: list[int], metrics: RoundRecord | None, stream: SimStream
) -> tuple[ShareGraph, Literal["seed", "beacon"] | None]:
    """The graph of a round and where it comes from; `stream` is the one the simulation had for that round.

    A graph of the protocol is believed only where its digest is the recorded one.
    """
    settings = config["methods"][0]
    degree, groups = float(settings["neighbours"]), settings.get("groups") or ()
    simulated = config.get("exchange", "simulated") == "simulated"
    if not simulated and metrics is not None and metrics.public is not None:
        public = metrics.public
        commitment = bytes.fromhex(public["participants"]) + bytes.fromhex(public["terms"])
        graph = draw_graph(len(members), degree, bytes.fromhex(public["beacon"]), commitment)
        if graph.digest().hex() == public["graph"]:
            return graph, "beacon"
    beacon = stream.child("beacon").generator().bytes(32) if simulated else _STAND_IN
    graph = GRAPHS[settings["graph"]](Drawing(members, degree, beacon, groups))
    return graph, "seed" if simulated else None


def _worst_colluders(
    config: Mapping[str, Any], graph: ShareGraph, metrics: RoundRecord | None
) -> tuple[int, tuple[int, ...]]:
    """The worst-off seat and the colluders that are worst for it, with the distortion of that round.

    Variances are in units of a client's own, `sigma_k^2 = 1`: a unit share then has `kappa / neighbours`.
    """
    settings, privacy = config["methods"][0], config["privacy"]
    tau2 = (metrics.tau2 if metrics is not None else None) or 0.0
    unit = settings["kappa"] / settings["neighbours"]
    plan = Plan(
        delta=privacy["delta"],
        participations=_participations(config),
        graph=settings["graph"],
        groups=tuple(map(tuple, settings["groups"])),
        collusion=privacy["collusion"],
        neighbours=settings["neighbours"],
        attempts=LINKS_PER_ROUND if config.get("exchange") == "protocol" else 1,
    )
    worst = worst_case(
        graph,
        plan.assumed(graph.size),
        unit_variance=unit,
        residual_variance=tau2 * unit * graph.in_weight,
        target_variance=1.0,
    )
    return worst.client, worst.colluders


def _participations(config: Mapping[str, Any]) -> int:
    """The rounds over which a client's target is composed: all it may take part in, unless configured."""
    privacy, training, rounds = config["privacy"], config["training"], int(config["rounds"])
    if privacy.get("scope") == "round":
        return 1
    if privacy.get("participations") is not None:
        return int(privacy["participations"])
    if training.get("sampling") in ("shuffled", "cyclic"):
        cohorts = int(config["data"]["clients"]) // int(training["participants"])
        return -(-rounds // cohorts)
    return -(-rounds // int(training.get("separation") or 1))


def _dropped(
    config: Mapping[str, Any], size: int, metrics: RoundRecord | None, stream: SimStream
) -> frozenset[int]:
    """The seats that dropped out, drawn again from the seed; none where their number is not the recorded one."""
    share = config["privacy"].get("dropout", 0.0)
    if metrics is None or not metrics.dropped or not share:
        return frozenset()
    drawn = stream.child("dropout").generator().random(size) < share
    drawn[0] &= not drawn.all()
    seats = frozenset(int(seat) for seat in np.flatnonzero(drawn))
    return seats if len(seats) == metrics.dropped else frozenset()


# So many seats fit on a circle with their numbers; of a larger round, one client is shown.
MOST_WHOLE = 36

# At most so many neighbours of that client.
MOST_AROUND = 28

_SIZE = 450.0
_RING = 200.0
_RADIUS = 15.0
_MOST_NAMED = 12
_REMARKS = {"colluder": ", assumed to collude", "dropped": ", dropped out"}

Point = tuple[float, float]


def layout(shown: RoundGraph) -> dict[str, Any]:
    """What graph.html.j2 draws: all seats on a circle, or that to look at with (some of) its neighbours around it.

    Of a large round only shares between the seats that are drawn appear. A kind of seat, centre, honest, colluder or
    dropped, is the CSS class of its sign, and what the template draws it by.
    """
    graph, whole = shown.graph, shown.graph.size <= MOST_WHOLE
    middle: dict[int, Point] = {} if whole else {shown.centre: (_SIZE / 2, _SIZE / 2)}
    places = middle | _circle(list(range(graph.size)) if whole else _around(shown))
    kinds = dict.fromkeys(places, "honest") | ({} if whole else {shown.centre: "centre"})
    kinds |= dict.fromkeys(places.keys() & shown.dropped, "dropped")
    kinds |= dict.fromkeys(places.keys() & shown.colluders, "colluder")
    shares: dict[int, list[tuple[str, str]]] = {seat: [] for seat in places}
    for sender, receiver in zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True):
        if sender in places and receiver in places:
            # Around one client, whether it sends, receives or has no part in it.
            part = {sender: " sent", receiver: " received"}.get(shown.centre, " beside")
            path = _share_path(places[sender], places[receiver])
            shares[sender].append(("share" + ("" if whole else part), path))
    seats = [
        {
            "kind": kinds[seat],
            "client": shown.clients[seat],
            "title": f"client {shown.clients[seat]}{_REMARKS.get(kinds[seat], '')}",
            "at": f"{x:.1f} {y:.1f}",
            "shares": shares[seat],
        }
        for seat, (x, y) in places.items()
    ]
    signs = [
        ("centre", "the client looked at", not whole),
        ("honest", "client", True),
        ("colluder", "assumed to collude with the server", bool(shown.colluders)),
        ("dropped", "dropped out", bool(shown.dropped)),
    ]
    return {
        "round_graph": shown,
        "whole": whole,
        "drawn": len(places) - 1,
        "around": graph.neighbours(shown.centre).size,
        "size": f"{_SIZE:.0f}",
        "radius": _RADIUS,
        "description": _describe(shown, whole=whole),
        "seats": seats,
        "legend": [(kind, meaning) for kind, meaning, occurs in signs if occurs],
    }


def _around(shown: RoundGraph) -> list[int]:
    """The neighbours of the seat to look at that are drawn.

    Where not all fit, up to half of the places go to colluders and dropped clients, so that the drawing shows what it
    is about, and the others are spread evenly over the rest.
    """
    neighbours = [int(seat) for seat in shown.graph.neighbours(shown.centre)]
    if len(neighbours) <= MOST_AROUND:
        return neighbours
    marked = [seat for seat in neighbours if seat in shown.colluders | shown.dropped]
    others = [seat for seat in neighbours if seat not in set(marked)]
    marked = _evenly(marked, MOST_AROUND // 2)
    return sorted([*marked, *_evenly(others, MOST_AROUND - len(marked))])


def _circle(seats: list[int]) -> dict[int, Point]:
    turn, middle = 2.0 * math.pi / max(len(seats), 1), _SIZE / 2
    return {
        seat: (middle + _RING * math.sin(place * turn), middle - _RING * math.cos(place * turn))
        for place, seat in enumerate(seats)
    }


def _evenly(seats: list[int], most: int) -> list[int]:
    if len(seats) <= most:
        return seats
    return [seats[place * len(seats) // most] for place in range(most)]


def _describe(shown: RoundGraph, *, whole: bool) -> str:
    """The drawing in words, for those who do not see it; of many marked clients the first few by name."""
    graph = shown.graph
    parts = [
        f"Drawing of the share graph of round {shown.round} of {shown.label}: {graph.size} participants, "
        f"{graph.senders.size} shares sent in all."
    ]
    if not whole:
        sent = int(np.count_nonzero(graph.senders == shown.centre))
        received = int(np.count_nonzero(graph.receivers == shown.centre))
        client = shown.clients[shown.centre]
        parts.append(f"Client {client} in the middle sends {sent} shares and receives {received}.")
    for seats, name in ((shown.colluders, "Assumed to collude"), (shown.dropped, "Dropped out")):
        if seats:
            named = ", ".join(shown.clients[seat] for seat in sorted(seats)[:_MOST_NAMED])
            more = f" and {len(seats) - _MOST_NAMED} more" if len(seats) > _MOST_NAMED else ""
            parts.append(f"{name}: clients {named}{more}.")
    return " ".join(parts)


def _share_path(start: Point, end: Point) -> str:
    """The path of a share in SVG, a quadratic curve from the rim of one sign to the rim of the other.

    It is bent a little to its right, so that the two directions between a pair can be told apart.
    """
    first, last = complex(*start), complex(*end)
    along = (last - first) / (abs(last - first) or 1.0)
    bend = 0.06j * (last - first)
    first, last = first + (_RADIUS + 2.0) * along, last - (_RADIUS + 2.0) * along
    middle = (first + last) / 2 + bend
    return f"M{first.real:.1f} {first.imag:.1f}Q{middle.real:.1f} {middle.imag:.1f} {last.real:.1f} {last.imag:.1f}"
