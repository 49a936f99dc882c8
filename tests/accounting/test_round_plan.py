"""One round's predicted noise, worked out by hand for every method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from niss.accounting import Plan, RoundPlan
from niss.mechanism import add_shares, gdp_mu
from niss.randomness import SimStream

TARGET: dict[str, Any] = {"clip": 0.5, "epsilon": 3.0, "delta": 1e-5}
OWN = (0.25 * 0.5 / gdp_mu(3.0, 1e-5)) ** 2


def _round(**settings: Any) -> RoundPlan:
    """Four clients of weight 1/4, numbered as a server might pick them."""
    return Plan(**(TARGET | settings)).for_round([7, 1, 4, 2], weights=0.25, records=10, beacon=b"beacon")


def test_fedavg_adds_and_promises_nothing() -> None:
    bare = _round(method="fedavg")
    assert bare.aggregate_variance == 0.0
    assert np.all(np.isinf(bare.joint_mu))
    assert np.all(np.isinf(bare.marginal_mu))


def test_dp_fedavg_adds_every_clients_noise() -> None:
    alone = _round(method="dp-fedavg")
    assert alone.aggregate_variance == pytest.approx(4 * OWN, rel=1e-12)
    np.testing.assert_allclose(alone.joint_mu, gdp_mu(3.0, 1e-5), rtol=1e-12)
    np.testing.assert_allclose(alone.marginal_mu, alone.joint_mu)


def test_central_dp_adds_the_largest_noise_once() -> None:
    plan = Plan(**TARGET, method="central-dp")
    trusted = plan.for_round([0, 1], weights=[0.25, 0.75], records=10, beacon=b"b")
    assert trusted.aggregate_variance == pytest.approx(9 * OWN, rel=1e-12)
    np.testing.assert_allclose(trusted.joint_mu, gdp_mu(3.0, 1e-5) * np.array([1 / 3, 1.0]), rtol=1e-12)
    assert np.all(np.isinf(trusted.marginal_mu))


@pytest.mark.parametrize("kappa", [1.0, 4.0])
@pytest.mark.parametrize("neighbours", [3.0, 2.5, 12.0])
def test_niss_on_the_complete_graph_with_a_given_tau2(kappa: float, neighbours: float) -> None:
    tau2 = 0.3
    shared = _round(graph="complete", kappa=kappa, neighbours=neighbours, tau2=tau2)
    total = kappa * OWN
    assert shared.unit_variance == pytest.approx(total / neighbours)
    np.testing.assert_allclose(shared.own_variance, OWN)
    assert shared.aggregate_variance == pytest.approx(4 * tau2 * total, rel=1e-12)
    np.testing.assert_allclose(shared.marginal_variance, (2 + tau2) * total, rtol=1e-12)
    residual, weight = tau2 * total, total / 3
    precision = 1 / (4 * residual) + 0.75 / (residual + 8 * weight)
    assert shared.joint_variance is not None
    np.testing.assert_allclose(shared.joint_variance, 1 / precision, rtol=1e-10)
    np.testing.assert_allclose(shared.joint_mu, 0.125 * np.sqrt(precision), rtol=1e-10)
    np.testing.assert_allclose(shared.marginal_mu, 0.125 / np.sqrt((2 + tau2) * total), rtol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"graph": "regular", "neighbours": 2},
        {"graph": "complete", "kappa": 4.0},
        {"graph": "coalition", "groups": ((7, 2, 9), (1, 4)), "neighbours": 1},
        {"graph": "regular", "epsilon": (9.0, 3.0, 3.5, 9.0, 4.0, 9.0, 9.0, 3.2)},
        {"graph": "complete", "epsilon": (9.0, 3.0, 3.5, 9.0, 4.0, 9.0, 9.0, 3.2)},
        {"graph": "regular", "relation": "replace-one", "participations": 5},
    ],
)
def test_calibrated_rounds_keep_every_clients_target(settings: dict[str, Any]) -> None:
    shared = _round(**settings)
    assert shared.graph.balanced
    target = shared.plan.round_mu(shared.participants)
    assert np.all(shared.joint_mu <= target * (1 + 1e-9))
    assert np.max(shared.joint_mu / target) == pytest.approx(1.0, rel=1e-9)
    if shared.plan.kappa == 4.0:
        assert shared.aggregate_variance < 1.2 * OWN
    np.testing.assert_allclose(
        shared.aggregate_variance, np.sum(shared.plan.kappa * shared.own_variance * shared.tau2), rtol=1e-8
    )


def test_numbers_follow_the_order_of_the_participants() -> None:
    tau2 = (0.0, 0.1, 0.2, 0.0, 0.4, 0.0, 0.0, 0.7)
    epsilon = (9.0, 3.0, 3.5, 9.0, 4.0, 9.0, 9.0, 3.2)
    shared = _round(tau2=tau2, epsilon=epsilon, graph="complete")
    np.testing.assert_array_equal(shared.tau2, [0.7, 0.1, 0.4, 0.2])
    own = [(0.125 / gdp_mu(target, 1e-5)) ** 2 for target in (3.2, 3.0, 4.0, 3.5)]
    np.testing.assert_allclose(shared.own_variance, own, rtol=1e-12)
    np.testing.assert_allclose(shared.unit_variance * shared.graph.in_weight, own, rtol=1e-9)
    assert shared.aggregate_variance == pytest.approx(np.dot(own, [0.7, 0.1, 0.4, 0.2]), rel=1e-9)


def test_without_distortion_there_is_a_marginal_promise_and_no_joint_one() -> None:
    for distortion in ("additive", "coordinate", "scalar"):
        shared = _round(tau2=0.0, distortion=distortion)
        assert shared.aggregate_variance == 0.0
        assert np.all(np.isinf(shared.joint_mu))
        np.testing.assert_allclose(shared.marginal_variance, 2 * OWN, rtol=1e-12)


def test_no_joint_bound_is_invented_for_multiplicative_distortions() -> None:
    assert _round(tau2=0.5, distortion="coordinate").joint_variance is None
    scalar = _round(tau2=0.5, distortion="scalar")
    assert scalar.joint_variance is None
    assert np.all(np.isinf(scalar.joint_mu))


def test_a_scalar_distortion_counts_as_it_was_drawn() -> None:
    scalar = _round(tau2=0.5, distortion="scalar", graph="complete")
    scales = add_shares(
        np.zeros((4, 1)),
        scalar.graph,
        unit_variance=scalar.unit_variance,
        tau2=scalar.tau2,
        distortion="scalar",
        stream=SimStream(1),
    )
    drawn = scalar.with_scales(scales)
    assert scales is not None
    covariance = np.zeros((4, 4))
    for a, b, c, s in zip(
        drawn.graph.senders, drawn.graph.receivers, drawn.graph.weights, scales, strict=True
    ):
        direction = np.zeros(4)
        direction[a], direction[b] = 1.0, -s
        covariance += scalar.unit_variance * c * np.outer(direction, direction)
    assert drawn.joint_variance is not None
    np.testing.assert_allclose(drawn.joint_variance, 1 / np.diag(np.linalg.inv(covariance)), rtol=1e-9)
    assert scalar.joint_variance is None


def test_the_graph_follows_the_beacon() -> None:
    plan = Plan(**TARGET, neighbours=3)
    drawn = [
        plan.for_round(range(20), weights=0.05, records=1, beacon=beacon).graph
        for beacon in (b"a", b"b", b"a")
    ]
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]
