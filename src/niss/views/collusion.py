"""How bad it can get when some clients tell the server all they know.

The corruption is static: at most `colluders` participants, chosen before the beacon, and so before the
graph, is known. A client's neighbours are then a random sample, and the number of colluders among them
stays below a hypergeometric quantile except with a stated probability, which is charged to delta. Given
that bound, the worst set of colluders is found exactly where all sets can be tried (or are all alike),
and else by a search, which is reported as such.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import lapack
from scipy.sparse import csr_array, diags_array
from scipy.sparse.linalg import LinearOperator, cg

from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.randomness import SimStream
from niss.views.covariance import per_client
from niss.views.joint import effective_variance, least_tau2, received_variance, target_per_client

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# All sets of colluders are tried when there are at most this many.
EXACT_SETS = 3_000
_REFINEMENTS = 6
_SMALL = 500
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


@dataclass(frozen=True)
class Corruption:
    """At most `colluders` static colluders, and what a repair of dropouts may give away.

    `revealed` edges of any one client, at most, are told to the server, and at most `dropped` clients are
    declared dropped in a round: all their edges may be revealed and their own noise is lost, so they count
    like colluders. `failure` is the probability, per client and round, with which more of its neighbours
    may collude than the accountant assumes.
    """

    colluders: int = 0
    revealed: int = 0
    dropped: int = 0
    failure: float = 0.0

    @property
    def removed(self) -> int:
        """The most participants whose part is known to the server or missing."""
        return self.colluders + max(self.revealed, self.dropped)

    def __post_init__(self) -> None:
        for field in ("colluders", "revealed", "dropped"):
            value = getattr(self, field)
            if not isinstance(value, (int, np.integer)) or value < 0:
                raise ConfigError(f"must be a whole number of at least 0, not {value!r}", field=field)
        if not 0.0 <= self.failure < 1.0:
            raise ConfigError(f"must lie in [0, 1), not {self.failure!r}", field="failure")


@dataclass(frozen=True)
class WorstCase:
    """The worst that was found on one graph.

    ratio      effective variance over target; 1 is just enough, 0 no protection
    client     whose it is
    colluders  with which it comes about
    exact      whether every admissible set was covered
    examined   how many sets were evaluated
    """

    ratio: float
    client: int
    colluders: tuple[int, ...]
    exact: bool
    examined: int


@lru_cache(maxsize=4_096)
def colluding_neighbours(participants: int, neighbours: int, colluders: int, failure: float) -> int:
    """The least q with P(more than q of the neighbours collude) <= failure.

    The neighbours are a uniform sample of the other participants, `colluders` of whom collude.
    """
    if not 0 <= neighbours < participants or not 0 <= colluders < participants:
        raise ConfigError("neighbours and colluders must be fewer than the participants", field="neighbours")
    most = min(neighbours, colluders)
    if failure <= 0.0:
        # A probability too small for a float is not yet none.
        return most
    from scipy.stats import hypergeom

    for count in range(most):
        if hypergeom.sf(count, participants - 1, colluders, neighbours) <= failure:
            return count
    return most


def worst_case(
    graph: ShareGraph,
    corruption: Corruption,
    *,
    unit_variance: float,
    residual_variance: ArrayLike,
    target_variance: ArrayLike,
) -> WorstCase:
    """The smallest ratio of effective to target variance over honest clients and colluder sets.

    graph              who shares with whom
    corruption         how many collude, and how much a repair may reveal
    unit_variance      sigma^2, the variance of a share of weight 1
    residual_variance  eta_k^2, the fresh noise of each client: one number, or one per client
    target_variance    the effective variance that each client wants, likewise

    Raises PrivacyError where fewer than two participants are left.
    """
    residual = per_client(residual_variance, graph.size, "residual_variance")
    target = target_per_client(target_variance, graph.size)
    removed = corruption.removed
    if removed > graph.size - 2:
        raise PrivacyError(
            f"{removed} of {graph.size} participants known to the server leave nobody to share noise with",
            hint="assume fewer colluders or reveals, or let more clients take part",
        )
    search = Search(graph, corruption, unit_variance, residual, target)
    if removed == 0:
        return search.evaluate(())
    if search.all_alike():
        return search.evaluate(tuple(range(graph.size - removed, graph.size)))
    if math.comb(graph.size, removed) <= EXACT_SETS:
        return search.enumerate(removed)
    return search.guided(removed)


def calibrate_for(
    graph: ShareGraph,
    corruption: Corruption,
    *,
    unit_variance: float,
    target_variance: ArrayLike,
) -> tuple[float, WorstCase]:
    """The smallest common tau^2 that keeps every target in the worst case found, and that worst case.

    The arguments are those of `worst_case`; the residual of client k is `tau^2 sigma^2 in_k`, as it adds it.
    """
    target = target_per_client(target_variance, graph.size)
    everyone = np.arange(graph.size)
    received = received_variance(graph, unit_variance, everyone)

    def examine(tau2: float) -> WorstCase:
        return worst_case(
            graph,
            corruption,
            unit_variance=unit_variance,
            residual_variance=tau2 * received,
            target_variance=target,
        )

    opponents: list[WorstCase] = []

    def ratio(tau2: float) -> float:
        return _ratio(graph, opponents, unit_variance, target, tau2) if opponents else examine(tau2).ratio

    def worst_known(tau2: float, latest: WorstCase) -> WorstCase:
        """The search may miss at this tau^2 what it found at another."""
        again = [
            replace(opponent, ratio=_ratio(graph, [opponent], unit_variance, target, tau2))
            for opponent in opponents
        ]
        worst = min([latest, *again], key=_by_ratio)
        return replace(worst, examined=latest.examined)

    first = examine(float(np.max(target / received)) / graph.size)
    # Following one opponent is quick; on a small graph so is asking for the worst of all each time.
    if not first.exact or first.colluders or graph.size > _SMALL:
        opponents.append(first)
    for _ in range(_REFINEMENTS):
        tau2 = least_tau2(graph, unit_variance, target, everyone, ratio)
        found = examine(tau2)
        if found.ratio >= 1.0 - 1e-9:
            return tau2, worst_known(tau2, found)
        opponents.append(found)
    # The search keeps finding slightly worse sets: step past the last one.
    while found.ratio < 1.0 - 1e-9:
        tau2 *= 1.02
        found = examine(tau2)
    return tau2, worst_known(tau2, found)


def least_tau2_against(graph: ShareGraph, opponents: Sequence[WorstCase], *, unit_variance: float) -> float:
    """The smallest common tau^2 that leaves the client of each opponent an effective variance of 1."""
    target, everyone = np.ones(graph.size), np.arange(graph.size)

    def ratio(tau2: float) -> float:
        return _ratio(graph, opponents, unit_variance, target, tau2)

    return least_tau2(graph, unit_variance, target, everyone, ratio)


def _ratio(
    graph: ShareGraph, opponents: Sequence[WorstCase], unit_variance: float, target: FloatArray, tau2: float
) -> float:
    """The least ratio of effective to target variance over known clients with known colluders."""

    def ratio(opponent: WorstCase) -> float:
        variance = effective_variance(
            graph,
            unit_variance=unit_variance,
            residual_variance=tau2 * (unit_variance * graph.in_weight),
            colluders=opponent.colluders,
            clients=[opponent.client],
        )
        return float(variance[0] / target[opponent.client])

    return min(ratio(opponent) for opponent in opponents)


class Search:
    """Looking for the worst client and its worst colluders on one graph.

    The effective variance of client k is `min u^T Sigma_H u` with u_k = 1, so every set of colluders gives an upper
    bound on the worst case, and the search can only be too optimistic, never too pessimistic: what it reports is not
    called exact. It goes after the clients that look weakest, with greedy sets, random sets, and exchanges.
    """

    def __init__(
        self,
        graph: ShareGraph,
        corruption: Corruption,
        unit_variance: float,
        residual: FloatArray,
        target: FloatArray,
    ) -> None:
        self.graph, self.unit, self.residual, self.target = graph, unit_variance, residual, target
        links = csr_array(
            (unit_variance * graph.weights, (graph.senders, graph.receivers)), shape=(graph.size,) * 2
        )
        self.links = csr_array(links + links.T)
        self.corruption = corruption
        # Only where the draw treats all clients alike are a client's neighbours a uniform sample.
        degrees = np.bincount(graph.senders, minlength=graph.size)
        drawn_alike = graph.kind == "random" or (graph.kind == "regular" and np.ptp(degrees) == 0)
        self.failure = corruption.failure if drawn_alike else 0.0
        self.examined = 0
        self.dense: FloatArray | None = self.links.toarray() if graph.size <= _DENSE else None
        self.matrix = self.links if self.dense is None else self.dense
        self.linked: FloatArray = self.matrix.sum(axis=1)

    def neighbours(self, client: int) -> IntArray:
        linked: IntArray = self.links.indices[self.links.indptr[client] : self.links.indptr[client + 1]]
        return linked.astype(np.int64)

    def limit(self, client: int) -> int:
        """How many of the client's neighbours may be known to the server."""
        degree = self.neighbours(client).size
        colluding = colluding_neighbours(self.graph.size, degree, self.corruption.colluders, self.failure)
        return min(degree, colluding + self.corruption.revealed)

    def all_alike(self) -> bool:
        """On a complete graph of equal clients every set of the same size is as bad as any other."""
        complete = self.links.nnz == self.graph.size * (self.graph.size - 1)
        alike = all(np.ptp(values) <= 1e-12 * values.max() for values in (self.residual, self.target))
        return complete and alike and bool(np.ptp(self.links.data) <= 1e-12 * self.links.data.max())

    def evaluate(self, colluders: tuple[int, ...], counted: NDArray[np.bool_] | None = None) -> WorstCase:
        """The worst of all honest clients, or of those that `counted` marks, with one set of colluders."""
        self.examined += 1
        honest = np.setdiff1d(np.arange(self.graph.size), colluders)
        ratios = self._effective(colluders) / self.target[honest]
        place = int((ratios if counted is None else np.where(counted[honest], ratios, np.inf)).argmin())
        return WorstCase(float(ratios[place]), int(honest[place]), colluders, True, self.examined)

    def enumerate(self, removed: int) -> WorstCase:
        """Every set of that size; a client counts only where its neighbours keep to the bound."""
        limits = np.array([self.limit(client) for client in range(self.graph.size)])
        linked = self.links.toarray() > 0.0
        cases = []
        for colluders in itertools.combinations(range(self.graph.size), removed):
            counted = linked[:, list(colluders)].sum(axis=1) <= limits
            counted[list(colluders)] = False
            if counted.any():
                cases.append(self.evaluate(colluders, counted))
        if not cases:
            raise PrivacyError("no set of colluders fits the bound", hint="raise the failure probability")
        return replace(min(cases, key=_by_ratio), examined=self.examined)

    def _effective(self, colluders: tuple[int, ...], clients: list[int] | None = None) -> FloatArray:
        return effective_variance(
            self.graph,
            unit_variance=self.unit,
            residual_variance=self.residual,
            colluders=colluders,
            clients=clients,
        )

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
        return self._confirmed(min(found, key=_by_ratio))

    def _confirmed(self, found: WorstCase) -> WorstCase:
        """The same set with its ratio to full precision: the search follows softened numbers."""
        variance = self._effective(found.colluders, [found.client])
        ratio = float(variance[0] / self.target[found.client])
        return replace(found, ratio=ratio, examined=self.examined)

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
        self.examined += 1
        variance = 1.0 / float(self._solution(client, colluders)[client])
        return WorstCase(variance / float(self.target[client]), client, colluders, False, 0)

    def _weights_to(self, client: int) -> FloatArray:
        weights: FloatArray = self.links.data[self.links.indptr[client] : self.links.indptr[client + 1]]
        return weights


def _by_ratio(case: WorstCase) -> float:
    return case.ratio
