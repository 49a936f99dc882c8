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

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.views.covariance import (
    DENSE_LIMIT,
    HiddenNoise,
    Knowledge,
    client_mask,
    conditional_variance,
    conditional_variances,
    hidden_noise,
    hidden_noise_by_coordinate,
    per_client,
    require_dense,
    sampled_variance,
)
from niss.views.numerics import find_root

FloatArray = NDArray[np.float64]

# Stands for log(0) in a root search, which needs finite numbers.
_NO_NOISE = -700.0
# Solving for a few clients of a larger graph beats inverting the whole matrix.
_FEW, _SMALL = 16, 200
# Factors per coordinate: small graphs are treated many coordinates at a time.
_STACKED, _BLOCK = 100, 256


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

    unit_variance    sigma^2, the variance of a share of weight 1
    target_variance  the effective variance that each client wants: one number, or one per client
    colluders        clients that tell the server all they know; they are owed nothing

    Raises PrivacyError where nobody is honest, or an honest client receives no share to distort.
    """
    target = target_per_client(target_variance, graph.size)
    honest = np.flatnonzero(~client_mask(colluders, graph.size, "colluders"))

    def worst_ratio(tau2: float) -> float:
        effective = effective_variance(
            graph,
            unit_variance=unit_variance,
            residual_variance=tau2 * unit_variance * graph.in_weight,
            colluders=colluders,
        )
        return float(np.min(effective / target[honest]))

    if honest.size == 0:
        raise PrivacyError("no honest client is left to protect", hint="name fewer colluders")
    return least_tau2(graph, unit_variance, target, honest, worst_ratio)


def least_tau2(
    graph: ShareGraph,
    unit_variance: float,
    target: FloatArray,
    honest: NDArray[np.int64],
    worst_ratio: Callable[[float], float],
) -> float:
    """The smallest tau^2 at which `worst_ratio` (effective variance over target, increasing) reaches 1.

    A bracketed root search in log tau^2, stepped up at the end until the ratio is 1 or more in floating point.
    """
    received = received_variance(graph, unit_variance, honest)

    def shortfall(log_tau2: float) -> float:
        ratio = worst_ratio(float(np.exp(log_tau2)))
        return float(np.log(ratio)) if ratio > 0.0 else _NO_NOISE

    # At `high` the residual alone reaches every target. At `low` the residuals of all clients together
    # do not exceed the largest one, and no effective variance exceeds the variance of the sum.
    high = float(np.log(np.max(target[honest] / received[honest])))
    low = float(np.log(np.max(target[honest]) / np.sum(received)))
    if shortfall(low) >= 0.0:
        return float(np.exp(low))
    root = find_root(shortfall, low, high + 1e-9, xtol=1e-12, rtol=1e-12)
    step = 1e-12 * max(1.0, abs(root))
    while shortfall(root) < 0.0:
        root += step
        step *= 2.0
    return float(np.exp(root))


def received_variance(graph: ShareGraph, unit_variance: float, honest: NDArray[np.int64]) -> FloatArray:
    """The variance of the shares each client receives, refusing rounds in which an honest one gets none."""
    if not np.isfinite(unit_variance) or unit_variance <= 0.0:
        raise ConfigError("must be a finite number above 0", field="unit_variance")
    received = unit_variance * graph.in_weight
    if np.any(received[honest] == 0.0):
        raise PrivacyError(
            f"{int(np.sum(received[honest] == 0.0))} clients receive no share, so distortion gives them no noise",
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
    require_dense(size)
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
