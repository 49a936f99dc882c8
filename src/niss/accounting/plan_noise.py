"""How much residual noise a plan needs, and what is left in the sum, as functions of the strength of the shares.

All in units of `sigma_k^2`, the noise that a client would need alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from niss.accounting.plans import Plan
from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.methods import draw_graph
from niss.views import WorstCase, calibrate_for, worst_case
from niss.views.collusion import SpectralBound, expected_bound, few_sets, spectral_bound
from niss.views.roots import find_root
from niss.views.search import search_colluders

KAPPA_LIMIT = 100.0
NOMINAL_KAPPA = 4.0
# Stronger shares gain little and make every unforeseen dropout cost more: the least kappa this close to the best.
_GOOD_ENOUGH = 1.01
# Up to this many participants a plan without colluders rests on the exact matrix, beyond on the bound.
_EXACT_LIMIT = 400
# Larger graphs are not drawn for a plan, which would take seconds; the graph of each round is examined when it runs.
_DRAWN_PARTICIPANTS, _DRAWN_SHARES = 2_000, 100_000


@dataclass(frozen=True)
class TradeOff:
    """Aggregate noise at one kappa, in units of sigma_k^2.

    residual  what is left by design
    dropout   what dropped clients leave uncancelled
    """

    kappa: float
    residual: float
    dropout: float

    @property
    def total(self) -> float:
        return self.residual + self.dropout


def is_drawn(participants: int, neighbours: float) -> bool:
    """Whether a plan rests on a sparse graph that is drawn for it, or on the one to be expected."""
    return participants <= _DRAWN_PARTICIPANTS and participants * neighbours <= _DRAWN_SHARES


def total_noise(point: TradeOff) -> float:
    """A key for sorting."""
    return point.total


class NoiseNeeded:
    """How much residual noise a draft needs at which kappa, in units of sigma_k^2.

    Exact on complete graphs, on small ones, and without colluders on graphs of moderate size; else by the bound: of a
    graph that is drawn here, or, for large rounds, of the graph that is to be expected.
    """

    def __init__(self, draft: Plan, participants: int, dropout: float, mode: str) -> None:
        self._draft, self._size, self._dropout, self._mode = draft, participants, dropout, mode
        assumed = draft.corruption
        complete = draft.graph == "complete"
        exact = complete or (few_sets(participants, assumed.removed) and participants <= _EXACT_LIMIT)
        self._bound: SpectralBound | None = None
        self._graph: ShareGraph | None = None
        if not complete and is_drawn(participants, draft.neighbours):
            self._graph = draw_graph(
                draft.graph, range(participants), degree=draft.neighbours, beacon=b"niss.planner"
            )
        if not exact:
            self._bound = (
                expected_bound(participants, draft.neighbours, assumed)
                if self._graph is None
                else spectral_bound(self._graph, assumed)
            )

    def curve(self) -> tuple[TradeOff, ...]:
        """The aggregate noise over kappa."""
        needed = self._needed()
        return tuple(
            noise_in_the_sum(kappa, needed(kappa), self._size, self._dropout, self._mode)
            for kappa in np.geomspace(0.25, KAPPA_LIMIT, 53).tolist()
        )

    def calibrated(self, kappa: float) -> tuple[float, WorstCase]:
        """tau^2, and the worst case that it just withstands."""
        draft = self._draft
        if self._bound is not None:
            residual = self._bound.residual_for(kappa / draft.neighbours)
            return residual / kappa, WorstCase(1.0, 0, self._bound.taken[0], False, residual >= 1.0)
        if self._graph is None:
            residual = self._needed()(kappa)
            return residual / kappa, self.worst(kappa, residual / kappa)
        return calibrate_for(
            self._graph, draft.corruption, unit_variance=kappa / draft.neighbours, target_variance=1.0
        )

    def worst(self, kappa: float, tau2: float) -> WorstCase:
        """The worst case at a given tau^2."""
        removed, residual = self._draft.corruption.removed, tau2 * kappa
        if self._bound is not None:
            return self._bound.worst(
                kappa / self._draft.neighbours, np.full(self._bound.kept.size, residual), np.ones(1)
            )
        if self._graph is None:
            ratio = _complete_variance(self._size, removed, kappa, residual)
            return WorstCase(ratio, 0, tuple(range(self._size - removed, self._size)), True)
        return worst_case(
            self._graph,
            self._draft.corruption,
            unit_variance=kappa / self._draft.neighbours,
            residual_variance=residual,
            target_variance=1.0,
        )

    def search(self, kappa: float, tau2: float, worst: WorstCase) -> WorstCase:
        """The worst colluders that a search finds."""
        graph = self._graph
        if worst.exact:
            return worst
        if graph is None:
            raise ConfigError(
                f"a search through rounds of {self._size} with {self._draft.neighbours:g} neighbours takes too long",
                field="search",
                hint=f"at most {_DRAWN_PARTICIPANTS:,} participants, and {_DRAWN_SHARES:,} shares in all",
            )
        return search_colluders(
            graph,
            self._draft.corruption,
            unit_variance=kappa / self._draft.neighbours,
            residual_variance=tau2 * kappa,
            target_variance=1.0,
        )

    def _needed(self) -> Callable[[float], float]:
        """The residual variance as a function of kappa."""
        draft, bound, graph = self._draft, self._bound, self._graph
        if bound is not None:
            return lambda kappa: bound.residual_for(kappa / draft.neighbours)
        if graph is None:
            removed = draft.corruption.removed

            def shortfall(log_residual: float, kappa: float) -> float:
                return math.log(_complete_variance(self._size, removed, kappa, math.exp(log_residual)))

            lowest = -math.log(self._size) - 1.0
            return lambda kappa: math.exp(find_root(lambda log: shortfall(log, kappa), lowest, 1e-9))
        _, nominal = calibrate_for(
            graph, draft.corruption, unit_variance=NOMINAL_KAPPA / draft.neighbours, target_variance=1.0
        )
        return _residual_needed(graph, nominal, draft.neighbours)


def _complete_variance(size: int, removed: int, kappa: float, residual: float) -> float:
    """The effective variance on a complete graph: `1 / (1 / (n eta^2) + (1 - 1/n) / (n w + eta^2))`.

    n honest clients, and `w = 2 kappa / (size - 1)` on each link between two of them.
    """
    honest = size - removed
    if residual <= 0.0:
        return 0.0
    apart = (1.0 - 1.0 / honest) / (honest * 2.0 * kappa / (size - 1) + residual)
    return 1.0 / (1.0 / (honest * residual) + apart)


def noise_in_the_sum(kappa: float, residual: float, size: int, dropout: float, mode: str) -> TradeOff:
    """In units of sigma_k^2, with a residual eta^2 in the same units."""
    lost = 2.0 * kappa * dropout * (1.0 - dropout) * size if mode == "tolerate" else 0.0
    return TradeOff(kappa, (1.0 - dropout) * size * residual, lost)


def _residual_needed(graph: ShareGraph, opponent: WorstCase, sent: float) -> Callable[[float], float]:
    """eta^2 as a function of kappa for one client and one set of colluders.

    With equal residuals, `(Sigma^-1)_kk = sum_j u_jk^2 / (kappa lambda_j / v + eta^2)` over the eigenpairs of the
    honest Laplacian: one decomposition serves every kappa.
    """
    honest = np.setdiff1d(np.arange(graph.size), opponent.colluders)
    linked = ~np.isin(graph.senders, opponent.colluders) & ~np.isin(graph.receivers, opponent.colluders)
    kept = ShareGraph(
        graph.size,
        zip(
            graph.senders[linked].tolist(),
            graph.receivers[linked].tolist(),
            graph.weights[linked].tolist(),
            strict=True,
        ),
    )
    values, vectors = np.linalg.eigh(kept.laplacian()[np.ix_(honest, honest)])
    parts = vectors[int(np.searchsorted(honest, opponent.client))] ** 2
    values = np.maximum(values, 0.0)

    def needed(kappa: float) -> float:
        def shortfall(log_residual: float) -> float:
            return 1.0 - float(np.sum(parts / (kappa * values / sent + math.exp(log_residual))))

        return math.exp(find_root(shortfall, -math.log(graph.size) - 1.0, 1e-9))

    return needed


@lru_cache(maxsize=64)
def cheapest_kappa(draft: Plan, participants: int, *, dropout: float = 0.0, mode: str = "tolerate") -> float:
    """The strength of shares that leaves least noise in the sum of a round of so many; 1 where tau^2 is given.

    draft    its own kappa does not matter, nor do epsilon and clip: the trade-off is the same for all of them
    dropout  share of the participants; `mode` is what happens to their noise

    What a round promises does not rest on this choice: tau^2 is calibrated for the graph that is drawn.
    """
    if draft.tau2 is not None or not draft.private:
        return 1.0
    graph = "complete" if draft.neighbours >= participants - 1 or draft.graph == "complete" else "regular"
    plain = replace(draft, graph=graph, groups=(), kappa=NOMINAL_KAPPA)
    return cheapest(NoiseNeeded(plain, participants, dropout, mode).curve())


def cheapest(curve: tuple[TradeOff, ...]) -> float:
    """The kappa of least noise on a curve; without dropouts the smallest that is nearly as good."""
    best = min(curve, key=total_noise)
    if best.dropout:
        return best.kappa
    return next(point.kappa for point in curve if point.total <= _GOOD_ENOUGH * best.total)
