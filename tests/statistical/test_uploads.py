"""What the server sees: the covariance of all uploads, and of one upload alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from niss.mechanism import DISTORTIONS
from niss.randomness import SimStream

FALSE_ALARM = 1e-6


@pytest.mark.parametrize("distortion", DISTORTIONS)
def test_covariance_of_the_uploads_is_the_closed_form(case: Any, draw: Any, distortion: str) -> None:
    """Every entry of the matrix, false-alarm rate at most 1e-6 together.

    Each entry is a mean over independent experiments, studentised by its own spread; normal
    quantiles are taken at 1e-7 over all entries to leave room for their skewness.
    """
    noise = draw(case, distortion)
    experiments, clients, coordinates = noise.shape
    products = np.einsum("eih,ejh->eij", noise, noise) / coordinates
    error = products.mean(axis=0) - case.covariance
    spread = products.std(axis=0, ddof=1) / np.sqrt(experiments)
    entries = clients * (clients + 1) // 2
    limit = stats.norm.isf(1e-7 / (2 * entries))
    assert np.max(np.abs(error) / spread) <= limit
    assert np.max(spread / np.sqrt(np.outer(np.diag(case.covariance), np.diag(case.covariance)))) < 0.1


@pytest.mark.parametrize("distortion", DISTORTIONS)
def test_the_noise_has_mean_zero(case: Any, draw: Any, distortion: str) -> None:
    """Studentised means over experiments, false-alarm rate 1e-6 over all clients."""
    means = draw(case, distortion).mean(axis=2)
    statistic = means.mean(axis=0) / means.std(axis=0, ddof=1) * np.sqrt(len(means))
    assert np.max(np.abs(statistic)) <= stats.norm.isf(FALSE_ALARM / (2 * statistic.size))


def test_scalar_covariance_given_the_returned_factors(case: Any) -> None:
    """Whitened by the matrix the joint view conditions on, uploads are standard normal, and so is their sum (1e-6)."""
    coordinates = 20_000
    uploads, scales = case.noise(coordinates, SimStream(41).child(case.name))
    covariance = np.zeros((case.graph.size, case.graph.size))
    for sender, receiver, weight, factor in zip(
        case.graph.senders, case.graph.receivers, case.graph.weights, scales, strict=True
    ):
        direction = np.zeros(case.graph.size)
        direction[sender], direction[receiver] = 1.0, -factor
        covariance += case.unit_variance * weight * np.outer(direction, direction)
    white = np.linalg.solve(np.linalg.cholesky(covariance), uploads)
    white = np.vstack([white, uploads.sum(axis=0) / np.sqrt(covariance.sum())])
    limits = stats.chi2.ppf(
        [FALSE_ALARM / (2 * len(white)), 1.0 - FALSE_ALARM / (2 * len(white))], coordinates
    )
    squares = np.sum(white**2, axis=1)
    assert np.all((limits[0] < squares) & (squares < limits[1]))


def test_one_upload_alone_carries_twice_its_own_noise_without_distortion(case: Any) -> None:
    """At tau = 0 exactly N(0, sigma^2 (out_k + in_k)), on balanced graphs 2 sigma_k^2: chi-square, 1e-6."""
    coordinates = 20_000
    uploads, _ = case.noise(coordinates, SimStream(42).child(case.name), "additive", tau2=0.0)
    variance = case.unit_variance * (case.graph.out_weight + case.graph.in_weight)
    if case.graph.balanced:
        np.testing.assert_allclose(variance, 2.0 * case.own, rtol=1e-9)
    statistics = np.sum(uploads**2, axis=1) / variance
    limits = stats.chi2.ppf(
        [FALSE_ALARM / (2 * variance.size), 1.0 - FALSE_ALARM / (2 * variance.size)], coordinates
    )
    assert np.all((limits[0] < statistics) & (statistics < limits[1]))
