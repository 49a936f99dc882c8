"""Tails and roots against scipy's, whose slow imports a plan avoids."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, hypergeom, poisson

from niss.views.numerics import (
    binomial_quantile,
    binomial_tail,
    find_root,
    hypergeometric_tails,
    poisson_quantile,
)


@pytest.mark.parametrize("trials", [1, 2, 30, 1_000, 1_000_000])
@pytest.mark.parametrize("probability", [1e-6, 0.05, 0.3, 0.99])
def test_binomial_tails_and_quantiles(trials: int, probability: float) -> None:
    for count in {-1, 0, trials // 20, trials // 3, trials - 1, trials}:
        assert binomial_tail(count, trials, probability) == pytest.approx(
            float(binom.sf(count, trials, probability)), rel=1e-9, abs=1e-280
        )
    for tail in (1e-12, 1e-6, 0.1, 0.9):
        least = binomial_quantile(tail, trials, probability)
        assert least == int(binom.isf(tail, trials, probability))


@pytest.mark.parametrize(
    ("population", "marked", "drawn"),
    [
        (9, 3, 4),
        (9, 8, 7),
        (199, 40, 20),
        (999, 200, 100),
        (1_999, 1_900, 300),
        (999_999, 200_000, 500),
        (5, 0, 3),
    ],
)
def test_hypergeometric_tails(population: int, marked: int, drawn: int) -> None:
    counts = np.arange(min(marked, drawn))
    expected = hypergeom.sf(counts, population, marked, drawn)
    np.testing.assert_allclose(
        hypergeometric_tails(population, marked, drawn), expected, rtol=1e-6, atol=1e-290
    )


@pytest.mark.parametrize("mean", [1e-4, 0.3, 2.0, 50.0])
@pytest.mark.parametrize("tail", [1e-7, 1e-3, 0.2])
def test_poisson_quantiles(mean: float, tail: float) -> None:
    assert poisson_quantile(tail, mean, 10_000) == int(poisson.isf(tail, mean))
    assert poisson_quantile(tail, mean, 0) == 0


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        (lambda x: x**3 - 2.0, 0.0, 5.0),
        (lambda x: math.exp(x) - 1e-6, -50.0, 3.0),
        (lambda x: math.log(x / 7.0), 1e-9, 1e9),
        (lambda x: math.copysign(1.0, x - 0.3), -1.0, 1.0),
        (lambda x: x, 0.0, 1.0),
        (lambda x: math.tanh(40.0 * (x - 0.77)), 0.0, 1.0),
    ],
)
def test_roots_are_those_of_brentq_to_the_last_bit(function, low: float, high: float) -> None:
    for xtol in (2e-12, 1e-6):
        assert find_root(function, low, high, xtol=xtol) == brentq(function, low, high, xtol=xtol)


def test_no_root_where_the_sign_stays() -> None:
    for function in (lambda x: x * x + 1.0, lambda _: math.nan):
        with pytest.raises(ValueError, match="sign"):
            find_root(function, -1.0, 1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--participants", "200", "--collusion", "0.2"],
        ["--participants", "1000000", "--collusion", "0.2", "--dropout", "0.05", "--mode", "repair"],
    ],
)
def test_a_plan_leaves_the_slow_packages_alone(arguments: list[str]) -> None:
    code = (
        "import sys; from niss.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "slow = {'scipy.stats', 'scipy.optimize', 'torch', 'matplotlib', 'flwr'} & set(sys.modules); "
        "assert not slow, slow"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
