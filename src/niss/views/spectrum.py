"""Eigenvalues of a share graph, and what they prove about a round in which nobody colludes.

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
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array
from scipy.sparse.csgraph import connected_components

from niss.graph import ShareGraph
from niss.randomness import SimStream
from niss.views.covariance import DENSE_LIMIT, conditional_variance

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Up to this many participants the whole matrix is inverted where nobody colludes: 2 s for calibrating a round.
EXACT_LIMIT = 2_000
# Up to this many clients the eigenvalues of the whole matrix take no longer than an iteration.
_DENSE = 300
# Steps of the Lanczos iteration, and the probability with which its start may have been an unlucky one. It is a matter
# of arithmetic, like rounding, and not charged to anyone.
_STEPS, _UNLUCKY = 100, 1e-15


def links(graph: ShareGraph) -> csr_array:
    """A: the weights of the graph between any two clients, both directions added."""
    one_way = csr_array((graph.weights, (graph.senders, graph.receivers)), shape=(graph.size,) * 2)
    return csr_array(one_way + one_way.T)


@dataclass(frozen=True)
class _Group:
    """Connected clients: the Laplacian between them, and a proved lower bound on its second eigenvalue."""

    members: IntArray
    laplacian: csr_array
    gap: float

    def variance(self, unit: float, residual: FloatArray) -> FloatArray:
        """`1 / (Sigma^-1)_kk` of each member or less; exact where the group is small or there is no such bound."""
        size = self.members.size
        if size <= EXACT_LIMIT or (self.gap <= 0.0 and size <= DENSE_LIMIT):
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
        if members.size > EXACT_LIMIT:
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
