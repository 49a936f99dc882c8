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
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import lapack, solve_triangular, solveh_banded

from niss.checks import require_real
from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.mechanism.shares import per_client
from niss.views.joint import Knowledge, hidden_noise

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Up to here the whole matrix is factored (300 MB).
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
        vertices = ((client, number) for number, one in enumerate(self.rounds) for client in one.clients)
        return {vertex: place for place, vertex in enumerate(vertices)}

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
    *,
    colluders: Collection[int] = (),
    dropped: Collection[Vertex] = (),
    revealed: Collection[tuple[Vertex, Vertex]] = (),
    sensitivity: ArrayLike = 1.0,
) -> dict[int, float]:
    """mu_k^2 over the whole run, for every honest client that uploaded.

    colluders    clients that tell the server all they know, in every round they take part in
    dropped      (client, round): uploads that never arrived; nobody knows their shares, which stay with the others
    revealed     pairs of (client, round) whose shared seeds the server was given
    sensitivity  Delta: how far one client can move an upload; one number, or one per round

    Exact to rounding (Cholesky). Infinite where a client has an upload in a connected group without fresh noise.
    """
    if len(run.places) > DENSE_VERTICES:
        raise ConfigError(
            f"{len(run.places)} uploads are too many for the whole matrix",
            field="run",
            hint=f"at most {DENSE_VERTICES}; where everyone shares with everyone, CompleteRun has no limit",
        )
    shift, telling = per_client(sensitivity, len(run.rounds), "sensitivity"), set(colluders)
    known = Knowledge(
        colluders=[place for vertex, place in run.places.items() if vertex[0] in telling],
        dropped=[run.vertex(vertex, "dropped") for vertex in dropped],
        revealed=[(run.vertex(a, "revealed"), run.vertex(b, "revealed")) for a, b in revealed],
    )
    hidden = hidden_noise(run.graph, known, unit_variance=1.0, residual=run.residual)
    owners, rounds = np.array(list(run.places), dtype=np.int64).reshape(-1, 2)[hidden.kept].T
    clients = np.unique(owners)
    moves = np.where(owners[:, None] == clients, shift[rounds][:, None], 0.0)
    covered = ~np.any(moves[hidden.exposed] > 0.0, axis=0)
    values = np.where(covered, 0.0, math.inf)
    solid = np.flatnonzero(~hidden.exposed)
    if not solid.size:
        return dict(zip(clients.tolist(), values.tolist(), strict=True))
    covariance = hidden.covariance[solid][:, solid]
    scale = np.sqrt(covariance.diagonal())
    correlation = np.asfortranarray(covariance.toarray() / scale / scale[:, None])
    factor, failed = lapack.dpotrf(correlation, lower=1, clean=1, overwrite_a=1)
    if failed:
        raise PrivacyError(
            "the joint view could not be computed: the noise is nearly singular",
            hint="give every client residual noise",
        )
    white = solve_triangular(factor, moves[np.ix_(solid, covered)] / scale[:, None], lower=True)
    values[covered] = np.einsum("ij,ij->j", white, white)
    return dict(zip(clients.tolist(), values.tolist(), strict=True))


@dataclass(frozen=True)
class CompleteRun:
    """The exact view of a run where everyone shares with everyone, within a round and with the next cohort.

    The noise is block diagonal in the sums of rounds and the deviations from them, so for participations P

        mu^2 = Delta' K[P, P] Delta,     K = Gamma^-1 + diag((1 - 1/h) / D_t),

    h the honest clients of a round, `Gamma = diag(h eta_t^2) + L(w)` the covariance of the sums, the Laplacian of the
    path of rounds with `w_t` the carried variance between two of them, and D_t the variance of a deviation. Those whose
    shares are known take their own parts out: `r -> (1 - rho) r`, `w -> (1 - rho)^2 w`, `m -> (1 - rho) m`.

    participants  m of every round, of whom the shares of `known` are known
    carried       variance from the sum of each of T rounds to the next, T - 1 numbers, in units of a residual r: the
                  fresh noise in the sum of a round, all clients together

    With these ratios fixed, all is proportional to r but for the shares within a round: one system serves all r.
    """

    participants: int
    known: int
    carried: FloatArray

    @property
    def honest(self) -> int:
        return self.participants - self.known

    @cached_property
    def bands(self) -> FloatArray:
        """Gamma at r = 1, as its diagonal and the numbers below it."""
        share, rounds = self.honest / self.participants, self.carried.size + 1
        bands = np.zeros((min(2, rounds), rounds))
        bands[0] = share
        if rounds > 1:
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
        unit = np.eye(self.carried.size + 1, order="F")
        inverse = solveh_banded(bands, unit, lower=True, overwrite_b=True, check_finite=False)
        # In place: a plan for many rounds takes several of these, each of millions of numbers.
        matrix = np.asarray(inverse + inverse.T)
        matrix /= 2.0
        np.maximum(matrix, 0.0, out=matrix)
        np.einsum("tt->t", matrix)[:] += (1.0 - 1.0 / self.honest) / self.deviations(residual, spatial)
        return matrix
