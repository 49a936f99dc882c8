"""Distributed noise behind secure aggregation: what is left of it, and what discreteness costs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from niss.accounting import Plan
from niss.errors import ConfigError
from niss.mechanism import gdp_mu
from niss.methods import PlainRows, SecAggDdg, discrete_mu, enough_uploads
from niss.randomness import SimStream


def one_round(size: int = 10, threshold: int | None = None, colluders: int = 0):
    plan = Plan(method=SecAggDdg(threshold=threshold), clip=1.0, epsilon=3.0, collusion=colluders / 10)
    return plan.for_round(range(size), weights=1.0 / size, records=1.0, beacon=b"b")


def test_the_sum_carries_one_over_the_honest_share() -> None:
    central = (0.1 / gdp_mu(3.0, 1e-5)) ** 2
    assert one_round().aggregate_variance == pytest.approx(central)
    assert one_round(colluders=2).aggregate_variance == pytest.approx(central / 0.8)
    assert one_round(colluders=2, threshold=7).aggregate_variance == pytest.approx(central * 10 / 5)


def test_what_is_left_without_colluders_and_dropouts_is_enough() -> None:
    """At the threshold, with the noise of all colluders taken out, drawn and measured; six deviations of tolerance."""
    planned = one_round(colluders=2, threshold=7)
    rows = np.zeros((10, 40_000))
    planned.plan.kind.add_client_noise(PlainRows(rows), planned, SimStream(5))
    left = float(
        np.mean(rows[[0, 1, 2, 3, 4]].sum(axis=0) ** 2)
    )  # seats 5 and 6 collude, three never uploaded
    needed = (0.1 / gdp_mu(3.0, 1e-5)) ** 2
    assert left == pytest.approx(needed, rel=6 * math.sqrt(2 / 40_000))
    assert planned.joint_mu == pytest.approx(0.1 / math.sqrt(needed))
    assert planned.plan.kind.variance_against(planned, (5, 6)) == pytest.approx(np.full(8, needed))


@pytest.mark.parametrize(("threshold", "lost"), [(None, [1, 2, 3, 4]), (8, [3, 4]), (1, [])])
def test_a_round_below_the_threshold_is_lost(threshold: int | None, lost: list[int]) -> None:
    planned = one_round(threshold=threshold)
    assert [count for count in range(5) if planned.plan.kind.loses(planned.with_lost(range(count)))] == lost


def test_nobody_honest_left_is_refused() -> None:
    with pytest.raises(ConfigError, match="nobody whose noise is unknown"):
        _ = one_round(colluders=4, threshold=4).aggregate_variance


def test_the_planned_threshold_is_hardly_ever_missed() -> None:
    from scipy.stats import binom

    assert enough_uploads(100, 0.0) is None
    threshold = enough_uploads(100, 0.1)
    assert threshold is not None
    assert binom.cdf(threshold - 1, 100, 0.9) <= 1e-6 < binom.cdf(threshold, 100, 0.9)


@pytest.mark.parametrize("deviation", [0.5, 0.6, 0.8])
@pytest.mark.parametrize("clients", [2, 3, 5])
def test_a_sum_of_discrete_gaussians_is_as_close_to_one_as_the_bound_says(
    deviation: float, clients: int
) -> None:
    """Both densities summed up by hand, over all values that occur with probability above 1e-13."""
    values = np.arange(-60, 61)
    single = np.exp(-(values**2) / (2 * deviation**2))
    single /= single.sum()
    total = single
    for _ in range(clients - 1):
        total = np.convolve(total, single)
    support = np.arange(-60 * clients, 60 * clients + 1)
    whole = np.exp(-(support**2) / (2 * clients * deviation**2))
    whole /= whole.sum()
    likely = total > 1e-13
    gap = float(np.abs(np.log(total[likely] / whole[likely])).max())
    k = np.arange(1, clients)
    tau = 10 * np.sum(np.exp(-2 * np.pi**2 * deviation**2 * k / (k + 1)))
    assert 0.0 < gap <= tau
    found = discrete_mu(clients=clients, sensitivity=1.0, deviation=deviation, coordinates=4, step=1.0)
    gaussian = (1.0 + 2.0) / (math.sqrt(clients) * deviation)
    assert found == pytest.approx(min(math.sqrt(gaussian**2 + 8 * tau), gaussian + 2 * tau), rel=1e-12)


def test_a_deviation_below_half_a_step_has_no_bound() -> None:
    with pytest.raises(ConfigError, match="half a step"):
        discrete_mu(clients=3, sensitivity=1.0, deviation=0.4, coordinates=4, step=1.0)
