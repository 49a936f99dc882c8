"""`1 / (covariance^-1)_kk`: the variance of each entry given all the others, exactly.

Dense for some thousands of clients, since the inverse of an expander's matrix is full whatever the order
of elimination; for a sample of clients of a larger round by conjugate gradients with an error bound.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack
from scipy.sparse import csr_array, diags_array
from scipy.sparse.linalg import cg

from niss.errors import ConfigError, PrivacyError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# A dense matrix of this many rows takes 1.2 GB.
DENSE_LIMIT = 12_000
# Below this share of the largest eigenvalue an eigenvalue is rounding, and counts as zero noise.
_SINGULAR = 1e-13
# Above this squared pivot the Cholesky factor loses at most half the digits; below it, eigenvalues decide.
_WELL_CONDITIONED = 1e-8


def conditional_variance(covariance: FloatArray) -> FloatArray:
    """The variance of each entry given all the others, from a dense matrix; 0 where singular."""
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


def least_conditional_variance(covariances: FloatArray) -> FloatArray:
    """For a stack of matrices (B x n x n): the least conditional variance of each entry over the stack."""
    scale = np.sqrt(np.einsum("bii->bi", covariances))
    if not np.any(scale == 0.0):
        correlations = covariances / scale[:, :, None] / scale[:, None, :]
        try:
            factors = np.linalg.cholesky(correlations)
        except np.linalg.LinAlgError:
            factors = None
        if factors is not None and np.min(np.einsum("bii->bi", factors)) ** 2 > _WELL_CONDITIONED:
            inverses = np.linalg.inv(factors)
            return np.asarray(np.min(scale**2 / np.einsum("bij,bij->bj", inverses, inverses), axis=0))
    return np.asarray(np.min([conditional_variance(one) for one in covariances], axis=0))


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
