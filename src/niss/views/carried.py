"""The joint view over a whole training with carried shares: one vertex for every client in every round.

Client `k` of round `t` uploads, besides its clipped update, its shares within the round, the shares it carries to later
rounds, minus those carried to it, plus fresh noise. Over all honest uploads the unknown noise has the covariance

    Sigma = L_within + L_carried + diag(residual)          (honest-honest edges only)

and moving `k`'s update by at most `Delta_t` in each of its rounds `P_k` is exactly mu_k-GDP with

    mu_k^2 = Delta' (Sigma^-1)[P_k, P_k] Delta.

Cross terms between rounds count, so this is no sum of separate charges. `Sigma` has no positive entry off the diagonal
(a Stieltjes matrix), its inverse therefore no negative one: moving every round the same way is the worst case.

Where the receiver of a carried share subtracts `a_t / a_s` times it (rounds that enter the model with factors `a`),
`Sigma = A^-1 (L + diag(a^2 residual)) A^-1`, and all of the above still holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import lapack, solve_triangular
from scipy.sparse import csr_array, diags_array
from scipy.sparse.linalg import cg

from niss.errors import ConfigError, PrivacyError
from niss.graph import CarriedGraph, ShareGraph
from niss.views.covariance import Knowledge, hidden_noise, per_client

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Up to here the whole matrix is factored (300 MB); beyond, each client is solved for by itself.
DENSE_VERTICES = 6_000
# Rounding in the dot products of a bound, relative to the result.
_ROUNDING = 1e-12

Vertex = tuple[int, int]


@dataclass(frozen=True)
class CarriedRound:
    """One round as it ran.

    clients        who took part, in the order in which the graphs number them
    shares         the graph within the round; its unit shares have the variance `unit_variance`
    residual       variance of the fresh noise of each client: one number, or one per client
    carried        graphs that start in this round, each with the variance of its unit share
    factor         a_t, if receivers rescale what they subtract by the ratio of factors; else 1 in every round
    """

    clients: tuple[int, ...]
    shares: ShareGraph
    unit_variance: float
    residual: ArrayLike
    carried: tuple[tuple[CarriedGraph, float], ...] = ()
    factor: float = 1.0

    def __post_init__(self) -> None:
        if len(set(self.clients)) != len(self.clients) or len(self.clients) != self.shares.size:
            raise ConfigError(
                f"needs {self.shares.size} different clients, one for each vertex of the graph",
                field="clients",
            )
        for value in (self.unit_variance, *(variance for _, variance in self.carried)):
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(
                    f"must be a finite number, not below 0, not {value!r}", field="unit_variance"
                )
        if not (math.isfinite(self.factor) and self.factor > 0.0):
            raise ConfigError(f"must be a finite number above 0, not {self.factor!r}", field="factor")


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
class CarriedRun:
    """All rounds of a run; vertex `(client, round)` with rounds numbered from 0."""

    rounds: tuple[CarriedRound, ...]

    def __post_init__(self) -> None:
        for number, one in enumerate(self.rounds):
            if len({graph.lag for graph, _ in one.carried}) != len(one.carried):
                raise ConfigError(f"round {number} has two carried graphs to the same round", field="carried")
            for graph, _ in one.carried:
                later = number + graph.lag
                if later >= len(self.rounds):
                    raise ConfigError(
                        f"round {number} carries shares to round {later}, which does not exist",
                        field="carried",
                        hint="the last rounds carry nothing; or add a closing round",
                    )
                sizes = (len(one.clients), len(self.rounds[later].clients))
                if graph.sizes != sizes:
                    raise ConfigError(
                        f"the carried graph of round {number} joins {graph.sizes}, not {sizes}",
                        field="carried",
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
    def _edges(self) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
        """Ends, variances, and the factor with which the receiver subtracts."""
        starts = np.cumsum([0, *(len(one.clients) for one in self.rounds)])
        parts: list[tuple[IntArray, IntArray, FloatArray, FloatArray]] = []
        for number, one in enumerate(self.rounds):
            within, start = one.shares, starts[number]
            parts.append(_part(within, start, start, one.unit_variance, 1.0))
            for graph, variance in one.carried:
                later = number + graph.lag
                ratio = one.factor / self.rounds[later].factor
                parts.append(_part(graph, start, starts[later], variance, ratio))
        senders, receivers, weights, scales = (np.concatenate(column) for column in zip(*parts, strict=True))
        return senders, receivers, weights, scales

    @cached_property
    def graph(self) -> tuple[ShareGraph, FloatArray]:
        """One graph over all vertices, weights being variances, and each edge's factor at its receiver."""
        senders, receivers, weights, scales = self._edges
        kept = weights > 0.0
        graph = ShareGraph.from_arrays(
            max(len(self.places), 1), senders[kept], receivers[kept], weights[kept], "carried"
        )
        # No two edges join the same ordered pair, so sorting the codes sorts the factors alike.
        order = np.argsort(senders[kept] * graph.size + receivers[kept], kind="stable")
        return graph, scales[kept][order]

    def vertex(self, vertex: Vertex, field: str) -> int:
        """The number of a vertex that must exist."""
        if vertex not in self.places:
            raise ConfigError(f"client {vertex[0]} did not take part in round {vertex[1]}", field=field)
        return self.places[vertex]


def _part(
    graph: ShareGraph | CarriedGraph, start: int, later: int, variance: float, ratio: float
) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
    return (
        graph.senders + start,
        graph.receivers + later,
        variance * graph.weights,
        np.full(graph.weights.size, ratio),
    )


def run_mu2(
    run: CarriedRun,
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
    graph, scales = run.graph
    colluding = set(known.colluders)
    places = Knowledge(
        colluders=[place for vertex, place in run.places.items() if vertex[0] in colluding],
        dropped=[run.vertex(vertex, "dropped") for vertex in known.dropped],
        revealed=[(run.vertex(a, "revealed"), run.vertex(b, "revealed")) for a, b in known.revealed],
    )
    hidden = hidden_noise(
        graph,
        places,
        unit_variance=1.0,
        residual=run.residual,
        scales=None if np.all(scales == 1.0) else scales,
    )
    owners: dict[int, list[int]] = {}
    vertices = list(run.places)
    for row, place in enumerate(hidden.kept.tolist()):
        owners.setdefault(vertices[place][0], []).append(row)
    wanted = sorted(owners) if clients is None else list(clients)
    for client in wanted:
        if client not in owners:
            raise ConfigError(
                f"client {client} is not among the honest clients that uploaded", field="clients"
            )
    rounds = np.array([vertices[place][1] for place in hidden.kept.tolist()], dtype=np.int64)
    bare = {
        client
        for client in wanted
        if np.any(hidden.exposed[owners[client]] & (shift[rounds[owners[client]]] > 0))
    }
    solid = np.flatnonzero(~hidden.exposed)
    rows = {int(row): place for place, row in enumerate(solid)}
    covered = [client for client in wanted if client not in bare]
    moves = np.zeros((solid.size, len(covered)))
    for column, client in enumerate(covered):
        for row in owners[client]:
            if row in rows:
                moves[rows[row], column] = shift[rounds[row]]
    covariance = csr_array(hidden.covariance[solid][:, solid])
    if solid.size <= DENSE_VERTICES:
        values = _exact_forms(covariance, moves)
    else:
        values = _bounded_forms(covariance, moves, run.residual[hidden.kept[solid]])
    found = dict(zip(covered, values.tolist(), strict=True))
    return {client: found.get(client, math.inf) for client in wanted}


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
    return bounds * (1.0 + _ROUNDING)
