"""The joint view: what a server that sees every upload really learns.

Given all uploads and everything the colluders know, the noise that protects the honest clients has,
per coordinate, the covariance

    Sigma_H = sigma^2 L_H + diag(residual variances)

with `L_H` the weighted Laplacian of the honest-honest edges. Moving one client's contribution by
`Delta_k` is exactly, and tightly, mu_k-GDP with

    mu_k = Delta_k sqrt((Sigma_H^-1)_kk),    effective variance 1 / (Sigma_H^-1)_kk.

A connected group of honest clients without residual noise has none: its uploads sum to the exact sum.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import brentq
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph

FloatArray = NDArray[np.float64]

# Below this share of the largest eigenvalue an eigenvalue is rounding, and counts as zero noise.
_SINGULAR = 1e-13
# Above this squared pivot the Cholesky factor loses at most half the digits; below it, eigenvalues decide.
_WELL_CONDITIONED = 1e-8
# Stands for log(0) in a root search, which needs finite numbers.
_NO_NOISE = -700.0


def effective_variance(
    graph: ShareGraph,
    *,
    unit_variance: float,
    residual_variance: ArrayLike,
    colluders: Collection[int] = (),
    dropped: Collection[int] = (),
    scales: ArrayLike | None = None,
) -> FloatArray:
    """Effective noise variance of each honest client that uploaded, in the order of their numbers.

    `residual_variance` is the fresh noise each client adds (a number, or one per client). `colluders`
    tell the server all they know; their edges protect nobody. `dropped` clients are honest and never
    uploaded: their edges stay uncancelled and keep protecting the others (principal submatrix).
    `scales` are the factors `s_e` a multiplicative `scalar` distortion really drew, one per edge; the
    covariance is then conditioned on them, `sigma^2 sum_e c_e (e_a - s_e e_b)(e_a - s_e e_b)^T`.
    0 means that there is no protection at all.
    """
    residual = _per_client(residual_variance, graph.size, "residual_variance")
    if not np.isfinite(unit_variance) or unit_variance < 0.0:
        raise ConfigError("must be a finite number, not below 0", field="unit_variance")
    colluding = _mask(colluders, graph.size, "colluders")
    missing = _mask(dropped, graph.size, "dropped")
    kept = np.flatnonzero(~colluding & ~missing)
    if scales is not None:
        scales = np.asarray(scales, dtype=np.float64)
        if scales.shape not in ((), graph.senders.shape) or not np.all(np.isfinite(scales)):
            raise ConfigError(f"needs one finite factor per edge ({graph.senders.size})", field="scales")
        if np.all(scales == 1.0):
            scales = None
    covariance = _honest_covariance(graph, unit_variance, residual, colluding, scales)[np.ix_(kept, kept)]
    if scales is not None:
        return _conditional_variance(covariance)
    singular = _unprotected(graph, unit_variance, residual, colluding, missing)[kept]
    result = np.zeros(kept.size)
    solid = np.flatnonzero(~singular)
    if solid.size:
        result[solid] = _conditional_variance(covariance[np.ix_(solid, solid)])
    return result


def calibrate_tau2(
    graph: ShareGraph,
    *,
    unit_variance: float,
    target_variance: ArrayLike,
    colluders: Collection[int] = (),
) -> float:
    """The smallest common tau^2 that gives every honest client its target variance in the joint view.

    The residual noise of client k is `tau^2 sigma^2 in_k` (additive distortion). The worst client of this
    very graph decides. The result is verified with the exact matrix before it is returned.
    """
    target = _per_client(target_variance, graph.size, "target_variance")
    if np.any(target == 0.0):
        raise ConfigError("must be above 0", field="target_variance")
    if not np.isfinite(unit_variance) or unit_variance <= 0.0:
        raise ConfigError("must be a finite number above 0", field="unit_variance")
    honest = np.flatnonzero(~_mask(colluders, graph.size, "colluders"))
    received = unit_variance * graph.in_weight

    def shortfall(log_tau2: float) -> float:
        effective = effective_variance(
            graph,
            unit_variance=unit_variance,
            residual_variance=np.exp(log_tau2) * received,
            colluders=colluders,
        )
        worst = float(np.min(effective / target[honest]))
        return float(np.log(worst)) if worst > 0.0 else _NO_NOISE

    if honest.size == 0:
        raise PrivacyError("no honest client is left to protect", hint="name fewer colluders")
    if np.any(received[honest] == 0.0):
        raise PrivacyError(
            f"{int(np.sum(received[honest] == 0.0))} clients receive no share, so distortion gives them no noise",
            hint="use graph = 'regular', in which everyone receives as much as it sends",
        )
    # At `high` the residual alone reaches every target. At `low` the residuals of all clients together
    # do not exceed the largest one, and no effective variance exceeds the variance of the sum.
    high = float(np.log(np.max(target[honest] / received[honest])))
    low = float(np.log(np.max(target[honest]) / np.sum(received[honest])))
    if shortfall(low) >= 0.0:
        return float(np.exp(low))
    root = float(brentq(shortfall, low, high + 1e-9, xtol=1e-12, rtol=1e-12))
    step = 1e-12 * max(1.0, abs(root))
    while shortfall(root) < 0.0:
        root += step
        step *= 2.0
    return float(np.exp(root))


def _honest_covariance(
    graph: ShareGraph,
    unit_variance: float,
    residual: FloatArray,
    colluding: NDArray[np.bool_],
    scales: ArrayLike | None,
) -> FloatArray:
    honest_edge = ~colluding[graph.senders] & ~colluding[graph.receivers]
    senders, receivers = graph.senders[honest_edge], graph.receivers[honest_edge]
    weights = unit_variance * graph.weights[honest_edge]
    factors = np.ones(weights.size)
    if scales is not None:
        factors = np.broadcast_to(np.asarray(scales, dtype=np.float64), graph.senders.shape)[honest_edge]
    covariance = np.zeros((graph.size, graph.size))
    np.add.at(covariance, (senders, receivers), -weights * factors)
    covariance += covariance.T
    diagonal = residual.copy()
    np.add.at(diagonal, senders, weights)
    np.add.at(diagonal, receivers, weights * factors**2)
    np.fill_diagonal(covariance, diagonal)
    return covariance


def _unprotected(
    graph: ShareGraph,
    unit_variance: float,
    residual: FloatArray,
    colluding: NDArray[np.bool_],
    missing: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Clients in a connected honest group that has neither residual noise nor a dropped member."""
    honest_edge = ~colluding[graph.senders] & ~colluding[graph.receivers]
    if unit_variance == 0.0:
        honest_edge[:] = False
    ones = np.ones(int(honest_edge.sum()))
    links = coo_array(
        (ones, (graph.senders[honest_edge], graph.receivers[honest_edge])), shape=(graph.size,) * 2
    )
    _, group = connected_components(links, directed=False)
    covered = np.zeros(group.max() + 1, dtype=bool)
    covered[group[(residual > 0.0) | missing]] = True
    return np.asarray(~covered[group])


