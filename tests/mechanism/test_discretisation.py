"""The cost of rounding noises one by one: proven bound against exact laws on the grid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import special

from niss.errors import ConfigError
from niss.mechanism import gdp_delta
from niss.mechanism.grid import aliasing_distance, discretisation_delta
from niss.randomness import sampler_distance

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


def test_one_rounded_noise_costs_the_sampler_alone() -> None:
    found = discretisation_delta(0.3, 10**6, 30, epsilon=1.0)
    assert found == pytest.approx((1 + math.e) * sampler_distance(0.3, 3e7))


def test_a_realistic_round_costs_next_to_nothing_and_a_coarse_one_everything() -> None:
    shares: dict[str, Any] = {"coordinates": 10**6, "rounds": 30, "epsilon": 1.0}
    assert discretisation_delta([256.0] * 30, share_steps=[500.0] * 900, **shares) < 1e-6
    assert discretisation_delta([4.0] * 30, share_steps=[8.0] * 900, **shares) < 1e-7
    assert discretisation_delta([0.3] * 30, share_steps=[8.0] * 900, **shares) == 1.0
    assert discretisation_delta([2.0**40] * 30, share_steps=[2.0**40] * 900, **shares) == 1.0
    assert discretisation_delta(256.0, 1, 1, epsilon=1000.0) == 1.0


def test_what_has_no_proof_is_refused() -> None:
    calls: list[tuple[str, Any]] = [
        ("deviation_steps", lambda: discretisation_delta([4.0, 0.0], 1, 1, epsilon=1.0, share_steps=[4.0])),
        ("deviation_steps", lambda: discretisation_delta(0.0, 1, 1, epsilon=1.0)),
        ("deviation_steps", lambda: discretisation_delta([], 1, 1, epsilon=1.0)),
        ("deviation_steps", lambda: discretisation_delta(math.nan, 1, 1, epsilon=1.0)),
        ("share_steps", lambda: discretisation_delta(4.0, 1, 1, epsilon=1.0, share_steps=[-1.0])),
        ("coordinates", lambda: discretisation_delta(4.0, 0, 1, epsilon=1.0)),
        ("rounds", lambda: discretisation_delta(4.0, 1, 0, epsilon=1.0)),
        ("epsilon", lambda: discretisation_delta(4.0, 1, 1, epsilon=-1.0)),
        ("epsilon", lambda: discretisation_delta(4.0, 1, 1, epsilon=math.nan)),
    ]
    for field, call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.field == field
