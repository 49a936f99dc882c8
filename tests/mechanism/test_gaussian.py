"""The Gaussian mechanism: the curve delta(epsilon) of mu-GDP, its inverses, and secret Poisson sampling."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from niss.errors import PrivacyError
from niss.mechanism import classical_sigma, gdp_delta, gdp_epsilon, gdp_mu
from niss.mechanism.gaussian import log_normal_cdf
from support.refusals import refuses


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


def test_the_papers_target_under_both_mechanisms() -> None:
    analytic = 1.0 / gdp_mu(10.0, 1e-4)
    classical = classical_sigma(10.0, 1e-4, allow_invalid=True)
    assert analytic == pytest.approx(0.4553, abs=5e-5)
    assert classical == pytest.approx(0.4344, abs=5e-5)
    assert gdp_delta(10.0, 1.0 / analytic) == pytest.approx(1e-4, rel=1e-9)
    assert gdp_delta(10.0, 1.0 / classical) == pytest.approx(2.7e-4, rel=0.02)


@pytest.mark.parametrize("epsilon", [1.0, 10.0])
def test_classical_is_refused_where_it_is_not_proved(epsilon: float) -> None:
    with pytest.raises(PrivacyError, match="epsilon < 1") as caught:
        classical_sigma(epsilon, 1e-5)
    assert caught.value.hint is not None
    assert "analytic" in caught.value.hint


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.01, 0.2])
def test_classical_keeps_its_promise_below_one(epsilon: float, delta: float) -> None:
    sigma = classical_sigma(epsilon, delta)
    assert gdp_delta(epsilon, 1.0 / sigma) <= delta
    assert sigma >= 1.0 / gdp_mu(epsilon, delta)


@settings(deadline=None, max_examples=150)
@given(log_epsilon=st.floats(-3.0, 4.0), log_delta=st.floats(-300.0, -0.01))
def test_mu_rounds_to_the_safe_side_and_is_tight(log_epsilon: float, log_delta: float) -> None:
    epsilon, delta = 10.0**log_epsilon, 10.0**log_delta
    mu = gdp_mu(epsilon, delta)
    assert mu > 0.0
    assert gdp_delta(epsilon, mu) <= delta
    assert gdp_delta(epsilon, mu * (1.0 + 1e-6)) > delta


@settings(deadline=None, max_examples=150)
@given(log_mu=st.floats(-3.0, math.log10(500.0)), log_delta=st.floats(-250.0, -0.3))
def test_epsilon_rounds_to_the_safe_side_and_inverts_mu(log_mu: float, log_delta: float) -> None:
    mu, delta = 10.0**log_mu, 10.0**log_delta
    epsilon = gdp_epsilon(mu, delta)
    assert gdp_delta(epsilon, mu) <= delta
    if epsilon > 1e-3:
        assert gdp_mu(epsilon, delta) == pytest.approx(mu, rel=1e-6)


def test_inverses_at_the_extremes() -> None:
    assert gdp_epsilon(1e-6, 1e-5) == 0.0
    assert gdp_epsilon(0.0, 1e-5) == 0.0
    assert gdp_epsilon(math.inf, 1e-5) == math.inf
    assert gdp_epsilon(1e200, 1e-5) == math.inf
    assert gdp_epsilon(500.0, 1e-5) == pytest.approx(500.0**2 / 2 + 500.0 * 4.265, rel=1e-4)
    assert 0.0 < gdp_mu(1e-3, 1e-300) < 1e-3 / 30.0
    assert gdp_mu(1e4, 1e-300) == pytest.approx(-37.05 + math.sqrt(37.05**2 + 2e4), rel=1e-3)
    assert gdp_mu(1e-80, 1e-12) > 0.0


@settings(deadline=None, max_examples=60)
@given(epsilon=st.floats(0.01, 50.0), more=st.floats(0.01, 5.0), log_delta=st.floats(-20.0, -1.0))
def test_a_looser_target_needs_less_noise(epsilon: float, more: float, log_delta: float) -> None:
    delta = 10.0**log_delta
    assert gdp_mu(epsilon + more, delta) > gdp_mu(epsilon, delta)
    assert gdp_mu(epsilon, delta / 2) < gdp_mu(epsilon, delta)


@pytest.mark.parametrize(
    ("ask", "given", "field"),
    [
        *((gdp_delta, (bad, 1.0), "epsilon") for bad in (-1.0, math.nan, math.inf)),
        *((gdp_delta, (1.0, bad), "mu") for bad in (-1.0, math.nan, math.inf)),
        *((gdp_epsilon, (bad, 1e-5), "mu") for bad in (-1.0, math.nan, -math.inf)),
        *((ask, (bad, 1e-5), "epsilon") for bad in (0.0, math.nan) for ask in (gdp_mu, classical_sigma)),
        *((ask, (0.5, bad), "delta") for bad in (0.0, 1.0, math.nan) for ask in (gdp_mu, classical_sigma)),
    ],
)
def test_bad_numbers_are_refused_by_name(
    ask: Callable[..., float], given: tuple[float, ...], field: str
) -> None:
    with refuses(field, match=field):
        ask(*given)
