"""Numbers that bounds rest on: roots, tails of distributions, variances given all else, eigenvalues of graphs.

`scipy.optimize` and `scipy.stats` have roots and tails too, but importing either takes longer than most plans.

`conditional_variance` is `1 / (covariance^-1)_kk`, the variance of each entry given all the others, exactly. It is
dense for some thousands of clients, since the inverse of an expander's matrix is full whatever the order of
elimination; `sampled_variance` serves a few clients of a larger round by conjugate gradients with an error bound.

**What eigenvalues prove about a round in which nobody colludes** (`connected_bound`).
The exact joint view of a client takes the inverse of the covariance `Sigma = sigma^2 L + diag(eta_j^2)`, L the weighted
Laplacian. Of a round of thousands that matrix is not built: what a client has is bounded from below by sparse products.
By Thomson's principle (`niss.views.collusion`) any unit flow from k to the ground bounds `(Sigma^-1)_kk` from above.
Let it leave to the ground in proportion to the residuals, `g_j = eta_j^2 / sum eta^2`, and be optimal within the graph:

    (Sigma^-1)_kk <= 1 / sum_j eta_j^2 + u' L^+ u / sigma^2,    u = e_k - g.

u has sum 0, so of the spectrum of L only what lies at `l <= lambda_2` or above counts. For x >= l and any b > 0

    q(x) - 1/x = (x - l) (x - b)^2 / (l b^2 x) >= 0

with a quadratic q, so `u' L^+ u <= u' q(L) u`, which takes no more than `|u|^2`, `u' L u` and `|L u|^2`. The best b is
`M + V / (M - l)`, M and V mean and variance of the spectrum as u weighs it: the Gauss-Radau rule (Golub, Meurant 1994)
with its fixed node at l. On a regular random graph with 10 neighbours it is 2 % above the true value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack
from scipy.sparse import csr_array, diags_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import cg
from scipy.special import betainc, gammainc, gammaln

from niss.errors import PrivacyError
from niss.graph import ShareGraph
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# A dense matrix of this many rows takes 1.2 GB.
DENSE_LIMIT = 12_000
# Below this share of the largest eigenvalue an eigenvalue is rounding, and counts as zero noise.
_SINGULAR = 1e-13
# Above this squared pivot the Cholesky factor loses at most half the digits; below it, eigenvalues decide.
_WELL_CONDITIONED = 1e-8
# Of a root search.
_EPSILON, _MOST_STEPS = 2.0**-52, 100
# Up to this many participants the whole matrix may be inverted where nobody colludes, which takes seconds; beyond the
# second number only where some have fewer links than the third, alike in weight: with 20 shares each way of strength 1
# or more the bound is within 0.4 % of the truth, with 10 within 1 %.
EXACT_LIMIT, _SMALL, _MANY_LINKS = 2_000, 500, 30.0
# Up to this many clients the eigenvalues of the whole matrix take no longer than an iteration.
_DENSE = 300
# Steps of the Lanczos iteration, and the probability with which its start may have been an unlucky one. It is a matter
# of arithmetic, like rounding, and not charged to anyone.
_STEPS, _UNLUCKY = 100, 1e-15


def find_root(
    function: Callable[[float], float],
    low: float,
    high: float,
    *,
    xtol: float = 2e-12,
    rtol: float = 4.0 * _EPSILON,
) -> float:
    """Where `function`, which has different signs at `low` and `high`, is 0, within `xtol + rtol |x|`.

    Brent's method (1973, chapter 4), step by step that of `scipy.optimize.brentq`: same roots, to the last bit. A plan
    needs nothing else of that package, and importing it takes longer than the plan.
    """
    before, here, opposite = low, high, 0.0
    f_before, f_here, f_opposite = function(before), function(here), 0.0
    if f_before == 0.0:
        return before
    if f_here == 0.0:
        return here
    if not (f_before < 0.0 < f_here or f_here < 0.0 < f_before):
        raise ValueError(f"the function does not change its sign between {low!r} and {high!r}")
    last_step = step = 0.0
    for _ in range(_MOST_STEPS):
        if f_before != 0.0 and f_here != 0.0 and (f_before < 0.0) != (f_here < 0.0):
            opposite, f_opposite = before, f_before
            last_step = step = here - before
        if abs(f_opposite) < abs(f_here):
            before, here, opposite = here, opposite, here
            f_before, f_here, f_opposite = f_here, f_opposite, f_here
        within = (xtol + rtol * abs(here)) / 2.0
        half = (opposite - here) / 2.0
        if f_here == 0.0 or abs(half) < within:
            return here
        tried = math.inf
        if abs(last_step) > within and abs(f_here) < abs(f_before):
            if before == opposite:
                tried = -f_here * (here - before) / (f_here - f_before)
            else:
                slope = (f_before - f_here) / (before - here)
                far_slope = (f_opposite - f_here) / (opposite - here)
                tried = -f_here * (f_opposite * far_slope - f_before * slope)
                tried /= far_slope * slope * (f_opposite - f_before)
        if 2.0 * abs(tried) < min(abs(last_step), 3.0 * abs(half) - within):
            last_step, step = step, tried
        else:
            last_step = step = half
        before, f_before = here, f_here
        here += step if abs(step) > within else math.copysign(within, half)
        f_here = function(here)
    raise ValueError(f"no root found within {_MOST_STEPS} steps")


def binomial_tail(count: int, trials: int, probability: float) -> float:
    """P(X > count), X binomial: `I_p(count + 1, trials - count)`."""
    if count < 0:
        return 1.0
    return float(betainc(count + 1.0, trials - count, probability)) if count < trials else 0.0


def binomial_quantile(tail: float, trials: int, probability: float) -> int:
    """The least k with P(X > k) <= tail."""
    return _least(lambda count: binomial_tail(count, trials, probability) <= tail, trials)


def poisson_quantile(tail: float, mean: float, most: int) -> int:
    """The least k with P(X > k) <= tail, X Poisson, or `most`: `P(X > k) = P(k + 1, mean)`, the incomplete gamma."""
    return _least(lambda count: float(gammainc(count + 1.0, mean)) <= tail, most)


def hypergeometric_tails(population: int, marked: int, drawn: int) -> FloatArray:
    """P(X > k) for k = 0 ... min(marked, drawn) - 1, X the marked ones in a sample without replacement.

    The terms are summed from the small end, so that the far tail keeps its relative precision.
    """
    most = min(marked, drawn)
    counts = np.arange(max(drawn + marked - population, 0), most + 1)
    logs = (
        _log_choose(marked, counts)
        + _log_choose(population - marked, drawn - counts)
        - _log_choose(population, np.asarray(drawn))
    )
    above = np.cumsum(np.exp(logs)[::-1])[::-1]
    # Below the least possible count the tail is certain.
    return np.asarray(np.minimum(np.concatenate([np.ones(int(counts[0])), above[1:]]), 1.0))


def _log_choose(total: int, chosen: NDArray[np.int64]) -> FloatArray:
    return np.asarray(gammaln(total + 1.0) - gammaln(chosen + 1.0) - gammaln(total - chosen + 1.0))


def _least(enough: Callable[[int], bool], most: int) -> int:
    """The least k in 0 ... most for which `enough`, by bisection; `most` is enough."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


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


