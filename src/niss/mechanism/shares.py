"""The noise shares of a round: drawn, given to both ends of each edge, distorted, added.

Client `k` uploads (the package's notation; `c_e` unit shares merged on edge `e`)

    y_k = p_k x_k + sum_{e out of k} n_e - sum_{e into k} s_e n_e               multiplicative
    y_k = p_k x_k + sum_{e out of k} n_e - sum_{e into k} n_e + residual_k      additive

with `n_e ~ N(0, c_e sigma^2 I)`, `s_e ~ N(1, tau_k^2)`, `residual_k ~ N(0, tau_k^2 sigma^2 in_k I)`
and `in_k` the total weight of the edges into `k`. Each distortion (`DISTORTIONS`) is an object that says which of the
two it is. All of them leave the aggregate variance `sum_k tau_k^2 sigma^2 in_k` (the paper's Lemma 1 and Theorem 2).
Where the paper's Algorithm 2 draws shares of variance `sigma_k^2`, its text and proofs need the unit
variance `sigma^2`: the unit variance is used here.

`add_shares` draws every share and is the reference. Where everyone shares with everyone, `Clique` has the same law from
one draw a client; that is for simulations, where nobody holds a single share. With a share of variance `s^2` from
each of k clients to each other one, client `a` adds

    S_a = sum_{b != a} (n_ab - n_ba),    Cov(S_a, S_a') = 2 s^2 (k [a = a'] - 1),

and so does `S_a = sqrt(2 k) s (g_a - mean(g))` with one standard normal `g_a` a client: the same law from k draws
instead of k (k - 1).

So it is with noise that is carried from one round to the next. Every client of one round (m of them) carries a share of
variance c to every one of the next (m'). Row sums R_i and column sums C_j of an m x m' matrix of independent N(0, c)
have the law

    R_i = S / m + sqrt(m' c) (u_i - mean u),    C_j = S / m' + sqrt(m c) (v_j - mean v),    S ~ N(0, m m' c),

with standard normals u and v, all independent: between two rounds only the vector S is common. Shares within a round
deviate from their mean in the same way, and so does fresh noise, but for its sum. So the uploads of a round come from
one draw a client, for all deviations together, and one vector for each sum (`add_spread`); the S of the round before
is drawn again from its seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.errors import ConfigError
from niss.randomness import SimStream
from niss.randomness.sim import normal_blocks, normal_streams

FloatArray = NDArray[np.float64]
Rows = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Distortion:
    """How a client keeps received shares from cancelling to the last bit.

    name            as in configurations, files and tables
    multiplies      a received share is multiplied by `s_e ~ N(1, tau_k^2)`, instead of fresh noise being added;
                    whoever knows the share (a colluder that sent it) can then strip the distortion
    per_coordinate  a fresh `s_e` in every coordinate, instead of one for the whole share
    """

    name: str
    multiplies: bool = False
    per_coordinate: bool = False

    @property
    def additive(self) -> bool:
        """Whether fresh noise is added: the only form that survives active colluders.

        Only then can tau^2 be chosen for a target in the joint view, and only then can a share be taken out of the sum
        again after its sender or receiver dropped out.
        """
        return not self.multiplies

    @property
    def one_factor(self) -> bool:
        """Whether a share has one factor, so that the distortion lies in the span of the shares."""
        return self.multiplies and not self.per_coordinate


DISTORTIONS: dict[str, Distortion] = {
    distortion.name: distortion
    for distortion in (
        Distortion("scalar", multiplies=True),  # The letter of the paper's Algorithm 2.
        Distortion("coordinate", multiplies=True, per_coordinate=True),  # What the paper's analysis means.
        Distortion("additive"),  # The default.
    )
}


def distortion_named(distortion: str | Distortion) -> Distortion:
    """The distortion of that name; an object is returned as it is. Raises ConfigError for an unknown name."""
    if isinstance(distortion, Distortion):
        return distortion
    if distortion not in DISTORTIONS:
        raise ConfigError(
            f"unknown distortion {distortion!r}",
            field="distortion",
            hint="use one of: " + ", ".join(DISTORTIONS),
        )
    return DISTORTIONS[distortion]


class Edges(Protocol):
    """What is needed of a share graph: parallel arrays, one entry per merged edge."""

    @property
    def size(self) -> int: ...
    @property
    def senders(self) -> NDArray[np.int64]: ...
    @property
    def receivers(self) -> NDArray[np.int64]: ...
    @property
    def weights(self) -> FloatArray: ...
    @property
    def in_weight(self) -> FloatArray: ...


@dataclass(frozen=True)
class SomeEdges:
    """Some edges of a graph. What a client distorts is all that it received, so `in_weight` is the whole graph's."""

    size: int
    senders: NDArray[np.int64]
    receivers: NDArray[np.int64]
    weights: FloatArray
    in_weight: FloatArray

    @classmethod
    def of(cls, edges: Edges, kept: NDArray[np.bool_]) -> SomeEdges:
        """Those that are `kept`, one entry per edge."""
        return cls(
            edges.size, edges.senders[kept], edges.receivers[kept], edges.weights[kept], edges.in_weight
        )


