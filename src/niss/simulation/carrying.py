"""Rounds that carry noise to one another: what each has to know of its neighbours, drawn again instead of kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Plan, RoundPlan
from niss.methods import Carrying, Gap, enough_uploads
from niss.simulation.sampling import Sampling, absent_seats, choose_participants
from niss.simulation.uploads import Uploads

if TYPE_CHECKING:
    from niss.simulation.config import Config
    from niss.simulation.round import Federation

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


def carrying_of(
    federation: Federation, number: int, participants: IntArray, history: Sequence[IntArray]
) -> Carrying | None:
    """What round `number` (from 0) needs to know of the rounds around it; None where nothing is carried.

    history  the participants of all rounds before
    """
    plan = federation.plan
    if not plan.kind.carries:
        return None
    rounds = plan.planned_rounds + plan.closing
    before = after = None
    if number:
        before = _gap(federation, number - 1, history[number - 1], participants)
        lost = absent_seats(
            history[number - 1].size,
            federation.config.protocol.dropout,
            federation.stream.child("round", number - 1).child("dropout"),
        )
        repaired = federation.repairing and bool(lost) and can_repair(plan, len(lost))
        before = replace(before, absent=tuple(lost), repaired=repaired)
    if number + 1 < rounds:
        following = next_cohort(federation, number + 1, [*history, participants])
        after = _gap(federation, number, participants, following)
    return Carrying(before, after, tuple(history))


def _gap(federation: Federation, number: int, first: IntArray, second: IntArray) -> Gap:
    """From round `number` to the next; the graph follows from the beacon of the first and both lists."""
    stream = federation.stream.child("round", number)
    graph = federation.plan.kind.carried_graph(
        federation.plan, (first, second), beacon_of(federation, number)
    )
    return Gap(stream.child("noise").child("gap"), graph=graph)


def next_cohort(federation: Federation, number: int, history: Sequence[IntArray]) -> IntArray:
    """The participants of round `number`, who are fixed one round ahead; `history` are those of all before."""
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


def can_repair(plan: Plan, lost: int) -> bool:
    """Whether clients agree to a repair of a complete graph that lost so many."""
    return lost <= min(plan.dropped, plan.revealed)


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
        carrying=carrying_of(federation, number, cohort, history),
    )
    stream = federation.stream.child("round", number)
    absent = absent_seats(cohort.size, federation.config.protocol.dropout, stream.child("dropout"))
    edges = federation.repaired_edges(plan, absent)
    rows = uploads.blank(cohort.size)
    plan.plan.kind.add_client_noise(rows, plan, stream.child("noise"), edges)
    return rows.total(np.delete(np.arange(cohort.size), absent)), plan, absent
