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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array, diags_array, eye_array
from scipy.sparse.linalg import cg
from scipy.stats import hypergeom

from niss.accounting.joint import effective_variance, least_tau2, received_variance, target_per_client
from niss.accounting.view import hidden_noise, per_client
from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# All sets of colluders are tried when there are at most this many.
EXACT_SETS = 3_000
# Rounds of up to this many clients are searched against every client, larger ones against a few.
_EVERYONE = 60
_SUSPECTS = 6
_GREEDY_STEPS = 5
_RANDOM_SETS = 2
# The worst few sets found, if of up to this many colluders, are improved by exchanging one at a time.
_EXCHANGED = 12
_EXCHANGED_SETS, _EXCHANGE_ROUNDS, _CANDIDATES = 3, 3, 4
_REFINEMENTS = 6
# Added to the diagonal, as a share of its mean, so that a group without fresh noise can be searched too.
_SOFTENING = 1e-9


@dataclass(frozen=True)
class Corruption:
    """At most `colluders` static colluders; up to `revealed` edges of a client given away in a repair.

    `failure` is the probability, per client and round, with which more of its neighbours may collude than
    the accountant assumes.
    """

    colluders: int = 0
    revealed: int = 0
    failure: float = 0.0

    def __post_init__(self) -> None:
        for field in ("colluders", "revealed"):
            value = getattr(self, field)
            if not isinstance(value, (int, np.integer)) or value < 0:
                raise ConfigError(f"must be a whole number, not below 0, not {value!r}", field=field)
        if not 0.0 <= self.failure < 1.0:
            raise ConfigError(f"must lie in [0, 1), not {self.failure!r}", field="failure")


