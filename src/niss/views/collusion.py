"""How bad it can get when some clients tell the server all they know, as a bound that holds for every placement.

At most `colluders` participants collude. They are fixed before the beacon, and so before the graph, is known; given its
shape, they are then a uniform sample of the other participants, and the number of them among a client's neighbours is
hypergeometric. Where a server can choose among graphs (`failure = 0`), any participants may be the ones.

What client k has left is `1 / (Sigma_H^-1)_kk`: the conductance from k to the ground of an electrical network, in which
an edge of weight w between honest clients conducts `sigma^2 w` and honest client j is grounded by its residual
`eta_j^2`. By Thomson's principle the energy of any unit flow bounds the resistance `(Sigma_H^-1)_kk` from above. With

    A          symmetric weights of the drawn graph, which is public (both directions added),
    lambda     the largest eigenvalue of P A P, P = I - 11'/m,
    W_j        what is left of the weight of j's edges once its colluding neighbours are out,

`y' A y <= lambda |y|^2` for all y with sum 0, so on honest clients `y' L_H y >= sum_j (W_j - lambda) y_j^2` for them.
Let k send its unit over its edges in proportion to their weights (x_j), and let it spread from there to the ground in
proportion to the residuals (g_j):

    R_k = 1 / sum_j eta_j^2 + 1 / (sigma^2 W_k) + |x - g|^2 / (sigma^2 (min_j W_j - lambda)),

all over the honest clients but k, with edges to k left out of W_j. The way over the others lies beside k's own ground,
so k has at least `eta_k^2 + 1 / R_k`. Nothing in it depends on where the colluders sit but
the weights W: k's own bound on its colluding neighbours may fail with half of the `failure`, those of all the others
together with the other half. The heaviest edges are taken to be the colluding ones. Small groups that colluders could
cut off are covered: they would need members with little honest weight, or a graph with a large lambda. On a graph that
is too sparse for its colluders there is no R_k, and the client's own noise is all that counts.

The worst case is exact, not a bound, where all sets of colluders can be tried or are all alike (complete graphs), and
where nobody colludes in a round of moderate size; in larger ones it is the bound of `niss.views.numerics`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from niss.checks import require_real, require_whole
from niss.errors import PrivacyError
from niss.graph import ShareGraph
from niss.mechanism.shares import per_client
from niss.views.joint import (
    effective_variance,
    least_tau2,
    received_variance,
    target_per_client,
)
from niss.views.numerics import (
    ConnectedBound,
    conditional_variances,
    connected_bound,
    exact_limit,
    hypergeometric_tails,
    largest_eigenvalue,
    links,
    poisson_quantile,
)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# All sets of colluders are tried when there are at most this many.
EXACT_SETS = 3_000
# Entries of matrices that are inverted together.
_STACKED_ENTRIES = 1_000_000


@dataclass(frozen=True)
class Corruption:
    """At most `colluders` colluders, and what a repair of dropouts may give away.

    `revealed` edges of any one client, at most, are told to the server, and at most `dropped` clients are
    declared dropped in a round: all their edges may be revealed and their own noise is lost, so they count
    like colluders. `failure` is the probability, per client and drawn graph, with which more neighbours
    may collude than the accountant assumes; 0: the colluders may be placed after the graph is known.
    """

    colluders: int = 0
    revealed: int = 0
    dropped: int = 0
    failure: float = 0.0

    @property
    def removed(self) -> int:
        """The most participants whose part is known to the server or missing."""
        return self.colluders + max(self.revealed, self.dropped)

    @property
    def own_failure(self) -> float:
        """The part of `failure` with which the bound on a client's own neighbours may fail."""
        return 0.5 * self.failure

    def __post_init__(self) -> None:
        for field in ("colluders", "revealed", "dropped"):
            require_whole(getattr(self, field), field=field, at_least=0)
        require_real(self.failure, field="failure", below=1.0)


@dataclass(frozen=True)
class WorstCase:
    """The least protection of any honest client of one graph, over all admissible sets of colluders.

    ratio      effective variance over target, or a proved lower bound on it; 1 is just enough, 0 no protection
    client     whose it is
    colluders  a set with which it comes about; for a bound, the neighbours it takes from the client
    exact      whether it is the worst case itself, and not a bound on it
    alone      whether the client's own noise is all that the bound relies on
    """

    ratio: float
    client: int
    colluders: tuple[int, ...]
    exact: bool
    alone: bool = False


