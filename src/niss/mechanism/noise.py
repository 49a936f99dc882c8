"""The numbers that a planner has found: how much noise of which kind there is in an upload, and who is assumed away.

**Noise that is correlated over rounds** (`CorrelatedNoise`), so that sums over rounds carry less of it than independent
noise would leave.

In units: round t of a run of T rounds gets the noise `s n_t`, and a client that moves the sums of the rounds P by at
most 1 each, all in one direction, pays `mu^2 = 1' G[P, P] 1 / s^2` with `G = Cov(n)^-1`. That holds for updates that
depend on what was released before (Denisov et al. 2022, 2202.08312). What counts is not the noise of a round but that
of the model, the prefix sum `n_0 + ... + n_t`.

`C n = z`, z white, C lower triangular with b bands, so that `G = C'C`. Columns that are b or more rounds apart do not
overlap, so participations at that separation cost `||column||^2` each and nothing in common. Two such strategies:

optimised    BandMF (Choquette-Choo et al. 2023, 2306.08153): the least mean over the rounds of the noise in the model,
             `||A C^-1||^2 / T`, A the prefix sums, with columns of one length where all rounds leave room for as many
             participations. A round t that is in no pattern of more than N_t costs K / N_t, K the most of any round:
             the sum over a pattern P is at most `sum_{t in P} K / |P| = K`.
square-root  Toeplitz: the first b coefficients of `(1 - x)^(-1/2)`, the square root of A cut off (McKenna 2024,
             2405.15913), and its columns again by the end of the run. In 100 rounds with b = 10 it leaves 10 % more.
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

    In what is agreed on (`niss.protocol.schedule`) they are those of an entry of an upload: `scaled` by Delta^2.

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

# In longer runs all columns are alike but for their length, which leaves up to 4 % more: 1 % in 1,000 rounds with ten.
_OPTIMISED_ROUNDS = 300
MOST_ROUNDS = 5_000
# From here on a whole triangle is inverted in less time than its bands.
_MANY_BANDS = 100
_FAR = 700.0
_SEARCH = {"maxiter": 400, "ftol": 1e-13, "gtol": 1e-9, "maxcor": 20}


@dataclass(frozen=True, eq=False)
class CorrelatedNoise:
    """The law of the noises of all rounds, up to their scale, for clients that rest between participations.

    columns         of C (bands x rounds): entry (lag, t) belongs to round t + lag
    separation      at least the bands; a client that takes part in round t stays out until round t + separation
    participations  the most of one client; None: as many as there is room for

    No pattern costs more than one that begins in the first rounds and rests no longer than it must.
    """

    columns: FloatArray
    separation: int
    participations: int | None = None

    @property
    def rounds(self) -> int:
        """Of the whole run."""
        return int(self.columns.shape[1])

    @cached_property
    def _costs(self) -> FloatArray:
        return np.asarray(np.sum(self.columns**2, axis=0))

    @cached_property
    def worst_client(self) -> float:
        """The most that all participations of a client cost."""
        cohorts = range(min(self.separation, self.rounds))
        return max(math.fsum(self._costs[first :: self.separation][: self._most]) for first in cohorts)

    @property
    def per_participation(self) -> float:
        """The same over the number of them."""
        return self.worst_client / self._most

    @property
    def _most(self) -> int:
        return self.participations or -(-self.rounds // self.separation)

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

    def row(self, number: int) -> FloatArray:
        """C of that round, its own entry first, then the round before, ...: `sum_j row_j n_{t-j} = z_t`."""
        self._known_round(number)
        lags = np.arange(min(len(self.columns), number + 1))
        return self.columns[lags, number - lags]

    @cached_property
    def inverse(self) -> FloatArray:
        """`C^-1`, whose rows are the noises of the rounds in terms of z."""
        from scipy.linalg import solve_banded, solve_triangular

        unit, lags = np.eye(self.rounds), len(self.columns) - 1
        if lags < _MANY_BANDS:
            return np.asarray(solve_banded((lags, 0), self.columns, unit))
        return np.asarray(solve_triangular(_matrix(self.columns), unit, lower=True))

    def charge(self, number: int) -> float:
        """What a participation in round `number` (from 0) adds to `mu^2`, at sensitivity 1 and scale 1."""
        self._known_round(number)
        return float(self._costs[number])

    def round_variance(self, number: int) -> float:
        """Variance of the noise of one round."""
        self._known_round(number)
        return float(np.sum(self.inverse[number] ** 2))

    def earlier_covariances(self, number: int) -> FloatArray:
        """Of the noise of one round with that of the round before, the one before that, ..., the first."""
        self._known_round(number)
        return np.asarray((self.inverse[:number] @ self.inverse[number])[::-1])

    @cached_property
    def model_variance(self) -> FloatArray:
        """Variance of the sum of the noises of all rounds so far, after each round."""
        return np.asarray(np.sum(np.cumsum(self.inverse, axis=0) ** 2, axis=1))


@lru_cache(maxsize=16)
def correlated_noise(
    rounds: int,
    separation: int,
    bands: int | None = None,
    participations: int | None = None,
    strategy: str = "optimised",
) -> CorrelatedNoise:
    """With that many bands; None: as many as the separation allows."""
    visits = np.arange(rounds) // separation + 1 + np.arange(rounds)[::-1] // separation
    visits = np.minimum(visits, participations or rounds)
    lengths = np.sqrt(visits.max() / visits)
    columns = STRATEGIES[strategy](min(bands or separation, rounds), lengths)
    return CorrelatedNoise(columns, separation, participations)


def _matrix(columns: FloatArray) -> FloatArray:
    """C, whose columns these are."""
    bands, rounds = columns.shape
    matrix, within = np.zeros((rounds, rounds)), _within(rounds, bands)
    lag, place = np.nonzero(within)
    matrix[place + lag, place] = columns[within]
    return matrix


def _root_of_sums(bands: int) -> FloatArray:
    """1, 1/2, 3/8, ..."""
    steps = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((2.0 * steps - 1.0) / (2.0 * steps))])


def _square_root(bands: int, lengths: FloatArray) -> FloatArray:
    return _alike(_root_of_sums(bands), lengths.size)


def _alike(coefficients: FloatArray, rounds: int) -> FloatArray:
    """The same in each column, cut short by the end of the run."""
    return np.where(_within(rounds, coefficients.size), coefficients[:, None], 0.0)


def _within(rounds: int, bands: int) -> NDArray[np.bool_]:
    return np.asarray(np.add.outer(np.arange(bands), np.arange(rounds)) < rounds)


def _least_alike(rounds: int, bands: int) -> FloatArray:
    """The coefficients c of a column that leave the least noise in the model where all columns are alike.

    `sum_t (T - t) y_t^2 |c|^2` with `y(x) = 1 / ((1 - x) c(x))`, from the square root by L-BFGS.
    """
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    first, weights = np.zeros(rounds), np.arange(float(rounds), 0.0, -1.0)
    first[0] = 1.0

    def noise(point: FloatArray) -> tuple[float, FloatArray]:
        c = np.append(1.0, point)
        with np.errstate(over="ignore", invalid="ignore"):
            model = np.cumsum(lfilter([1.0], c, first))
            turned, weighed, length = lfilter([1.0], c, model), weights * model, float(c @ c)
            total = float(weighed @ model)
            slope = np.array([weighed[lag:] @ turned[: rounds - lag] for lag in range(1, bands)])
        if not math.isfinite(total):  # Noise that feeds on itself: the search has to step back.
            return _FAR, np.zeros_like(point)
        return math.log(total * length), 2.0 * (point / length - slope / total)

    found = minimize(noise, _root_of_sums(bands)[1:], jac=True, method="L-BFGS-B", options=_SEARCH)
    return np.append(1.0, found.x)


def _least_noise(bands: int, lengths: FloatArray) -> FloatArray:
    """Columns of these lengths that leave the least noise in the model, from columns that are alike, by L-BFGS.

    With `Y = A C^-1` the objective `||Y||^2` has the gradient `-2 C^-T A' Y C^-T` in C, of which the bands count, and
    of those what is orthogonal to each column.
    """
    rounds = lengths.size
    start = _alike(_least_alike(rounds, bands), rounds)
    start *= lengths / np.linalg.norm(start, axis=0)
    if rounds > _OPTIMISED_ROUNDS:
        return start

    from scipy.linalg import solve_triangular
    from scipy.optimize import minimize

    within = _within(rounds, bands)

    def noise(point: FloatArray) -> tuple[float, FloatArray]:
        columns = np.zeros((bands, rounds))
        columns[within] = point
        norms = np.linalg.norm(columns, axis=0)
        units = columns / norms
        root = _matrix(units * lengths)
        inverse = solve_triangular(root, np.eye(rounds), lower=True)
        model = np.cumsum(inverse, axis=0)
        total = float(np.sum(model**2))
        later = np.cumsum(model[::-1], axis=0)[::-1]
        left, slope = solve_triangular(root, later, lower=True, trans=1), np.zeros_like(columns)
        for band in range(bands):
            slope[band, : rounds - band] = np.einsum("ij,ij->i", left[band:], inverse[: rounds - band])
        slope -= np.sum(slope * units, axis=0) * units
        return math.log(total), -2.0 * (slope * lengths / norms)[within] / total

    found = minimize(noise, start[within], jac=True, method="L-BFGS-B", options=_SEARCH)
    columns = np.zeros((bands, rounds))
    columns[within] = found.x
    return np.asarray(columns * lengths / np.linalg.norm(columns, axis=0))


STRATEGIES = {"optimised": _least_noise, "square-root": _square_root}
"""The columns of C for so many bands, and how long they may be."""
