"""Rounds that carry noise to one another: what each has to know of its neighbours, drawn again instead of kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Plan, RoundPlan
from niss.graph import ShareGraph
from niss.methods import CarriedEdges, enough_uploads
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


def beside_rounds(federation: Federation, plan: RoundPlan, history: Sequence[IntArray]) -> RoundPlan:
    """The round with what it needs to know of the rounds beside it; the same where nothing is carried.

    history  the participants of all rounds before
    """
    number = plan.number
    if not plan.plan.kind.carries:
        return plan
    before = after = None
    if number:
        absent, repaired = _lost(federation, number - 1, history[number - 1])
        before = CarriedEdges(_carried_stream(federation, number - 1), absent, repaired)
    if number + 1 < plan.plan.planned_rounds + plan.plan.closing:
        after = CarriedEdges(_carried_stream(federation, number))
    return replace(plan, before=before, after=after, history=tuple(history))


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


def close_run(federation: Federation, last: RoundPlan, uploads: Uploads) -> tuple[FloatArray, RoundPlan]:
    """One more round without data, by the next cohort: its noise, which takes out what the last round carried.

    Nothing is charged: an update of zero reveals nothing. Returns the sum, and the plan of that round.
    """
    assert last.history is not None
    number, history = last.number + 1, (*last.history, last.participants)
    cohort = next_cohort(federation, number, history)
    plan = beside_rounds(federation, replace(last, participants=cohort, number=number), history)
    stream = federation.stream.child("round", number)
    absent = absent_seats(cohort.size, federation.config.protocol.dropout, stream.child("dropout"))
    plan = federation.without(plan, absent)
    ranks = federation.trainer.ranks
    rows = uploads.blank(ranks.seats(cohort.size))
    plan.plan.kind.add_client_noise(rows, plan, stream.child("noise"))
    (total,) = ranks.pool(rows.total(plan.here))
    return total, plan
