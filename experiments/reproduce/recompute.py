"""Epsilon once more, from the numbers in a result file alone: nothing here imports the package.

A Gaussian mechanism with noise variance s^2 on a contribution of sensitivity D is mu-GDP with mu = D / s; n of them
compose to sqrt(n) mu, and delta(eps) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2). Where noise is shared, a client
is protected by 1 / (Sigma^-1)_kk, Sigma = (S / v) L + eta^2 I over the honest clients. The graph is drawn here anew:
the worst-off client of one expander is as well off as that of another, up to the tolerances.

Where noise is correlated over rounds, a client that takes part in P spends mu^2 = D^2 1' K[P, P] 1, K the inverse of
the covariance of what the rounds show of it; where clients are drawn in secret, dp-accounting says what that is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def _log_below(x: float) -> float:
    """log Phi(x), the normal distribution function; beyond 30 deviations by its expansion."""
    if x > -30.0:
        return math.log(0.5 * math.erfc(-x / math.sqrt(2.0)))
    return -x * x / 2.0 - math.log(-x * math.sqrt(2.0 * math.pi)) + math.log1p(-1.0 / (x * x))


def delta_at(mu: float, epsilon: float) -> float:
    """The delta at which a mu-GDP mechanism is (epsilon, delta)-DP."""
    lost = math.exp(_log_below(-epsilon / mu + mu / 2.0))
    return lost - math.exp(epsilon + _log_below(-epsilon / mu - mu / 2.0))


@cache
def mu_at(epsilon: float, delta: float) -> float:
    """The largest mu that is (epsilon, delta)-DP."""
    return _crossing(lambda mu: delta_at(mu, epsilon) - delta, 1e-9, 100.0)


@cache
def epsilon_at(mu: float, delta: float) -> float:
    """The least epsilon at which mu-GDP is (epsilon, delta)-DP."""
    if delta_at(mu, 0.0) <= delta:
        return 0.0
    return _crossing(lambda epsilon: delta - delta_at(mu, epsilon), 0.0, 10_000.0)


def _crossing(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where it turns positive."""
    while (middle := (low + high) / 2.0) not in (low, high):
        low, high = (low, middle) if rising(middle) > 0.0 else (middle, high)
    return low


@dataclass(frozen=True)
class Round:
    """What the rounds of a run have in common.

    sensitivity     D: how far one client, or one record, can move its part of the sum
    participations  rounds in which a client takes part
    epsilon, delta  promised over all of them; `delta` is the part of it that pays for the noise
    size            participants
    """

    sensitivity: float
    participations: int
    epsilon: float
    delta: float
    size: int

    @property
    def own_variance(self) -> float:
        """sigma_k^2: the noise with which a client alone keeps the promise."""
        return self.variance_for(self.epsilon, self.delta)

    def variance_for(self, epsilon: float, delta: float) -> float:
        """The noise that is worth this epsilon over all participations."""
        return self.participations * (self.sensitivity / mu_at(epsilon, delta)) ** 2

    def epsilon_of(self, variance: float) -> float:
        """What this noise is worth."""
        return self.composed(self.sensitivity / math.sqrt(variance))

    def composed(self, mu: float) -> float:
        """What all participations cost, each of them mu."""
        return epsilon_at(math.sqrt(self.participations) * mu, self.delta)


@dataclass(frozen=True)
class RecordRound(Round):
    """Rounds that hide single records, each in the batch of a round with `probability`; nobody learns which."""

    probability: float = 1.0

    def variance_for(self, epsilon: float, delta: float) -> float:
        """See `Round`."""
        return (self.sensitivity * _multiplier_at(epsilon, self.probability, self.participations, delta)) ** 2

    def composed(self, mu: float) -> float:
        """See `Round`."""
        return sampled_epsilon(1.0 / mu, self.probability, self.participations, self.delta)


@cache
def _multiplier_at(epsilon: float, probability: float, rounds: int, delta: float) -> float:
    """The least noise, in sensitivities, with which sampled records keep this promise; to a millionth."""
    low, high = 0.1, 1000.0
    while high > low * (1.0 + 1e-6):
        middle = math.sqrt(low * high)
        kept = sampled_epsilon(middle, probability, rounds, delta) <= epsilon
        low, high = (low, middle) if kept else (middle, high)
    return high


@cache
def protection(size: int, degree: int, strength: float, residual: float, gone: int) -> float:
    """The least 1 / (Sigma^-1)_kk over the clients that are left, where `gone` others help the server.

    strength  S: variance of all shares that a client sends, which it receives once more
    residual  eta^2: what each client adds that does not cancel

    The helpers are placed at random: a worst case over them must promise no less noise than this finds.
    """
    values, squares = _spectrum(size, degree, gone)
    return float(1.0 / (squares @ (1.0 / (strength / degree * values + residual))).max())


@cache
def _spectrum(size: int, degree: int, gone: int) -> tuple[FloatArray, FloatArray]:
    """Eigenvalues of the Laplacian between the clients that are left, and the squares of its eigenvectors."""
    laplacian = _laplacian(size, degree)[gone:, gone:].copy()
    np.fill_diagonal(laplacian, 0.0)
    np.fill_diagonal(laplacian, -laplacian.sum(axis=1))
    values, vectors = np.linalg.eigh(laplacian)
    return np.maximum(values, 0.0), vectors**2


