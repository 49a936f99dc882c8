"""What a plan fixes: sensitivities, targets per client, composition, and its refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from niss.accounting import Plan
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import gaussian_sigma, gdp_delta, gdp_mu


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"unit": "client", "relation": "zero-out"}, [0.25 * 3.0, 0.75 * 3.0]),
        ({"unit": "client", "relation": "replace-one"}, [2 * 0.25 * 3.0, 2 * 0.75 * 3.0]),
        ({"unit": "record", "learning_rate": 0.1}, [2 * 0.1 * 0.25 * 3 / 100, 2 * 0.1 * 0.75 * 3 / 300]),
        ({"unit": "nbafl"}, [2 * 3 / 100, 2 * 3 / 300]),
    ],
)
def test_sensitivity_of_every_unit(settings: dict[str, Any], expected: list[float]) -> None:
    moved = Plan(clip=3.0, **settings).sensitivity([0.25, 0.75], [100, 300])
    np.testing.assert_allclose(moved, expected, rtol=1e-15)


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
    with pytest.raises(ConfigError, match="3 values for at least 5 clients") as caught:
        plan.round_mu(np.array([1, 4]))
    assert caught.value.field == "epsilon"


def test_the_target_is_composed_over_participations() -> None:
    plan = Plan(epsilon=2.0, delta=1e-6, participations=9)
    per_round = plan.round_mu(np.array([0]))[0]
    assert per_round == pytest.approx(gdp_mu(2.0, 0.98e-6) / 3.0)
    assert gdp_delta(2.0, per_round * 3.0) + plan.grid_delta == pytest.approx(1e-6, rel=1e-9)
    np.testing.assert_allclose(plan.budget(2), gdp_mu(2.0, 0.98e-6))


def test_the_classical_mechanism_composes_from_its_own_noise() -> None:
    plan = Plan(epsilon=0.5, delta=1e-5, mechanism="classical", participations=4)
    sigma = gaussian_sigma(0.5, 0.98e-5, 1.0, mechanism="classical")
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
        ({"unit": "record"}, "learning_rate"),
        ({"unit": "record", "learning_rate": 0.0}, "learning_rate"),
        ({"unit": "record", "learning_rate": -0.1}, "learning_rate"),
        ({"tau2": -0.1}, "tau2"),
        ({"tau2": (0.1, math.nan)}, "tau2.1"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": (1.0, -1.0, 1.0)}, "epsilon.1"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 20.0}, "delta"),
        ({"colluders": -1}, "colluders"),
        ({"colluders": 0.2}, "colluders"),
        ({"revealed": -1}, "revealed"),
        ({"pattern": "poisson"}, "pattern"),
        ({"dropout": 1.0}, "dropout"),
        ({"carried_to_residual": -1.0}, "carried_to_residual"),
        ({"distortion": "scalar"}, "tau2"),
        ({"distortion": "coordinate"}, "tau2"),
        ({"graph": "coalition"}, "groups"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan(**settings)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"epsilon": (1.0, 1.0)}, "epsilon"),
        ({"tau2": (0.1, 0.1)}, "tau2"),
        ({"graph": "coalition", "groups": ((0, 1),)}, "groups"),
        ({"graph": "coalition", "groups": ((0, 1), (1, 2))}, "groups"),
    ],
)
def test_targets_that_cannot_be_met_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan(**settings).for_round([0, 1, 2], weights=1 / 3, records=10, beacon=b"b")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"participants": []}, "participants"),
        ({"participants": [0, 1, 1]}, "participants"),
        ({"participants": [[0, 1, 2]]}, "participants"),
        ({"weights": [0.5, 0.5]}, "weights"),
        ({"weights": [0.5, 0.5, 0.0]}, "weights"),
        ({"weights": [0.5, 0.5, math.nan]}, "weights"),
        ({"records": [1, 2]}, "records"),
        ({"records": [1, 2, 0]}, "records"),
    ],
)
def test_bad_rounds_are_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    plan = Plan(unit="record", learning_rate=0.1)
    given: dict[str, Any] = {"participants": [0, 1, 2], "weights": 1 / 3, "records": 10, "beacon": b"b"}
    given |= arguments
    with pytest.raises(ConfigError) as caught:
        plan.for_round(given.pop("participants"), **given)
    assert caught.value.field == field


def test_noise_shares_need_a_second_client() -> None:
    with pytest.raises(ConfigError) as caught:
        Plan(neighbours=1).for_round([4], weights=1.0, records=1, beacon=b"b")
    assert caught.value.field == "size"
