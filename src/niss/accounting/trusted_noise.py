"""What trusted servers leave in the model, to compare carried shares with. All at mu = 1 and sensitivity 1.

A trusted server may correlate its noise over the rounds (the matrix mechanism). With `Gamma` the covariance of the
noise of T rounds and `X = Gamma^-1`, a client with participations P has mu^2 = max over unit vectors g_t of
`sum_{s,t in P} X_st <g_s, g_t>`, which is `1' X[P, P] 1` where X has no negative entry.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from niss.mechanism.correlated import banded_root

FloatArray = NDArray[np.float64]

# Every step towards the best correlated noise costs T^3, so that longer runs would keep a reader waiting.
BEST_ROUNDS = 200


def independent_noise(rounds: int, separation: int) -> FloatArray:
    """Noise variance in the model after each round: independent noise, equal in every round."""
    return np.asarray(math.ceil(rounds / separation) * np.arange(1.0, rounds + 1.0))


def banded_noise(rounds: int, separation: int) -> FloatArray:
    """The same with the truncated square root (BandMF, `mechanism.correlated.BandedRoot`), `separation` bands."""
    root = banded_root(rounds, separation)
    return root.worst_client * root.model_variance


def best_noise(rounds: int, separation: int) -> FloatArray:
    """No correlated noise of a trusted server leaves less than this, on average over the rounds (fixed cyclic cohorts).

    The least `tr(S X^-1)` over X with sensitivity at most 1, `S = A'A / T` and A the sums over rounds. By duality it is
    at least

        (tr (S^1/2 U S^1/2)^1/2)^2 / sum_o lambda_o,       U = blocks lambda_o R_o, R_o a correlation matrix,

    one block for each cohort's rounds, and equal at the best U, since the problem is convex. Every U gives a bound, so
    the mean of what is returned is never above the truth; it is found by ascent over `R_o = F F'` with unit rows. The
    noise that belongs to U is `X^-1 = S^-1/2 (S^1/2 U S^1/2)^1/2 S^-1/2`.
    """
    from scipy.optimize import minimize

    sums = np.tril(np.ones((rounds, rounds)))
    values, vectors = np.linalg.eigh(sums.T @ sums / rounds)
    root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    # A = turn S^1/2, with orthogonal columns.
    turn = sums @ (vectors / np.sqrt(values) @ vectors.T)
    cohort = np.arange(rounds) % separation
    same = cohort[:, None] == cohort
    width = math.ceil(rounds / separation)

    def spectrum_at(point: FloatArray) -> tuple[FloatArray, ...]:
        logs, rows = point[:separation], point[separation:].reshape(rounds, width)
        lengths = np.linalg.norm(rows, axis=1)
        unit = rows / lengths[:, None]
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
        blocks = np.where(same, unit @ unit.T, 0.0)
        spectrum, basis = np.linalg.eigh(root @ (shares[cohort][:, None] * blocks) @ root)
        return np.sqrt(np.maximum(spectrum, 1e-26 * spectrum[-1])), basis, shares, blocks, unit, lengths

    def dual(point: FloatArray) -> tuple[float, FloatArray]:
        spectrum, basis, shares, blocks, unit, lengths = spectrum_at(point)
        weights = shares[cohort]
        total = float(spectrum.sum())
        # Half the gradient of the trace in U; weights are constant within a block.
        slope = root @ (basis / spectrum @ basis.T) @ root / 2.0 * same
        by_row = weights[:, None] * 2.0 * (slope @ unit)
        by_row -= np.sum(by_row * unit, axis=1)[:, None] * unit
        by_cohort = np.bincount(cohort, weights=np.sum(slope * blocks, axis=1), minlength=separation)
        by_log = shares * (by_cohort - float(shares @ by_cohort))
        gradient = np.concatenate([by_log, (by_row / lengths[:, None]).reshape(-1)])
        return -math.log(total), -gradient / total

    start = np.eye(width)[np.arange(rounds) // separation] + 0.3 / math.sqrt(width)
    found = minimize(
        dual,
        np.concatenate([np.zeros(separation), start.reshape(-1)]),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 400, "ftol": 1e-9, "gtol": 1e-7},
    )
    spectrum, basis, *_ = spectrum_at(found.x)
    return np.asarray(spectrum.sum() * ((turn @ basis) ** 2 @ spectrum))