def _laplacian(size: int, degree: int) -> FloatArray:
    """Of the complete graph, or of the union of `degree` random permutations without fixed points."""
    adjacency = np.zeros((size, size))
    if degree >= size - 1:
        adjacency[:] = 2.0 * degree / (size - 1)
    else:
        source = np.random.default_rng(20)
        for _ in range(degree):
            order = source.permutation(size)
            # Everyone sends to the next in a random circle.
            adjacency[order, np.roll(order, 1)] += 1.0
        adjacency += adjacency.T
    np.fill_diagonal(adjacency, 0.0)
    return np.asarray(np.diag(adjacency.sum(axis=1)) - adjacency)


def uncancelled(size: int, dropout: float, strength: float) -> float:
    """Mean variance left in the sum where each client vanishes with this probability: shares with one end left."""
    return 2.0 * strength * size * dropout * (1.0 - dropout)


@cache
def sampled_epsilon(multiplier: float, probability: float, rounds: int, delta: float) -> float:
    """What noise of so many sensitivities is worth against those who do not learn who was drawn."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-3)
    event = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(multiplier))
    accountant.compose(event, rounds)
    return float(accountant.get_epsilon(delta))


@cache
def banded_noise(
    rounds: int, bands: int, separation: int, strategy: str
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Of C n = z with so many bands, for z of variance 1: C the `square-root` of the prefix sums, or `optimised`.

    Returns the inverse covariance C'C of n, the variance of each round, and that of the model after each round.
    """
    column = np.zeros(rounds)
    column[0] = 1.0
    for step in range(1, min(bands, rounds)):
        column[step] = column[step - 1] * (2.0 * step - 1.0) / (2.0 * step)
    root = np.array([[column[i - j] if i >= j else 0.0 for j in range(rounds)] for i in range(rounds)])
    if strategy == "optimised":
        most = [1 + at // separation + (rounds - 1 - at) // separation for at in range(rounds)]
        root = _with_least_noise(root, np.sqrt(max(most) / np.array(most)))
    inverse = np.linalg.inv(root)
    model = np.cumsum(inverse, axis=0)
    return root.T @ root, (inverse**2).sum(axis=1), (model**2).sum(axis=1)


def _with_least_noise(root: FloatArray, lengths: FloatArray) -> FloatArray:
    """The matrix of those bands with columns of these lengths under which the sums over rounds have the least noise.

    In steps along the gradient, each as long as the last two say (Barzilai, Borwein), until they gain nothing.
    """
    bands, sums = root != 0.0, np.tril(np.ones_like(root))
    root = root * lengths / np.linalg.norm(root, axis=0)
    best, least, before, length = root, math.inf, (root, root), 1e-3
    for step in range(2_000):
        inverse = np.linalg.inv(root)
        total = float(np.sum((sums @ inverse) ** 2))
        if total < least:
            best, least = root, total
        slope = np.where(bands, -2.0 * inverse.T @ sums.T @ sums @ inverse @ inverse.T, 0.0) / total
        slope -= np.sum(slope * root, axis=0) * root / lengths**2
        moved, turned = root - before[0], slope - before[1]
        if step:
            length = float(np.sum(moved**2) / max(abs(np.sum(moved * turned)), 1e-300))
        if np.linalg.norm(slope) < 1e-9:
            break
        before, root = (root, slope), root - length * slope
        root = root * lengths / np.linalg.norm(root, axis=0)
    return best


@dataclass(frozen=True)
class CarriedNoise:
    """Noise that goes from every client to every one of the next round; variances in squared sensitivities.

    spatial   of the shares within the round in one upload, sent and received
    carried   w: from the sum of a round to that of the next
    residual  r: fresh noise in the sum of a round
    known     clients of a round whose shares the server knows
    """

    rounds: int
    size: int
    spatial: float
    carried: float
    residual: float
    known: int = 0

    def spent(self) -> FloatArray:
        """K: with the rounds P a client spends mu^2 = 1' K[P, P] 1.

        Covariances split into those of the round sums of the honest, and those of the deviations from their mean.
        """
        honest = self.size - self.known
        part = honest / self.size
        sums = part * self.residual * np.eye(self.rounds)
        links = np.diff(np.eye(self.rounds), axis=0)
        sums += part**2 * self.carried * links.T @ links
        touching = np.abs(links).sum(axis=0)
        deviations = (
            self.spatial * honest / (self.size - 1)
            + self.residual / self.size
            + touching * self.carried * part / self.size
        )
        return np.asarray(np.linalg.inv(sums) + np.diag((1.0 - 1.0 / honest) / deviations))

    @property
    def round_variance(self) -> float:
        """Of the sum of a round, on average over the rounds."""
        return self.residual + 2.0 * self.carried * (self.rounds - 1) / self.rounds

    def model_variance(self) -> FloatArray:
        """After each round: all fresh noise, and what the latest round carries on."""
        variance = self.residual * np.arange(1.0, self.rounds + 1.0)
        variance[:-1] += self.carried
        return variance


def dearest_cohort(spent: FloatArray, separation: int) -> float:
    """The most that K costs a client whose rounds are exactly so far apart."""
    rounds = np.arange(len(spent))
    return max(
        float(spent[np.ix_(rounds[first::separation], rounds[first::separation])].sum())
        for first in range(min(separation, len(spent)))
    )