@lru_cache(maxsize=4_096)
def colluding_neighbours(participants: int, neighbours: int, colluders: int, failure: float) -> int:
    """The least q with P(more than q of the neighbours collude) <= failure.

    The neighbours are a uniform sample of the other participants, `colluders` of whom collude.
    """
    most = min(neighbours, colluders)
    if failure <= 0.0:
        # A probability too small for a float is not yet none.
        return most
    enough = hypergeometric_tails(participants - 1, colluders, neighbours) <= failure
    return int(np.argmax(enough)) if enough.any() else most


def worst_case(
    graph: ShareGraph,
    corruption: Corruption,
    *,
    unit_variance: float,
    residual_variance: ArrayLike,
    target_variance: ArrayLike,
) -> WorstCase:
    """The smallest ratio of effective to target variance over honest clients and colluder sets, or a bound on it.

    graph              who shares with whom
    corruption         how many collude, and how much a repair may reveal
    unit_variance      sigma^2, the variance of a share of weight 1
    residual_variance  eta_k^2, the fresh noise of each client: one number, or one per client
    target_variance    the effective variance that each client wants, likewise

    Raises PrivacyError where fewer than two participants are left.
    """
    residual = per_client(residual_variance, graph.size, "residual_variance")
    target = target_per_client(target_variance, graph.size)
    return _Assumed(graph, corruption).worst(unit_variance, residual, target)


def calibrate_for(
    graph: ShareGraph,
    corruption: Corruption,
    *,
    unit_variance: float,
    target_variance: ArrayLike,
) -> tuple[float, WorstCase]:
    """The smallest common tau^2 that keeps every target in the worst case, and that worst case.

    The arguments are those of `worst_case`; the residual of client k is `tau^2 sigma^2 in_k`, as it adds it.
    """
    target = target_per_client(target_variance, graph.size)
    received = received_variance(graph, unit_variance)
    assumed = _Assumed(graph, corruption)
    opponents: list[WorstCase] = []

    def worst(tau2: float) -> WorstCase:
        return assumed.worst(unit_variance, tau2 * received, target)

    def ratio(tau2: float) -> float:
        """Trying all sets takes long: follow those that were worst so far."""
        if not opponents:
            return worst(tau2).ratio
        return min(assumed.against(one, unit_variance, tau2 * received, target) for one in opponents)

    if assumed.tries_all_sets:
        opponents.append(worst(float(np.max(target / received)) / graph.size))
    while True:
        tau2 = least_tau2(received, target, ratio)
        found = worst(tau2)
        if found.ratio >= 1.0 - 1e-9 or not opponents:
            return tau2, found
        opponents.append(found)


