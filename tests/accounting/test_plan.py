"""What a plan fixes: sensitivities, targets, composition, refusals; and one round's noise, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from niss.accounting import Plan, RoundPlan, plan
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import Slots, add_shares, classical_sigma, gdp_delta, gdp_mu
from niss.randomness import SimStream
from niss.simulation import make_config
from support.refusals import refuses

RECORD: dict[str, Any] = {"unit": "record", "batch": 0.05, "records": 60_000}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"unit": "client", "relation": "zero-out"}, [0.25 * 3.0, 0.75 * 3.0]),
        ({"unit": "client", "relation": "replace-one"}, [2 * 0.25 * 3.0, 2 * 0.75 * 3.0]),
        ({"unit": "record", "batch": 0.1, "records": 40}, [0.25 * 3.0, 0.75 * 3.0]),
        ({"unit": "nbafl"}, [2 * 3 / 100, 2 * 3 / 300]),
    ],
)
def test_sensitivity_of_every_unit(settings: dict[str, Any], expected: list[float]) -> None:
    moved = Plan(clip=3.0, **settings).sensitivity([0.25, 0.75], [100, 300])
    np.testing.assert_allclose(moved, expected, rtol=1e-15)


def test_a_round_that_hides_records_costs_what_all_rounds_with_secret_batches_may() -> None:
    """Each round is a slot (q, z); all of them together keep the target, at the delta that is left for the noise."""
    plan = Plan(**RECORD, clip=0.1, epsilon=1.0, participations=600, neighbours=3)
    (mu,) = plan.round_mu(np.zeros(1, dtype=np.int64))
    assert Slots.of((0.05, 1.0 / mu, 600)).epsilon(plan.gaussian_delta) == pytest.approx(1.0, rel=2e-4)
    assert plan.divisor(10) == plan.divisor(30) == 3000.0
    assert Plan().divisor(10) == 10.0
    made = plan.for_round(range(4), weights=1.0 / plan.divisor(4), records=1, beacon=b"b")
    np.testing.assert_allclose(made.sensitivity, 0.1 / 3000.0)
    assert made.joint_mu.max() <= mu * (1.0 + 1e-9)


def test_the_noise_of_the_papers_experiment() -> None:
    plan = Plan(
        method="dp-fedavg",
        unit="nbafl",
        clip=3.0,
        epsilon=10.0,
        delta=1e-4,
        mechanism="classical",
        allow_invalid=True,
    )
    prepared = plan.for_round([0, 1], weights=0.5, records=600, beacon=b"b")
    np.testing.assert_allclose(np.sqrt(prepared.own_variance), 0.00434, atol=5e-6)
    assert plan.heuristic
    assert not plan.calibrated


def test_targets_may_differ_per_client() -> None:
    plan = Plan(epsilon=(1.0, 2.0, 4.0), delta=1e-5)
    expected = [gdp_mu(epsilon, 0.98e-5) for epsilon in (4.0, 1.0)]
    np.testing.assert_allclose(plan.round_mu(np.array([2, 0])), expected)
    np.testing.assert_allclose(plan.budget(3), [gdp_mu(epsilon, 0.98e-5) for epsilon in (1.0, 2.0, 4.0)])
    with refuses("epsilon", "3 values for at least 5 clients"):
        plan.round_mu(np.array([1, 4]))


def test_the_target_is_composed_over_participations() -> None:
    plan = Plan(epsilon=2.0, delta=1e-6, participations=9)
    per_round = plan.round_mu(np.array([0]))[0]
    assert per_round == pytest.approx(gdp_mu(2.0, 0.98e-6) / 3.0)
    assert gdp_delta(2.0, per_round * 3.0) + plan.grid_delta == pytest.approx(1e-6, rel=1e-9)
    np.testing.assert_allclose(plan.budget(2), gdp_mu(2.0, 0.98e-6))


def test_the_classical_mechanism_composes_from_its_own_noise() -> None:
    plan = Plan(epsilon=0.5, delta=1e-5, mechanism="classical", participations=4)
    sigma = classical_sigma(0.5, 0.98e-5)
    assert plan.round_mu(np.array([0]))[0] == pytest.approx(1.0 / (2.0 * sigma))
    assert not plan.heuristic
    with pytest.raises(PrivacyError, match="classical"):
        Plan(epsilon=3.0, mechanism="classical").round_mu(np.array([0]))


@pytest.mark.parametrize(
    ("settings", "private", "calibrated", "heuristic"),
    [
        ({"method": "fedavg"}, False, False, False),
        ({"method": "dp-fedavg"}, True, True, False),
        ({"method": "central-dp"}, True, True, False),
        ({"method": "niss"}, True, True, False),
        ({"method": "niss", "tau2": 0.1}, True, False, False),
        ({"method": "niss", "unit": "nbafl"}, True, False, True),
    ],
)
def test_what_a_plan_claims(
    settings: dict[str, Any], private: bool, calibrated: bool, heuristic: bool
) -> None:
    plan = Plan(**settings)
    assert (plan.private, plan.calibrated, plan.heuristic) == (private, calibrated, heuristic)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"method": "magic"}, "method"),
        ({"unit": "family"}, "unit"),
        ({"relation": "add"}, "relation"),
        ({"mechanism": "laplace"}, "mechanism"),
        ({"graph": "ring"}, "graph"),
        ({"distortion": "none"}, "distortion"),
        ({"clip": 0.0}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"kappa": -1.0}, "kappa"),
        ({"kappa": math.inf}, "kappa"),
        ({"neighbours": 0.5}, "neighbours"),
        ({"neighbours": 0.0}, "neighbours"),
        ({"neighbours": math.nan}, "neighbours"),
        ({"participations": 0}, "participations"),
        ({"unit": "record"}, "batch"),
        ({"unit": "record", "batch": 0.1}, "records"),
        ({"unit": "record", "records": 10}, "batch"),
        ({**RECORD, "batch": 0.0}, "batch"),
        ({**RECORD, "batch": 1.1}, "batch"),
        ({**RECORD, "records": 0}, "records"),
        ({**RECORD, "relation": "replace-one"}, "relation"),
        ({**RECORD, "epsilon": (1.0, 2.0)}, "epsilon"),
        ({**RECORD, "mechanism": "classical", "epsilon": 0.5}, "mechanism"),
        ({**RECORD, "method": "niss-carried", "graph": "complete"}, "unit"),
        ({**RECORD, "method": "central-mf"}, "unit"),
        ({"method": "central-mf", "horizon": 5_001}, "horizon"),
        ({**RECORD, "method": "central-dp-sampled"}, "unit"),
        ({"batch": 0.1}, "batch"),
        ({"records": 10}, "records"),
        ({"unit": "nbafl", "batch": 0.1}, "batch"),
        ({"tau2": -0.1}, "tau2"),
        ({"tau2": (0.1, math.nan)}, "tau2.1"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": (1.0, -1.0, 1.0)}, "epsilon.1"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 20.0}, "delta"),
        ({"collusion": -0.1}, "collusion"),
        ({"collusion": 1.0}, "collusion"),
        ({"mode": "forget"}, "mode"),
        ({"colluders": 1}, "colluders"),
        ({"pattern": "poisson"}, "pattern"),
        ({"chain_rounds": 0}, "chain_rounds"),
        ({"dropout": 1.0}, "dropout"),
        ({"carried_to_residual": -1.0}, "carried_to_residual"),
        ({"distortion": "scalar"}, "tau2"),
        ({"distortion": "coordinate"}, "tau2"),
        ({"graph": "coalition"}, "groups"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with refuses(field):
        Plan(**settings)


@pytest.mark.parametrize(
    ("settings", "round", "field"),
    [
        ({"epsilon": (1.0, 1.0)}, {}, "epsilon"),
        ({"tau2": (0.1, 0.1)}, {}, "tau2"),
        ({"graph": "coalition", "groups": ((0, 1),)}, {}, "groups"),
        ({"graph": "coalition", "groups": ((0, 1), (1, 2))}, {}, "groups"),
        ({"neighbours": 1}, {"participants": [4]}, "size"),
        *(
            ({"unit": "nbafl"}, round, next(iter(round)))
            for round in (
                {"participants": []},
                {"participants": [0, 1, 1]},
                {"participants": [[0, 1, 2]]},
                {"weights": [0.5, 0.5]},
                {"weights": [0.5, 0.5, 0.0]},
                {"weights": [0.5, 0.5, math.nan]},
                {"records": [1, 2]},
                {"records": [1, 2, 0]},
            )
        ),
    ],
)
def test_rounds_that_cannot_be_are_refused_by_name(
    settings: dict[str, Any], round: dict[str, Any], field: str
) -> None:
    with refuses(field):
        Plan(**settings).for_round(
            **{"participants": [0, 1, 2], "weights": 1 / 3, "records": 10, "beacon": b"b"} | round
        )


@pytest.mark.parametrize("graph", ["regular", "random"])
def test_noise_is_carried_on_the_complete_graph_alone(graph: str) -> None:
    with pytest.raises(ConfigError, match="everyone shares with everyone") as refused:
        Plan(method="niss-carried", graph=graph)
    assert "complete" in str(refused.value.hint)


def test_the_grid_has_its_part_of_delta_whether_noise_is_carried_or_not() -> None:
    carried = Plan(method="niss-carried", graph="complete", horizon=9, separation=3)
    assert carried.grid_delta == Plan().grid_delta == pytest.approx(0.02 * 1e-5)
    assert replace(carried, tau2=0.5).grid_delta == 0.0


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
@pytest.mark.parametrize("neighbours", [2, 3, 12])
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
    drawn = replace(scalar, scales=scales)
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


SELDOM = {"rounds": 120, "data": {"clients": 4000}, "training": {"participants": 100}}


@pytest.mark.parametrize(
    "made",
    [
        lambda: Plan(collusion=0.1, participations=3, horizon=120, neighbours=10),
        lambda: plan(participants=100, participations=3, rounds=120, collusion=0.1),
        lambda: planned_by({}),
        lambda: planned_by({"exchange": "protocol"}),
    ],
    ids=["Plan", "niss.plan", "simulated", "protocol"],
)
def test_a_plan_for_many_rounds_pays_for_the_graphs_of_all(made: Callable[[], Plan]) -> None:
    found = made()
    assert found.turns == 3
    assert found.graphs >= 120 * found.attempts
    assert 0.0 < found.failure <= 0.1 * found.delta / found.graphs * (1 + 1e-12)


def planned_by(changes: dict[str, Any]) -> Plan:
    config = make_config({**SELDOM, "privacy": {"collusion": 0.1}, **changes})
    return config.plan(config.methods[0])


def test_participations_are_planned_from_the_horizon() -> None:
    assert [Plan(horizon=rounds, separation=4).turns for rounds in (None, 8, 9)] == [1, 2, 3]
    assert Plan(horizon=9, participations=2).turns == 2
    assert Plan(horizon=9).round_mu(np.array([0])) == Plan(participations=9).round_mu(np.array([0]))


@pytest.mark.parametrize(
    ("plan", "settled"),
    [(Plan(), "tolerate"), (Plan(unit="record", batch=0.05, records=60), "repair")],
)
def test_a_mode_that_is_left_to_be_planned_stays_so_in_copies(plan: Plan, settled: str) -> None:
    copied = replace(plan, delta=1e-6)
    assert (plan.mode, copied.mode) == ("planned", "planned")
    assert (copied.settled_mode, replace(copied, mode="repair").settled_mode) == (settled, "repair")
