"""The share graph of a round, drawn again from what the run recorded: seed, round, participants and settings.

A simulated round takes its beacon from the seed; a round of the real protocol leaves its beacon, and what that was let
out for, in the metrics. Either way the graph is the one that was used. Runs of older versions lack the beacon of the
protocol: then a graph made in the same way stands for it, and is said to.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from niss.accounting.collusion import worst_case
from niss.accounting.corruption import Corruption
from niss.accounting.plan import Plan
from niss.errors import NissError
from niss.graph import ShareGraph
from niss.protocol.agreement import draw_graph as draw_protocol_graph
from niss.protocol.beacon import LINKS_PER_ROUND
from niss.randomness import SimStream
from niss.report.ledger import read_ledger
from niss.report.run_folder import MethodResult, ReportInput

_STAND_IN = b"niss.report.example-graph"
# The search for the worst colluders is quick up to here.
_MOST_SEARCHED = 400


@dataclass(frozen=True)
class RoundGraph:
    """Who shared noise with whom in one round of one method.

    `clients` are the participants by seat; the graph numbers seats. `centre` is the seat to look at first: the
    worst-off client. `colluders` are seats of the worst set found for it (an assumption of the accountant, not
    something observed); `assumed` is how many may collude. `dropped` are the seats that never uploaded. `origin` is
    where the graph comes from: the "seed", the "beacon" of the protocol, or None where another stands for it.
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
    """The graph of the last round of the first method that shares noise and has one; None where none has."""
    methods = [method for method in report.methods if method.shares_noise]
    # A method with a guarantee says more about the system than one without.
    for method in sorted(methods, key=lambda one: one.finished and one.epsilon_joint is None):
        # A folder changed by hand or written by another version: the rest of the page still stands.
        with suppress(NissError, KeyError, TypeError, ValueError):
            if (graph := _round_graph(method)) is not None:
                return graph
    return None


def _round_graph(method: MethodResult) -> RoundGraph | None:
    config = method.manifest.get("config")
    if not isinstance(config, Mapping) or not _equal_clients(config):
        return None
    ledger = read_ledger(method)
    if ledger is None or not ledger.entries:
        return None
    entry = ledger.entries[-1]
    members = sorted(entry.mus, key=int)
    stream = SimStream(config["seed"]).child("round", entry.round - 1)
    graph, origin = _drawn_again(method, config, [int(client) for client in members], entry.round, stream)
    centre = max(range(len(members)), key=lambda seat: (entry.mus[members[seat]].joint, -seat))
    assumed = int(config["privacy"].get("colluders", 0))
    colluders: tuple[int, ...] = ()
    if assumed and graph.size <= _MOST_SEARCHED:
        centre, colluders = _worst_colluders(method, config, graph, entry.round)
    return RoundGraph(
        label=method.label,
        round=entry.round,
        clients=tuple(members),
        graph=graph,
        centre=centre,
        colluders=frozenset(colluders),
        assumed=assumed,
        dropped=_dropped(method, config, len(members), entry.round, stream),
        origin=origin,
    )


def _drawn_again(
    method: MethodResult, config: Mapping[str, Any], members: list[int], number: int, stream: SimStream
) -> tuple[ShareGraph, Literal["seed", "beacon"] | None]:
    """The graph of a round and where it comes from."""
    settings = config["methods"][0]
    if config.get("exchange", "simulated") == "simulated":
        return draw_graph(settings, members, stream.child("beacon").generator().bytes(32)), "seed"
    public = next((point.protocol for point in method.curve if point.round == number), None)
    if public is not None:
        commitment = bytes.fromhex(public["participants"]) + bytes.fromhex(public["terms"])
        beacon = bytes.fromhex(public["beacon"])
        graph = draw_protocol_graph(len(members), float(settings["neighbours"]), beacon, commitment)
        if graph.digest().hex() == public["graph"]:
            return graph, "beacon"
    return draw_graph(settings, members, _STAND_IN), None


def _equal_clients(config: Mapping[str, Any]) -> bool:
    """Whether all clients need the same noise: else the graph depends on sizes that are not recorded."""
    return (
        len(config.get("methods", ())) == 1
        and not isinstance(config["privacy"].get("epsilon"), list)
        and config["privacy"].get("unit", "client") == "client"
        and config["training"].get("weights", "equal") == "equal"
    )


def draw_graph(settings: Mapping[str, Any], members: list[int], beacon: bytes) -> ShareGraph:
    """The graph of these participants under the settings of a method, all needing the same noise."""
    size, degree, kind = len(members), float(settings["neighbours"]), settings["graph"]
    if kind == "complete":
        return ShareGraph.complete(size, weight=degree / (size - 1))
    if kind == "random":
        return ShareGraph.random(size, degree=degree, beacon=beacon)
    if kind == "coalition":
        seats = {client: seat for seat, client in enumerate(members)}
        groups = [[seats[client] for client in group if client in seats] for group in settings["groups"]]
        groups = [group for group in groups if len(group) >= 2]
        return ShareGraph.coalition(size, groups=groups, degree=degree, beacon=beacon)
    return ShareGraph.regular(size, degree=degree, beacon=beacon)


def _worst_colluders(
    method: MethodResult, config: Mapping[str, Any], graph: ShareGraph, number: int
) -> tuple[int, tuple[int, ...]]:
    """The worst-off seat and the colluders that are worst for it, with the distortion of that round."""
    settings, privacy = config["methods"][0], config["privacy"]
    tau2 = next((point.tau2 for point in method.curve if point.round == number), None) or 0.0
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
    assumed = Corruption(colluders=plan.colluders, failure=plan.corruption.failure)
    worst = worst_case(
        graph,
        assumed,
        unit_variance=unit,
        residual_variance=tau2 * unit * graph.in_weight,
        target_variance=1.0,
    )
    return worst.client, worst.colluders


def _participations(config: Mapping[str, Any]) -> int:
    """The rounds over which a client's target is composed."""
    privacy, training, rounds = config["privacy"], config["training"], int(config["rounds"])
    if privacy.get("scope") == "round":
        return 1
    if privacy.get("participations") is not None:
        return int(privacy["participations"])
    if training.get("sampling") == "shuffled":
        cohorts = int(config["data"]["clients"]) // int(training["participants"])
        return -(-rounds // cohorts)
    return rounds


def _dropped(
    method: MethodResult, config: Mapping[str, Any], size: int, number: int, stream: SimStream
) -> frozenset[int]:
    """The seats that dropped out, drawn again from the seed; none where their number is not the recorded one."""
    recorded = next((point.dropped for point in method.curve if point.round == number), None)
    share = config.get("protocol", {}).get("dropout", 0.0)
    if not recorded or not share:
        return frozenset()
    drawn = stream.child("dropout").generator().random(size) < share
    drawn[0] &= not drawn.all()
    seats = frozenset(int(seat) for seat in np.flatnonzero(drawn))
    return seats if len(seats) == recorded else frozenset()
