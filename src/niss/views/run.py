"""The joint view over a whole training: one vertex for every client in every round.

Client `k` of round `t` uploads, besides its clipped update, its shares within the round, the shares it carries to the
next round, minus those carried to it, plus fresh noise. Over all honest uploads the unknown noise has the covariance

    Sigma = L_within + L_carried + diag(residual)          (honest-honest edges only)

and moving `k`'s update by at most `Delta_t` in each of its rounds `P_k` is exactly mu_k-GDP with

    mu_k^2 = Delta' (Sigma^-1)[P_k, P_k] Delta.

Cross terms between rounds count, so this is no sum of separate charges. `Sigma` has no positive entry off the diagonal
(a Stieltjes matrix), its inverse therefore no negative one: moving every round the same way is the worst case. Without
carried shares it falls into blocks, and a run of one round is the view of `niss.views.joint`. This graph over all
vertices is the oracle of tests and audits. Where everyone shares with everyone no vertices are needed: `CompleteRun`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import lapack, solve_triangular, solveh_banded
from scipy.sparse import csr_array, diags_array
from scipy.sparse.linalg import cg

from niss.checks import BOUNDS, require_real
from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.mechanism.shares import per_client
from niss.views.joint import Knowledge, hidden_noise

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Up to here the whole matrix is factored (300 MB); beyond, each client is solved for by itself.
DENSE_VERTICES = 6_000

Vertex = tuple[int, int]


@dataclass(frozen=True)
class RoundNoise:
    """The noise of one round as it ran.

    clients        who took part, in the order in which the graphs number them
    shares         the graph within the round; its unit shares have the variance `unit_variance`
    residual       variance of the fresh noise of each client: one number, or one per client
    carried        the graph to the next round, and the variance of its unit share; None: nothing is carried on
    """

    clients: tuple[int, ...]
    shares: ShareGraph
    unit_variance: float
    residual: ArrayLike
    carried: tuple[ShareGraph, float] | None = None

    def __post_init__(self) -> None:
        if len(set(self.clients)) != len(self.clients) or len(self.clients) != self.shares.size:
            raise ConfigError(
                f"needs {self.shares.size} different clients, one for each vertex of the graph",
                field="clients",
            )
        for value in (self.unit_variance, *(() if self.carried is None else self.carried[1:])):
            require_real(value, field="unit_variance")


class RunKnowledge(NamedTuple):
    """What the adversary holds besides all uploads of the run.

    colluders  clients that tell it all they know, in every round they take part in
    dropped    (client, round): uploads that never arrived; nobody knows their shares, which stay with the others
    revealed   pairs of (client, round) whose shared seeds it was given
    """

    colluders: Collection[int] = ()
    dropped: Collection[Vertex] = ()
    revealed: Collection[tuple[Vertex, Vertex]] = ()


NOTHING_KNOWN = RunKnowledge()


@dataclass(frozen=True)
class RunNoise:
    """All rounds of a run; vertex `(client, round)` with rounds numbered from 0."""

    rounds: tuple[RoundNoise, ...]

    def __post_init__(self) -> None:
        for number, one in enumerate(self.rounds):
            if one.carried is None:
                continue
            if number + 1 == len(self.rounds):
                raise ConfigError(
                    f"round {number} carries shares to round {number + 1}, which does not exist",
                    field="carried",
                    hint="the last round carries nothing; or add a closing round",
                )
            sizes, graph = (len(one.clients), len(self.rounds[number + 1].clients)), one.carried[0]
            if graph.sizes != sizes or not graph.between:
                raise ConfigError(
                    f"the carried graph of round {number} joins {graph.sizes}, not {sizes}", field="carried"
                )

    @cached_property
    def places(self) -> Mapping[Vertex, int]:
        """The number of each vertex."""
        return {vertex: place for place, vertex in enumerate(self._vertices())}

    def _vertices(self) -> Iterable[Vertex]:
        return ((client, number) for number, one in enumerate(self.rounds) for client in one.clients)

    @cached_property
    def residual(self) -> FloatArray:
        """Fresh noise of every vertex."""
        return np.concatenate([per_client(one.residual, len(one.clients), "residual") for one in self.rounds])

    @cached_property
    def graph(self) -> ShareGraph:
        """One graph over all vertices, its weights being variances."""
        starts = np.cumsum([0, *(len(one.clients) for one in self.rounds)])
        parts: list[tuple[IntArray, IntArray, FloatArray]] = []
        for number, one in enumerate(self.rounds):
            graphs = [(one.shares, one.unit_variance, starts[number])]
            if one.carried is not None:
                graphs.append((*one.carried, starts[number + 1]))
            for graph, variance, later in graphs:
                if variance > 0.0:
                    ends = graph.senders + starts[number], graph.receivers + later
                    parts.append((*ends, variance * graph.weights))
        if not parts:
            return ShareGraph(max(len(self.places), 1), [])
        senders, receivers, weights = (np.concatenate(column) for column in zip(*parts, strict=True))
        return ShareGraph.from_arrays(len(self.places), senders, receivers, weights, "run")

    def vertex(self, vertex: Vertex, field: str) -> int:
        """The number of a vertex that must exist."""
        if vertex not in self.places:
            raise ConfigError(f"client {vertex[0]} did not take part in round {vertex[1]}", field=field)
        return self.places[vertex]


def run_mu2(
    run: RunNoise,
    known: RunKnowledge = NOTHING_KNOWN,
    *,
    sensitivity: ArrayLike = 1.0,
    clients: Sequence[int] | None = None,
) -> dict[int, float]:
    """mu_k^2 over the whole run, for every honest client that uploaded (or for `clients`, in that order).

    sensitivity  Delta: how far one client can move an upload; one number, or one per round

    Exact to rounding up to 6,000 vertices (Cholesky). Beyond, conjugate gradients with a bound that is never below the
    truth: with `x` near `Sigma^-1 d` and `r = d - Sigma x`,

        d' Sigma^-1 d = d'x + x'r + r' Sigma^-1 r <= d'x + x'r + sum_u r_u^2 / residual_u,

    since `Sigma >= diag(residual)`. Infinite where a client has an upload in a connected group without fresh noise.
    """
    shift = per_client(sensitivity, len(run.rounds), "sensitivity")
    colluding = set(known.colluders)
    places = Knowledge(
        colluders=[place for vertex, place in run.places.items() if vertex[0] in colluding],
        dropped=[run.vertex(vertex, "dropped") for vertex in known.dropped],
        revealed=[(run.vertex(a, "revealed"), run.vertex(b, "revealed")) for a, b in known.revealed],
    )
    hidden = hidden_noise(run.graph, places, unit_variance=1.0, residual=run.residual)
    owners, rounds = np.array(list(run.places), dtype=np.int64).reshape(-1, 2)[hidden.kept].T
    wanted = np.unique(owners) if clients is None else np.asarray(clients, dtype=np.int64)
    unknown = np.setdiff1d(wanted, owners)
    if unknown.size:
        raise ConfigError(
            f"client {unknown[0]} is not among the honest clients that uploaded", field="clients"
        )
    moves = np.where(owners[:, None] == wanted, shift[rounds][:, None], 0.0)
    covered = ~np.any(moves[hidden.exposed] > 0.0, axis=0)
    solid = np.flatnonzero(~hidden.exposed)
    covariance, moves = csr_array(hidden.covariance[solid][:, solid]), moves[np.ix_(solid, covered)]
    values = np.full(wanted.size, math.inf)
    if solid.size <= DENSE_VERTICES:
        values[covered] = _exact_forms(covariance, moves)
    else:
        values[covered] = _bounded_forms(covariance, moves, run.residual[hidden.kept[solid]])
    return dict(zip(wanted.tolist(), values.tolist(), strict=True))


def _exact_forms(covariance: csr_array, moves: FloatArray) -> FloatArray:
    """`d' covariance^-1 d` for every column d."""
    if moves.shape[0] == 0:
        return np.zeros(moves.shape[1])
    scale = np.sqrt(covariance.diagonal())
    correlation = np.asfortranarray(covariance.toarray() / scale / scale[:, None])
    factor, failed = lapack.dpotrf(correlation, lower=1, clean=1, overwrite_a=1)
    if failed:
        raise PrivacyError(
            "the joint view could not be computed: the noise is nearly singular",
            hint="give every client residual noise",
        )
    white = solve_triangular(factor, moves / scale[:, None], lower=True)
    return np.asarray(np.einsum("ij,ij->j", white, white))


def _bounded_forms(covariance: csr_array, moves: FloatArray, residual: FloatArray) -> FloatArray:
    """The same from above, column by column."""
    if np.any(residual <= 0.0):
        raise PrivacyError(
            "clients without residual noise in a run this large",
            hint=f"give every client residual noise, or stay below {DENSE_VERTICES} uploads",
        )
    jacobi = diags_array(1.0 / covariance.diagonal())
    bounds = np.empty(moves.shape[1])
    for column, move in enumerate(moves.T):
        solution, failed = cg(covariance, move, rtol=1e-9, atol=0.0, maxiter=10_000, M=jacobi)
        if failed:
            raise PrivacyError(
                "the joint view of a client could not be computed to full precision",
                hint="more residual noise or a better connected graph",
            )
        rest = move - covariance @ solution
        bounds[column] = move @ solution + solution @ rest + float(np.sum(rest**2 / residual))
    return bounds * (1.0 + BOUNDS)


@dataclass(frozen=True)
class CompleteRun:
    """The exact view of a run where everyone shares with everyone, within a round and with the next cohort.

    The noise is block diagonal in the sums of rounds and the deviations from them, so for participations P

        mu^2 = Delta' K[P, P] Delta,     K = Gamma^-1 + diag((1 - 1/h) / D_t),

    h the honest clients of a round, `Gamma = diag(h eta_t^2) + L(w)` the covariance of the sums, the Laplacian of the
    path of rounds with `w_t` the carried variance between two of them, and D_t the variance of a deviation. Those whose
    shares are known take their own parts out: `r -> (1 - rho) r`, `w -> (1 - rho)^2 w`, `m -> (1 - rho) m`.

    participants  m of every round, of whom the shares of `known` are known
    fresh         variance of the fresh noise in the sum of each round, all clients together, in units of a residual r
    carried       from the sum of each round to the next, T - 1 numbers, likewise

    With these ratios fixed, all is proportional to r but for the shares within a round: one system serves all r.
    """

    participants: int
    known: int
    fresh: FloatArray
    carried: FloatArray

    def __post_init__(self) -> None:
        if not 0 <= self.known < self.participants:
            raise PrivacyError("no honest client is left to protect", hint="assume fewer colluders")
        if self.fresh.ndim != 1 or not np.all(self.fresh > 0.0):
            raise ConfigError("needs a number above 0 for every round", field="residual")
        if self.carried.shape != (self.fresh.size - 1,):
            raise ConfigError(f"needs {self.fresh.size - 1} numbers", field="carried")
        if not np.all(np.isfinite(self.carried) & (self.carried >= 0.0)):
            raise ConfigError("must be finite and not negative", field="carried")

    @property
    def honest(self) -> int:
        return self.participants - self.known

    @cached_property
    def bands(self) -> FloatArray:
        """Gamma at r = 1, as its diagonal and the numbers below it."""
        share = self.honest / self.participants
        bands = np.zeros((min(2, self.fresh.size), self.fresh.size))
        bands[0] = share * self.fresh
        if self.fresh.size > 1:
            kept = share**2 * self.carried
            bands[0, :-1] += kept
            bands[0, 1:] += kept
            bands[1, :-1] = -kept
        return bands

    def deviations(self, residual: float, spatial: float) -> FloatArray:
        """D_t at this r, with shares within the round of that variance in one upload, sent and received."""
        within = spatial * self.honest / max(self.participants - 1, 1)
        return np.asarray(within + residual * self.bands[0] / self.honest)

    def matrix(self, residual: float, spatial: float) -> FloatArray:
        """K (T x T), without a negative entry."""
        bands = np.asarray_chkfinite(residual * self.bands)
        unit = np.eye(self.fresh.size, order="F")
        inverse = solveh_banded(bands, unit, lower=True, overwrite_b=True, check_finite=False)
        # In place: a plan for many rounds takes several of these, each of millions of numbers.
        matrix = np.asarray(inverse + inverse.T)
        matrix /= 2.0
        np.maximum(matrix, 0.0, out=matrix)
        np.einsum("tt->t", matrix)[:] += (1.0 - 1.0 / self.honest) / self.deviations(residual, spatial)
        return matrix
