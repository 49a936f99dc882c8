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
    """mu of the joint view where rounds are repaired: against the reveals, or a story that leaves the self-mask alone.

    A self-mask of `sigma_k^2 - residual` is in each upload until it is repaired (`niss.accounting.make_terms`), and a
    server that has a client's edges revealed is left with it and the residual noise: `max(sigma_k^2, residual)`.
    """
    alone = np.sqrt(np.maximum(plan.own_variance, plan.residual_variance))
    return np.maximum(plan.joint_mu, plan.sensitivity / alone)


def lost_neighbours(graph: ShareGraph, lost: NDArray[np.bool_]) -> IntArray:
    """How many lost neighbours each survivor has, whichever way shares went between them."""
    joined = np.zeros((graph.size, graph.size), dtype=bool)
    joined[graph.senders, graph.receivers] = joined[graph.receivers, graph.senders] = True
    counted: IntArray = joined[~lost][:, lost].sum(axis=1)
    return counted


def left_over_variance(plan: RoundPlan, absent: list[int], *, repaired: bool) -> float:
    """The noise per coordinate in the sum of the uploads that arrived, for central-dp of the released sum.

    `sum_{k here} tau_k^2 sigma^2 in_k`, and unless it is repaired `sum c_e sigma^2` over the edges with one end lost.
    """
    method = plan.plan.method
    if method == "central-dp" or not absent:
        return plan.aggregate_variance
    here = np.ones(plan.participants.size, dtype=bool)
    here[absent] = False
    if method != "niss":
        return float(plan.own_variance[here].sum())
    graph = plan.graph
    left = float(plan.residual_variance[here].sum())
    if not repaired:
        crossing = here[graph.senders] != here[graph.receivers]
        left += plan.unit_variance * float(graph.weights[crossing].sum())
    return left
