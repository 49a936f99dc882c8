"""The curve delta(epsilon) of mu-GDP: against direct evaluation, against high precision, at the extremes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from niss.errors import ConfigError
from niss.mechanism import gdp_delta
from niss.mechanism.gaussian import log_normal_cdf


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0, 5.0])
def test_curve_equals_its_definition(epsilon: float, mu: float) -> None:
    upper = stats.norm.cdf(-epsilon / mu + mu / 2)
    lower = math.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2)
    assert gdp_delta(epsilon, mu) == pytest.approx(upper - lower, rel=1e-10, abs=1e-15)


@pytest.mark.parametrize(
    ("epsilon", "accuracy"),
    [(0.001, 1e-6), (0.1, 1e-8), (1.0, 1e-9), (10.0, 1e-10), (1000.0, 1e-10), (10000.0, 1e-10)],
)
@pytest.mark.parametrize("tail", [-5.0, 0.0, 3.0, 10.0, 29.9, 30.1, 36.0])
def test_curve_against_high_precision(epsilon: float, accuracy: float, tail: float) -> None:
    """mu is chosen so that the first term is Phi(-tail): deltas from nearly 1 down to 1e-285."""
    mpmath = pytest.importorskip("mpmath", reason="mpmath comes with dp-accounting")
    mu = -tail + math.sqrt(tail * tail + 2.0 * epsilon)
    with mpmath.workdps(120):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        root = mpmath.sqrt(2)
        upper = mpmath.erfc((e / m - m / 2) / root) / 2
        lower = mpmath.exp(e) * mpmath.erfc((e / m + m / 2) / root) / 2
        truth = upper - lower
        error = float(abs(mpmath.mpf(gdp_delta(epsilon, mu)) / truth - 1))
    assert error < accuracy


@pytest.mark.parametrize("x", [5.0, 0.0, -1.0, -10.0, -29.999, -30.0, -30.001, -40.0, -1e4])
def test_log_normal_cdf_is_smooth_across_its_two_branches(x: float) -> None:
    assert log_normal_cdf(x) == pytest.approx(stats.norm.logcdf(x), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 1.0, 50.0, 500.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 1.0, 100.0, 1e4, 1e6])
def test_extremes_stay_probabilities(mu: float, epsilon: float) -> None:
    assert 0.0 <= gdp_delta(epsilon, mu) <= 1.0


def test_no_signal_costs_no_delta_and_a_strong_one_costs_all() -> None:
    assert gdp_delta(1.0, 0.0) == 0.0
    assert gdp_delta(1.0, 500.0) == 1.0
    assert gdp_delta(1e-3, 1e-6) == 0.0


@settings(deadline=None, max_examples=200)
@given(
    epsilon=st.floats(0.0, 100.0),
    more=st.floats(0.01, 10.0),
    mu=st.floats(0.01, 20.0),
)
def test_delta_falls_with_epsilon_and_rises_with_mu(epsilon: float, more: float, mu: float) -> None:
    slack = 1e-12
    assert gdp_delta(epsilon + more, mu) <= gdp_delta(epsilon, mu) * (1.0 + slack)
    assert gdp_delta(epsilon, mu + more) >= gdp_delta(epsilon, mu) * (1.0 - slack)


@pytest.mark.parametrize(
    ("epsilon", "mu", "field"),
    [
        (-1.0, 1.0, "epsilon"),
        (math.nan, 1.0, "epsilon"),
        (math.inf, 1.0, "epsilon"),
        (1.0, -1.0, "mu"),
        (1.0, math.nan, "mu"),
        (1.0, math.inf, "mu"),
    ],
)
def test_bad_input_names_the_field(epsilon: float, mu: float, field: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        gdp_delta(epsilon, mu)
    assert caught.value.field == field
