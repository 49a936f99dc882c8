"""A search for the colluders that hurt a client most: a diagnostic, which proves nothing.

The effective variance of client k is `min u^T Sigma_H u` with u_k = 1, so every set of colluders gives an upper bound
on the worst case: what a search finds can only be milder than the worst, and a claim that rests on it would be too good
(on a sparse graph it misses small groups that can be cut off). Claims rest on `niss.views.collusion`; the search says
how near an attacker comes to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import lapack
from scipy.sparse import csr_array, diags_array
from scipy.sparse.linalg import LinearOperator, cg

from niss.errors import PrivacyError
from niss.graph import ShareGraph
from niss.mechanism.shares import per_client
from niss.randomness import SimStream
from niss.views.collusion import Corruption, WorstCase, known_neighbours
from niss.views.joint import effective_variance, target_per_client
from niss.views.numerics import links

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Rounds of up to this many clients are searched against every client, larger ones against a few.
_EVERYONE = 60
_SUSPECTS = 6
_GREEDY_STEPS = 5
_RANDOM_SETS = 2
# The worst few sets found, if of up to this many colluders, are improved by exchanging one at a time.
_EXCHANGED = 12
_EXCHANGED_SETS, _EXCHANGE_ROUNDS, _CANDIDATES = 3, 3, 4
# Added to the diagonal, as a share of its mean, so that a group without fresh noise can be searched too.
_SOFTENING = 1e-9
# Up to this many clients a dense solve takes less time than building a sparse matrix.
_DENSE = 250


def search_colluders(
    graph: ShareGraph,
    corruption: Corruption,
    *,
    unit_variance: float,
    residual_variance: ArrayLike,
    target_variance: ArrayLike,
) -> WorstCase:
    """The worst set of colluders that a search finds; the arguments are those of `worst_case`."""
    residual = per_client(residual_variance, graph.size, "residual_variance")
    target = target_per_client(target_variance, graph.size)
    return _Search(graph, corruption, unit_variance, residual, target).guided(corruption.removed)


class _Search:
    """Looking for the worst client and its worst colluders on one graph: greedy sets, random sets, exchanges."""

    def __init__(
        self,
        graph: ShareGraph,
        corruption: Corruption,
        unit_variance: float,
        residual: FloatArray,
        target: FloatArray,
    ) -> None:
        self.graph, self.unit, self.residual, self.target = graph, unit_variance, residual, target
        self.links = csr_array(unit_variance * links(graph))
        self.corruption = corruption
        self.dense: FloatArray | None = self.links.toarray() if graph.size <= _DENSE else None
        self.matrix = self.links if self.dense is None else self.dense
        self.linked: FloatArray = self.matrix.sum(axis=1)

    def neighbours(self, client: int) -> IntArray:
        linked: IntArray = self.links.indices[self.links.indptr[client] : self.links.indptr[client + 1]]
        return linked.astype(np.int64)

    def limit(self, client: int) -> int:
        """How many of the client's neighbours may be known to the server."""
        return known_neighbours(self.graph, self.corruption, self.neighbours(client).size)

    def guided(self, removed: int) -> WorstCase:
        """Greedy and random sets against the clients that look weakest, the worst of them then improved.

        Deterministic: what is random in it follows from the digest of the graph.
        """
        stream = SimStream(int.from_bytes(self.graph.digest()[:7], "little")).child("worst case")
        found = []
        for client in self._suspects(stream):
            sets = self._sets_against(client, removed, stream.child("sets", client))
            found.append(min((self._case(client, colluders) for colluders in sets), key=_by_ratio))
        if removed <= _EXCHANGED:
            found += [self._exchanged(start) for start in sorted(found, key=_by_ratio)[:_EXCHANGED_SETS]]
        return self.confirmed(min(found, key=_by_ratio))

    def confirmed(self, found: WorstCase) -> WorstCase:
        """The same set with its ratio to full precision: the search follows softened numbers."""
        variance = effective_variance(
            self.graph,
            unit_variance=self.unit,
            residual_variance=self.residual,
            colluders=found.colluders,
            clients=[found.client],
        )
        return replace(found, ratio=float(variance[0] / self.target[found.client]))

    def _suspects(self, stream: SimStream) -> list[int]:
        """Clients whose own links leave the least once the heaviest allowed ones are known, and a few others."""
        left = np.empty(self.graph.size)
        for client in range(self.graph.size):
            weights = np.sort(self.links.data[self.links.indptr[client] : self.links.indptr[client + 1]])
            left[client] = weights[: weights.size - self.limit(client)].sum() + self.residual[client]
        weakest = np.argsort(left / self.target, kind="stable")[:_SUSPECTS]
        if self.graph.size <= _EVERYONE:
            return list(range(self.graph.size))
        others = stream.child("others").generator().permutation(self.graph.size)[:2]
        return list(dict.fromkeys([*weakest.tolist(), *others.tolist()]))

    def _sets_against(self, client: int, removed: int, stream: SimStream) -> Iterator[tuple[int, ...]]:
        yield self._greedy(client, removed)
        near = self.neighbours(client)
        heaviest = near[
            np.argsort(-self._weights_to(client), kind="stable")[: min(self.limit(client), removed)]
        ]
        far = np.setdiff1d(np.arange(self.graph.size), [*near.tolist(), client])
        for number in range(_RANDOM_SETS):
            rest = stream.child(number).generator().permutation(far)[: removed - heaviest.size]
            yield tuple(sorted([*heaviest.tolist(), *rest.tolist()]))

    def _greedy(self, client: int, removed: int) -> tuple[int, ...]:
        """Take out, in a few steps, the clients whose links and noise carry most of the victim's protection.

        The effective variance is the least energy `u^T Sigma u` with u_client = 1, so at the minimum u the
        energy on a client's links and residual is what removing it gains, to first order.
        """
        chosen: list[int] = []
        near = set(self.neighbours(client).tolist())
        allowance = self.limit(client)
        for step in range(_GREEDY_STEPS):
            energy = self._energy(client, tuple(chosen))
            wanted = math.ceil(removed * (step + 1) / _GREEDY_STEPS) - len(chosen)
            for candidate in np.argsort(-energy, kind="stable").tolist():
                if wanted == 0 or energy[candidate] < 0.0:
                    break
                if candidate in near:
                    if allowance == 0:
                        continue
                    allowance -= 1
                chosen.append(candidate)
                wanted -= 1
        return tuple(sorted(chosen))

    def _exchanged(self, start: WorstCase) -> WorstCase:
        """One colluder out, another in, as long as that makes it worse."""
        best, client = start, start.client
        near, limit = set(self.neighbours(client).tolist()), self.limit(client)
        for _ in range(_EXCHANGE_ROUNDS):
            before = best
            for leaving in before.colluders:
                staying = [colluder for colluder in best.colluders if colluder != leaving]
                energy = self._energy(client, tuple(staying))
                if len(near.intersection(staying)) >= limit:
                    energy[list(near)] = -1.0
                for candidate in np.argsort(-energy, kind="stable")[:_CANDIDATES].tolist():
                    if energy[candidate] >= 0.0:
                        best = min(
                            best, self._case(client, tuple(sorted([*staying, candidate]))), key=_by_ratio
                        )
            if best is before:
                break
        return best

    def _energy(self, client: int, chosen: tuple[int, ...]) -> FloatArray:
        """What each further client carries of the victim's protection; -1 for those already out."""
        potential = self._potential(client, chosen)
        squared = potential**2
        flow = self.matrix @ squared - 2.0 * potential * (self.matrix @ potential)
        energy: FloatArray = flow + squared * (self.linked + self.residual)
        np.maximum(energy, 0.0, out=energy)
        energy[[client, *chosen]] = -1.0
        return energy

    def _potential(self, client: int, colluders: tuple[int, ...]) -> FloatArray:
        """Sigma_H^-1 e_client scaled to 1 at the client; 0 at colluders."""
        solution = self._solution(client, colluders)
        return np.asarray(solution / solution[client])

    def _solution(self, client: int, colluders: tuple[int, ...]) -> FloatArray:
        """Sigma_H^-1 e_client, with a little noise more on the diagonal; 0 at colluders.

        Colluders stay in the matrix as clients without links, so that no index moves.
        """
        taken = list(colluders)
        honest = np.ones(self.graph.size)
        honest[taken] = 0.0
        diagonal = honest * (self.matrix @ honest + self.residual)
        diagonal += _SOFTENING * (float(diagonal.sum()) / (self.graph.size - len(taken)) or 1.0)
        unit = np.zeros(self.graph.size)
        unit[client] = 1.0
        if self.dense is None:
            return self._sparse_solution(diagonal, honest, unit)
        matrix = -self.dense
        matrix[taken] = 0.0
        matrix[:, taken] = 0.0
        np.fill_diagonal(matrix, diagonal)
        _, solution, failed = lapack.dposv(matrix, unit, lower=1, overwrite_a=1)
        if failed:
            raise PrivacyError("the noise covariance of a round has no inverse", hint="more residual noise")
        return np.asarray(solution, dtype=np.float64).reshape(-1)

    def _sparse_solution(self, diagonal: FloatArray, honest: FloatArray, unit: FloatArray) -> FloatArray:
        """By conjugate gradients; a search needs no more digits than this."""

        def times(vector: FloatArray) -> FloatArray:
            return np.asarray(diagonal * vector - honest * (self.links @ (honest * vector)))

        shape = (self.graph.size,) * 2
        covariance = LinearOperator(shape, matvec=times, dtype=np.float64)
        solution, _ = cg(covariance, unit, rtol=1e-7, maxiter=500, M=diags_array(1.0 / diagonal))
        return np.asarray(solution, dtype=np.float64)

    def _case(self, client: int, colluders: tuple[int, ...]) -> WorstCase:
        variance = 1.0 / float(self._solution(client, colluders)[client])
        return WorstCase(variance / float(self.target[client]), client, colluders, False)

    def _weights_to(self, client: int) -> FloatArray:
        weights: FloatArray = self.links.data[self.links.indptr[client] : self.links.indptr[client + 1]]
        return weights


def _by_ratio(case: WorstCase) -> float:
    return case.ratio