@dataclass(frozen=True)
class WorstCase:
    """The worst that was found: `ratio` is effective variance over target, for `client`, with `colluders`.

    `exact` says whether every admissible set was covered; otherwise `examined` sets were.
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
    """The smallest ratio of effective to target variance over honest clients and colluder sets."""
    residual = per_client(residual_variance, graph.size, "residual_variance")
    target = target_per_client(target_variance, graph.size)
    removed = corruption.colluders + corruption.revealed
    if removed > graph.size - 2:
        raise PrivacyError(
            f"{removed} of {graph.size} participants known to the server leave nobody to share noise with",
            hint="assume fewer colluders or reveals, or let more clients take part",
        )
    search = _Search(graph, corruption, unit_variance, residual, target)
    if removed == 0:
        return search.evaluate_all((), exact=True)
    if search.all_alike():
        return search.evaluate_all(tuple(range(graph.size - removed, graph.size)), exact=True)
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
    """The smallest common tau^2 that keeps every target in the worst case found, and that worst case."""
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

    def ratio_of(opponent: WorstCase, tau2: float) -> float:
        variance = effective_variance(
            graph,
            unit_variance=unit_variance,
            residual_variance=tau2 * received,
            colluders=opponent.colluders,
            clients=[opponent.client],
        )
        return float(variance[0] / target[opponent.client])

    def ratio(tau2: float) -> float:
        return min(ratio_of(opponent, tau2) for opponent in opponents) if opponents else examine(tau2).ratio

    def worst_known(tau2: float, found: WorstCase) -> WorstCase:
        """The search may miss at this tau^2 what it found at another."""
        again = [replace(opponent, ratio=ratio_of(opponent, tau2)) for opponent in opponents]
        worst = min([found, *again], key=_by_ratio)
        return replace(worst, examined=found.examined)

    first = examine(float(np.max(target / received)) / graph.size)
    if not first.exact or first.colluders:
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


class _Search:
    """Looking for the worst client and its worst colluders on one graph."""

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
        self.examined = 0

    def neighbours(self, client: int) -> IntArray:
        linked: IntArray = self.links.indices[self.links.indptr[client] : self.links.indptr[client + 1]]
        return linked.astype(np.int64)

    def limit(self, client: int) -> int:
        """How many of the client's neighbours may be known to the server."""
        degree = self.neighbours(client).size
        colluding = colluding_neighbours(
            self.graph.size, degree, self.corruption.colluders, self.corruption.failure
        )
        return min(degree, colluding + self.corruption.revealed)

    def all_alike(self) -> bool:
        """On a complete graph of equal clients every set of the same size is as bad as any other."""
        complete = self.links.nnz == self.graph.size * (self.graph.size - 1)
        alike = all(np.ptp(values) <= 1e-12 * values.max() for values in (self.residual, self.target))
        return complete and alike and bool(np.ptp(self.links.data) <= 1e-12 * self.links.data.max())

    def evaluate_all(self, colluders: tuple[int, ...], *, exact: bool) -> WorstCase:
        """The worst of all honest clients with one set of colluders."""
        self.examined += 1
        honest = np.setdiff1d(np.arange(self.graph.size), colluders)
        variance = effective_variance(
            self.graph, unit_variance=self.unit, residual_variance=self.residual, colluders=colluders
        )
        ratios = variance / self.target[honest]
        worst = int(ratios.argmin())
        return WorstCase(float(ratios[worst]), int(honest[worst]), colluders, exact, self.examined)

    def enumerate(self, removed: int) -> WorstCase:
        """Every set of that size; a client counts only where its neighbours keep to the bound."""
        limits = np.array([self.limit(client) for client in range(self.graph.size)])
        dense = self.links.toarray() > 0.0
        worst: WorstCase | None = None
        for colluders in itertools.combinations(range(self.graph.size), removed):
            honest = np.setdiff1d(np.arange(self.graph.size), colluders)
            admissible = dense[honest][:, list(colluders)].sum(axis=1) <= limits[honest]
            if not admissible.any():
                continue
            self.examined += 1
            variance = effective_variance(
                self.graph, unit_variance=self.unit, residual_variance=self.residual, colluders=colluders
            )
            ratios = np.where(admissible, variance / self.target[honest], np.inf)
            place = int(ratios.argmin())
            if worst is None or ratios[place] < worst.ratio:
                worst = WorstCase(float(ratios[place]), int(honest[place]), colluders, True, 0)
        if worst is None:
            raise PrivacyError("no set of colluders fits the bound", hint="raise the failure probability")
        return WorstCase(worst.ratio, worst.client, worst.colluders, True, self.examined)

    def guided(self, removed: int) -> WorstCase:
        """Greedy and random sets against the clients that look weakest."""
        stream = SimStream(int.from_bytes(self.graph.digest()[:7], "little")).child("worst case")
        found = []
        for client in self._suspects(stream):
            sets = self._sets_against(client, removed, stream.child("sets", client))
            found.append(min((self._case(client, colluders) for colluders in sets), key=_by_ratio))
        if removed <= _EXCHANGED:
            found += [self._exchanged(start) for start in sorted(found, key=_by_ratio)[:_EXCHANGED_SETS]]
        return replace(min(found, key=_by_ratio), examined=self.examined)

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
        flow = self.links @ potential**2 - 2.0 * potential * (self.links @ potential)
        energy: FloatArray = flow + potential**2 * (self.links.sum(axis=1) + self.residual)
        np.maximum(energy, 0.0, out=energy)
        energy[[client, *chosen]] = -1.0
        return energy

    def _potential(self, client: int, colluders: tuple[int, ...]) -> FloatArray:
        """Sigma_H^-1 e_client scaled to 1 at the client; 0 at colluders."""
        hidden = hidden_noise(
            self.graph, unit_variance=self.unit, residual=self.residual, colluders=colluders
        )
        unit = (hidden.kept == client).astype(np.float64)
        diagonal = hidden.covariance.diagonal()
        softened = hidden.covariance + _SOFTENING * (float(diagonal.mean()) or 1.0) * eye_array(unit.size)
        jacobi = diags_array(1.0 / softened.diagonal())
        solution, _ = cg(softened, unit, rtol=1e-6, maxiter=500, M=jacobi)
        potential = np.zeros(self.graph.size)
        potential[hidden.kept] = solution / solution[unit > 0.0]
        return potential

    def _case(self, client: int, colluders: tuple[int, ...]) -> WorstCase:
        self.examined += 1
        variance = effective_variance(
            self.graph,
            unit_variance=self.unit,
            residual_variance=self.residual,
            colluders=colluders,
            clients=[client],
        )
        return WorstCase(float(variance[0] / self.target[client]), client, colluders, False, 0)

    def _weights_to(self, client: int) -> FloatArray:
        weights: FloatArray = self.links.data[self.links.indptr[client] : self.links.indptr[client + 1]]
        return weights


def _by_ratio(case: WorstCase) -> float:
    return case.ratio
