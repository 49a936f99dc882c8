"""What does not cancel: the paper's Lemma 1 and Theorem 2, measured on every graph and distortion."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from niss.mechanism import DISTORTIONS
from niss.randomness import SimStream

# Stated rate 1e-6. Sums of heavy-tailed squares are skewed, so normal quantiles are taken at 1e-7.
FALSE_ALARM = 1e-6
NORMAL_RATE = 1e-7


@pytest.mark.parametrize("distortion", DISTORTIONS)
def test_measured_aggregate_variance_is_the_predicted(case: Any, draw: Any, distortion: str) -> None:
    """False-alarm rate at most 1e-6.

    Edge e leaves t_e = (1 - s_e) n_e of variance v_e, with E t_e^4 = 9 v_e^2, so the square of the
    total has variance 2 V^2 + 6 sum v_e^2; coordinates that share their factors have covariance
    2 sum v_e^2. Additive noise is Gaussian: 2 V^2 and 0.
    """
    predicted = float(case.residual.sum())
    if case.graph.balanced:
        assert predicted == pytest.approx(float(np.sum(case.own * case.tau2)), rel=1e-9)
    totals = draw(case, distortion).sum(axis=1)
    experiments, coordinates = totals.shape
    edge = case.tau2[case.graph.receivers] * case.unit_variance * case.graph.weights
    fourth = 0.0 if distortion == "additive" else float(np.sum(edge**2))
    spread = (2.0 * predicted**2 + 6.0 * fourth) / totals.size
    spread += 2.0 * fourth * (coordinates - 1) / totals.size
    assert experiments * coordinates >= 8000
    assert abs(np.mean(totals**2) - predicted) <= stats.norm.isf(NORMAL_RATE / 2) * np.sqrt(spread)


def test_balanced_cases_are_balanced_and_the_others_not(case: Any) -> None:
    assert case.graph.balanced == (case.name in ("regular", "complete", "coalition"))


def test_scalar_factors_have_mean_one_and_the_receivers_variance(case: Any) -> None:
    """sum ((s_e - 1) / tau_k)^2 is chi-square and sum (s_e - 1) / tau_k normal; 1e-6 each, exact."""
    factors = []
    for number in range(200):
        _, scales = case.noise(1, SimStream(32).child(number))
        factors.append((scales - 1.0) / np.sqrt(case.tau2[case.graph.receivers]))
    standard = np.concatenate(factors)
    square = float(np.sum(standard**2))
    assert stats.chi2.ppf(FALSE_ALARM / 2, standard.size) < square
    assert square < stats.chi2.isf(FALSE_ALARM / 2, standard.size)
    assert abs(standard.sum()) <= stats.norm.isf(FALSE_ALARM / 2) * np.sqrt(standard.size)
