"""Simulated noise of a round whose clients all share with all, within the round and with the next cohort.

Every client of one round (m of them) carries a share of variance c to every one of the next (m'). Row sums R_i and
column sums C_j of an m x m' matrix of independent N(0, c) have the law

    R_i = S / m + sqrt(m' c) (u_i - mean u),    C_j = S / m' + sqrt(m c) (v_j - mean v),    S ~ N(0, m m' c),

with standard normals u and v, all independent: between two rounds only the vector S is common. Shares within a round
deviate from their mean in the same way (`mechanism.shares.Clique`), and so does fresh noise, but for its sum. So the
uploads of a round come from one draw a client, for all deviations together, and one vector for each sum; the S
of the round before is drawn again from its seed. That is for simulations, where nobody holds a single share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.randomness import SimStream
from niss.randomness.sim import normal_blocks

Rows = NDArray[np.floating[Any]]
IntArray = NDArray[np.int64]

Common = tuple[float, SimStream]
"""A vector that all rows have in common: its deviation, negative where it is taken out, and where it is drawn from."""


def add_spread(
    rows: Rows, seats: IntArray, variance: float, common: Sequence[Common], stream: SimStream
) -> None:
    """Add `sqrt(variance) (g_k - mean g)` to each of these rows, and every common vector to all of them, in place."""
    dtype, width = rows.dtype, rows.shape[1]
    deviation = dtype.type(math.sqrt(variance))
    sources = [normal_blocks(stream.child("spread", int(seat)), width, dtype) for seat in seats]
    shared = [(dtype.type(scale), normal_blocks(source, width, dtype)) for scale, source in common]
    for parts in zip(*sources, strict=True):
        place = parts[0][0]
        drawn = np.stack([normals for _, normals in parts])
        drawn -= drawn.mean(axis=0, dtype=np.float64).astype(dtype)
        drawn *= deviation
        for scale, blocks in shared:
            drawn += scale * next(blocks)[1]
        for seat, noise in zip(seats, drawn, strict=True):
            rows[seat, place] += noise


def add_part_of_spread(
    rows: Rows, places: IntArray, variance: float, common: Sequence[Common], streams: Sequence[SimStream]
) -> NDArray[np.float64]:
    """What `add_spread` adds to some of its rows, but for the mean: `sqrt(variance) g_k`, each g_k from its own stream,
    and every common vector, in place; others have the rest of the rows.

    Returns the sum of these `sqrt(variance) g_k`. From a sum over n of the m rows, n / m of what all of them return has
    to be taken: each may take it from its own part.
    """
    dtype, width = rows.dtype, rows.shape[1]
    deviation, summed = dtype.type(math.sqrt(variance)), np.zeros(width)
    for place, stream in zip(places, streams, strict=True):
        for block, normals in normal_blocks(stream, width, dtype):
            normals *= deviation
            rows[place, block] += normals
            summed[block] += normals
    for scale, source in common if places.size else ():
        for block, normals in normal_blocks(source, width, dtype):
            normals *= dtype.type(scale)
            rows[places, block] += normals
    return summed
