"""The joint view: what a server that sees every upload really learns.

Given all uploads and everything the colluders know, the noise that protects the honest clients has,
per coordinate, the covariance

    Sigma_H = sigma^2 L_H + diag(residual variances)

with `L_H` the weighted Laplacian of the honest-honest edges. Moving one client's contribution by
`Delta_k` is exactly, and tightly, mu_k-GDP with

    mu_k = Delta_k sqrt((Sigma_H^-1)_kk),    effective variance 1 / (Sigma_H^-1)_kk.

A connected group of honest clients without residual noise has none: its uploads sum to the exact sum.

`hidden_noise` builds the covariance over the clients that are honest and uploaded; what it is worth to each of them is
`niss.views.numerics.conditional_variance`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.mechanism.shares import per_client
from niss.views.numerics import (
    DENSE_LIMIT,
    conditional_variance,
    conditional_variances,
    find_root,
    sampled_variance,
)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# Stands for log(0) in a root search, which needs finite numbers.
_NO_NOISE = -700.0
# Solving for a few clients of a larger graph beats inverting the whole matrix.
_FEW, _SMALL = 16, 200
# Factors per coordinate: small graphs are treated many coordinates at a time.
_STACKED, _BLOCK = 100, 256


@dataclass(frozen=True)
class HiddenNoise:
    """The noise of the honest uploads that the adversary does not know, per coordinate.

    kept        the clients that are honest and uploaded, in ascending order
    covariance  of their noise, in that order
    exposed     which of them are in a connected group without any fresh noise: its uploads add up exactly
    """

    kept: IntArray
    covariance: csr_array
    exposed: BoolArray


class Knowledge(NamedTuple):
    """What the adversary holds besides all uploads.

    colluders  clients that tell it all they know; edges that touch one are known
    dropped    clients that never uploaded; nobody knows their edges, which stay on the diagonal
    revealed   pairs of clients whose shared seeds it was given; edges between them, either way, are known
    """

    colluders: Collection[int] = ()
    dropped: Collection[int] = ()
    revealed: Collection[tuple[int, int]] = ()


NOTHING = Knowledge()


def hidden_noise(
    graph: ShareGraph,
    known: Knowledge = NOTHING,
    *,
    unit_variance: float,
    residual: FloatArray,
    scales: FloatArray | None = None,
) -> HiddenNoise:
    """Sigma_H = sigma^2 L_H + diag(residual) over the edges that nobody dishonest knows.

    With `scales` an edge contributes c (e_a - s e_b)(e_a - s e_b)^T instead of c (e_a - e_b)(e_a - e_b)^T.
    """
    unknown, kept = _unknown_edges(graph, known)
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
    grounded = (residual > 0.0) | client_mask(known.dropped, graph.size, "dropped")
    exposed = _without_fresh_noise(graph.size, senders, receivers, grounded)
    return HiddenNoise(kept, csr_array(whole[kept][:, kept]), exposed[kept])


def hidden_noise_by_coordinate(
    graph: ShareGraph, known: Knowledge, *, unit_variance: float, residual: FloatArray, scales: FloatArray
) -> FloatArray:
    """The same covariance for many coordinates at once: scales (edges x B) give B dense matrices."""
    unknown, kept = _unknown_edges(graph, known)
    senders, receivers, factors = graph.senders[unknown], graph.receivers[unknown], scales[unknown]
    weights = (unit_variance * graph.weights[unknown])[:, None]
    matrices = np.zeros((graph.size, graph.size, scales.shape[1]))
    np.add.at(matrices, (senders, receivers), -weights * factors)
    matrices += matrices.transpose(1, 0, 2)
    everyone = np.arange(graph.size)
    matrices[everyone, everyone] += residual[:, None]
    np.add.at(matrices, (senders, senders), np.broadcast_to(weights, factors.shape))
    np.add.at(matrices, (receivers, receivers), weights * factors**2)
    return np.ascontiguousarray(matrices[np.ix_(kept, kept)].transpose(2, 0, 1))


def _unknown_edges(graph: ShareGraph, known: Knowledge) -> tuple[BoolArray, IntArray]:
    """The edges that the adversary does not know, and the clients that are honest and uploaded."""
    colluding = client_mask(known.colluders, graph.size, "colluders")
    missing = client_mask(known.dropped, graph.size, "dropped")
    pairs = np.array([(a, b) for a, b in known.revealed], dtype=np.int64).reshape(-1, 2)
    if pairs.size and (pairs.min() < 0 or pairs.max() >= graph.size):
        raise ConfigError(f"clients are numbered 0 to {graph.size - 1}", field="revealed")
    codes = np.concatenate([pairs @ [graph.size, 1], pairs @ [1, graph.size]])
    told = np.isin(graph.senders * graph.size + graph.receivers, codes)
    unknown = ~(colluding[graph.senders] | colluding[graph.receivers] | told)
    return unknown, np.flatnonzero(~colluding & ~missing)


def client_mask(clients: Collection[int], size: int, field: str) -> BoolArray:
    """True at the clients named."""
    mask = np.zeros(size, dtype=bool)
    for client in clients:
        if not 0 <= client < size:
            raise ConfigError(f"client {client} is not in the graph (0 to {size - 1})", field=field)
        mask[client] = True
    return mask


def _without_fresh_noise(size: int, senders: IntArray, receivers: IntArray, grounded: BoolArray) -> BoolArray:
    """Clients in a connected group that has neither residual noise nor a dropped member."""
    links = coo_array((np.ones(senders.size), (senders, receivers)), shape=(size, size))
    group = connected_components(links, directed=False)[1]
    covered = np.zeros(group.max() + 1, dtype=bool)
    covered[group[grounded]] = True
    return np.asarray(~covered[group])


def effective_variance(
    graph: ShareGraph,
    *,
    unit_variance: float,
    residual_variance: ArrayLike,
    colluders: Collection[int] = (),
    dropped: Collection[int] = (),
    revealed: Collection[tuple[int, int]] = (),
    scales: ArrayLike | None = None,
    clients: Collection[int] | None = None,
) -> FloatArray:
    """Effective noise variance of each honest client that uploaded, in the order of their numbers.

    unit_variance       sigma^2, the variance of a share of weight 1
    residual_variance   the fresh noise each client adds: a number, or one per client
    colluders           clients that tell the server all they know; their edges protect nobody
    dropped             honest clients that never uploaded and whose edges stay uncancelled (`tolerate`):
                        they keep protecting the others, by the principal submatrix
    revealed            pairs of clients whose shared seeds were given to the server (`repair`): those
                        edges protect nobody
    scales              the factors a multiplicative distortion really drew, one per edge (`scalar`), or
                        one per edge and coordinate (`coordinate`, of which the worst coordinate counts);
                        the covariance is conditioned on them, and received shares earn no other credit
    clients             compute only these, in this order; needed above some thousand clients

    0 means that there is no protection at all.
    """
    residual = per_client(residual_variance, graph.size, "residual_variance")
    if not 0.0 <= unit_variance < np.inf:
        raise ConfigError("must be a finite number, not below 0", field="unit_variance")
    factors = _scales(graph, scales)

    known = Knowledge(colluders, dropped, revealed)

    def variance(drawn: FloatArray | None) -> FloatArray:
        hidden = hidden_noise(graph, known, unit_variance=unit_variance, residual=residual, scales=drawn)
        places = None if clients is None else _places(hidden.kept, clients)
        return _variance(hidden, places, residual, drawn is not None)

    if factors is None or factors.ndim == 1:
        return variance(factors)
    if clients is None and graph.size <= _STACKED:
        blocks = np.array_split(factors, -(-factors.shape[1] // _BLOCK), axis=1)
        stacks = (
            hidden_noise_by_coordinate(
                graph, known, unit_variance=unit_variance, residual=residual, scales=block
            )
            for block in blocks
        )
        least: FloatArray = np.min([conditional_variances(stack).min(axis=0) for stack in stacks], axis=0)
        return least
    worst: FloatArray = np.min([variance(column) for column in factors.T], axis=0)
    return worst


def least_tau2(received: FloatArray, target: FloatArray, worst_ratio: Callable[[float], float]) -> float:
    """The smallest tau^2 at which `worst_ratio` (effective variance over target, increasing) reaches 1.

    received  variance of the shares that each client receives

    A bracketed root search in log tau^2, stepped up at the end until the ratio is 1 or more in floating point.
    """

    def shortfall(log_tau2: float) -> float:
        ratio = worst_ratio(float(np.exp(log_tau2)))
        return float(np.log(ratio)) if ratio > 0.0 else _NO_NOISE

    # At `high` the residual alone reaches every target. At `low` the residuals of all clients together
    # do not exceed the largest one, and no effective variance exceeds the variance of the sum.
    high = float(np.log(np.max(target / received)))
    low = float(np.log(np.max(target) / np.sum(received)))
    if shortfall(low) >= 0.0:
        return float(np.exp(low))
    root = find_root(shortfall, low, high + 1e-9, xtol=1e-12, rtol=1e-12)
    step = 1e-12 * max(1.0, abs(root))
    while shortfall(root) < 0.0:
        root += step
        step *= 2.0
    return float(np.exp(root))


def received_variance(graph: ShareGraph, unit_variance: float) -> FloatArray:
    """The variance of the shares each client receives, refusing rounds in which one gets none."""
    if not np.isfinite(unit_variance) or unit_variance <= 0.0:
        raise ConfigError("must be a finite number above 0", field="unit_variance")
    received = unit_variance * graph.in_weight
    if np.any(received == 0.0):
        raise PrivacyError(
            f"{int(np.sum(received == 0.0))} clients receive no share, so distortion gives them no noise",
            hint="use graph = 'regular', in which everyone receives as much as it sends",
        )
    return np.asarray(received)


def target_per_client(values: ArrayLike, size: int) -> FloatArray:
    """One wanted variance per client, all above 0."""
    target = per_client(values, size, "target_variance")
    if np.any(target == 0.0):
        raise ConfigError("must be above 0", field="target_variance")
    return target


def _variance(
    hidden: HiddenNoise, places: NDArray[np.int64] | None, residual: FloatArray, conditioned: bool
) -> FloatArray:
    """The effective variances of one view, at `places` or everywhere.

    conditioned  factors were drawn, so that nothing cancels by construction: the matrix itself shows what is exposed
    """
    size = hidden.kept.size
    solid = np.arange(size) if conditioned else np.flatnonzero(~hidden.exposed)
    part = hidden.covariance if solid.size == size else hidden.covariance[solid][:, solid]
    least = float(residual[hidden.kept[solid]].min(initial=np.inf))
    few = places is not None and places.size <= _FEW and size > _SMALL and least > 0.0
    whole = np.zeros(size)
    if places is not None and (few or size > DENSE_LIMIT):
        wanted = np.intersect1d(places, solid)
        if wanted.size:
            rows = np.searchsorted(solid, wanted)
            whole[wanted] = sampled_variance(part, rows, least_residual=least)
        return whole[places]
    if size > DENSE_LIMIT:
        raise ConfigError(
            f"{size} clients are too many for the whole matrix",
            field="clients",
            hint="name the clients to compute, for example clients=range(10)",
        )
    if solid.size:
        whole[solid] = conditional_variance(part.toarray(order="F"))
    return whole if places is None else whole[places]


def _places(kept: NDArray[np.int64], clients: Collection[int]) -> NDArray[np.int64]:
    wanted = np.asarray(list(clients), dtype=np.int64)
    places = np.searchsorted(kept, wanted)
    found = np.isin(wanted, kept)
    if not np.all(found):
        raise ConfigError(
            f"client {int(wanted[~found][0])} is not among the honest clients that uploaded", field="clients"
        )
    return places


def _scales(graph: ShareGraph, scales: ArrayLike | None) -> FloatArray | None:
    if scales is None:
        return None
    factors = np.asarray(scales, dtype=np.float64)
    if factors.ndim == 0:
        factors = np.full(graph.senders.shape, float(factors))
    if factors.shape[0] != graph.senders.size or factors.ndim > 2 or not np.all(np.isfinite(factors)):
        raise ConfigError(
            f"needs one finite factor per edge ({graph.senders.size}), or one per edge and coordinate",
            field="scales",
        )
    return None if np.all(factors == 1.0) else factors