def add_shares(
    uploads: Rows,
    edges: Edges,
    *,
    unit_variance: float,
    tau2: ArrayLike,
    distortion: str | Distortion,
    stream: SimStream,
    keep_factors: bool = False,
    rows: NDArray[np.int64] | None = None,
) -> Rows | None:
    """Add a round's simulated shares and their distortion to `uploads` (m x h), in place.

    Streams edge by edge, block by block: memory beyond `uploads` is a few blocks, never v x h. Every edge draws
    from its own named child of `stream`, so the shares do not depend on the order of the edges.

    uploads        one row `p_k x_k` for each client of the graph
    edges          the share graph, or some of its edges
    unit_variance  sigma^2, the variance of a share of weight 1 in each coordinate
    tau2           the distortion of received shares, one number or one per client
    keep_factors   also keep factors per coordinate, which takes edges x h numbers
    rows           the row of each client of the graph, -1 where it is not among `uploads`; None: all are, in order

    Returns the drawn factors, which the joint view conditions on: one per edge where a share has one factor; one per
    edge and coordinate if `keep_factors`; None where nothing was multiplied or the factors were not kept. All edges
    have theirs, whoever has a row.
    """
    clients = edges.size
    if uploads.ndim != 2 or (len(uploads) != clients and rows is None):
        raise ConfigError(
            f"shape {uploads.shape} does not give one row to each of {clients} clients", field="uploads"
        )
    rows, coordinates = np.arange(clients) if rows is None else rows, uploads.shape[1]
    tau = np.sqrt(per_client(tau2, clients, "tau2"))
    kind = distortion_named(distortion)
    dtype = uploads.dtype
    if kind.additive:
        _add_undistorted(uploads, rows, edges, unit_variance, stream)
        residual = tau * np.sqrt(unit_variance * edges.in_weight)
        noisy = np.flatnonzero((residual > 0.0) & (rows >= 0)).tolist()
        sources = (stream.child("residual", client) for client in noisy)
        for number, place, noise in normal_streams(sources, coordinates, dtype):
            noise *= dtype.type(residual[noisy[number]])
            uploads[rows[noisy[number]], place] += noise
        return None
    kept = kind.per_coordinate and keep_factors
    scales = np.ones(
        (edges.senders.size, coordinates) if kept else edges.senders.size, dtype=dtype if kept else float
    )
    # Of an edge between two clients without a row only its factors are of interest.
    touched = (rows[edges.senders] >= 0) | (rows[edges.receivers] >= 0)
    for index in np.flatnonzero(touched | kept | kind.one_factor):
        sender, receiver, weight = edges.senders[index], edges.receivers[index], edges.weights[index]
        giver, taker = rows[sender], rows[receiver]
        source = stream.child("share", int(sender), int(receiver))
        distorting = source.child("distortion")
        factors = None
        if kind.one_factor and tau[receiver] > 0.0:
            scales[index] = 1.0 + tau[receiver] * distorting.generator().standard_normal()
        if not (touched[index] or kept):
            continue
        if kind.per_coordinate and tau[receiver] > 0.0:
            factors = normal_blocks(distorting, coordinates, dtype)
        for place, share in normal_blocks(source, coordinates, dtype):
            share *= dtype.type(math.sqrt(weight * unit_variance))
            if giver >= 0:
                uploads[giver, place] += share
            if factors is not None:
                factor = next(factors)[1]
                factor *= dtype.type(tau[receiver])
                factor += dtype.type(1.0)
                if kept:
                    scales[index, place] = factor
                share *= factor
            elif kind.one_factor:
                share *= dtype.type(scales[index])
            if taker >= 0:
                uploads[taker, place] -= share
    return scales if kept or kind.one_factor else None