class _Assumed:
    """One graph and what is assumed of its clients: which way to the worst case there is, and the way itself."""

    def __init__(self, graph: ShareGraph, corruption: Corruption) -> None:
        removed = corruption.removed
        if removed > graph.size - 2:
            raise PrivacyError(
                f"{removed} of {graph.size} participants known to the server leave nobody to share noise with",
                hint="assume fewer colluders or reveals, or let more clients take part",
            )
        self._graph, self._corruption, self._removed = graph, corruption, removed

    @cached_property
    def _links(self) -> csr_array:
        return links(self._graph)

    @cached_property
    def _bound(self) -> SpectralBound | ConnectedBound | None:
        if self._removed:
            return None if self.tries_all_sets else spectral_bound(self._graph, self._corruption)
        return connected_bound(self._graph) if self._graph.size > exact_limit(self._graph) else None

    @property
    def tries_all_sets(self) -> bool:
        return self._removed > 0 and few_sets(self._graph.size, self._removed)

    def against(self, opponent: WorstCase, unit: float, residual: FloatArray, target: FloatArray) -> float:
        """The ratio of one client with one set of colluders."""
        variance = effective_variance(
            self._graph,
            unit_variance=unit,
            residual_variance=residual,
            colluders=opponent.colluders,
            clients=[opponent.client],
        )
        return float(variance[0] / target[opponent.client])

    def worst(self, unit: float, residual: FloatArray, target: FloatArray) -> WorstCase:
        if self._graph.kind == "complete" and equal(residual) and equal(target):
            return self._of_a_clique(unit, residual, target)
        if isinstance(self._bound, ConnectedBound):
            variance = self._bound.variance(unit, residual)
            client = int((variance / target).argmin())
            alone = bool(variance[client] <= residual[client])
            return WorstCase(float(variance[client] / target[client]), client, (), False, alone)
        if self._removed == 0:
            return self._exactly(unit, residual, target)
        if isinstance(self._bound, SpectralBound):
            return self._bound.worst(unit, residual, target)
        return self._of_all_sets(unit, residual, target)

    def _of_a_clique(self, unit: float, residual: FloatArray, target: FloatArray) -> WorstCase:
        """Everyone shares alike with everyone."""
        size = self._graph.size
        honest = size - self._removed
        variance = clique_variance(honest, 2.0 * unit * self._graph.weight, float(residual.min()))
        return WorstCase(variance / float(target.max()), 0, tuple(range(honest, size)), True)

    def _exactly(self, unit: float, residual: FloatArray, target: FloatArray) -> WorstCase:
        """The worst of all clients, none of whom colludes."""
        variance = effective_variance(self._graph, unit_variance=unit, residual_variance=residual)
        client = int((variance / target).argmin())
        return WorstCase(float(variance[client] / target[client]), client, (), True)

    def _of_all_sets(self, unit: float, residual: FloatArray, target: FloatArray) -> WorstCase:
        """Every set of that size; a client counts only where its neighbours keep to the bound."""
        size, weights = self._graph.size, self._links.toarray()
        linked = weights > 0.0
        certain = not drawn_alike(self._graph)
        limits = np.array(
            [
                _known_of(near, size, self._corruption, certain=certain)[0]
                for near in linked.sum(axis=1).tolist()
            ]
        )
        sets = np.array(list(itertools.combinations(range(size), self._removed)))
        honest = np.ones((len(sets), size), dtype=bool)
        np.put_along_axis(honest, sets, False, axis=1)
        counted = honest & (limits >= linked[:, sets].sum(axis=2).T)
        if not counted.any():
            raise PrivacyError("no set of colluders fits the bound", hint="raise the failure probability")
        kept = np.nonzero(honest)[1].reshape(len(sets), -1)
        blocks = np.array_split(np.arange(len(sets)), -(-len(sets) * size**2 // _STACKED_ENTRIES))
        variances = np.concatenate([_variances_among(weights, kept[some], unit, residual) for some in blocks])
        ratios = np.where(np.take_along_axis(counted, kept, axis=1), variances / target[kept], np.inf)
        place, client = np.unravel_index(int(np.argmin(ratios)), ratios.shape)
        return WorstCase(
            float(ratios[place, client]), int(kept[place, client]), tuple(sets[place].tolist()), True
        )


def _variances_among(links: FloatArray, kept: IntArray, unit: float, residual: FloatArray) -> FloatArray:
    """Effective variances of the honest clients left by many sets of colluders, a row of `kept` for each.

    `Sigma_H = sigma^2 (D_H - A_H) + diag(residual)`, A_H the rows and columns of the honest and D_H its row sums.
    """
    within = unit * links[kept[:, :, None], kept[:, None, :]]
    own = np.arange(kept.shape[1])
    covariances = -within
    covariances[:, own, own] += within.sum(axis=2) + residual[kept]
    return conditional_variances(covariances)


def clique_variance(honest: int, between: float, residual: float) -> float:
    """The effective variance where everyone shares alike with everyone, `between` the variance of two clients' shares.

    Of h honest clients `Sigma_H = (eta^2 + h c) I - c 11'`, whose inverse has `1 / eta^2` along the vector of ones, and
    `1 / (eta^2 + h c)` across it.
    """
    if residual <= 0.0:
        return 0.0
    return honest / (1.0 / residual + (honest - 1) / (residual + honest * between))


def few_sets(size: int, removed: int) -> bool:
    """Whether there are so few sets of `removed` clients that all of them can be tried."""
    # With more to choose from than this on both sides there are more sets than that.
    return min(removed, size - removed) <= 12 and math.comb(size, removed) <= EXACT_SETS


def equal(values: FloatArray) -> bool:
    """Whether they are all the same, but for rounding."""
    return bool(np.ptp(values) <= 1e-12 * values.max())


def drawn_alike(graph: ShareGraph) -> bool:
    """Whether the draw treats all clients alike, so that a client's neighbours are a uniform sample of the others."""
    if graph.kind == "regular":
        return bool(np.ptp(np.bincount(graph.senders, minlength=graph.size)) == 0)
    return graph.kind == "random"


@dataclass(frozen=True)
class SpectralBound:
    """The bound of this module on one graph; everything in it is known before any variance is.

    kept      W_k: the least honest weight of each client's edges
    spread    the most that sum_j x_j^2 can be for each
    spare     min_j W_j - lambda in the connected group of each; the bound is void where it isn't above 0
    grounded  how many honest clients there are besides k, at least, in its group
    groups    the number of each client's group
    taken     the neighbours that the bound takes from each client
    """

    kept: FloatArray
    spread: FloatArray
    spare: FloatArray
    grounded: IntArray
    groups: IntArray
    taken: tuple[tuple[int, ...], ...]

    @property
    def energy(self) -> float:
        """`1 / W_k + |x - g|^2 / spare` of the worst-off client where residuals are equal; infinite: no bound."""
        if self.spare.min() <= 0.0 or self.grounded.min() < 1 or self.kept.min() <= 0.0:
            return math.inf
        return float(
            np.max(1.0 / self.kept + np.maximum(self.spread - 1.0 / self.grounded, 0.0) / self.spare)
        )

    def residual_for(self, unit: float) -> float:
        """The residual variance, equal for all, that leaves everyone an effective variance of 1.

        `eta^2 + 1 / (1 / (n eta^2) + e) = 1`, n honest clients besides k, e = energy / sigma^2: the positive root of
        `n e eta^4 + (n + 1 - n e) eta^2 - 1`. 1, which protects alone, where there is no bound.
        """
        if self.energy == math.inf:
            return 1.0
        others, energy = float(self.grounded.min()), self.energy / unit
        linear = others + 1.0 - others * energy
        # In the form that does not cancel where the linear term is large.
        return 2.0 / (linear + math.sqrt(linear**2 + 4.0 * others * energy))

    def worst(self, unit: float, residual: FloatArray, target: FloatArray) -> WorstCase:
        """The client that is left with the least by the bound, given its variances."""
        together = self.variance(unit, residual)
        ratios = (together + residual) / target
        client = int(ratios.argmin())
        return WorstCase(
            float(ratios[client]), client, self.taken[client], False, bool(together[client] == 0.0)
        )

    def variance(self, unit: float, residual: FloatArray) -> FloatArray:
        """1 / R_k, what each client has from the others at least; 0 where there is no bound."""
        result = np.zeros(residual.size)
        for group in np.unique(self.groups):
            members = np.flatnonzero(self.groups == group)
            spare, count = float(self.spare[members[0]]), int(self.grounded[members[0]])
            if spare <= 0.0 or count < 1 or unit <= 0.0:
                continue
            # The colluders may be those with the most residual noise.
            least = np.sort(residual[members])[:count]
            ground = float(least.sum())
            if ground <= 0.0:
                continue
            # |x - g|^2 <= sum x^2 - 2 min g + sum g^2, and sum g^2 <= max g, since both x and g sum to 1.
            apart = np.maximum(self.spread[members] + (least[-1] - 2.0 * least[0]) / ground, 0.0)
            # At an infinite unit the last two terms are gone: `spare` and `kept` above 0 say that all are connected.
            kept = self.kept[members]
            linked = kept > 0.0
            energy = 1.0 / ground + (1.0 / kept[linked] + apart[linked] / spare) / unit
            result[members[linked]] = 1.0 / energy
        return result


@lru_cache(maxsize=64)
def spectral_bound(graph: ShareGraph, corruption: Corruption) -> SpectralBound:
    """The bound on a drawn graph. In a graph of several groups, all the colluders may sit in each."""
    size, weights = graph.size, links(graph)
    certain = not drawn_alike(graph)
    _, groups = connected_components(weights, directed=False)
    kept, spread, spare = np.zeros(size), np.ones(size), np.full(size, -math.inf)
    grounded = np.zeros(size, dtype=np.int64)
    taken: list[tuple[int, ...]] = [()] * size
    for group in range(int(groups.max()) + 1):
        members = np.flatnonzero(groups == group)
        within = csr_array(weights[members][:, members])
        others = np.zeros(members.size)
        for place, client in enumerate(members.tolist()):
            row = slice(within.indptr[place], within.indptr[place + 1])
            order = np.argsort(-within.data[row], kind="stable")
            heaviest = within.data[row][order]
            own, other = _known_of(heaviest.size, size, corruption, certain=certain)
            kept[client], spread[client] = _kept(heaviest, own)
            others[place] = heaviest[other:].sum()
            taken[client] = tuple(sorted(members[within.indices[row][order[:own]]].tolist()))
        if members.size > 1:
            spare[members] = others.min() - largest_eigenvalue(within)
        grounded[members] = members.size - 1 - corruption.removed
    return SpectralBound(kept, spread, spare, grounded, groups.astype(np.int64), tuple(taken))


def expected_bound(size: int, degree: float, corruption: Corruption) -> SpectralBound:
    """What the bound will be on a regular graph of that degree that is yet to be drawn: for planning, not for a claim.

    The bound of its worst-off client, as one entry. The eigenvalue of a random regular graph of degree d = 2 v is close
    to 2 sqrt(d - 1) (Friedman 2008), less where d is not small next to the size; 3 % more are assumed here.
    """
    near = min(math.ceil(degree), size - 1)
    weight, heaviest = degree / near, expected_weights(size, degree)
    eigenvalue = 1.03 * weight * 2.0 * math.sqrt((2 * near - 1) * max(0.0, 1.0 - near / (size - 1)))
    own, other = _known_of(heaviest.size, size, corruption, certain=False)
    kept, spread = _kept(heaviest, own)
    return SpectralBound(
        np.array([kept]),
        np.array([spread]),
        np.array([float(heaviest[other:].sum()) - eigenvalue]),
        np.array([size - 1 - corruption.removed]),
        np.zeros(1, dtype=np.int64),
        ((),),
    )


def expected_weights(size: int, degree: float) -> FloatArray:
    """The edges of the worst-off client of such a graph, in descending order, but for one graph in ten."""
    near = min(math.ceil(degree), size - 1)
    # Edges both ways between two clients; of the clients that have most of them, one will be the worst off.
    both = poisson_quantile(0.1 / size, near * near / (size - 1), near)
    heaviest = degree / near * np.concatenate([np.full(both, 2.0), np.ones(2 * (near - both))])
    return heaviest if heaviest.size < size else np.full(size - 1, 2.0 * degree / (size - 1))


def _known_of(near: int, size: int, corruption: Corruption, *, certain: bool) -> tuple[int, int]:
    """How many of `near` neighbours the server may know all about: of the client itself, and of any of the others.

    For k itself colluders are a sample of the other `size - 1` clients. For another honest client they are one of
    `size - 2`, since k is honest too, and its edge to k does not count.
    """
    if certain:
        corruption = replace(corruption, failure=0.0)
    others_failure = corruption.failure - corruption.own_failure
    own = colluding_neighbours(size, near, corruption.colluders, corruption.own_failure)
    among = colluding_neighbours(
        size - 1, min(near, size - 2), min(corruption.colluders, size - 2), others_failure / (size - 1)
    )
    return min(near, own + corruption.revealed), min(near, among + corruption.revealed + 1)


def _kept(heaviest: FloatArray, known: int) -> tuple[float, float]:
    """W_k, and the most that sum_j x_j^2 can be, for a client with these weights, in descending order."""
    kept = float(heaviest[known:].sum())
    if kept <= 0.0:
        return 0.0, 1.0
    squares = float(np.sum(heaviest[: heaviest.size - known] ** 2))
    return kept, min(float(heaviest[0]) / kept, squares / kept**2)
