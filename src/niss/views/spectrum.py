"""The eigenvalue of a graph that says how well it spreads noise."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigvalsh_tridiagonal
from scipy.sparse import csr_array

from niss.randomness import SimStream

FloatArray = NDArray[np.float64]

# Up to this many clients the eigenvalues of the whole matrix take no longer than an iteration.
_DENSE = 300
# Steps of the Lanczos iteration, and the probability with which its start may have been an unlucky one. It is a matter
# of arithmetic, like rounding, and not charged to anyone.
_STEPS, _UNLUCKY = 100, 1e-15


def largest_eigenvalue(weights: csr_array) -> float:
    """An upper bound on lambda: the largest eigenvalue of P A P, with P the projection that takes the mean away.

    Exact for small matrices. Else the Lanczos iteration on the square of P A P, from a random start: its estimate xi of
    the largest eigenvalue of an n x n matrix without negative ones obeys after k steps (Kuczynski, Wozniakowski 1992)

        P(xi < (1 - e) true value) <= 1.648 sqrt(n) exp(-sqrt(e) (2 k - 1)).
    """
    size = weights.shape[0]
    if size <= _DENSE:
        dense = weights.toarray()
        dense -= dense.mean(axis=0)
        dense -= dense.mean(axis=1)[:, None]
        return float(np.linalg.eigvalsh(dense)[-1])

    def times(vector: FloatArray) -> FloatArray:
        product = weights @ (vector - vector.mean())
        return np.asarray(product - product.mean())

    seed = int.from_bytes(np.ascontiguousarray(weights.indices[:64]).tobytes()[:7], "little")
    start = SimStream(seed).child("eigenvalue").generator().standard_normal(size)
    basis = np.zeros((_STEPS, size))
    basis[0] = start / np.linalg.norm(start)
    diagonal, beside = np.zeros(_STEPS), np.zeros(_STEPS - 1)
    steps = _STEPS
    for step in range(_STEPS):
        vector = times(times(basis[step]))
        diagonal[step] = float(basis[step] @ vector)
        # Twice is enough for an orthogonal basis in floating point.
        for _ in range(2):
            vector -= basis[: step + 1].T @ (basis[: step + 1] @ vector)
        length = float(np.linalg.norm(vector))
        if step + 1 == _STEPS or length <= 1e-12 * abs(diagonal[0]):
            steps = step + 1
            break
        beside[step] = length
        basis[step + 1] = vector / length
    estimate = float(eigvalsh_tridiagonal(diagonal[:steps], beside[: steps - 1])[-1])
    missed = (math.log(1.648 * math.sqrt(size) / _UNLUCKY) / (2 * _STEPS - 1)) ** 2
    return math.sqrt(max(estimate, 0.0) / (1.0 - missed))
