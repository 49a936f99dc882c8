"""Terms of a hostile server's making, and what noise is left of them on the grid."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields
from typing import Any

import numpy as np

from niss.accounting import DrawnAccount, Plan, make_terms
from niss.errors import NissError
from niss.protocol.agreement import Agreed
from niss.protocol.keys import link_of
from niss.protocol.messages import Beacon, CarryTerms, Participant, RoundOpen, Terms, encode
from support.protocol_round import Federation, resigned

SIZE, COORDINATES, COLLUDERS = 7, 16, 1


def assessing(size: int, label: str, **policy: Any) -> Federation:
    """A federation for a round or two, whose clients compute for themselves what a round costs."""
    federation = Federation(size, label, prekeys=2, **policy)
    for seat in federation.seats:
        seat.assess = DrawnAccount()
        seat.restart()
    return federation


def honest_terms(mode: str) -> Terms:
    """Of a round that tolerates dropouts, or of one that is repaired."""
    lost = 1 if mode == "repair" else 0
    plan = Plan(
        clip=1.0,
        epsilon=3.0,
        kappa=2.0,
        neighbours=float(SIZE - 1),
        graph="complete",
        colluders=COLLUDERS,
        revealed=lost,
        dropped=lost,
    )
    return make_terms(
        plan, participants=SIZE, coordinates=COORDINATES, run=b"run", number=1, mode=mode, attempt=1
    )


def spoilt(terms: Terms, name: str) -> list[Any]:
    """0, tiny, huge, negative, not a number, and what the other fields say."""
    value = getattr(terms, name)
    if isinstance(value, bytes):
        return [b"", b"\0", bytes(16), bytes(255), bytes(256)]
    if isinstance(value, str):
        return ["", "none", "tolerate", "repair"]
    if value is None:
        return [CarryTerms(bytes(32), amount) for amount in (0.0, 1.0, 1e300)]
    others = [getattr(terms, field.name) for field in fields(terms)]
    numbers = [other for other in others if isinstance(other, int | float)]
    if isinstance(value, int):
        ends = [0, 1, 2, value - 1, value + 1, 62, 63, 64, 2**20, 2**31, 2**32, 2**63, 2**64, -1]
        return [*ends, *(int(number) for number in numbers if math.isfinite(number))]
    scales = [value * 2.0**power for power in (-200, -60, -30, -16, -4, -1, 1, 4, 16, 30, 60, 200)]
    extremes = [0.0, -0.0, 5e-324, 1e-300, 1e-150, 1e150, 1e300, -1.0, -value, math.nan, math.inf, -math.inf]
    return [*extremes, *scales, *map(float, numbers)]


def rounded_variance(steps: float) -> float:
    """Of `rint(N(0, steps^2))`, in steps: what noise is left once it is on the grid; never counted above `steps^2`."""
    if steps > 1.0:
        return steps**2
    reach = np.arange(1, 12) - 0.5
    tails = np.array([math.erfc(one / (steps * math.sqrt(2.0))) if steps > 0.0 else 0.0 for one in reach])
    return min(steps**2, float(np.sum((2 * np.arange(1, 12) - 1) * tails)))


def true_mu(agreed: Agreed) -> float:
    """The worst client, colluders and repair: `Delta / sqrt(1 / (Sigma^-1)_kk)`, everything in grid steps."""
    from support.what_left import effective_variance

    terms, graph, step = agreed.terms, agreed.graph, 2.0**-agreed.terms.grid_bits
    size = len(agreed.participants)
    residual = rounded_variance(math.sqrt(terms.residual_variance) / step)
    own = rounded_variance(math.sqrt(terms.self_variance) / step)
    shared = np.zeros((size, size))
    for one, other, weight in zip(graph.senders, graph.receivers, graph.weights, strict=True):
        variance = rounded_variance(math.sqrt(float(weight) * terms.unit_variance) / step)
        shared[one, other] += variance
        shared[other, one] += variance
    repair = terms.mode == "repair"
    lost = min(terms.revealed, terms.dropped, size) if repair else 0
    least = math.inf
    for bad in itertools.combinations(range(size), min(size - 1, COLLUDERS + lost)):
        honest = [seat for seat in range(size) if seat not in bad]
        known = shared[np.ix_(honest, honest)]
        if residual == 0.0:
            return math.inf
        own_noise = np.full(len(honest), residual)
        least = min(least, *(effective_variance(known, own_noise, row) for row in range(len(honest))))
    if repair:
        # A client that is said to have dropped out: its edges are bared, its self-mask is not.
        least = min(least, residual + own)
    # The rounded update is no longer than the clip.
    return terms.clip / size / step / math.sqrt(least) if least > 0.0 else math.inf


def opened_with(federation: Federation, terms: Terms) -> RoundOpen | None:
    """The round with these terms, signed by a server that checks nothing; None where the wire cannot carry them.

    None also where the beacon's chain has no link for them.
    """
    try:
        encode(RoundOpen(terms, (), Beacon(1, bytes(32), bytes(64)), bytes(64)))
        index = link_of(terms.round, terms.attempt)
    except NissError:
        return None
    if index >= len(federation.chain._links):
        return None
    participants = tuple(
        Participant(seat.client.public, keys[0])
        for seat, keys in zip(federation.seats, federation.prekeys, strict=True)
    )
    bare = RoundOpen(terms, participants, federation.beacon(participants, terms))
    opened: RoundOpen = resigned(federation.server, bare, "open")
    return opened
