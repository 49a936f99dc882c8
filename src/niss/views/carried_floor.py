"""Bounds on the joint view of carried shares that need no vertices: the sums of rounds and the deviations from them.

A lower bound on the noise, in the order of Loewner, that is block diagonal in (round sums, deviations within a round),

    Sigma >= [Gamma on the sums] + [D_t on the deviations of round t],

bounds every quadratic form of `Sigma^-1` from above: for a client with participations P

    mu^2 <= Delta' K[P, P] Delta,     K = Gamma^-1 + diag((1 - 1/h_t) / D_t),

`h_t` the honest clients of round t and `Gamma = diag(h_t eta_t^2) + L(w)`, the Laplacian of the rounds with `w` the
carried variance between two of them. For complete graphs this is equality, with any number of colluders.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solveh_banded

from niss.errors import ConfigError, PrivacyError
from niss.graph import CarriedGraph, ShareGraph
from niss.views.carried import CarriedRun
from niss.views.covariance import per_client
from niss.views.spectrum import largest_eigenvalue, links

FloatArray = NDArray[np.float64]

# How much of the carried variance is given up for the coupling of sums and deviations; the best of these is taken.
_CONCESSIONS = (*np.geomspace(1e-9, 1e-3, 13).tolist(), *np.geomspace(2e-3, 0.9, 24).tolist())


@dataclass(frozen=True)
class RunFloor:
    """Noise that a run has at least: for the sums of its rounds, and `deviations` for each round.

    bands  Gamma, of which only what lies within the lags is not 0: `bands[lag, t] = Gamma[t + lag, t]`

    All in units of what enters the model: variances of round t times `factors[t]`^2.
    """

    bands: FloatArray
    deviations: FloatArray
    honest: FloatArray
    factors: FloatArray

    @cached_property
    def matrix(self) -> FloatArray:
        """K (T x T), without a negative entry: `mu^2 <= Delta' K[P, P] Delta` for participations P."""
        unit = np.eye(self.honest.size, order="F")
        bands = np.asarray_chkfinite(self.bands)
        inverse = solveh_banded(bands, unit, lower=True, overwrite_b=True, check_finite=False)
        # In place: a plan for many rounds takes several of these, each of millions of numbers.
        matrix = np.asarray(inverse + inverse.T)
        matrix /= 2.0
        np.maximum(matrix, 0.0, out=matrix)
        np.einsum("tt->t", matrix)[:] += (1.0 - 1.0 / self.honest) / self.deviations
        matrix *= self.factors[:, None]
        matrix *= self.factors
        return matrix


def round_bands(residual: ArrayLike, carried: ArrayLike) -> FloatArray:
    """Gamma = diag(residual) + L(carried), the covariance of the sums of T rounds, as the bands of `RunFloor`.

    residual  variance of the fresh noise in the sum of each round
    carried   variance carried from each round to the next (T - 1 numbers), or one row for each lag (lags x T, of which
              the last numbers of a row, which would lead past the end, must be 0)
    """
    own = np.asarray(residual, dtype=np.float64)
    lags = carried_by_lag(carried, own.size)
    bands = np.zeros((1 + min(len(lags), own.size - 1), own.size))
    bands[0] = own
    for lag in range(1, len(bands)):
        row = lags[lag - 1, : own.size - lag]
        bands[0, : row.size] += row
        bands[0, lag:] += row
        bands[lag, : row.size] = -row
    return bands


def carried_by_lag(carried: ArrayLike, rounds: int) -> FloatArray:
    """Carried variances as lags x rounds."""
    array = np.asarray(carried, dtype=np.float64)
    if array.ndim == 1 and array.size == rounds - 1:
        array = np.append(array, 0.0)[None]
    if array.ndim != 2 or array.shape[1] != rounds:
        raise ConfigError(f"needs {rounds - 1} numbers, or {rounds} for each lag", field="carried")
    if not np.all(np.isfinite(array)) or np.any(array < 0.0):
        raise ConfigError("must be finite and not negative", field="carried")
    if any(np.any(row[max(rounds - lag, 0) :]) for lag, row in enumerate(array, start=1)):
        raise ConfigError("the last rounds cannot carry noise past the end", field="carried")
    return array


def carried_touching(carried: FloatArray) -> FloatArray:
    """The carried variance that starts or ends in each round, from lags x rounds."""
    touching = carried.sum(axis=0)
    for lag, row in enumerate(carried, start=1):
        touching[lag:] += row[: row.size - lag]
    return np.asarray(touching)


def complete_floor(
    *,
    participants: int,
    residual: ArrayLike,
    carried: ArrayLike,
    spatial: ArrayLike,
    colluders: int = 0,
    factors: ArrayLike | None = None,
) -> RunFloor:
    """The exact view where everyone shares with everyone, within a round and with the next cohort.

    participants  m of every round, of whom `colluders` collude
    residual      r_t: variance of the fresh noise in the sum of round t, all clients together
    carried       w_t, as in `round_bands`, all clients together, in the units of the round that adds it
    spatial       variance of all shares within the round in one upload, sent and received
    factors       a_t, where receivers rescale; None: 1

    Colluders take their own parts out: `r -> (1 - rho) r`, `w -> (1 - rho)^2 w`, `m -> (1 - rho) m`.
    """
    own = np.asarray(residual, dtype=np.float64)
    scale = np.ones(own.size) if factors is None else np.asarray(factors, dtype=np.float64)
    honest = participants - colluders
    if honest < 1 or colluders < 0:
        raise PrivacyError("no honest client is left to protect", hint="assume fewer colluders")
    if own.ndim != 1 or np.any(own <= 0.0) or scale.shape != own.shape or np.any(scale <= 0.0):
        raise ConfigError("needs a number above 0 for every round", field="residual")
    share = honest / participants
    kept = share**2 * carried_by_lag(carried, own.size) * scale**2
    fresh = share * own * scale**2
    within = per_client(spatial, own.size, "spatial") * scale**2 * honest / max(participants - 1, 1)
    deviations = within + (fresh + carried_touching(kept)) / honest
    return RunFloor(round_bands(fresh, kept), deviations, np.full(own.size, float(honest)), scale)


def sparse_floors(run: CarriedRun, colluders: Collection[int] = ()) -> tuple[RunFloor, ...]:
    """Proved floors for the graphs that ran and a given set of colluders; each holds, so the best may be used.

    Write a vector as round means alpha_t plus deviations y_t orthogonal to 1 (honest clients). Within a round
    `y'Ly >= lambda_2 |y|^2`. A carried graph with honest weights c_ij, total W, contributes, with
    `delta = alpha_t - alpha_s` and `u`, `v` the deviations of its row and column sums from their means,

        sum c_ij (delta + y_i - y_j)^2 = W delta^2 + 2 delta (u'y_t - v'y_s) + sum c_ij (y_i - y_j)^2
            >= (1 - theta) W delta^2 - |u| (|u| + |v|) / (theta W) |y_t|^2 - |v| (|u| + |v|) / (theta W) |y_s|^2
               + (min row - s) |y_t|^2 + (min column - s) |y_s|^2

    for every theta in (0, 1), `s` the norm of the matrix c between deviations; the last line counts only where both
    parts are positive. So `Gamma` has `(1 - theta) W`, and the rest goes into D_t. Without colluders and biregular,
    u = v = 0 and D_t = lambda_2 + eta^2 + (1 - s_2)(w_t + w_{t-1}) / m. The last floor gives up carrying altogether.
    """
    known = set(colluders)
    rounds = run.rounds
    factors = np.array([one.factor for one in rounds])
    kept = [np.array([c not in known for c in one.clients], dtype=bool) for one in rounds]
    honest = np.array([float(mask.sum()) for mask in kept])
    if np.any(honest == 0.0):
        raise PrivacyError("a round has no honest client", hint="assume fewer colluders")
    least = np.empty(factors.size)
    within = np.empty(factors.size)
    for number, (one, mask) in enumerate(zip(rounds, kept, strict=True)):
        least[number] = per_client(one.residual, mask.size, "residual")[mask].min() * factors[number] ** 2
        within[number] = (
            one.unit_variance * factors[number] ** 2 * _connectivity(one.shares.laplacian(), mask)
        )
    if np.any(least <= 0.0):
        raise PrivacyError(
            "a round has clients without residual noise", hint="give every client residual noise"
        )
    bare = RunFloor((honest * least)[None], within + least, honest, factors)
    parts = [
        (number, number + graph.lag, part)
        for number, one in enumerate(rounds)
        for graph, variance in one.carried
        if (
            part := _carried_part(
                graph, variance * factors[number] ** 2, kept[number], kept[number + graph.lag]
            )
        )
    ]
    floors = []
    lags = max((later - number for number, later, _ in parts), default=0)
    for theta in _CONCESSIONS:
        bands, deviations = np.zeros((1 + lags, factors.size)), bare.deviations.copy()
        bands[0] = bare.bands[0]
        for number, later, part in parts:
            weight = (1.0 - theta) * part.weight
            bands[0, [number, later]] += weight
            bands[later - number, number] -= weight
            deviations[number] += part.credit[0] - part.loss[0] / theta
            deviations[later] += part.credit[1] - part.loss[1] / theta
        if np.all(deviations > 0.0):
            floors.append(RunFloor(bands, deviations, honest, factors))
    return (*floors, bare)


@dataclass(frozen=True)
class _CarriedPart:
    """One carried graph among the honest: total weight, what deviations gain, and what they lose at theta = 1."""

    weight: float
    credit: tuple[float, float]
    loss: tuple[float, float]


def _carried_part(
    graph: CarriedGraph, variance: float, senders: NDArray[np.bool_], receivers: NDArray[np.bool_]
) -> _CarriedPart | None:
    inner = variance * graph.matrix()[np.ix_(senders, receivers)]
    weight = float(inner.sum())
    if weight == 0.0:
        return None
    rows, columns = inner.sum(axis=1), inner.sum(axis=0)
    u, v = float(np.linalg.norm(rows - rows.mean())), float(np.linalg.norm(columns - columns.mean()))
    centred = inner - inner.mean(axis=0)
    norm = float(np.linalg.norm(centred - centred.mean(axis=1)[:, None], 2))
    credit = (float(rows.min()) - norm, float(columns.min()) - norm)
    return _CarriedPart(
        weight,
        credit if min(credit) > 0.0 else (0.0, 0.0),
        (u * (u + v) / weight, v * (u + v) / weight),
    )


def _connectivity(laplacian: FloatArray, honest: NDArray[np.bool_]) -> float:
    """The second eigenvalue of the Laplacian of the honest-honest edges, 0 for a single client."""
    inner = laplacian[np.ix_(honest, honest)]
    if len(inner) < 2:
        return 0.0
    np.fill_diagonal(inner, 0.0)
    np.fill_diagonal(inner, -inner.sum(axis=1))
    return max(float(np.linalg.eigvalsh(inner)[1]), 0.0)


def within_connectivity(graph: ShareGraph, known_neighbours: int = 0) -> float:
    """c with `y' L_H y >= c W |y|^2` for deviations y of the honest clients, W the least weight of a client's edges.

    The clients that are not honest may sit anywhere, as long as any honest client has at most `known_neighbours` of
    them as neighbours. With A the weights between any two clients and lambda its largest eigenvalue across deviations
    of all clients,

        y' L_H y = sum_j W_j y_j^2 - y'A y >= (min_j W_j - lambda) |y|^2,

    `W_j` what is left of j's edges without its heaviest ones. With none taken out, that is the second eigenvalue of the
    Laplacian of a graph whose clients all have the same weight.
    """
    weights = links(graph)
    own, kept = np.empty(graph.size), np.empty(graph.size)
    for client in range(graph.size):
        edges = np.sort(weights.data[weights.indptr[client] : weights.indptr[client + 1]])
        own[client] = edges.sum()
        kept[client] = edges[: max(edges.size - known_neighbours, 0)].sum()
    return float((kept.min() - largest_eigenvalue(weights)) / own.min())


def mixed_carried(
    weight: float, second: float, participants: int, colluders: int, revealed: float = 0.0
) -> tuple[float, float]:
    """A biregular carried graph against colluders placed anywhere: its least honest weight, and its irregularity.

    `second` is the second singular value of the graph's matrix over its first, and `revealed` the largest share phi of
    the graph's weight that may be given away (by both sides together). By the expander mixing lemma, with the share
    rho of colluders,

        W >= w (1 - rho) ((1 - rho) - s_2 rho) - phi w,
        |u|, |v| <= (w / m) (s_2 sqrt(m rho (1 - rho)) + sqrt(m phi)),

    the last since no client loses more than its `w / m` and all together at most `phi w`.

    Returned are that W and the bound on `2 |u|^2 / W`, the loss of the deviations at theta = 1 in each of two rounds.
    """
    if not 0.0 <= second <= 1.0 or not 0 <= colluders < participants or not 0.0 <= revealed < 1.0:
        raise ConfigError("needs 0 <= s_2 <= 1, an honest client, and a share below 1", field="second")
    rho = colluders / participants
    left = weight * ((1.0 - rho) * (1.0 - rho - second * rho) - revealed)
    if left <= 0.0:
        return 0.0, 0.0
    spread = second * math.sqrt(rho * (1.0 - rho)) + math.sqrt(revealed)
    return left, 2.0 * weight**2 / participants * spread**2 / left
