"""What an adversary cannot know: the covariance of the noise that is left, given all it holds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

from niss.errors import ConfigError
from niss.graph import ShareGraph

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class HiddenNoise:
    """The noise of the honest uploads that the adversary does not know, per coordinate.

    `kept` are the clients that are honest and uploaded, in ascending order; `covariance` is theirs.
    `exposed` marks those whose connected group has no fresh noise at all: its uploads add up exactly.
    """

    kept: IntArray
    covariance: csr_array
    exposed: BoolArray


def hidden_noise(
    graph: ShareGraph,
    *,
    unit_variance: float,
    residual: FloatArray,
    colluders: Collection[int] = (),
    dropped: Collection[int] = (),
    revealed: Collection[tuple[int, int]] = (),
    scales: FloatArray | None = None,
) -> HiddenNoise:
    """Sigma_H = sigma^2 L_H + diag(residual) over the edges that nobody dishonest knows.

    Edges that touch a colluder, and edges named in `revealed` (in either direction), are known to the
    server and vanish. Edges to a dropped client stay on the diagonal: nobody knows them. With `scales`
    an edge contributes c (e_a - s e_b)(e_a - s e_b)^T instead of c (e_a - e_b)(e_a - e_b)^T.
    """
    colluding = client_mask(colluders, graph.size, "colluders")
    missing = client_mask(dropped, graph.size, "dropped")
    unknown = ~colluding[graph.senders] & ~colluding[graph.receivers] & ~_known_edges(graph, revealed)
    if unit_variance == 0.0:
        unknown[:] = False
    senders, receivers = graph.senders[unknown], graph.receivers[unknown]
    weights = unit_variance * graph.weights[unknown]
    factors = np.ones(weights.size) if scales is None else scales[unknown]
    everyone = np.arange(graph.size)
    rows = np.concatenate([senders, receivers, senders, receivers, everyone])
    columns = np.concatenate([senders, receivers, receivers, senders, everyone])
    crossed = -weights * factors
    values = np.concatenate([weights, weights * factors**2, crossed, crossed, residual])
    whole = csr_array(coo_array((values, (rows, columns)), shape=(graph.size, graph.size)))
    kept = np.flatnonzero(~colluding & ~missing)
    exposed = _without_fresh_noise(graph.size, senders, receivers, (residual > 0.0) | missing)
    return HiddenNoise(kept, csr_array(whole[kept][:, kept]), exposed[kept])


def hidden_noise_by_coordinate(
    graph: ShareGraph,
    *,
    unit_variance: float,
    residual: FloatArray,
    colluders: Collection[int],
    dropped: Collection[int],
    revealed: Collection[tuple[int, int]],
    scales: FloatArray,
) -> FloatArray:
    """The same covariance for many coordinates at once: scales (edges x B) give B dense matrices."""
    gone = client_mask(colluders, graph.size, "colluders")
    known = gone[graph.senders] | gone[graph.receivers] | _known_edges(graph, revealed)
    senders, receivers, factors = graph.senders[~known], graph.receivers[~known], scales[~known]
    weights = (unit_variance * graph.weights[~known])[:, None]
    matrices = np.zeros((graph.size, graph.size, scales.shape[1]))
    np.add.at(matrices, (senders, receivers), -weights * factors)
    matrices += matrices.transpose(1, 0, 2)
    everyone = np.arange(graph.size)
    matrices[everyone, everyone] += residual[:, None]
    np.add.at(matrices, (senders, senders), np.broadcast_to(weights, factors.shape))
    np.add.at(matrices, (receivers, receivers), weights * factors**2)
    kept = np.flatnonzero(~gone & ~client_mask(dropped, graph.size, "dropped"))
    return np.ascontiguousarray(matrices[np.ix_(kept, kept)].transpose(2, 0, 1))


def per_client(values: ArrayLike, size: int, field: str) -> FloatArray:
    """One finite, non-negative number per client, from one number or from one per client."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1 or (array.ndim == 1 and array.shape != (size,)):
        raise ConfigError(f"needs one number, or one per client ({size})", field=field)
    if not np.all(np.isfinite(array)) or np.any(array < 0.0):
        raise ConfigError("must be finite and not negative", field=field)
    return np.broadcast_to(array, (size,)).copy()


def client_mask(clients: Collection[int], size: int, field: str) -> BoolArray:
    """True at the clients named."""
    mask = np.zeros(size, dtype=bool)
    for client in clients:
        if not 0 <= client < size:
            raise ConfigError(f"client {client} is not in the graph (0 to {size - 1})", field=field)
        mask[client] = True
    return mask


def _known_edges(graph: ShareGraph, revealed: Collection[tuple[int, int]]) -> BoolArray:
    pairs = np.array([(a, b) for a, b in revealed], dtype=np.int64).reshape(-1, 2)
    if pairs.size and (pairs.min() < 0 or pairs.max() >= graph.size):
        raise ConfigError(f"clients are numbered 0 to {graph.size - 1}", field="revealed")
    codes = np.concatenate([pairs[:, 0] * graph.size + pairs[:, 1], pairs[:, 1] * graph.size + pairs[:, 0]])
    return np.isin(graph.senders * graph.size + graph.receivers, codes)


def _without_fresh_noise(size: int, senders: IntArray, receivers: IntArray, grounded: BoolArray) -> BoolArray:
    """Clients in a connected group that has neither residual noise nor a dropped member."""
    links = coo_array((np.ones(senders.size), (senders, receivers)), shape=(size, size))
    _, group = connected_components(links, directed=False)
    covered = np.zeros(group.max() + 1, dtype=bool)
    covered[group[grounded]] = True
    return np.asarray(~covered[group])