def _add_undistorted(
    uploads: Rows,
    rows: NDArray[np.int64],
    edges: Edges,
    unit_variance: float,
    stream: SimStream,
) -> None:
    """Add each share to the row of its sender and take it from that of its receiver, where they have one."""
    touched = np.flatnonzero((rows[edges.senders] >= 0) | (rows[edges.receivers] >= 0))
    senders, receivers = edges.senders[touched], edges.receivers[touched]
    givers, takers = rows[senders].tolist(), rows[receivers].tolist()
    deviations = np.sqrt(edges.weights[touched] * unit_variance).astype(uploads.dtype)
    ends = zip(senders.tolist(), receivers.tolist(), strict=True)
    sources = (stream.child("share", *pair) for pair in ends)
    for number, place, share in normal_streams(sources, uploads.shape[1], uploads.dtype):
        share *= deviations[number]
        if givers[number] >= 0:
            uploads[givers[number], place] += share
        if takers[number] >= 0:
            uploads[takers[number], place] -= share


def add_gaussian(vector: Rows, deviation: float, stream: SimStream) -> None:
    """Add simulated `N(0, deviation^2 I)` to `vector`, in place."""
    for place, noise in normal_blocks(stream, vector.size, vector.dtype):
        noise *= vector.dtype.type(deviation)
        vector[place] += noise


def per_client(values: ArrayLike, size: int, field: str) -> FloatArray:
    """One finite, non-negative number per client, from one number or from one per client."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1 or (array.ndim == 1 and array.shape != (size,)):
        raise ConfigError(f"needs one number, or one per client ({size})", field=field)
    if not np.all(np.isfinite(array)) or np.any(array < 0.0):
        raise ConfigError("must be finite and not negative", field=field)
    return np.broadcast_to(array, (size,)).copy()


@dataclass(frozen=True)
class Clique:
    """Clients of whom each sends `weight` unit shares to each other one."""

    seats: NDArray[np.int64]
    weight: float

    def variance(self, unit_variance: float) -> float:
        """Of the normal that stands for the shares of one client, of which the mean over all is taken."""
        return 2.0 * self.seats.size * self.weight * unit_variance


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


Common = tuple[float, SimStream]
"""A vector that all rows have in common: its deviation, negative where it is taken out, and where it is drawn from."""


def add_spread(
    rows: Rows,
    seats: NDArray[np.int64],
    variance: float,
    common: Sequence[Common],
    stream: SimStream,
    name: str = "spread",
) -> None:
    """Add `sqrt(variance) (g_k - mean g)` to each of these rows, and every common vector to all of them, in place.

    Each g_k is drawn from the child of `stream` with that name and seat.
    """
    streams = [stream.child(name, int(seat)) for seat in seats]
    dtype, width = rows.dtype, rows.shape[1]
    deviation = dtype.type(math.sqrt(variance))
    sources = [normal_blocks(source, width, dtype) for source in streams]
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
    rows: Rows,
    places: NDArray[np.int64],
    variance: float,
    common: Sequence[Common],
    streams: Sequence[SimStream],
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
