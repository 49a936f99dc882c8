"""The shares of a round in which everyone shares with everyone, without drawing each of them.

With a share of variance `s^2` from each of k clients to each other one, client `a` adds

    S_a = sum_{b != a} (n_ab - n_ba),    Cov(S_a, S_a') = 2 s^2 (k [a = a'] - 1),

and so does `S_a = sqrt(2 k) s (g_a - mean(g))` with one standard normal `g_a` a client: the same law from k draws
instead of k (k - 1). `niss.mechanism.add_shares` is the reference; this is for simulations, where nobody holds a
single share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.mechanism.shares import Edges
from niss.randomness import SimStream
from niss.randomness.sim import normal_blocks


@dataclass(frozen=True)
class Clique:
    """Clients of whom each sends `weight` unit shares to each other one."""

    seats: NDArray[np.int64]
    weight: float


def find_clique(edges: Edges) -> Clique | None:
    """The clique that all edges make up; None where they are something else, or none."""
    seats = np.unique(edges.senders)
    if seats.size < 2 or edges.senders.size != seats.size * (seats.size - 1):
        return None
    # No edge is there twice or leads back to its sender, so that many between these seats are all there are.
    within = np.isin(edges.receivers, seats).all()
    if not within or edges.weights.min() != edges.weights.max():
        return None
    return Clique(seats, float(edges.weights[0]))


def add_clique_shares(
    uploads: NDArray[np.floating[Any]], clique: Clique, *, unit_variance: float, stream: SimStream
) -> None:
    """Add simulated shares of a clique to its rows of `uploads`, in place, undistorted. Their sum is zero."""
    dtype, size = uploads.dtype, clique.seats.size
    deviation = dtype.type(math.sqrt(2.0 * size * clique.weight * unit_variance))
    sources = [
        normal_blocks(stream.child("clique", int(seat)), uploads.shape[1], dtype) for seat in clique.seats
    ]
    for parts in zip(*sources, strict=True):
        place = parts[0][0]
        drawn = np.stack([normals for _, normals in parts])
        drawn -= drawn.mean(axis=0, dtype=np.float64).astype(dtype)
        drawn *= deviation
        for seat, shares in zip(clique.seats, drawn, strict=True):
            uploads[seat, place] += shares
