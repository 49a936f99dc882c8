"""The least residual that keeps a promise, found without inverting anything twice.

With the ratios w / r fixed, a floor of a run is `Gamma = r Gamma_1` and `D = r d + s c` (s the shares within a round),
so what fixed cyclic cohorts o pay is

    max_o  A_o / r + sum_{t in o} (1 - 1/h_t) Delta^2 a_t^2 / (r d_t + s c_t),     A_o = 1_o' Gamma_1^-1 1_o,

one banded system for all r and s. Plans for any pattern at a separation start from there; a single pattern P is a
cohort like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solveh_banded

from niss.accounting.carried import CarriedPlan, UnitFloor
from niss.errors import PrivacyError
from niss.views.roots import find_root

FloatArray = NDArray[np.float64]

_PRECISION, _PRECISION_OF_A_BOUND = 1e-11, 1e-6
_MOST_STEPS = 50


@dataclass(frozen=True)
class ResidualFit:
    """Plans like `shape`, but for their residual and the shares within a round.

    pattern  the participations that have to stay within the budget; (): those of all fixed cyclic cohorts
    """

    shape: CarriedPlan
    pattern: tuple[int, ...] = ()

    @cached_property
    def _rounds(self) -> NDArray[np.int64]:
        """The rounds in which anybody takes part."""
        return np.array(self.pattern) if self.pattern else np.arange(self.shape.horizon)

    @cached_property
    def _cohort(self) -> NDArray[np.int64]:
        """Who does, in each of them."""
        return np.zeros_like(self._rounds) if self.pattern else self._rounds % self.shape.separation

    @cached_property
    def _sums(self) -> list[FloatArray]:
        """A_o for each floor and cohort."""
        return [self._cohort_sums(unit) for unit in self.shape.unit_floors]

    def _cohort_sums(self, unit: UnitFloor) -> FloatArray:
        shift = np.zeros((self.shape.rounds, int(self._cohort.max()) + 1))
        shift[self._rounds, self._cohort] = self.shape.sensitivity * unit.floor.factors[self._rounds]
        return np.asarray(np.sum(shift * solveh_banded(unit.floor.bands, shift, lower=True), axis=0))

    def cost(self, residual: float, spatial: float) -> float:
        """`mu^2` of the costliest of the cohorts."""
        best = math.inf
        for unit, sums in zip(self.shape.unit_floors, self._sums, strict=True):
            deviations = unit.deviations(residual, spatial)
            if np.all(deviations > 0.0):
                squares = (self.shape.sensitivity * unit.floor.factors) ** 2
                spread = ((1.0 - 1.0 / unit.floor.honest) * squares / deviations)[self._rounds]
                best = min(best, float(np.max(sums / residual + np.bincount(self._cohort, weights=spread))))
        return best

    def fitted(self, budget: float, spatial: float, highest: float) -> CarriedPlan:
        """The plan with the least residual whose worst pattern stays within `budget`, at most `highest`."""
        plan = replace(self.shape, residual=self._least(budget, spatial, highest), spatial=spatial)
        return plan if plan.pattern == "cyclic" else self._for_any_pattern(plan, budget, highest)

    def _least(self, budget: float, spatial: float, highest: float) -> float:
        """The least residual with which the cohorts stay within the budget."""

        def excess(log_residual: float) -> float:
            return math.log(self.cost(math.exp(log_residual), spatial) / budget)

        # The deviations only add to what the sums cost.
        low = math.log(min(float(sums.max()) for sums in self._sums) / budget) - _PRECISION
        high = math.log(highest)
        if low >= high or excess(high) > 0.0:
            raise PrivacyError(
                "the shares within a round are too weak for this promise",
                hint="raise kappa, or assume fewer colluders",
            )
        return math.exp(find_root(excess, low, high, xtol=_PRECISION))

    def _for_any_pattern(self, plan: CarriedPlan, budget: float, highest: float) -> CarriedPlan:
        """The same for the costliest pattern, which takes a search for every residual, so few are tried.

        Where that pattern is known exactly, the least residual for it is the next one: it is too small as long as there
        is a costlier pattern, and often there is none.
        """
        worst = plan.worst
        if not worst.rounds or len(self.shape.unit_floors) > 1:
            return self._by_secants(plan, budget)
        for _ in range(_MOST_STEPS):
            if worst.cost <= budget * (1.0 + _PRECISION):
                break
            following = replace(self, pattern=worst.rounds)._least(budget, plan.spatial, highest)
            if following <= plan.residual:
                break
            plan = replace(plan, residual=following)
            worst = plan.worst
        return plan

    def _by_secants(self, plan: CarriedPlan, budget: float) -> CarriedPlan:
        """Where only a bound on the costliest pattern is known: secants on logarithms.

        `r cost(r)` changes little, so its inverse is a good guess to start with.
        """

        def excess(log_residual: float) -> float:
            return math.log(replace(plan, residual=math.exp(log_residual)).worst.cost / budget)

        before, low = math.log(plan.residual), math.log(plan.worst.cost / budget)
        if low <= 0.0:
            return plan
        here, value = before + low, excess(before + low)
        for _ in range(_MOST_STEPS):
            if abs(value) <= _PRECISION_OF_A_BOUND or value == low:
                break
            following = here - value * (here - before) / (value - low)
            before, low, here, value = here, value, following, excess(following)
        return replace(plan, residual=math.exp(here))


def safely_within(plan: CarriedPlan, budget: float) -> CarriedPlan:
    """The plan with as little more residual as it takes; rounding is all that a fit should leave to mend here."""
    while (excess := plan.worst.cost / budget) > 1.0:
        plan = replace(plan, residual=plan.residual * max(excess, 1.0 + _PRECISION))
    return plan