def links(graph: ShareGraph) -> csr_array:
    """A: the weights of the graph between any two clients, both directions added."""
    one_way = csr_array((graph.weights, (graph.senders, graph.receivers)), shape=(graph.size,) * 2)
    return csr_array(one_way + one_way.T)


def exact_limit(graph: ShareGraph) -> int:
    """The most participants of whom the exact view is taken where nobody colludes, and not the bound: see above."""
    least = min(_SMALL, EXACT_LIMIT)
    return least if graph.size <= least or graph.kind == "complete" else _limit_of(links(graph))


def _limit_of(weights: csr_array) -> int:
    many = np.asarray(weights.sum(axis=0)) ** 2 >= _MANY_LINKS * np.asarray(weights.power(2).sum(axis=0))
    return min(_SMALL, EXACT_LIMIT) if many.all() else EXACT_LIMIT


@dataclass(frozen=True)
class _Group:
    """Connected clients: the Laplacian between them, and a proved lower bound on its second eigenvalue; 0: exactly."""

    members: IntArray
    laplacian: csr_array
    gap: float

    def variance(self, unit: float, residual: FloatArray) -> FloatArray:
        """`1 / (Sigma^-1)_kk` of each member or less; exact where the group is small or there is no such bound."""
        size = self.members.size
        if self.gap <= 0.0 and size <= DENSE_LIMIT:
            covariance = (unit * self.laplacian).toarray(order="F")
            covariance[np.arange(size), np.arange(size)] += residual
            return conditional_variance(covariance) if residual.any() else np.zeros(size)
        together = float(residual.sum())
        if together <= 0.0 or self.gap <= 0.0:
            return residual
        ground = residual / together
        flown = self.laplacian @ ground
        # |u|^2, u' L u and |L u|^2 of every client at once.
        mass = 1.0 - 2.0 * ground + ground @ ground
        mean = (self.laplacian.diagonal() - 2.0 * flown + ground @ flown) / mass
        columns = np.asarray(self.laplacian.power(2).sum(axis=0))
        square = (columns - 2.0 * (self.laplacian @ flown) + flown @ flown) / mass
        spread, above = np.maximum(square - mean**2, 0.0), np.maximum(mean - self.gap, 1e-12 * self.gap)
        lowest = spread / (spread + above**2)
        resistance = mass * (lowest / self.gap + (1.0 - lowest) / (mean + spread / above))
        least: FloatArray = np.maximum(1.0 / (1.0 / together + resistance / unit), residual)
        return least


@dataclass(frozen=True)
class ConnectedBound:
    """The bound of this module on one graph: of each of its connected groups."""

    groups: tuple[_Group, ...]

    def variance(self, unit: float, residual: FloatArray) -> FloatArray:
        """The effective variance of every client in the joint view, or less; `unit` finite."""
        if unit <= 0.0:
            return residual
        result = np.empty(residual.size)
        for group in self.groups:
            result[group.members] = group.variance(unit, residual[group.members])
        return result


@lru_cache(maxsize=8)
def connected_bound(graph: ShareGraph) -> ConnectedBound:
    """What is needed of a graph for the bound; everything in it is known before any variance is."""
    weights = links(graph)
    _, labels = connected_components(weights, directed=False)
    order, groups = np.argsort(labels, kind="stable"), []
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        within = csr_array(weights[members][:, members])
        degrees = np.asarray(within.sum(axis=1))
        gap = 0.0
        if members.size > _limit_of(within):
            # The Laplacian turned upside down: its largest eigenvalue but that of the mean is `heaviest - lambda_2`.
            heaviest = float(degrees.max())
            turned = csr_array(within + diags_array(heaviest - degrees))
            gap = heaviest - largest_eigenvalue(turned)
        groups.append(_Group(members.astype(np.int64), csr_array(diags_array(degrees) - within), gap))
    return ConnectedBound(tuple(groups))


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
    from scipy.linalg import eigvalsh_tridiagonal

    estimate = float(eigvalsh_tridiagonal(diagonal[:steps], beside[: steps - 1])[-1])
    missed = (math.log(1.648 * math.sqrt(size) / _UNLUCKY) / (2 * _STEPS - 1)) ** 2
    return math.sqrt(max(estimate, 0.0) / (1.0 - missed))