def _conditional_variance(covariance: FloatArray) -> FloatArray:
    """`1 / (covariance^-1)_kk`: the variance of each entry given all the others; 0 where singular."""
    result = np.zeros(len(covariance))
    noisy = np.flatnonzero(np.diag(covariance) > 0.0)
    if noisy.size == 0:
        return result
    scale = np.sqrt(np.diag(covariance)[noisy])
    correlation = covariance[np.ix_(noisy, noisy)] / np.outer(scale, scale)
    try:
        factor = cholesky(correlation, lower=True, check_finite=False)
    except np.linalg.LinAlgError:
        factor = None
    if factor is not None and np.min(np.diag(factor)) ** 2 > _WELL_CONDITIONED:
        inverse = solve_triangular(factor, np.eye(noisy.size), lower=True, check_finite=False)
        result[noisy] = scale**2 / np.sum(inverse**2, axis=0)
        return result
    values, vectors = np.linalg.eigh(correlation)
    null = values <= _SINGULAR * values[-1]
    precision = np.sum(vectors[:, ~null] ** 2 / values[~null], axis=1)
    # A null direction strips every client that has a part in it; the others keep their noise.
    exposed = np.sum(vectors[:, null] ** 2, axis=1) > _SINGULAR
    result[noisy] = np.where(exposed, 0.0, scale**2 / precision)
    return result


def _per_client(values: ArrayLike, size: int, field: str) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1 or (array.ndim == 1 and array.shape != (size,)):
        raise ConfigError(f"needs one number, or one per client ({size})", field=field)
    if not np.all(np.isfinite(array)) or np.any(array < 0.0):
        raise ConfigError("must be finite and not negative", field=field)
    return np.broadcast_to(array, (size,)).copy()


def _mask(clients: Collection[int], size: int, field: str) -> NDArray[np.bool_]:
    mask = np.zeros(size, dtype=bool)
    for client in clients:
        if not 0 <= client < size:
            raise ConfigError(f"client {client} is not in the graph (0 to {size - 1})", field=field)
        mask[client] = True
    return mask
