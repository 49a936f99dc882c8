"""The planner: theory's tables, promises that are kept, and refusals that say what binds."""

from __future__ import annotations

import inspect
import itertools
import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from niss.accounting import Forecast, PlanQuestion, forecast, plan
from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.mechanism import gdp_epsilon, gdp_mu
from niss.simulation import make_config
from niss.views import Corruption, calibrate_for
from support.refusals import refuses


def planned(**changes: object) -> Forecast:
    return forecast(**{"participants": 30, "neighbours": 29, **changes})  # type: ignore[arg-type]


def test_the_papers_setting_needs_a_tau2_of_two_over_m() -> None:
    assert planned(kappa=1.0).tau2 == pytest.approx(0.061, abs=0.001)


# Aggregate noise in units of a trusted server's, complete graph: by colluders and kappa, to 2 %.
TABLE = {
    0.0: {1: (1.84, 2.0), 2: (1.33, 1.33), 4: (1.14, 1.14), 10: (1.05, 1.05), 100: (1.005, 1.005)},
    0.2: {1: (2.7, 3.3), 2: (1.8, 1.8), 4: (1.48, 1.48), 10: (1.33, 1.33), 100: (1.26, 1.26)},
    0.5: {1: (5.6, 46.0), 2: (3.5, 4.0), 4: (2.65, 2.65), 10: (2.2, 2.2), 100: (2.02, 2.02)},
}


@pytest.mark.parametrize("size", [100, 300])
@pytest.mark.parametrize("collusion", sorted(TABLE))
def test_the_dense_table_of_the_theory(collusion: float, size: int) -> None:
    """By the planner, and by calibrating the graph itself."""
    graph, corruption = ShareGraph.complete(size, weight=1.0 / (size - 1)), round(collusion * size)
    for kappa, (low, high) in TABLE[collusion].items():
        tau2, found = calibrate_for(
            graph, Corruption(colluders=corruption), unit_variance=float(kappa), target_variance=1.0
        )
        assert found.exact
        plan = planned(participants=size, neighbours=size - 1, collusion=collusion, kappa=kappa)
        for noise in (size * tau2 * kappa, plan.aggregate_variance_ratio_to_central):
            assert 0.98 * low <= noise <= 1.02 * high
            assert noise >= plan.ratio_ideal * (1 - 1e-9)
        assert plan.effective_variance_ratio == pytest.approx(1.0, abs=1e-6)


def test_the_plan_on_the_command_line_of_the_docs() -> None:
    plan = planned(clip=3.0, epsilon=8.0, participations=30, collusion=0.2, dropout=0.05)
    values = plan.to_json()
    json.dumps(values)
    for field in (
        "sigma",
        "tau2",
        "epsilon_joint",
        "effective_variance_ratio",
        "aggregate_variance_ratio_to_central",
        "ratio_to_local",
    ):
        assert isinstance(values[field], float), field
    assert values["epsilon_joint"] == pytest.approx(8.0, abs=1e-6)
    assert values["ratio_to_local"] == pytest.approx(
        values["aggregate_variance_ratio_to_central"] / (0.95 * 30)
    )
    assert (values["plan"]["collusion"], values["assumed"]["colluders"]) == (0.2, 6)


def test_sigma_is_the_noise_a_client_would_need_alone() -> None:
    plan = planned(clip=3.0, epsilon=8.0, participations=30)
    assert plan.sigma == pytest.approx(3.0 / 30 / (gdp_mu(8.0, plan.plan.gaussian_delta) / np.sqrt(30)))


def test_the_chosen_kappa_is_the_cheapest() -> None:
    chosen = planned(collusion=0.2, dropout=0.05)
    for kappa in (0.5, 0.8, 1.25, 2.0, 4.0):
        other = planned(collusion=0.2, dropout=0.05, kappa=kappa)
        assert chosen.aggregate_variance_ratio_to_central <= 1.01 * other.aggregate_variance_ratio_to_central


def test_without_dropouts_the_plan_is_within_a_few_percent_of_the_ideal() -> None:
    for collusion in (0.0, 0.2, 0.5):
        plan = planned(participants=100, neighbours=99, collusion=collusion)
        assert plan.aggregate_variance_ratio_to_central < 1.04 * plan.ratio_ideal


def test_repair_is_cheaper_than_tolerating_where_many_drop() -> None:
    tolerant = planned(participants=60, neighbours=59, dropout=0.1)
    repairing = planned(participants=60, neighbours=59, dropout=0.1, mode="repair")
    assert repairing.dropout_part == 0.0
    assert repairing.plan.assumed(60).revealed > 0
    assert repairing.aggregate_variance_ratio_to_central < 0.2 * tolerant.aggregate_variance_ratio_to_central


@pytest.mark.parametrize(
    ("field", "values", "asked", "slack"),
    [
        # The cheapest kappa is taken from a grid, and to within a percent.
        ("collusion", (0.0, 0.1, 0.2, 0.4), {}, 0.985),
        ("dropout", (0.0, 0.1, 0.2, 0.4), {}, 0.985),
        ("neighbours", (39, 18, 12), {"participants": 40, "collusion": 0.1, "kappa": 4.0}, 1.0),
    ],
)
def test_more_trouble_never_costs_less(
    field: str, values: tuple[float, ...], asked: dict[str, Any], slack: float
) -> None:
    costs = [planned(**asked | {field: value}).aggregate_variance_ratio_to_central for value in values]
    assert all(later >= slack * earlier for earlier, later in itertools.pairwise(costs))
    assert costs[-1] > costs[0]


