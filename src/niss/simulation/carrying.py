"""Rounds that carry noise to one another: what each has to know of its neighbours, drawn again instead of kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Plan, RoundPlan
from niss.graph import ShareGraph
from niss.mechanism.shares import SomeEdges
from niss.methods import CarriedEdges, Carrying, enough_uploads
from niss.randomness import SimStream
from niss.simulation.sampling import absent_seats, choose_participants
from niss.simulation.uploads import Uploads

if TYPE_CHECKING:
    from niss.simulation.config import Config
    from niss.simulation.round import Federation
    from niss.simulation.sections import Sampling

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def plan_fields(config: Config, sampling: Sampling) -> dict[str, Any]:
    """What a plan that carries noise over has to know of the rounds, and of clients that drop out of them.

    Where lost clients are repaired and no number of them is given, one round in a million loses more.
    """
    size, privacy, protocol = config.training.participants, config.privacy, config.protocol
    dropped = revealed = 0
    if protocol.mode == "repair" and protocol.dropout:
        dropped = privacy.dropped or size - (enough_uploads(size, protocol.dropout) or size)
        # Whoever is left needs someone to share noise with.
        dropped = min(dropped, size - 2)
        revealed = max(privacy.revealed, dropped)
    return {
        "participants": size,
        "pattern": "cyclic" if sampling == "cyclic" else "any",
        "dropout": protocol.dropout,
        "dropped": dropped,
        "revealed": revealed,
    }


def carrying_of(federation: Federation, number: int, history: Sequence[IntArray]) -> Carrying | None:
    """What round `number` (from 0) needs to know of the rounds beside it; None where nothing is carried.

    history  the participants of all rounds before
    """
    plan = federation.plan
    if not plan.kind.carries:
        return None
    before = after = None
    if number:
        absent, repaired = _lost(federation, number - 1, history[number - 1])
        before = CarriedEdges(_carried_stream(federation, number - 1), absent, repaired)
    if number + 1 < plan.planned_rounds + plan.closing:
        after = CarriedEdges(_carried_stream(federation, number))
    return Carrying(before, after, tuple(history))


def _carried_stream(federation: Federation, number: int) -> SimStream:
    """What round `number` carries to the next is drawn from, by both."""
    return federation.stream.child("round", number).child("noise").child("gap")


def _lost(federation: Federation, number: int, participants: IntArray) -> tuple[tuple[int, ...], bool]:
    """The seats that round `number` lost, and whether that was repaired: both are drawn again."""
    dropout = federation.config.protocol.dropout
    absent = absent_seats(
        participants.size, dropout, federation.stream.child("round", number).child("dropout")
    )
    if not absent or not federation.repairing:
        return tuple(absent), False
    plan = federation.plan
    graph = plan.for_round(
        participants,
        weights=1.0 / participants.size,
        records=1,
        beacon=beacon_of(federation, number),
        number=number,
    ).graph
    return tuple(absent), can_repair(plan, graph, absent)


def next_cohort(federation: Federation, number: int, history: Sequence[IntArray]) -> IntArray:
    """The participants of round `number`, who are fixed ahead of it; `history` are those of all before."""
    plan, clients = federation.plan, len(federation.materials.clients)
    return choose_participants(
        number,
        sampling=federation.sampling,
        size=federation.config.training.participants,
        eligible=np.ones(clients, dtype=bool),
        stream=federation.stream.child("participants"),
        resting=history[max(len(history) - plan.separation + 1, 0) :],
    )


def beacon_of(federation: Federation, number: int) -> bytes:
    """The public randomness of a simulated round."""
    return federation.stream.child("round", number).child("beacon").generator().bytes(32)


def can_repair(plan: Plan, graph: ShareGraph, absent: Sequence[int]) -> bool:
    """Whether clients agree to a repair of a round that lost these seats.

    They refuse where more are lost, or a client has more lost neighbours, than the plan has charged for.
    """
    if len(absent) > plan.dropped:
        return False
    lost = np.zeros(graph.size, dtype=bool)
    lost[list(absent)] = True
    joined = np.zeros((graph.size, graph.size), dtype=bool)
    joined[graph.senders, graph.receivers] = joined[graph.receivers, graph.senders] = True
    return int(joined[~lost][:, lost].sum(axis=1).max(initial=0)) <= plan.revealed


def repair(plan: RoundPlan, absent: list[int]) -> SomeEdges | None:
    """The edges between survivors, once the server was given those to the lost, and took them out.

    Each edge has the same noise with and without the others. None where clients would refuse the repair: the protocol
    then repairs around those who refuse; here nothing is repaired, which leaves more noise.
    """
    graph = plan.graph
    if not can_repair(plan.plan, graph, absent):
        return None
    lost = np.zeros(graph.size, dtype=bool)
    lost[absent] = True
    return SomeEdges.of(graph, ~(lost[graph.senders] | lost[graph.receivers]))


def close_run(
    federation: Federation, last: RoundPlan, uploads: Uploads
) -> tuple[FloatArray, RoundPlan, list[int]]:
    """One more round without data, by the next cohort: its noise, which takes out what the last round carried.

    Nothing is charged: an update of zero reveals nothing. Returns the sum, the plan of that round, and who was absent.
    """
    assert last.carrying is not None
    number = last.number + 1
    history = (*last.carrying.history, last.participants)
    cohort = next_cohort(federation, number, history)
    plan = replace(
        last,
        participants=cohort,
        number=number,
        carrying=carrying_of(federation, number, history),
    )
    stream = federation.stream.child("round", number)
    absent = absent_seats(cohort.size, federation.config.protocol.dropout, stream.child("dropout"))
    edges = federation.repaired_edges(plan, absent)
    ranks = federation.trainer.ranks
    rows = uploads.blank(ranks.seats(cohort.size))
    plan.plan.kind.add_client_noise(rows, plan, stream.child("noise"), edges)
    (total,) = ranks.pool(rows.total(np.delete(np.arange(cohort.size), absent)))
    return total, plan, absent
