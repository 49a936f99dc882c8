"""What every accountant must do, whatever it computes with: one suite, inherited by a test class for each."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from niss.errors import NissError
from niss.mechanism import gdp_epsilon

ROUNDS = [0.3, 0.5, 0.3]
DELTA = 1e-5


class AccountantContract:
    """`epsilon(mus, delta)` of rounds that are mu-GDP each, without sampling; None: no guarantee.

    It may exceed the exact curve by the part `above` of it, and fall short by `below`: 0 but for rounding,
    except where amplification by sampling is what the accountant is for.
    """

    above = 1e-9
    below = 1e-9
    refused = (([0.3, math.nan], DELTA), ([-0.3], DELTA), ([0.3], 0.0), ([0.3], 1.0), ([0.3], math.nan))

    def epsilon(self, mus: list[float], delta: float) -> float | None:
        raise NotImplementedError

    def known(self, mus: list[float], delta: float = DELTA) -> float:
        epsilon = self.epsilon(mus, delta)
        assert epsilon is not None
        return epsilon

    def test_no_rounds_cost_nothing(self) -> None:
        assert self.epsilon([], DELTA) == pytest.approx(0.0, abs=1e-9)

    def test_more_rounds_cost_more(self) -> None:
        costs = [self.known(ROUNDS[:count]) for count in range(len(ROUNDS) + 1)]
        assert all(less < more for less, more in pairwise(costs))

    def test_less_noise_costs_more(self) -> None:
        costs = [self.known([scale * mu for mu in ROUNDS]) for scale in (0.5, 1.0, 2.0)]
        assert all(less < more for less, more in pairwise(costs))

    def test_less_noise_in_one_round_costs_more(self) -> None:
        assert self.known([0.3, 0.5, 0.4]) > self.known(ROUNDS)

    def test_a_smaller_delta_costs_more(self) -> None:
        costs = [self.known(ROUNDS, delta) for delta in (1e-2, 1e-6)]
        assert all(less < more for less, more in pairwise(costs))

    def test_the_order_of_the_rounds_does_not_matter(self) -> None:
        assert self.known(ROUNDS) == pytest.approx(self.known(ROUNDS[::-1]), rel=1e-9)

    @pytest.mark.parametrize("mus", [ROUNDS, [0.05], [1.0] * 4, [0.1] * 40, [2.0, 1e-3]])
    def test_it_agrees_with_the_exact_curve(self, mus: list[float]) -> None:
        exact = gdp_epsilon(math.sqrt(math.fsum(mu**2 for mu in mus)), DELTA)
        assert (1.0 - self.below) * exact - 1e-9 <= self.known(mus) <= (1.0 + self.above) * exact + 1e-9

    def test_a_round_without_noise_leaves_no_guarantee(self) -> None:
        assert self.epsilon([0.3, math.inf], DELTA) is None

    def test_it_refuses_rather_than_guess(self) -> None:
        for mus, delta in self.refused:
            with pytest.raises(NissError):
                self.epsilon(mus, delta)
