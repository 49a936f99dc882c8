"""The best attack on simulated uploads succeeds exactly as often as the joint view says."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from niss.graph import ShareGraph
from niss.mechanism import add_shares, gdp_delta
from niss.randomness import SimStream
from niss.views import effective_variance

FALSE_ALARM = 1e-6
COORDINATES = 40_000


@pytest.mark.parametrize("client", [0, 3])
@pytest.mark.parametrize("tau2", [0.05, 0.5])
def test_likelihood_ratio_attack_reaches_mu_and_no_more(client: int, tau2: float) -> None:
    """A server that knows every other update decides whether client k sent 0 or Delta.

    Each coordinate is one experiment. The log-likelihood ratio, scaled, is N(0, 1) without the update and
    N(mu, 1) with it. Four exact tests (two variances, the shift, the number of right guesses), each with
    false-alarm rate 2.5e-7: together at most 1e-6.
    """
    graph = ShareGraph.regular(5, degree=2, beacon=b"distinguisher")
    rate = FALSE_ALARM / 4
    unit_variance, delta = 1.5, 1.2
    residual = tau2 * unit_variance * graph.in_weight
    variance = effective_variance(graph, unit_variance=unit_variance, residual_variance=residual)[client]
    mu = delta / np.sqrt(variance)
    precision = np.linalg.inv(unit_variance * graph.laplacian() + np.diag(residual))[client]
    scores = []
    for present in (0, 1):
        uploads = np.zeros((graph.size, COORDINATES))
        uploads[client] += present * delta
        add_shares(
            uploads,
            graph,
            unit_variance=unit_variance,
            tau2=tau2,
            distortion="additive",
            stream=SimStream(50).child(client, present),
        )
        scores.append(precision @ uploads / np.sqrt(precision[client]))
    without, with_update = scores
    for centred in (without, with_update - mu):
        square = float(np.sum(centred**2))
        assert stats.chi2.ppf(rate / 2, COORDINATES) < square < stats.chi2.isf(rate / 2, COORDINATES)
    measured = float(np.mean(with_update) - np.mean(without))
    assert abs(measured - mu) <= stats.norm.isf(rate / 2) * np.sqrt(2.0 / COORDINATES)
    # Guessing "present" above mu / 2 is right with probability (1 + delta(0)) / 2, the total variation.
    right = int(np.sum(with_update > mu / 2)) + int(np.sum(without <= mu / 2))
    success = (1.0 + gdp_delta(0.0, mu)) / 2.0
    low, high = stats.binom.ppf([rate / 2, 1.0 - rate / 2], 2 * COORDINATES, success)
    assert low <= right <= high


def test_without_residual_the_sum_gives_the_update_away() -> None:
    graph = ShareGraph.complete(4)
    uploads = np.zeros((4, 3))
    uploads[2] = [1.0, -2.0, 3.0]
    add_shares(uploads, graph, unit_variance=100.0, tau2=0.0, distortion="additive", stream=SimStream(1))
    assert effective_variance(graph, unit_variance=100.0, residual_variance=0.0).max() == 0.0
    np.testing.assert_allclose(uploads.sum(axis=0), [1.0, -2.0, 3.0], atol=1e-12)
