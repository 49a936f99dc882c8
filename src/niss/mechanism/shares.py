"""The noise shares of a round: drawn, given to both ends of each edge, distorted, added.

Client `k` uploads (the package's notation; `c_e` unit shares merged on edge `e`)

    y_k = p_k x_k + sum_{e out of k} n_e - sum_{e into k} s_e n_e               multiplicative
    y_k = p_k x_k + sum_{e out of k} n_e - sum_{e into k} n_e + residual_k      additive

with `n_e ~ N(0, c_e sigma^2 I)`, `s_e ~ N(1, tau_k^2)`, `residual_k ~ N(0, tau_k^2 sigma^2 in_k I)`
and `in_k` the total weight of the edges into `k`. The distortions:

- `scalar`: one `s_e` per share, the letter of the paper's Algorithm 2;
- `coordinate`: a fresh `s_e` in every coordinate, which is what the paper's analysis means;
- `additive`: fresh noise instead of a product, the only one that survives active colluders.

All three leave the aggregate variance `sum_k tau_k^2 sigma^2 in_k` (the paper's Lemma 1 and Theorem 2).
Where the paper's Algorithm 2 draws shares of variance `sigma_k^2`, its text and proofs need the unit
variance `sigma^2`: the unit variance is used here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.errors import ConfigError
from niss.randomness import SimStream
from niss.randomness.normals import normal_blocks

DISTORTIONS = ("scalar", "coordinate", "additive")

FloatArray = NDArray[np.float64]


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


def share_counts(variance: ArrayLike, unit_variance: float) -> FloatArray:
    """`v_k = sigma_k^2 / sigma^2` unit shares per client; may be fractional, never below 1."""
    if not math.isfinite(unit_variance) or unit_variance <= 0.0:
        raise ConfigError(f"must be a finite number above 0, not {unit_variance!r}", field="unit_variance")
    own = np.atleast_1d(np.asarray(variance, dtype=np.float64))
    if own.size == 0 or not np.all(np.isfinite(own)):
        raise ConfigError("needs a finite number for every client", field="variance")
    counts = own / unit_variance
    if counts.min() < 1.0 - 1e-12:
        raise ConfigError(
            f"a client would send {counts.min():.3g} unit shares, fewer than one",
            field="unit_variance",
            hint=f"the unit noise must not exceed any client's own: at most {own.min():.6g}",
        )
    return counts


def add_shares(
    uploads: NDArray[np.floating[Any]],
    edges: Edges,
    *,
    unit_variance: float,
    tau2: ArrayLike,
    distortion: str,
    stream: SimStream,
    keep_factors: bool = False,
) -> NDArray[np.floating[Any]] | None:
    """Add a round's simulated shares and their distortion to `uploads` (m x h), in place.

    Streams edge by edge, block by block: memory beyond `uploads` is a few blocks, never v x h. Every edge draws
    from its own named child of `stream`, so the shares do not depend on the order of the edges.
    Returns the drawn factors, which the joint view conditions on: one `s_e` per edge for the `scalar`
    distortion; for `coordinate`, edges x h of them, kept only if `keep_factors` asks for that much memory.
    """
    if uploads.ndim != 2 or len(uploads) != edges.size:
        raise ConfigError(
            f"shape {uploads.shape} does not give one row to each of {edges.size} clients", field="uploads"
        )
    clients, coordinates = uploads.shape
    if not math.isfinite(unit_variance) or unit_variance < 0.0:
        raise ConfigError(f"must be finite and not negative, not {unit_variance!r}", field="unit_variance")
    tau = np.sqrt(_per_client(tau2, clients, "tau2"))
    if distortion not in DISTORTIONS:
        raise ConfigError(
            f"unknown distortion {distortion!r}",
            field="distortion",
            hint="use one of: " + ", ".join(DISTORTIONS),
        )
    dtype = uploads.dtype
    kept = distortion == "coordinate" and keep_factors
    scales = np.ones(
        (edges.senders.size, coordinates) if kept else edges.senders.size, dtype=dtype if kept else float
    )
    for index, (sender, receiver, weight) in enumerate(
        zip(edges.senders, edges.receivers, edges.weights, strict=True)
    ):
        source = stream.child("share", int(sender), int(receiver))
        distorting = source.child("distortion")
        factors = None
        if distortion == "scalar" and tau[receiver] > 0.0:
            scales[index] = 1.0 + tau[receiver] * distorting.generator().standard_normal()
        if distortion == "coordinate" and tau[receiver] > 0.0:
            factors = normal_blocks(distorting, coordinates, dtype)
        for place, share in normal_blocks(source, coordinates, dtype):
            share *= dtype.type(math.sqrt(weight * unit_variance))
            uploads[sender, place] += share
            if factors is not None:
                factor = next(factors)[1]
                factor *= dtype.type(tau[receiver])
                factor += dtype.type(1.0)
                if kept:
                    scales[index, place] = factor
                share *= factor
            elif distortion == "scalar":
                share *= dtype.type(scales[index])
            uploads[receiver, place] -= share
    if distortion == "additive":
        residual = tau * np.sqrt(unit_variance * edges.in_weight)
        for client in np.flatnonzero(residual):
            add_gaussian(uploads[client], float(residual[client]), stream.child("residual", int(client)))
    return scales if kept or distortion == "scalar" else None


def add_gaussian(vector: NDArray[np.floating[Any]], deviation: float, stream: SimStream) -> None:
    """Add simulated `N(0, deviation^2 I)` to `vector`, in place."""
    for place, noise in normal_blocks(stream, vector.size, vector.dtype):
        noise *= vector.dtype.type(deviation)
        vector[place] += noise


def aggregate_variance(edges: Edges, *, unit_variance: float, tau2: ArrayLike) -> float:
    """What does not cancel: `sum_k tau_k^2 sigma^2 in_k` per coordinate.

    With in-weight = out-weight = v_k this is the paper's Theorem 2, `sum_k sigma_k^2 tau_k^2`.
    """
    return float(np.sum(_per_client(tau2, edges.size, "tau2") * unit_variance * edges.in_weight))


def _per_client(values: ArrayLike, clients: int, field: str) -> FloatArray:
    given = np.asarray(values, dtype=np.float64)
    if given.shape not in ((), (1,), (clients,)):
        raise ConfigError(f"needs one number, or one per client ({clients})", field=field)
    array = np.broadcast_to(given, (clients,))
    if not np.all(np.isfinite(array)) or array.min() < 0.0:
        raise ConfigError("must be finite and not negative", field=field)
    return array