def test_asked_what_a_tau2_promises() -> None:
    calibrated = planned(kappa=1.0, epsilon=8.0)
    asked = planned(kappa=1.0, epsilon=8.0, tau2=calibrated.tau2)
    assert asked.epsilon_joint == pytest.approx(8.0, rel=1e-6)
    assert planned(kappa=1.0, epsilon=8.0, tau2=0.3).epsilon_joint < 8.0
    assert planned(kappa=1.0, epsilon=8.0, tau2=0.01).epsilon_joint > 8.0
    nothing = planned(kappa=1.0, epsilon=8.0, tau2=0.0)
    assert nothing.epsilon_joint is None
    assert nothing.epsilon_marginal < 8.0


def test_the_simulator_takes_the_plan_as_it_is() -> None:
    plan = forecast(
        participants=20, neighbours=6, clip=1.0, epsilon=5.0, participations=4, collusion=0.1
    ).plan
    config = make_config({"data": {"clients": 40}, "training": {"participants": 20}}).with_plan(plan)
    assert config.plan(config.methods[0]) == replace(plan, horizon=config.rounds)
    drawn = config.plan(config.methods[0]).for_round(range(20), weights=0.05, records=1, beacon=b"round")
    mu = float(drawn.joint_mu.max()) * 2.0
    assert gdp_epsilon(mu, plan.gaussian_delta) <= 5.0 * (1 + 1e-6)


ASKED: dict[str, dict[str, Any]] = {
    "rounds": {"participants": 100, "rounds": 20},
    "run": {"participants": 100, "rounds": 20, "clients": 1000, "carry": True},
    "records": {
        "participants": 10, "unit": "record", "records": 60_000, "batch": 0.05, "rounds": 600, "epsilon": 1.0
    },
}  # fmt: skip
BOTH: list[dict[str, Any]] = [
    {"participants": 1},
    {"epsilon": 0.0},
    {"epsilon": float("nan")},
    {"delta": 0.0},
    {"clip": 0.0},
    {"rounds": 0},
    {"collusion": 1.0},
    {"dropout": -0.1},
    {"mode": "pray"},
    {"kappa": 0.0},
]


@pytest.mark.parametrize(
    ("asked", "changes", "field"),
    [
        *((asked, changes, next(iter(changes))) for asked in ("rounds", "run") for changes in BOTH),
        ("rounds", {"participations": 0}, "participations"),
        ("rounds", {"neighbours": 0.5}, "neighbours"),
        ("run", {"separation": 11}, "separation"),
        ("run", {"separation": 0}, "separation"),
        ("run", {"pattern": "poisson"}, "pattern"),
        ("run", {"for_": "fun"}, "for_"),
        ("run", {"clients": 50}, "clients"),
        ("run", {"clients": 1050}, "clients"),
        ("run", {"carried_to_residual": -1.0}, "carried_to_residual"),
        ("records", {"batch": None}, "batch"),
        ("records", {"records": None}, "records"),
        ("records", {"relation": "replace-one"}, "relation"),
        ("records", {"participations": 5}, "participations"),
        ("records", {"carry": True, "clients": 100}, "carry"),
        ("records", {"unit": "client"}, "batch"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(asked: str, changes: dict[str, Any], field: str) -> None:
    with refuses(field):
        forecast(**ASKED[asked] | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "pray"}, "mode: must be tolerate, repair or planned"),
        ({"collusion": 0.995}, "infeasible: 100 colluders"),
        ({"mode": "repair", "dropout": 0.9, "collusion": 0.3}, "a repair needs 66 of 100"),
        ({"mode": "repair", "dropout": 0.41, "collusion": 0.2}, "a repair needs 61 of 100"),
    ],
)
def test_the_refusal_says_what_binds(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, PrivacyError), match=message):
        forecast(**ASKED["rounds"] | changes)


def test_a_plan_without_gain_says_so() -> None:
    plan = planned(dropout=0.6, kappa=4.0)
    assert plan.ratio_to_local >= 1.0
    assert any("No gain over DP-FedAvg" in note for note in plan.notes)


def test_dense_graphs_of_large_rounds_are_not_drawn_for_a_plan():
    expected = forecast(participants=600, neighbours=180, collusion=0.1)
    drawn = forecast(participants=600, neighbours=160, collusion=0.1)
    assert any("to be expected" in note for note in expected.notes)
    assert not any("to be expected" in note for note in drawn.notes)
    assert expected.aggregate_variance_ratio_to_central == pytest.approx(
        drawn.aggregate_variance_ratio_to_central, rel=0.01
    )


def test_what_plan_takes_is_what_can_be_asked_of_single_rounds() -> None:
    """Its signature is written out, for readers and editors; names and defaults are those of the question."""
    written = {name: one.default for name, one in inspect.signature(plan).parameters.items()}
    asked = {one.name: one.default for one in fields(PlanQuestion)}
    across = {
        "parameters",
        "carry",
        "pattern",
        "separation",
        "closing",
        "carried_to_residual",
        "for_",
    }
    assert written.pop("participants") is inspect.Parameter.empty
    assert written == {name: asked[name] for name in asked if name not in across | {"participants"}}
