"""Clients that drop out of a round: which, what is repaired, and what stays in the sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from niss.accounting import RoundPlan
from niss.graph import ShareGraph
from niss.mechanism.shares import SomeEdges
from niss.randomness import SimStream

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def absent_seats(size: int, share: float, stream: SimStream) -> list[int]:
    """The seats that drop out of a round, each with that probability; one always stays."""
    drawn = stream.generator().random(size) < share
    drawn[0] &= not drawn.all()
    return [int(seat) for seat in np.flatnonzero(drawn)]


def repair(plan: RoundPlan, absent: list[int]) -> SomeEdges | None:
    """The edges between survivors, once the server was given those to the lost, and took them out.

    Each edge has the same noise with and without the others. None where clients would refuse the repair.

    They do where more are lost, or a client has more lost neighbours, than the plan has charged for. The protocol
    then repairs around those who refuse; here nothing is repaired, which leaves more noise.
    """
    graph, limits = plan.graph, plan.plan
    lost = np.zeros(graph.size, dtype=bool)
    lost[absent] = True
    if len(absent) > limits.dropped or lost_neighbours(graph, lost).max(initial=0) > limits.revealed:
        return None
    return SomeEdges.of(graph, ~(lost[graph.senders] | lost[graph.receivers]))


def with_self_masks(plan: RoundPlan) -> FloatArray:
    """mu of the joint view where rounds are repaired."""
    return plan.plan.kind.joint_mu(plan, repairing=True)


def lost_neighbours(graph: ShareGraph, lost: NDArray[np.bool_]) -> IntArray:
    """How many lost neighbours each survivor has, whichever way shares went between them."""
    joined = np.zeros((graph.size, graph.size), dtype=bool)
    joined[graph.senders, graph.receivers] = joined[graph.receivers, graph.senders] = True
    counted: IntArray = joined[~lost][:, lost].sum(axis=1)
    return counted


def left_over_variance(plan: RoundPlan, absent: list[int], *, repaired: bool) -> float:
    """The noise per coordinate in the sum of the uploads that arrived, with what a trusted server adds."""
    return plan.plan.kind.left_over_variance(plan, absent, repaired=repaired)
