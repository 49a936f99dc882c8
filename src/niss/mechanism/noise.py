"""The numbers that a planner has found: how much noise of which kind there is in an upload, and who is assumed away.

**Noise that is correlated over rounds** (`BandedRoot`), so that sums over rounds carry less of it than independent
noise would leave.

In units: round t of a run of T rounds gets the noise `s n_t`, and a client that moves the sums of the rounds P by at
most 1 each, all in one direction, pays `mu^2 = 1' G[P, P] 1 / s^2` with `G = Cov(n)^-1`. That holds for updates that
depend on what was released before (Denisov et al. 2022, 2202.08312). What counts is not the noise of a round but that
of the model, the prefix sum `n_0 + ... + n_t`.

`C n = z`, z white, C lower triangular and Toeplitz with the first b coefficients of `(1 - x)^(-1/2)`: the square root
of the matrix of prefix sums, cut off. `G = C'C`. Columns that are b or more rounds apart do not overlap, so
participations at that separation cost `||column||^2` each and nothing in common. Choquette-Choo et al. 2023
(2306.08153), McKenna 2024 (2405.15913).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from niss.checks import require_real, require_whole
from niss.errors import ConfigError

_VARIANCES = ("unit", "residual", "carried", "self_mask")


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise of rounds of one size, variances in units of Delta^2, the squared sensitivity of one upload.

    In what is agreed on (`niss.protocol.Schedule`) they are those of an entry of an upload: `scaled` by Delta^2.

    participants          of a round, m
    neighbours            unit shares that each client sends within the round, each of the variance `unit`
    residual              of the fresh noise in one upload
    carried               of all that one upload carries on to the next round, where it is taken out; 0: nothing
    self_mask             of what an upload carries until the round is repaired, so that a client that is called dropped
                          although it uploaded is hidden without its shares
    colluders             most participants of a round that tell the server all they know
    dropped, revealed     most clients of a round that repairs may call dropped, and most edges of a client that they
                          reveal; the shares of the former are known like a colluder's
    committee, threshold  members that repair a round, and how many of them must answer; 0: nothing is repaired
    """

    participants: int
    neighbours: float
    unit: float
    residual: float
    carried: float = 0.0
    self_mask: float = 0.0
    colluders: int = 0
    dropped: int = 0
    revealed: int = 0
    committee: int = 0
    threshold: int = 0

    def __post_init__(self) -> None:
        for name in ("participants", "colluders", "dropped", "revealed", "committee", "threshold"):
            require_whole(getattr(self, name), field=name, at_least=1 if name == "participants" else 0)
        for name in _VARIANCES:
            require_real(getattr(self, name), field=name)

    def scaled(self, factor: float) -> Noise:
        """The same noise in other units: all variances times `factor`."""
        variances = {name: factor * getattr(self, name) for name in _VARIANCES}
        return replace(self, **variances)

    @property
    def spatial(self) -> float:
        """Variance of all shares within the round in one upload, sent and received."""
        return 2.0 * self.neighbours * self.unit

    @property
    def known(self) -> int:
        """Clients of a round whose shares the adversary may know."""
        return self.colluders + self.dropped


def colluders_among(share: float, participants: int) -> int:
    """How many that share of them is, rounded up; what rounding adds to a share like 6 / 30 does not count."""
    return math.ceil(share * participants - 1e-9)


FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class BandedRoot:
    """The law of the noises of all rounds, up to their scale, for clients that rest between participations.

    rounds          of the whole run
    separation      a client that takes part in round t stays out until round t + separation, or longer
    bands           b, at most the separation
    participations  the most of one client; None: as many as there is room for

    Later columns are shorter, so no pattern costs more than one that begins at once and rests no longer than it must.
    """

    rounds: int
    separation: int
    bands: int
    participations: int | None = None

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

    @property
    def ratio_to_independent(self) -> tuple[float, float]:
        """Noise in the model relative to independent noise at the same mu: mean over the rounds, and final."""
        relative = self.per_participation * self.model_variance
        alone = np.arange(1.0, self.rounds + 1.0)
        return float(relative.sum() / alone.sum()), float(relative[-1] / alone[-1])

    def _known_round(self, number: int) -> None:
        if not 0 <= number < self.rounds:
            raise ConfigError(
                f"round {number + 1} of a run that was planned for {self.rounds}",
                field="rounds",
                hint="what goes on past the planned end is a new run",
            )

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
        """What a participation in round `number` (from 0) adds to `mu^2`, at sensitivity 1 and scale 1.

        The squared norm of that column of C, which the end of the run cuts short.
        """
        self._known_round(number)
        return float(np.sum(self.coefficients[: self.rounds - number] ** 2))

    def round_variance(self, number: int) -> float:
        """Variance of the noise of one round."""
        self._known_round(number)
        return float(np.sum(self.inverse[: number + 1] ** 2))

    def earlier_covariances(self, number: int) -> FloatArray:
        """Of the noise of one round with that of the round before, the one before that, ..., the first.

        `sum_i d_i d_{i + lag}` over what both rounds have in common, d the first column of `C^-1`.
        """
        self._known_round(number)
        column = self.inverse[: number + 1]
        return np.array([column[:-lag] @ column[lag:] for lag in range(1, number + 1)])

    @cached_property
    def model_variance(self) -> FloatArray:
        """Variance of the sum of the noises of all rounds so far, after each round."""
        return np.cumsum(np.cumsum(self.inverse) ** 2)


@lru_cache(maxsize=64)
def banded_root(
    rounds: int,
    separation: int,
    bands: int | None = None,
    participations: int | None = None,
) -> BandedRoot:
    """The square root with that many bands; None: as many as the separation allows."""
    return BandedRoot(rounds, separation, bands or separation, participations)
