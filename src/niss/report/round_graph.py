"""The share graph of a round, drawn again from what the run recorded: seed, round, participants and settings.

A simulated round takes its beacon from the seed; a round of the real protocol leaves its beacon, and what that was let
out for, in the metrics. Either way the graph is the one that was used. Where that record is missing or does not fit, a
graph made in the same way stands for it, and is said to.

The participants are those that the ledger charged in its last entry. All of this is public in the protocol: the graph
shows who shares noise with whom, and nothing about any share.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from niss.accounting import Plan
from niss.errors import NissError
from niss.graph import ShareGraph
from niss.methods import draw_graph
from niss.protocol.agreement import LINKS_PER_ROUND
from niss.protocol.agreement import draw_graph as draw_protocol_graph
from niss.randomness import SimStream
from niss.report.ledger import read_ledger
from niss.report.run_folder import MethodResult, ReportInput
from niss.runs import RoundRecord
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
    clients = sorted(entry.mus, key=int)
    metrics = next((point for point in method.curve if point.round == entry.round), None)
    stream = SimStream(config["seed"]).child("round", entry.round - 1)
    graph, origin = _draw_again(config, [int(client) for client in clients], metrics, stream)
    centre = max(range(len(clients)), key=lambda seat: (entry.mus[clients[seat]].joint, -seat))
    assumed = int(config["privacy"].get("colluders", 0))
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
        graph = draw_protocol_graph(len(members), degree, bytes.fromhex(public["beacon"]), commitment)
        if graph.digest().hex() == public["graph"]:
            return graph, "beacon"
    beacon = stream.child("beacon").generator().bytes(32) if simulated else _STAND_IN
    graph = draw_graph(settings["graph"], members, degree=degree, beacon=beacon, groups=groups)
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
        colluders=privacy["colluders"],
        neighbours=settings["neighbours"],
        attempts=LINKS_PER_ROUND if config.get("exchange") == "protocol" else 1,
    )
    worst = worst_case(
        graph,
        plan.corruption,
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
    share = config.get("protocol", {}).get("dropout", 0.0)
    if metrics is None or not metrics.dropped or not share:
        return frozenset()
    drawn = stream.child("dropout").generator().random(size) < share
    drawn[0] &= not drawn.all()
    seats = frozenset(int(seat) for seat in np.flatnonzero(drawn))
    return seats if len(seats) == metrics.dropped else frozenset()
