"""Noise that is correlated over rounds, so that sums over rounds carry less of it than independent noise would leave.

Both shapes are in units: round t of a run of T rounds gets the noise `s n_t`, and a client that moves the sums of the
rounds P by at most 1 each, all in one direction, pays `mu^2 = 1' G[P, P] 1 / s^2` with `G = Cov(n)^-1`. That holds for
updates that depend on what was released before (Denisov et al. 2022, 2202.08312). What counts is not the noise of a
round but that of the model, the prefix sum `n_0 + ... + n_t`.

BandedRoot    `C n = z`, z white, C lower triangular and Toeplitz with the first b coefficients of `(1 - x)^(-1/2)`: the
              square root of the matrix of prefix sums, cut off. `G = C'C`. Columns that are b or more rounds apart do
              not overlap, so participations at that separation cost `||column||^2` each and nothing in common.
              Choquette-Choo et al. 2023 (2306.08153), McKenna 2024 (2405.15913).
CarriedChain  `n_t = e_t + c_t - c_{t-1}`, `Var e = 1`, `Var c = w`, none before the first and after the last round:
              `Cov(n) = I + w L` with the Laplacian L of a path. What one round carries over the next takes out.
              Participations are exactly b apart (fixed cyclic cohorts); cross terms count.

Where round t enters the model with a factor `a_t`, the model is `a_0 n_0 + ... + a_t n_t`. The chain then takes out
`(a_{t-1} / a_t) c_{t-1}`, so that it cancels: `Cov(n) = A^-1 (A^2 + w L_a) A^-1`, edge t of the path weighing `a_t^2`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from niss.errors import ConfigError

FloatArray = NDArray[np.float64]


class RoundNoise(ABC):
    """The law of the noises of all rounds, up to their scale, for clients that rest between participations.

    rounds          of the whole run
    separation      a client that takes part in round t stays out until round t + separation
    participations  the most of one client; None: as many as there is room for
    factors         with which rounds enter the model; (): all alike
    """

    rounds: int
    separation: int
    participations: int | None
    factors: tuple[float, ...]

    @cached_property
    def scales(self) -> FloatArray:
        """The factor of every round."""
        return np.array(self.factors or (1.0,) * self.rounds)

    @abstractmethod
    def charge(self, number: int) -> float:
        """What a participation in round `number` (from 0) adds to `mu^2`, at sensitivity 1 and scale 1."""

    @cached_property
    def worst_client(self) -> float:
        """The most that all participations of a client cost."""
        cohorts = range(min(self.separation, self.rounds))
        patterns = [range(self.rounds)[first :: self.separation][: self._most] for first in cohorts]
        return max(math.fsum(map(self.charge, pattern)) for pattern in patterns)

    @property
    def per_participation(self) -> float:
        """The same over the number of them."""
        return self.worst_client / self._most

    @property
    def _most(self) -> int:
        return self.participations or math.ceil(self.rounds / self.separation)

    @abstractmethod
    def round_variance(self, number: int) -> float:
        """Variance of the noise of one round."""

    @abstractmethod
    def earlier_covariances(self, number: int) -> FloatArray:
        """Of the noise of one round with that of the round before, the one before that, ..., the first."""

    @property
    @abstractmethod
    def model_variance(self) -> FloatArray:
        """Variance of the sum of the noises of all rounds so far, each with its factor, after each round."""

    @property
    def ratio_to_independent(self) -> tuple[float, float]:
        """Noise in the model relative to independent noise at the same mu: mean over the rounds, and final."""
        relative = self.per_participation * self.model_variance
        alone = np.cumsum(self.scales**2)
        return float(relative.sum() / alone.sum()), float(relative[-1] / alone[-1])

    def _known_round(self, number: int) -> None:
        if not 0 <= number < self.rounds:
            raise ConfigError(
                f"round {number + 1} of a run that was planned for {self.rounds}",
                field="rounds",
                hint="what goes on past the planned end is a new run",
            )


@dataclass(frozen=True)
class BandedRoot(RoundNoise):
    """The banded square root; for participations that are at least `separation` rounds apart.

    bands  at most the separation

    Later columns are shorter, so no pattern costs more than one that begins at once and rests no longer than it must.
    """

    rounds: int
    separation: int
    bands: int
    participations: int | None = None
    factors: tuple[float, ...] = ()

    @cached_property
    def coefficients(self) -> FloatArray:
        """The first `bands` coefficients of `(1 - x)^(-1/2)`: 1, 1/2, 3/8, ..."""
        steps = np.arange(1, min(self.bands, self.rounds))
        return np.concatenate([[1.0], np.cumprod((2.0 * steps - 1.0) / (2.0 * steps))])

    @cached_property
    def inverse(self) -> FloatArray:
        """The first column of `C^-1`."""
        c, inverse = self.coefficients, np.zeros(self.rounds)
        inverse[0] = 1.0
        for number in range(1, self.rounds):
            lags = np.arange(1, min(c.size, number + 1))
            inverse[number] = -float(c[lags] @ inverse[number - lags])
        return inverse

    def charge(self, number: int) -> float:
        """The squared norm of that column of C, which the end of the run cuts short."""
        self._known_round(number)
        return float(np.sum(self.coefficients[: self.rounds - number] ** 2))

    def round_variance(self, number: int) -> float:
        self._known_round(number)
        return float(np.sum(self.inverse[: number + 1] ** 2))

    def earlier_covariances(self, number: int) -> FloatArray:
        """`sum_i d_i d_{i + lag}` over what both rounds have in common, d the first column of `C^-1`."""
        self._known_round(number)
        column = self.inverse[: number + 1]
        return np.array([column[:-lag] @ column[lag:] for lag in range(1, number + 1)])

    @cached_property
    def model_variance(self) -> FloatArray:
        if self.factors:
            return self.noise_in_model(self.scales)
        return np.cumsum(np.cumsum(self.inverse) ** 2)

    def noise_in_model(self, factors: FloatArray) -> FloatArray:
        """The same for these factors."""
        past = np.subtract.outer(np.arange(self.rounds), np.arange(self.rounds))
        mixing = np.where(past >= 0, self.inverse[np.maximum(past, 0)], 0.0)
        return np.asarray(np.sum(np.cumsum(factors[:, None] * mixing, axis=0) ** 2, axis=1))


@dataclass(frozen=True)
class CarriedChain(RoundNoise):
    """Noise of which a part is carried to the next round and taken out; for fixed cyclic cohorts.

    ratio  w, the carried variance in units of what stays
    """

    rounds: int
    separation: int
    ratio: float
    participations: int | None = None
    factors: tuple[float, ...] = ()

    @cached_property
    def covariance(self) -> FloatArray:
        """`A^-1 (A^2 + w L_a) A^-1`, rounds by rounds."""
        identity = np.eye(self.rounds)
        links = np.diff(identity, axis=0) * self.scales[:-1, None] / self.scales
        return np.asarray(identity + self.ratio * links.T @ links)

    @cached_property
    def _precision(self) -> FloatArray:
        return np.asarray(np.linalg.inv(self.covariance), dtype=np.float64)

    def charge(self, number: int) -> float:
        """`1'G[P + t]1 - 1'G[P]1`, P the earlier rounds of the same cohort."""
        self._known_round(number)
        earlier = np.arange(number % self.separation, number, self.separation)
        row = self._precision[number]
        return float(row[number] + 2.0 * row[earlier].sum())

    def round_variance(self, number: int) -> float:
        self._known_round(number)
        return float(self.covariance[number, number])

    def earlier_covariances(self, number: int) -> FloatArray:
        """Of the round before alone."""
        self._known_round(number)
        return self.covariance[number, max(number - 1, 0) : number]

    @property
    def model_variance(self) -> FloatArray:
        squares = self.scales**2
        variance = np.cumsum(squares)
        variance[:-1] += self.ratio * squares[:-1]
        return variance


@lru_cache(maxsize=64)
def banded_root(
    rounds: int,
    separation: int,
    bands: int | None = None,
    participations: int | None = None,
    factors: tuple[float, ...] = (),
) -> BandedRoot:
    """The square root with that many bands; None: as many as the separation allows."""
    return BandedRoot(rounds, separation, bands or separation, participations, factors)


@lru_cache(maxsize=64)
def carried_chain(
    rounds: int,
    separation: int,
    ratio: float | None = None,
    participations: int | None = None,
    factors: tuple[float, ...] = (),
) -> CarriedChain:
    """The chain with that ratio of carried to staying variance; None: the one that leaves least noise on average."""
    if ratio is not None:
        return CarriedChain(rounds, separation, ratio, participations, factors)
    if separation == 1 or rounds == 1:
        return CarriedChain(rounds, separation, 0.0, participations, factors)
    from scipy.optimize import minimize_scalar

    def noise(log_ratio: float) -> float:
        chain = CarriedChain(rounds, separation, math.exp(log_ratio), participations, factors)
        return chain.ratio_to_independent[0]

    highest = 2.0 * math.log(rounds)
    found = minimize_scalar(noise, bounds=(-4.0, highest), method="bounded", options={"xatol": 1e-4})
    return CarriedChain(rounds, separation, math.exp(float(found.x)), participations, factors)
