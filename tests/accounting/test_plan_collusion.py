"""Plans that assume colluders and reveals: what the rounds add, promise, and pay from delta."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from niss.accounting import Plan, RoundPlan
from niss.accounting.assumed import Assumed
from niss.errors import PrivacyError
from niss.mechanism import classical_sigma, gdp_delta, gdp_mu
from niss.views import effective_variance

TARGET: dict[str, Any] = {"clip": 0.5, "epsilon": 3.0, "delta": 1e-5, "neighbours": 4}
UNEQUAL = tuple(np.linspace(2.0, 4.0, 12))


# A repair in which so few are expected to be lost that in a million rounds none loses two.
ONE_MAY_BE_LOST = {"mode": "repair", "dropout": 1e-4}


def _round(size: int = 12, *, colluders: int = 0, **settings: Any) -> RoundPlan:
    plan = Plan(**(TARGET | {"collusion": colluders / size} | settings))
    return plan.for_round(range(size), weights=1 / size, records=10, beacon=b"beacon")


def _in_its_worst_case(shared: RoundPlan) -> float:
    """The ratio at the set the round names, from the matrix itself; reveals are extra colluders there."""
    assert shared.worst is not None
    value = effective_variance(
        shared.graph,
        unit_variance=shared.unit_variance,
        residual_variance=shared.tau2 * shared.unit_variance * shared.graph.in_weight,
        colluders=shared.worst.colluders,
        clients=[shared.worst.client],
    )
    return float(value[0] / shared.own_variance[shared.worst.client])


@pytest.mark.parametrize(
    "settings",
    [
        {"colluders": 2},
        {"colluders": 2, "kappa": 4.0, "participations": 9},
        {"colluders": 1, **ONE_MAY_BE_LOST},
        {"mode": "repair", "dropout": 1e-3},
        {"colluders": 3, "graph": "complete"},
        {"colluders": 2, "epsilon": UNEQUAL},
        {"colluders": 2, "graph": "complete", "epsilon": UNEQUAL},
        {"colluders": 13, "size": 61, "neighbours": 25},
    ],
)
def test_calibrated_rounds_keep_the_target_in_the_worst_case(settings: dict[str, Any]) -> None:
    shared = _round(**settings)
    np.testing.assert_allclose(shared.joint_mu, shared.plan.round_mu(shared.participants), rtol=1e-9)
    assert shared.plan.calibrated
    assert shared.opponent is shared.worst
    # Where the worst case is a bound, the colluders it names do no worse.
    found = _in_its_worst_case(shared)
    assert found == pytest.approx(1.0, abs=1e-8) if shared.opponent.exact else 1.0 <= found < 2.0


def test_colluders_cost_noise_and_more_of_them_more() -> None:
    spent = [_round(colluders=count, graph="complete").aggregate_variance for count in (0, 2, 4, 8)]
    assert spent == sorted(spent)
    assert spent[-1] > 1.5 * spent[0]
    lost = _round(colluders=3, graph="complete", **ONE_MAY_BE_LOST)
    assert lost.plan.assumed(12).dropped == 1
    assert lost.aggregate_variance == pytest.approx(spent[2])


def test_a_sparse_graph_pays_for_its_bound_from_delta() -> None:
    plan = Plan(**TARGET, collusion=0.25, participations=5)
    assert plan.assumed(12) == Assumed(colluders=3, failure=0.1 * 1e-5 / 5)
    assert plan.gaussian_delta == pytest.approx(0.88e-5, rel=1e-12)
    whole = float(plan.budget(1)[0])
    assert whole == pytest.approx(gdp_mu(3.0, 0.88e-5), rel=1e-12)
    paid = gdp_delta(3.0, whole) + 5 * plan.failure + plan.grid_delta
    assert paid == pytest.approx(1e-5, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "graphs"),
    [
        # A run of 40 rounds with 3 attempts each, in 5 of which a client takes part: 120 graphs, not 5.
        ({"participations": 5, "chain_rounds": 40, "attempts": 3}, 120),
        ({"participations": 5, "chain_rounds": 40}, 40),
        ({"participations": 5, "attempts": 2}, 10),
        ({"participations": 5, "chain_rounds": 3}, 5),
        ({"participations": 3, "separation": 40}, 120),
    ],
)
def test_every_graph_a_server_could_choose_is_paid_for(settings: dict[str, Any], graphs: int) -> None:
    """It may choose which rounds of which chain a client is shown, so all count, shown or not."""
    plan = Plan(**TARGET, collusion=0.25, **settings)
    assert plan.graphs == graphs
    assert plan.failure == pytest.approx(0.1 * plan.delta / graphs, rel=1e-12)
    assert plan.failing_delta == pytest.approx(1e-6, rel=1e-12)
    assert plan.gaussian_delta == pytest.approx(0.88e-5, rel=1e-12)


def test_the_length_of_a_run_is_not_that_of_the_chains_its_graphs_may_come_from() -> None:
    """Noise is planned for the one, and the graphs of the others are paid for; either may be all that is known."""
    run = Plan(**TARGET, method="niss-carried", graph="complete", participations=5, separation=8, horizon=40)
    assert (run.planned_rounds, run.graphs) == (40, 40)
    chains = replace(run, chain_rounds=160)
    assert (chains.planned_rounds, chains.graphs) == (40, 160)
    assert chains.committed(20) == run.committed(20)
    only_chains = Plan(**TARGET, participations=5, separation=8, chain_rounds=160)
    assert (only_chains.planned_rounds, only_chains.graphs) == (40, 160)
    assert replace(run, closing=True).graphs == 41


def test_the_classical_mechanism_pays_too() -> None:
    plan = Plan(epsilon=0.5, mechanism="classical", collusion=0.2)
    sigma = classical_sigma(0.5, plan.gaussian_delta)
    assert plan.gaussian_delta < plan.delta
    assert plan.round_mu(np.array([0]))[0] == pytest.approx(1.0 / sigma, rel=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"graph": "complete", "collusion": 0.3},
        {"graph": "coalition", "groups": ((0, 1, 2), (3, 4, 5)), "collusion": 0.3},
        {"graph": "regular", "mode": "repair"},
        {"method": "dp-fedavg", "collusion": 0.3},
        {"method": "central-dp", "collusion": 0.3},
        {},
    ],
)
def test_where_no_bound_can_fail_nothing_is_paid(settings: dict[str, Any]) -> None:
    plan = Plan(**(TARGET | settings))
    assert plan.failure == 0.0
    # A part of it pays for the grid where a protocol can run the plan.
    assert plan.gaussian_delta == (0.98 if plan.kind.has_protocol else 1.0) * plan.delta
    assert plan.budget(1)[0] == gdp_mu(3.0, plan.gaussian_delta)


@pytest.mark.parametrize("tau2", [0.2, tuple(np.linspace(0.1, 0.6, 12).tolist())], ids=["one", "each"])
def test_a_given_tau2_charges_the_worst_ratio_to_everyone(tau2: Any) -> None:
    shared = _round(colluders=2, tau2=tau2, epsilon=UNEQUAL)
    assert not shared.plan.calibrated
    assert shared.opponent is None
    assert shared.worst is not None
    assert shared.worst.ratio == pytest.approx(_in_its_worst_case(shared), rel=1e-9)
    assert shared.joint_variance is not None
    np.testing.assert_allclose(shared.joint_variance, shared.worst.ratio * shared.own_variance, rtol=1e-12)
    np.testing.assert_allclose(shared.joint_mu, shared.sensitivity / np.sqrt(shared.joint_variance))
    trusting = replace(shared, plan=replace(shared.plan, collusion=0.0))
    assert trusting.joint_variance is not None
    assert np.all(shared.joint_variance < trusting.joint_variance)


@pytest.mark.parametrize(("size", "colluders"), [(12, 0), (12, 2), (60, 10)])
@pytest.mark.parametrize("graph", ["regular", "complete"])
@pytest.mark.parametrize("distortion", ["additive", "scalar", "coordinate"])
def test_without_distortion_there_is_a_marginal_promise_and_no_joint_one(
    size: int, colluders: int, graph: str, distortion: str
) -> None:
    shared = _round(size, colluders=colluders, tau2=0.0, graph=graph, distortion=distortion)
    assert shared.aggregate_variance == 0.0
    assert np.all(np.isinf(shared.joint_mu))
    np.testing.assert_allclose(shared.marginal_variance, 2.0 * shared.own_variance, rtol=1e-12)


@pytest.mark.parametrize("assumed", [{"colluders": 2}, ONE_MAY_BE_LOST, {"colluders": 1, **ONE_MAY_BE_LOST}])
@pytest.mark.parametrize("distortion", ["scalar", "coordinate"])
def test_no_worst_case_is_invented_for_multiplicative_distortions(
    distortion: str, assumed: dict[str, Any]
) -> None:
    shared = _round(tau2=0.3, distortion=distortion, **assumed)
    scales = np.random.default_rng(0).normal(1.0, 0.5, shared.graph.senders.size)
    for drawn in (shared, replace(shared, scales=scales)):
        assert drawn.worst is None
        assert drawn.joint_variance is None
        assert np.all(np.isinf(drawn.joint_mu))
    undrawn = _round(tau2=0.3, distortion=distortion)
    assert undrawn.joint_variance is None
    assert np.all(np.isinf(undrawn.joint_mu))
    trusting = replace(undrawn, scales=scales)
    assert trusting.joint_variance is not None
    assert np.all(trusting.joint_variance > 0.0)


def test_colluders_of_a_coalition_count_in_each_group() -> None:
    """Two groups of six with two colluders each cost what one round of six with two colluders costs."""
    groups = (tuple(range(6)), tuple(range(6, 12)))
    both = _round(graph="coalition", groups=groups, collusion=2 / 6, neighbours=5)
    plan = both.plan
    single = plan.for_round(range(6), weights=1 / 12, records=10, beacon=b"beacon")
    alone = replace(plan, graph="complete").for_round(range(6), weights=1 / 12, records=10, beacon=b"b")
    assert both.tau2[0] == pytest.approx(single.tau2[0], rel=1e-8)
    assert both.tau2[0] == pytest.approx(alone.tau2[0], rel=1e-8)
    whole = replace(plan, graph="complete", collusion=2 / 12)
    whole = whole.for_round(range(12), weights=1 / 12, records=10, beacon=b"b")
    assert both.tau2[0] > 1.2 * whole.tau2[0]
    # Two in each group at once are no worse than two in one of them.
    values = effective_variance(
        both.graph,
        unit_variance=both.unit_variance,
        residual_variance=both.tau2 * both.unit_variance * both.graph.in_weight,
        colluders=[0, 1, 6, 7],
    )
    assert np.all(values >= both.own_variance[[2, 3, 4, 5, 8, 9, 10, 11]] * (1.0 - 1e-8))


def test_a_group_of_colluders_around_one_client_leaves_it_its_own_noise() -> None:
    shared = _round(6, graph="coalition", groups=((0, 1, 2), (3, 4, 5)), collusion=2 / 3, neighbours=2)
    np.testing.assert_allclose(shared.tau2 * shared.plan.kappa, 1.0, rtol=1e-8)
    np.testing.assert_allclose(shared.joint_mu, shared.plan.round_mu(shared.participants), rtol=1e-9)


def test_the_balance_compares_graphs_and_not_assumptions() -> None:
    """What a random list costs is the same number whoever is assumed to collude."""
    settings: dict[str, Any] = {"graph": "random", "tau2": 0.3, "neighbours": 3}
    trusting = _round(**settings).balance()
    wary = _round(**settings, colluders=2).balance()
    assert trusting is not None
    assert wary is not None
    assert (trusting.least_received, trusting.most_received) == (wary.least_received, wary.most_received)
    assert trusting.kept is not None
    assert wary.kept == pytest.approx(trusting.kept, rel=1e-9)
    assert trusting.kept < 0.9


@pytest.mark.parametrize("assumed", [{"colluders": 11}, {"collusion": 0.99}])
@pytest.mark.parametrize("tau2", [None, 0.3])
def test_two_honest_participants_must_be_left(assumed: dict[str, Any], tau2: float | None) -> None:
    with pytest.raises(PrivacyError, match="leave nobody") as caught:
        _ = _round(**assumed, tau2=tau2).joint_mu
    assert caught.value.hint is not None


@pytest.mark.parametrize("method", ["fedavg", "dp-fedavg", "central-dp"])
def test_methods_that_share_no_noise_have_nothing_to_lose_to_colluders(method: str) -> None:
    shared, plain = _round(method=method, colluders=11), _round(method=method)
    assert shared.worst is None
    np.testing.assert_array_equal(shared.joint_mu, plain.joint_mu)
