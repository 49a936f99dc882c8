"""How much noise a promise needs: of rounds that are judged one by one, and of a run that carries noise between them.

Rounds: the residual noise as a function of the strength of the shares (`NoiseNeeded`), all in units of `sigma_k^2`, the
noise that a client would need alone.

A committed run: residual, carried variance and shares within a round together (`CarriedSearch`), in units of the
squared sensitivity. The least residual is found without inverting anything twice. With the ratio w / r fixed, the
covariance of the sums is `r Gamma_1` and that of deviations `D = r d + s c` (s the shares within a round), so what
fixed cyclic cohorts o pay is

    max_o  A_o / r + sum_{t in o} (1 - 1/h) / (r d_t + s c),     A_o = 1_o' Gamma_1^-1 1_o,

one banded system for all r and s. Runs for any pattern at a separation start from there; a single pattern P is a cohort
like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solveh_banded

from niss.accounting.committed import Committed
from niss.errors import PrivacyError
from niss.graph import GRAPHS, Drawing, ShareGraph
from niss.mechanism import gdp_mu
from niss.mechanism.noise import Noise
from niss.views import WorstCase, calibrate_for, worst_case
from niss.views.collusion import (
    SpectralBound,
    clique_variance,
    expected_bound,
    few_sets,
    spectral_bound,
)
from niss.views.numerics import find_root, links

if TYPE_CHECKING:
    from niss.accounting.plans import Plan

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

KAPPA_LIMIT = 100.0
NOMINAL_KAPPA = 4.0
# Stronger shares gain little and make every unforeseen dropout cost more: the least kappa this close to the best.
_GOOD_ENOUGH = 1.01
# Up to this many participants a plan without colluders rests on the exact matrix, beyond on the bound.
_EXACT_LIMIT = 400
# Larger graphs are not drawn for a plan, which would take seconds; the graph of each round is examined when it runs.
_DRAWN_PARTICIPANTS, _DRAWN_SHARES = 2_000, 100_000
_KAPPAS = tuple(np.geomspace(0.5, 50.0, 17).tolist())
# Carried variance over residual: from none to more than any plan has used.
_LEAST_RATIO, _MOST_RATIO = 1e-2, 1e3
_PRECISION, _MOST_STEPS = 1e-11, 50


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


class NoiseNeeded:
    """How much residual noise a draft needs at which kappa, in units of sigma_k^2.

    Exact on complete graphs, on small ones, and without colluders on graphs of moderate size; else by the bound: of a
    graph that is drawn here, or, for large rounds, of the graph that is to be expected.
    """

    def __init__(self, draft: Plan, participants: int) -> None:
        self._draft, self._size = draft, participants
        self.assumed = assumed = draft.assumed(participants)
        complete = draft.graph == "complete"
        exact = complete or (few_sets(participants, assumed.removed) and participants <= _EXACT_LIMIT)
        self._bound: SpectralBound | None = None
        self._graph: ShareGraph | None = None
        if not complete and is_drawn(participants, draft.neighbours):
            drawing = Drawing(range(participants), draft.neighbours, b"niss.planner")
            self._graph = GRAPHS[draft.graph](drawing)
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
            noise_in_the_sum(self._draft, self._size, kappa, needed(kappa))
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
            self._graph, self.assumed, unit_variance=kappa / draft.neighbours, target_variance=1.0
        )

    def worst(self, kappa: float, tau2: float) -> WorstCase:
        """The worst case at a given tau^2."""
        removed, residual = self.assumed.removed, tau2 * kappa
        if self._bound is not None:
            return self._bound.worst(
                kappa / self._draft.neighbours, np.full(self._bound.kept.size, residual), np.ones(1)
            )
        if self._graph is None:
            return WorstCase(
                self._of_a_clique(kappa, residual), 0, tuple(range(self._size - removed, self._size)), True
            )
        return worst_case(
            self._graph,
            self.assumed,
            unit_variance=kappa / self._draft.neighbours,
            residual_variance=residual,
            target_variance=1.0,
        )

    def _of_a_clique(self, kappa: float, residual: float) -> float:
        """The effective variance on a complete graph."""
        return clique_variance(self._size - self.assumed.removed, 2.0 * kappa / (self._size - 1), residual)

    def _needed(self) -> Callable[[float], float]:
        """The residual variance as a function of kappa."""
        draft, bound, graph = self._draft, self._bound, self._graph
        if bound is not None:
            return lambda kappa: bound.residual_for(kappa / draft.neighbours)
        if graph is None:

            def shortfall(log_residual: float, kappa: float) -> float:
                return math.log(self._of_a_clique(kappa, math.exp(log_residual)))

            lowest = -math.log(self._size) - 1.0
            return lambda kappa: math.exp(find_root(lambda log: shortfall(log, kappa), lowest, 1e-9))
        _, nominal = calibrate_for(
            graph, self.assumed, unit_variance=NOMINAL_KAPPA / draft.neighbours, target_variance=1.0
        )
        return _residual_needed(graph, nominal, draft.neighbours)


def noise_in_the_sum(plan: Plan, size: int, kappa: float, residual: float) -> TradeOff:
    """In units of sigma_k^2, with a residual eta^2 in the same units."""
    dropout = plan.dropout
    lost = 2.0 * kappa * dropout * (1.0 - dropout) * size if plan.settled_mode == "tolerate" else 0.0
    return TradeOff(kappa, (1.0 - dropout) * size * residual, lost)


def _residual_needed(graph: ShareGraph, opponent: WorstCase, sent: float) -> Callable[[float], float]:
    """eta^2 as a function of kappa for one client and one set of colluders.

    With equal residuals, `(Sigma^-1)_kk = sum_j u_jk^2 / (kappa lambda_j / v + eta^2)` over the eigenpairs of the
    honest Laplacian: one decomposition serves every kappa.
    """
    honest = np.setdiff1d(np.arange(graph.size), opponent.colluders)
    among = links(graph).toarray()[np.ix_(honest, honest)]
    values, vectors = np.linalg.eigh(np.diag(among.sum(axis=1)) - among)
    parts = vectors[int(np.searchsorted(honest, opponent.client))] ** 2
    values = np.maximum(values, 0.0)

    def needed(kappa: float) -> float:
        def shortfall(log_residual: float) -> float:
            return 1.0 - float(np.sum(parts / (kappa * values / sent + math.exp(log_residual))))

        return math.exp(find_root(shortfall, -math.log(graph.size) - 1.0, 1e-9))

    return needed


@lru_cache(maxsize=64)
def cheapest_kappa(draft: Plan, participants: int) -> float:
    """The strength of shares that leaves least noise in the sum of a round of so many; 1 where tau^2 is given.

    The draft's own kappa does not matter, nor do epsilon and clip: the trade-off is the same for all of them. What a
    round promises does not rest on this choice: tau^2 is calibrated for the graph that is drawn.
    """
    if draft.tau2 is not None or not draft.private:
        return 1.0
    graph = "complete" if draft.neighbours >= participants - 1 or draft.graph == "complete" else "regular"
    plain = replace(draft, graph=graph, groups=(), kappa=NOMINAL_KAPPA)
    return cheapest(NoiseNeeded(plain, participants).curve())


def cheapest(curve: tuple[TradeOff, ...]) -> float:
    """The kappa of least noise on a curve; without dropouts the smallest that is nearly as good."""
    best = min(curve, key=attrgetter("total"))
    if best.dropout:
        return best.kappa
    return next(point.kappa for point in curve if point.total <= _GOOD_ENOUGH * best.total)


@dataclass(frozen=True)
class _Fit:
    """The least residual of runs like `shape`, with its ratio of carried noise and its shares within a round.

    pattern  the participations that have to stay within the budget; (): those of all fixed cyclic cohorts
    """

    shape: Committed
    pattern: tuple[int, ...] = ()

    @cached_property
    def _rounds(self) -> IntArray:
        """The rounds in which anybody takes part."""
        return np.array(self.pattern) if self.pattern else np.arange(self.shape.horizon)

    @cached_property
    def _cohort(self) -> IntArray:
        """Who does, in each of them."""
        return np.zeros_like(self._rounds) if self.pattern else self._rounds % self.shape.separation

    @cached_property
    def _sums(self) -> FloatArray:
        """A_o for each cohort."""
        shift = np.zeros((self.shape.rounds, int(self._cohort.max()) + 1))
        shift[self._rounds, self._cohort] = 1.0
        return np.asarray(np.sum(shift * solveh_banded(self.shape.view.bands, shift, lower=True), axis=0))

    def cost(self, residual: float) -> float:
        """`mu^2` of the costliest of the cohorts."""
        view, spatial = self.shape.view, self.shape.noise.spatial
        spread = ((1.0 - 1.0 / view.honest) / view.deviations(residual, spatial))[self._rounds]
        return float(np.max(self._sums / residual + np.bincount(self._cohort, weights=spread)))

    def fitted(self, budget: float, highest: float) -> Committed:
        """The run with the least residual whose worst pattern stays within `budget`, at most `highest`.

        For any pattern that takes a search for every residual, so few are tried. Where the costliest pattern is known
        exactly, the least residual for it is the next one: it is too small as long as there is a costlier pattern, and
        often there is none.
        """
        run = self.shape.with_residual(self._least(budget, highest))
        if run.pattern == "cyclic":
            return run
        for _ in range(_MOST_STEPS):
            worst = run.worst
            if not worst.rounds or worst.cost <= budget * (1.0 + _PRECISION):
                break
            residual = replace(self, pattern=worst.rounds)._least(budget, highest)
            if residual <= run.noise.participants * run.noise.residual:
                break
            run = self.shape.with_residual(residual)
        return run

    def _least(self, budget: float, highest: float) -> float:
        """The least residual with which the cohorts stay within the budget."""

        def excess(log_residual: float) -> float:
            return math.log(self.cost(math.exp(log_residual)) / budget)

        # The deviations only add to what the sums cost.
        low = math.log(float(self._sums.max()) / budget) - _PRECISION
        high = math.log(highest)
        if low >= high or excess(high) > 0.0:
            raise PrivacyError(
                "the shares within a round are too weak for this promise",
                hint="raise kappa, or assume fewer colluders",
            )
        return math.exp(find_root(excess, low, high, xtol=_PRECISION))


def safely_within(run: Committed, budget: float) -> Committed:
    """The run with as little more residual as it takes: rounding, or what merged patterns add to a bound."""
    while (excess := run.worst.cost / budget) > 1.0:
        residual = run.noise.participants * run.noise.residual * max(excess, 1.0 + _PRECISION)
        run = run.with_residual(residual)
    return run


@dataclass(frozen=True)
class CarriedSearch:
    """The run that leaves least noise in the model at the promised mu.

    Unless it is repaired, what dropped clients had carried stays in it for good: less is carried where many drop out.

    draft     the run with a residual of 1 in each sum and no other noise
    mu        that is promised; `dropout` and whether it is `repaired` as planned
    kept      the part of the noise in the model that a round of training leaves in it, as far as that is weighed
    """

    draft: Committed
    mu: float
    dropout: float
    repaired: bool
    kept: float = 1.0

    @classmethod
    def of(cls, plan: Plan, participants: int, *, kept: float = 1.0) -> CarriedSearch:
        """For rounds of that size under a plan that carries noise."""
        assert not isinstance(plan.epsilon, tuple)
        assumed = plan.assumed(participants)
        noise = Noise(
            participants=participants,
            neighbours=participants - 1.0,
            unit=0.0,
            residual=1.0 / participants,
            colluders=assumed.colluders,
            dropped=assumed.dropped,
        )
        draft = Committed(
            noise=noise,
            horizon=plan.planned_rounds,
            separation=plan.separation,
            pattern=plan.pattern,
            closing=plan.closing,
        )
        mu = gdp_mu(plan.epsilon, plan.gaussian_delta)
        return cls(draft, mu, plan.dropout, plan.settled_mode == "repair", kept)

    @property
    def alone(self) -> float:
        """sigma_k^2: what a client would add if it stood alone."""
        return math.ceil(self.draft.horizon / self.draft.separation) / self.mu**2

    def noise(self, run: Committed) -> FloatArray:
        """In the model after each round, the closing one too."""
        return run.noise_in_model(self.dropout, repaired=self.repaired)

    def objective(self, run: Committed) -> float:
        """Noise that clients train on, on average over the rounds."""
        noise = run.noise_in_model(self.dropout, repaired=self.repaired, kept=self.kept)
        return float(noise[: run.horizon].mean())

    def fitted(self, kappa: float, ratio: float) -> Committed:
        """The least residual that keeps the promise, at this ratio and shares within a round."""
        size, spatial = self.draft.noise.participants, 2.0 * kappa * self.alone
        shape = self.draft.sharing(ratio=ratio, spatial=spatial)
        # Without carrying and without shares the residual of one client's own upload would have to do it all.
        return _Fit(shape).fitted(self.mu**2, 2.0 * self.alone * size)

    def at(self, kappa: float, ratio: float | None) -> Committed:
        """The best plan at this kappa.

        The carried variance is chosen for cyclic cohorts, which is quick. For any pattern at that separation another
        choice gained less than 0.1 % in the eight settings in which both were computed.
        """
        if ratio is not None:
            return self.fitted(kappa, ratio)
        nothing = carrying_nothing(self, kappa)
        if self.draft.separation == 1:
            return nothing
        best = self.cyclic._carrying(kappa)
        if self.draft.pattern != "cyclic":
            best = self.fitted(kappa, best.ratio)
        return min(best, nothing, key=self.objective)

    def _carrying(self, kappa: float) -> Committed:
        """The best plan over all ratios."""
        # Imported here because it takes longer than other plans do.
        from scipy.optimize import minimize_scalar

        found = minimize_scalar(
            lambda log: math.log(self.objective(self.fitted(kappa, math.exp(log)))),
            bounds=(math.log(_LEAST_RATIO), math.log(_MOST_RATIO)),
            method="bounded",
            options={"xatol": 0.02},
        )
        return self.fitted(kappa, math.exp(float(found.x)))

    @property
    def cyclic(self) -> CarriedSearch:
        return replace(self, draft=replace(self.draft, pattern="cyclic"))

    def cheapest(self, ratio: float | None, say: Callable[[str], None]) -> float:
        """The least kappa that is nearly the best, each with its own carried variance.

        Kappas are compared for cyclic cohorts, which is quicker and hardly matters; the plan is made for the pattern
        that was asked for.
        """
        points = []
        for kappa in _KAPPAS:
            say(f"trying shares of strength {kappa:.3g}")
            try:
                points.append((kappa, self.objective(self.cyclic.at(kappa, ratio))))
            except PrivacyError:
                continue
        if not points:
            raise PrivacyError(
                "no strength of shares keeps this promise",
                hint="assume fewer colluders, or fewer that drop out",
            )
        enough = _GOOD_ENOUGH * min(cost for _, cost in points)
        chosen: float = next(kappa for kappa, cost in points if cost <= enough)
        say(f"choosing what to carry at strength {chosen:.3g}")
        return chosen


@lru_cache(maxsize=2)
def carrying_nothing(search: CarriedSearch, kappa: float) -> Committed:
    """The plan at this kappa that carries no noise on; asked for again when the gain is stated."""
    return search.fitted(kappa, 0.0)


@lru_cache(maxsize=64)
def committed_run(plan: Plan, participants: int) -> Committed:
    """What a plan that carries noise commits to for rounds of that size: the run that leaves least noise in the model.

    With tau^2 given there is that much fresh noise instead of what the promise needs, over the shares sent.
    """
    assert not isinstance(plan.tau2, tuple)
    search = CarriedSearch.of(plan, participants)
    run = safely_within(search.at(plan.kappa, plan.carried_to_residual), search.mu**2)
    if plan.tau2 is None:
        return run
    return replace(run, noise=replace(run.noise, residual=plan.tau2 * run.noise.spatial / 2.0))
