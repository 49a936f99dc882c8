"""Noise for secret sampling, against dp-accounting asked by hand."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from niss.errors import ConfigError
from niss.mechanism import gdp_mu, poisson_epsilon, poisson_multiplier

DELTA = 1e-5


def by_hand(z: float, probability: float, rounds: int) -> float:
    accountant = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(z))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, rounds))
    return float(accountant.get_epsilon(DELTA))


@pytest.mark.parametrize(("epsilon", "part"), [(1.0, 0.20), (3.0, 0.27), (8.0, 0.46)])
def test_a_thousand_of_six_thousand_need_a_part_of_the_noise(epsilon: float, part: float) -> None:
    """30 rounds; without the secret a client takes part five times, dealt out in turn."""
    z = poisson_multiplier(epsilon, DELTA, 1 / 6, 30)
    assert epsilon * (1.0 - 1e-3) < by_hand(z, 1 / 6, 30) <= epsilon * (1.0 + 1e-4)
    assert z**2 * gdp_mu(epsilon, DELTA) ** 2 / 5 == pytest.approx(part, abs=0.006)


@pytest.mark.parametrize(
    ("epsilon", "probability", "rounds"), [(0.1, 0.01, 50), (8.0, 0.5, 4), (1.0, 0.999, 3)]
)
def test_the_target_is_kept_and_hardly_undercut(epsilon: float, probability: float, rounds: int) -> None:
    z = poisson_multiplier(epsilon, DELTA, probability, rounds)
    assert epsilon * (1.0 - 1e-4) <= poisson_epsilon(((z, rounds),), probability, DELTA) <= epsilon
    assert z <= 1.01 * math.sqrt(rounds) / gdp_mu(epsilon, DELTA)


def test_without_a_secret_it_is_plain_composition() -> None:
    assert poisson_multiplier(3.0, DELTA, 1.0, 9) == pytest.approx(3.0 / gdp_mu(3.0, DELTA))
    assert poisson_epsilon(((1.0, 4), (2.0, 4)), 1.0, DELTA) == pytest.approx(
        poisson_epsilon(((1.0, 5),), 1.0, DELTA)
    )


def test_a_probability_is_one() -> None:
    with pytest.raises(ConfigError, match="probability"):
        poisson_multiplier(1.0, DELTA, 0.0, 3)
