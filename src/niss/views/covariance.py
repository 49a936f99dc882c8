"""What an adversary cannot know: the covariance of the noise that is left to it, and what that is worth to each client.

`hidden_noise` builds the covariance over the clients that are honest and uploaded; `conditional_variance` is
`1 / (covariance^-1)_kk`, the variance of each entry given all the others, exactly. It is dense for some thousands of
clients, since the inverse of an expander's matrix is full whatever the order of elimination; `sampled_variance` serves
a few clients of a larger round by conjugate gradients with an error bound.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import lapack
from scipy.sparse import coo_array, csr_array, diags_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import cg

from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# A dense matrix of this many rows takes 1.2 GB.
DENSE_LIMIT = 12_000
# Below this share of the largest eigenvalue an eigenvalue is rounding, and counts as zero noise.
_SINGULAR = 1e-13
# Above this squared pivot the Cholesky factor loses at most half the digits; below it, eigenvalues decide.
_WELL_CONDITIONED = 1e-8


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


def _groups(size: int, senders: IntArray, receivers: IntArray) -> IntArray:
    """By client, the number of the connected group that it is in."""
    links = coo_array((np.ones(senders.size), (senders, receivers)), shape=(size, size))
    return np.asarray(connected_components(links, directed=False)[1], dtype=np.int64)


def _without_fresh_noise(size: int, senders: IntArray, receivers: IntArray, grounded: BoolArray) -> BoolArray:
    """Clients in a connected group that has neither residual noise nor a dropped member."""
    group = _groups(size, senders, receivers)
    covered = np.zeros(group.max() + 1, dtype=bool)
    covered[group[grounded]] = True
    return np.asarray(~covered[group])


def conditional_variance(covariance: FloatArray) -> FloatArray:
    """The variance of each entry given all the others, `1 / (covariance^-1)_kk`, from a dense matrix; 0 where singular.

    By Cholesky on the correlations, which scales clients of very different noise alike; where that is badly
    conditioned, by eigenvalues, of which the tiny ones count as none.
    """
    diagonal = np.diag(covariance)
    result = np.zeros(len(covariance))
    noisy = np.flatnonzero(diagonal > 0.0)
    if noisy.size == 0:
        return result
    scale = np.sqrt(diagonal[noisy])
    correlation = np.asfortranarray(
        covariance if noisy.size == len(covariance) else covariance[np.ix_(noisy, noisy)]
    )
    correlation = correlation / scale / scale[:, None]
    factor, failed = lapack.dpotrf(np.asfortranarray(correlation), lower=1, clean=1)
    if not failed and float(np.min(np.diag(factor))) ** 2 > _WELL_CONDITIONED:
        inverse, _ = lapack.dtrtri(factor, lower=1, overwrite_c=1)
        result[noisy] = scale**2 / np.einsum("ij,ij->j", inverse, inverse)
        return result
    values, vectors = np.linalg.eigh(correlation)
    null = values <= _SINGULAR * values[-1]
    precision = np.sum(vectors[:, ~null] ** 2 / values[~null], axis=1)
    # A null direction strips every client that has a part in it; the others keep their noise.
    exposed = np.sum(vectors[:, null] ** 2, axis=1) > _SINGULAR
    result[noisy] = np.where(exposed, 0.0, scale**2 / precision)
    return result


def conditional_variances(covariances: FloatArray) -> FloatArray:
    """The same for each of a stack of matrices (B x n x n)."""
    scale = np.sqrt(np.einsum("bii->bi", covariances))
    if not np.any(scale == 0.0):
        correlations = covariances / scale[:, :, None] / scale[:, None, :]
        try:
            factors = np.linalg.cholesky(correlations)
        except np.linalg.LinAlgError:
            factors = None
        if factors is not None and np.min(np.einsum("bii->bi", factors)) ** 2 > _WELL_CONDITIONED:
            inverses = np.linalg.inv(factors)
            return np.asarray(scale**2 / np.einsum("bij,bij->bj", inverses, inverses))
    return np.array([conditional_variance(one) for one in covariances])


def variances_among(
    links: FloatArray, kept: IntArray, *, unit_variance: float, residual: FloatArray
) -> FloatArray:
    """Effective variances against many sets of colluders at once.

    links     A: weights between any two clients, both directions added
    kept      the honest clients with each set, a row for each (B x h)
    residual  of all clients, above 0

    `Sigma_H = sigma^2 (D_H - A_H) + diag(residual)`, A_H the rows and columns of the honest and D_H its row sums.
    """
    within = unit_variance * links[kept[:, :, None], kept[:, None, :]]
    own = np.arange(kept.shape[1])
    covariances = -within
    covariances[:, own, own] += within.sum(axis=2) + residual[kept]
    return conditional_variances(covariances)


def sampled_variance(covariance: csr_array, places: IntArray, *, least_residual: float) -> FloatArray:
    """The same for a few entries of a large sparse matrix, rounded to the safe side.

    Conjugate gradients solve `covariance x = e_k`. With residual `r` and `lambda_min >= least_residual`,

        (covariance^-1)_kk <= (d/2 + sqrt(d^2/4 + x_k))^2,    d = ||r|| / sqrt(least_residual),

    so what is returned is never above the true value, and below it by about 1e-9 of it.
    """
    if least_residual <= 0.0:
        raise PrivacyError(
            "clients without residual noise in a round this large",
            hint=f"give every client residual noise, or stay below {DENSE_LIMIT} clients",
        )
    jacobi = diags_array(1.0 / covariance.diagonal())
    result = np.empty(places.size)
    for number, place in enumerate(places):
        unit = np.zeros(covariance.shape[0])
        unit[place] = 1.0
        solution, failed = cg(covariance, unit, rtol=1e-11, atol=0.0, maxiter=5_000, M=jacobi)
        if failed:
            raise PrivacyError(
                "the joint view of a client could not be computed to full precision",
                hint="more residual noise or a better connected graph",
            )
        error = float(np.linalg.norm(unit - covariance @ solution)) / np.sqrt(least_residual)
        result[number] = 1.0 / (error / 2.0 + np.sqrt(error**2 / 4.0 + solution[place])) ** 2
    return result


def require_dense(size: int) -> None:
    """Refuse a matrix too large to invert whole, saying what to do."""
    if size > DENSE_LIMIT:
        raise ConfigError(
            f"{size} clients are too many for the whole matrix",
            field="clients",
            hint="name the clients to compute, for example clients=range(10)",
        )
