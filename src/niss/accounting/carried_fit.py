"""The least residual that keeps a promise, found without inverting anything twice.

With the ratios w / r fixed, a floor of a run is `Gamma = r Gamma_1` and `D = r d + s c` (s the shares within a round),
so what fixed cyclic cohorts o pay is

    max_o  A_o / r + sum_{t in o} (1 - 1/h_t) Delta^2 a_t^2 / (r d_t + s c_t),     A_o = 1_o' Gamma_1^-1 1_o,

one banded system for all r and s. Plans for any pattern at a separation start from there and are searched with the
whole matrix.
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

_PRECISION = 1e-11
_MOST_SECANTS = 50


@dataclass(frozen=True)
class ResidualFit:
    """Plans like `shape`, but for their residual and the shares within a round."""

    shape: CarriedPlan

    @cached_property
    def _cohort(self) -> NDArray[np.int64]:
        return np.arange(self.shape.horizon) % self.shape.separation

    @cached_property
    def _sums(self) -> list[FloatArray]:
        """A_o for each floor and cohort."""
        return [self._cohort_sums(unit) for unit in self.shape.unit_floors]

    def _cohort_sums(self, unit: UnitFloor) -> FloatArray:
        shape, gamma = self.shape, unit.floor.sums
        rounds, cohorts = np.arange(shape.horizon), int(self._cohort.max()) + 1
        shift = np.zeros((shape.rounds, cohorts))
        shift[rounds, self._cohort] = shape.sensitivity * unit.floor.factors[: shape.horizon]
        lags = min(len(shape.carried_to_residual), shape.rounds - 1)
        bands = np.zeros((lags + 1, shape.rounds))
        for lag in range(lags + 1):
            bands[lag, : shape.rounds - lag] = np.diagonal(gamma, lag)
        return np.asarray(np.sum(shift * solveh_banded(bands, shift, lower=True), axis=0))

    def cyclic_cost(self, residual: float, spatial: float) -> float:
        """`mu^2` of the costliest of the fixed cyclic cohorts."""
        best = math.inf
        horizon = self.shape.horizon
        for unit, sums in zip(self.shape.unit_floors, self._sums, strict=True):
            deviations = unit.deviations(residual, spatial)
            if np.all(deviations > 0.0):
                squares = (self.shape.sensitivity * unit.floor.factors) ** 2
                spread = ((1.0 - 1.0 / unit.floor.honest) * squares / deviations)[:horizon]
                best = min(best, float(np.max(sums / residual + np.bincount(self._cohort, weights=spread))))
        return best

    def fitted(self, budget: float, spatial: float, highest: float) -> CarriedPlan:
        """The plan with the least residual whose worst pattern stays within `budget`, at most `highest`."""

        def excess(log_residual: float) -> float:
            return math.log(self.cyclic_cost(math.exp(log_residual), spatial) / budget)

        # The deviations only add to what the sums cost.
        low = math.log(min(float(sums.max()) for sums in self._sums) / budget) - _PRECISION
        high = math.log(highest)
        if low >= high or excess(high) > 0.0:
            raise PrivacyError(
                "the shares within a round are too weak for this promise",
                hint="raise kappa, or assume fewer colluders",
            )
        residual = math.exp(find_root(excess, low, high, xtol=_PRECISION))
        plan = replace(self.shape, residual=residual, spatial=spatial)
        return plan if plan.pattern == "cyclic" else self._for_any_pattern(plan, budget)

    def _for_any_pattern(self, plan: CarriedPlan, budget: float) -> CarriedPlan:
        """The same for the costliest pattern; every step of it is a search, so few are made.

        `r cost(r)` changes little, so its inverse is a good guess. Secants follow, on logarithms.
        """

        def excess(log_residual: float) -> float:
            return math.log(replace(plan, residual=math.exp(log_residual)).worst.cost / budget)

        before, low = math.log(plan.residual), excess(math.log(plan.residual))
        if low <= 0.0:
            return plan
        here, value = before + low, excess(before + low)
        for _ in range(_MOST_SECANTS):
            if abs(value) <= _PRECISION or value == low:
                break
            following = here - value * (here - before) / (value - low)
            before, low, here, value = here, value, following, excess(following)
        return replace(plan, residual=math.exp(here))


def safely_within(plan: CarriedPlan, budget: float) -> CarriedPlan:
    """The plan with as little more residual as it takes; rounding is all that a fit should leave to mend here."""
    while (excess := plan.worst.cost / budget) > 1.0:
        plan = replace(plan, residual=plan.residual * max(excess, 1.0 + _PRECISION))
    return plan
