"""The cost of rounding noises one by one: proven bound against exact laws on the grid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import special

from niss.errors import ConfigError
from niss.mechanism import gdp_delta, gdp_mu
from niss.mechanism.grid import aliasing_distance, discretisation_delta
from niss.randomness import sampler_distance, sampler_factor

Law = NDArray[np.float64]


def cell(center: Any, deviation: float) -> Law:
    """The probability of a normal variable within 1/2 of `center`."""
    near, far = (np.abs(center) + half for half in (-0.5, 0.5))
    return np.asarray(special.ndtr(-near / deviation) - special.ndtr(-far / deviation))


def law(shift: int, share: float, residual: float, *, fineness: int) -> Law:
    """Two clients and one share: the law of the uploads with the first update at `shift`.

    `fineness = 1`: the share is rounded. Large: it is continuous, plus a uniform (the integral over it by the
    trapezoidal rule, which for these functions is exact to exp(-2 pi^2 fineness^2 / kappa)).
    """
    reach = math.ceil(12 * max(share, residual)) + 2
    places = np.arange(-reach * fineness, reach * fineness + 1) / fineness
    outcomes = np.arange(-2 * reach, 2 * reach + 1)
    first = cell(outcomes[None, :] - shift - places[:, None], residual)
    second = cell(outcomes[None, :] + places[:, None], residual)
    return np.einsum("v,va,vb->ab", cell(places, share) / fineness, first, second, optimize=True)


def hockey_stick(one: Law, other: Law, epsilon: float) -> float:
    return float(np.maximum(one - math.exp(epsilon) * other, 0.0).sum())


CASES = [(0.3, 0.3), (0.5, 0.5), (0.4, 1.0), (1.0, 0.4), (0.7, 0.7), (1.0, 1.0), (2.0, 1.0)]


@pytest.mark.parametrize(("share", "residual"), CASES)
def test_rounding_one_by_one_is_as_near_as_proven(share: float, residual: float) -> None:
    rounded, ideal = (law(0, share, residual, fineness=fineness) for fineness in (1, 24))
    assert rounded.sum() == pytest.approx(1.0, abs=1e-12)
    assert ideal.sum() == pytest.approx(1.0, abs=1e-12)
    distance = 0.5 * float(np.abs(rounded - ideal).sum())
    assert distance <= aliasing_distance([residual, residual], [share]) + 1e-14


@pytest.mark.parametrize(("share", "residual"), CASES)
@pytest.mark.parametrize("shift", [1, 3])
def test_the_claim_holds_on_the_grid(share: float, residual: float, shift: int) -> None:
    """delta of the exact law <= delta of the Gaussian mechanism + (1 + e^epsilon) * aliasing."""
    covariance = residual**2 * np.eye(2) + share**2 * np.array([[1.0, -1.0], [-1.0, 1.0]])
    mu = shift * math.sqrt(np.linalg.inv(covariance)[0, 0])
    aliasing = aliasing_distance([residual, residual], [share])
    for epsilon in (0.0, 0.5, 1.0, 3.0):
        gaussian = gdp_delta(epsilon, mu)
        for fineness, extra in ((1, (1 + math.exp(epsilon)) * aliasing), (24, 0.0)):
            laws = [law(here, share, residual, fineness=fineness) for here in (0, shift)]
            assert hockey_stick(laws[0], laws[1], epsilon) <= gaussian + extra + 1e-12
            assert hockey_stick(laws[1], laws[0], epsilon) <= gaussian + extra + 1e-12


def test_the_cost_is_real_where_noise_is_narrower_than_a_step() -> None:
    """At 0.3 steps the exact law breaks the Gaussian curve: the bound is not mere caution."""
    mu = math.sqrt(np.linalg.inv(0.09 * np.array([[2.0, -1.0], [-1.0, 2.0]]))[0, 0])
    laws = [law(here, 0.3, 0.3, fineness=1) for here in (0, 1)]
    assert max(hockey_stick(laws[0], laws[1], e) - gdp_delta(e, mu) for e in (0.0, 1.0, 2.0, 3.0)) > 1e-3


def test_the_numbers_of_the_docstring() -> None:
    assert aliasing_distance([2.0] * 2, [2.0]) == pytest.approx(4e-12, rel=0.1)
    assert aliasing_distance([4.0] * 2, [4.0]) == pytest.approx(2e-46, rel=0.2)
    assert aliasing_distance([5.0], []) == 0.0
    assert aliasing_distance([5.0, 9.0], [7.0, 0.0, 8.0]) == pytest.approx(
        sum(math.exp(-2 * math.pi**2 / (1 / s**2 + 2 / 25)) for s in (7.0, 8.0))
    )
    assert aliasing_distance([1e-200], [1e-200]) == math.inf


def cost(
    steps: float, draws: float, *, epsilon: float = 1.0, aliasing: float = 0.0, rest: float = 1e-9
) -> float:
    mu = gdp_mu(epsilon, 1e-5)
    return discretisation_delta([steps], [draws], aliasing=aliasing, epsilon=epsilon, mu=mu, rest=rest)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0])
def test_the_cost_is_that_of_the_proof(epsilon: float) -> None:
    mu, rest, aliasing = gdp_mu(epsilon, 1e-5), 1e-12, 1e-13
    factor = 2.0 * sampler_factor([256.0], [1e9], rest=rest)
    expected = math.exp(factor) * gdp_delta(epsilon - 2.0 * factor, mu) - gdp_delta(epsilon, mu)
    expected += (1.0 + math.exp(epsilon + factor)) * (rest + aliasing)
    found = cost(256.0, 1e9, epsilon=epsilon, rest=rest, aliasing=aliasing)
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_realistic_run_costs_next_to_nothing_and_a_fine_grid_everything() -> None:
    """A million coordinates, 31,000 noises each, 30 rounds; a total variation distance would cost more than delta."""
    draws = 1e6 * 31_000 * 30
    assert cost(16.0, draws, epsilon=8.0, rest=3e-11) < 1e-6
    assert (1.0 + math.exp(8.0)) * sampler_distance(16.0, draws) > 1e-5
    assert cost(2.0**40, draws) == 1.0
    assert cost(256.0, 1.0, epsilon=1000.0) == 1.0
    assert cost(256.0, 1e6, aliasing=1.0) == 1.0


def test_many_unlike_rounds_cost_no_more_than_was_allowed_for_each() -> None:
    """The doubled factor covers rounds of which each alone, repeated, has that factor."""
    rounds, draws, rest = 50, 1e8, 1e-9
    steps = np.geomspace(16.0, 4096.0, rounds)
    each = max(sampler_factor([one], [rounds * draws], rest=rest) for one in steps)
    together = sampler_factor(steps, np.full(rounds, draws), rest=rest)
    assert together <= 2.0 * each


def test_what_has_no_proof_is_refused() -> None:
    calls: list[tuple[str, Any]] = [
        ("deviation_steps", lambda: aliasing_distance([4.0, 0.0], [4.0])),
        ("deviation_steps", lambda: cost(math.nan, 1.0)),
        ("share_steps", lambda: aliasing_distance(4.0, [-1.0])),
        ("draws", lambda: cost(4.0, -1.0)),
        ("epsilon", lambda: discretisation_delta([4.0], [1.0], aliasing=0.0, epsilon=-1.0, mu=1.0, rest=0.1)),
        ("epsilon", lambda: discretisation_delta([4.0], [1.0], aliasing=0.0, epsilon=1.0, mu=0.0, rest=0.1)),
    ]
    for field, call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.field == field
