"""Simulated dropouts: the same clients are lost to every method, and what their shares leave is as predicted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import niss
from niss.accounting import RoundPlan
from niss.claims import digits
from niss.randomness import SimStream
from niss.simulation import make_config, with_overrides
from niss.simulation.federation import absent_seats, can_repair
from niss.simulation.uploads import HostUploads
from support.federation import WideRun, small_config

ROOMY = {"epsilon": 50.0, "clip": 1.0, "dropout": 0.2}
TWELVE = {"participants": 12, "epochs": 1, "batch_size": 4, "learning_rate": 0.1}


def a_round(size: int = 12, **changes: object) -> RoundPlan:
    settings = {"clip": 1.0, "neighbours": 4.0, "kappa": 2.0, "mode": "repair", "dropout": 0.2, **changes}
    return niss.Plan(**settings).for_round(  # type: ignore[arg-type]
        np.arange(size), weights=1.0 / size, records=1.0, beacon=bytes(32)
    )


def repairable(plan: RoundPlan, absent: list[int]) -> bool:
    return can_repair(plan.plan, plan.graph, absent)


def uploads_of(plan: RoundPlan, coordinates: int) -> np.ndarray:
    rows = HostUploads(np.zeros((plan.participants.size, coordinates)))
    plan.plan.kind.add_client_noise(rows, plan, SimStream(5))
    return rows.rows()


def test_a_repaired_sum_is_the_sum_of_the_uploads_less_the_revealed_shares():
    """The server sums the uploads that arrived and subtracts the shares that it was given."""
    plan, absent = a_round(), [2, 7, 8]
    graph, here = plan.graph, np.setdiff1d(np.arange(12), absent)
    total = uploads_of(plan, 50)[here].sum(axis=0)
    lost = np.isin(graph.senders, absent) != np.isin(graph.receivers, absent)
    crossing = niss.ShareGraph(
        12, zip(graph.senders[lost], graph.receivers[lost], graph.weights[lost], strict=True)
    )
    total -= uploads_of(replace(plan, graph=crossing, tau2=np.zeros(12)), 50)[here].sum(axis=0)

    assert can_repair(plan.plan, graph, absent)
    repaired = uploads_of(plan.with_lost(absent, repaired=True), 50)[here].sum(axis=0)
    np.testing.assert_allclose(repaired, total, atol=1e-12)


@pytest.mark.parametrize("repaired", [False, True])
@pytest.mark.parametrize("method", ["niss", "dp-fedavg"])
def test_the_noise_that_is_left_is_as_predicted(method: str, repaired: bool):
    plan, coordinates = a_round(method=method).with_lost([0, 5, 6], repaired=repaired), 40_000
    noise = uploads_of(plan, coordinates)[plan.here].sum(axis=0)
    predicted = plan.plan.kind.left_over_variance(plan)
    # Six deviations of a sample variance of that many.
    assert np.var(noise) == pytest.approx(predicted, rel=6 * np.sqrt(2 / coordinates))


def test_nothing_lost_leaves_what_a_whole_round_leaves():
    for method in ("niss", "dp-fedavg", "central-dp"):
        plan = a_round(method=method)
        assert plan.plan.kind.left_over_variance(plan) == pytest.approx(plan.aggregate_variance)


def test_more_lost_than_was_charged_for_is_not_repaired():
    for graph in ({}, {"neighbours": 11.0, "graph": "complete"}):
        plan = a_round(dropout=1e-3, **graph)
        assert plan.plan.assumed(12).dropped == 2
        assert repairable(plan, [1, 2])
        assert not repairable(plan, [1, 2, 3])
    # Of a sparse round no more edges of one client than its neighbours are likely to lose.
    sparse = a_round(200, neighbours=6.0, dropout=0.02, tau2=1.0)
    near = sparse.graph.neighbours(0).tolist()
    assert sparse.plan.assumed(200).revealed < len(near) < sparse.plan.assumed(200).dropped
    assert not repairable(sparse, near)


def test_a_repair_is_never_charged_less_than_its_self_mask():
    weak = a_round(tau2=0.01)
    np.testing.assert_array_equal(weak.plan.kind.joint_mu(weak, repairing=True), weak.joint_mu)
    strong = a_round(tau2=0.45, mode="tolerate")
    repaired = strong.plan.kind.joint_mu(strong, repairing=True)
    assert np.all(repaired > strong.joint_mu)
    np.testing.assert_allclose(repaired, strong.sensitivity / np.sqrt(strong.own_variance))


def test_someone_always_stays():
    assert absent_seats(3, 1.0, SimStream(1)) == [1, 2]
    assert absent_seats(50, 0.0, SimStream(1)) == []


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_every_method_loses_the_same_clients_and_none_breaks_its_promise(given, mode):
    names = ("fedavg", "dp-fedavg", "central-dp", "niss")
    config = small_config(
        rounds=3,
        training=TWELVE,
        privacy={**ROOMY, "mode": mode},
        methods=[{"name": name, "neighbours": 5} for name in names],
    )
    results = niss.compare(config, **given).results
    lost = [[line.dropped for line in result.rounds] for result in results]
    assert sum(lost[0]) > 0
    assert all(row == lost[0] for row in lost)
    for name, result in zip(names, results, strict=True):
        told = [caveat for caveat in result.statement.caveats if "never arrived" in caveat]
        assert told
        assert ("lied" in told[0]) == (name == "niss")
        noisy = any("should have cancelled" in caveat for caveat in result.statement.caveats)
        assert noisy == (name == "niss" and mode == "tolerate")
        if name != "fedavg":
            assert result.statement.epsilon_joint <= 50.0 * (1 + 1e-9)


def test_without_distortion_a_repaired_round_is_the_survivors_mean(given):
    """tau = 0, repaired: as FedAvg on the same survivors, since no update is clipped."""
    config = small_config(
        rounds=2,
        training=TWELVE,
        privacy={**ROOMY, "clip": 100.0, "mode": "repair"},
        methods=[{"name": "fedavg"}, {"name": "niss", "neighbours": 5, "tau2": 0.0}],
    )
    plain, shared = niss.compare(config, **given).results
    assert all(line.dropped for line in plain.rounds)
    for name, weights in plain.state_dict.items():
        np.testing.assert_allclose(shared.state_dict[name].numpy(), weights.numpy(), atol=1e-3)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_what_dropouts_leave_of_carried_noise_in_the_model_is_as_predicted(
    monkeypatch, mode, closing, optimizer
):
    """Momentum lets it fade."""
    training = {"server_rate": 0.7, "server_optimizer": optimizer}
    training |= {"server_momentum": 0.6} if optimizer == "momentum" else {}
    watched = WideRun(
        monkeypatch,
        {"name": "niss-carried", "closing": closing},
        training=training,
        privacy={"epsilon": 3.0, "clip": 0.5, "dropout": 0.25, "mode": mode},
        seed=12,
    )
    lines, statement = watched.result.rounds, watched.result.statement
    assert sum(line.dropped for line in lines) >= 4
    predicted = [line.model_noise_variance for line in lines]
    # Six deviations of a mean of squares over all coordinates.
    close = 6.0 * np.sqrt(2.0 / watched.models.shape[1])
    np.testing.assert_allclose(np.mean(watched.models**2, axis=1), predicted, rtol=close)
    assert watched.result.epsilon <= 3.0 * (1.0 + 1e-9)
    repaired = [line.exact for line in lines if line.dropped]
    assert any(repaired) == (mode == "repair")
    if optimizer == "momentum":
        assert not any(line.carried_variance for line in lines), "no later round takes out just that"
        assert any(f"the model has {digits(predicted[-1], 2)}" in caveat for caveat in statement.caveats)
    elif all(repaired):
        fresh = 0.7**2 * watched.plans[0].residual_variance[0]
        left = sum(4 - line.dropped for line in lines) + 4 * closing
        assert predicted[-1] <= fresh * left + 1e-12


def test_dropouts_of_carried_noise_are_planned_for():
    """What is repaired does not stay in the model, so much can be carried; where nothing is, little."""
    ratios, residuals = {}, {}
    for label, trust in {
        "none": {},
        "tolerate": {"dropout": 0.1},
        "repair": {"dropout": 0.1, "mode": "repair"},
    }.items():
        config = small_config(
            rounds=100,
            data={"clients": 1000},
            training={"participants": 100, "sampling": "cyclic"},
            privacy={"epsilon": 20.0, "clip": 1.0, **trust},
            methods=[{"name": "niss-carried"}],
        )
        plan = config.plan(config.methods[0])
        noise = plan.committed(100).noise
        ratios[label], residuals[label] = noise.carried / noise.residual, noise.residual
        assert noise.known == (27 if label == "repair" else 0)
    assert ratios["tolerate"] < 0.3 * ratios["none"]
    assert ratios["repair"] > 0.8 * ratios["none"]
    assert residuals["repair"] > residuals["none"]


LATE = {**TWELVE, "late": 0.3}


@pytest.mark.parametrize("exchange", ["simulated", "protocol"])
def test_blanks_cancel_like_any_other_upload_and_nobody_is_lost(given, exchange):
    """tau = 0: as FedAvg with the same clients late, since no update is clipped."""
    config = small_config(
        rounds=3,
        training=LATE,
        exchange=exchange,
        privacy={"epsilon": 50.0, "clip": 100.0},
        methods=[{"name": "fedavg"}, {"name": "niss", "neighbours": 5, "tau2": 0.0}],
    )
    plain, shared = niss.compare(config, **given).results
    blanks = [line.blanks for line in plain.rounds]
    assert sum(blanks) > 0
    for result in (plain, shared):
        assert [line.blanks for line in result.rounds] == blanks
        assert not any(line.dropped for line in result.rounds)
        assert all(line.exact for line in result.rounds)
        assert any(f"{sum(blanks):.0f} uploads were blank" in one for one in result.statement.caveats)
    for name, weights in plain.state_dict.items():
        np.testing.assert_allclose(shared.state_dict[name].numpy(), weights.numpy(), atol=1e-3)
    punctual = niss.run(
        with_overrides(config, {"training.late": 0.0, "methods": [{"name": "fedavg"}]}), **given
    )
    assert all(line.blanks is None for line in punctual.rounds)
    moved = [
        np.abs(punctual.state_dict[name].numpy() - weights.numpy()).max()
        for name, weights in plain.state_dict.items()
    ]
    assert max(moved) > 1e-3, "else being late changed nothing"


@pytest.mark.parametrize("method", ["niss", "niss-carried", "dp-fedavg", "central-dp"])
def test_blanks_change_no_charge_and_no_noise(given, method):
    results = []
    for late in (0.0, 0.3):
        config = small_config(
            training={**TWELVE, "participants": 6, "sampling": "cyclic", "late": late},
            methods=[{"name": method}],
        )
        results.append(niss.run(config, **given))
    punctual, late = results
    assert late.epsilon == punctual.epsilon
    for one, other in zip(late.rounds, punctual.rounds, strict=True):
        assert one.aggregate_variance_predicted == other.aggregate_variance_predicted
        assert one.model_noise_variance == other.model_noise_variance
        assert one.mu_joint == other.mu_joint
        # The noise is drawn from the same seed: measured without what anyone learned, it is the same.
        assert one.aggregate_variance == pytest.approx(other.aggregate_variance, rel=1e-3)


def test_silos_that_are_late_add_nothing_to_the_sum(given):
    """All of them: the model stays where it was, but for noise, which fedavg has none of."""
    values = {
        "seed": 5,
        "rounds": 1,
        "data": {"silos": 12},
        "privacy": {"unit": "record", "batch": 0.5, "clip": 0.8, "epsilon": 4.0},
        "methods": [{"name": "fedavg"}],
    }
    found = niss.run(make_config({**values, "training": {"late": 0.999999}}), **given)
    assert found.rounds[0].blanks == 12
    for name, weights in given["model"].state_dict().items():
        np.testing.assert_array_equal(found.state_dict[name].numpy(), weights.numpy())


def test_the_clip_follows_those_that_trained(given):
    """A blank has no say in it: with everyone late it stays where it is."""
    privacy = {"epsilon": 50.0, "clip": 1.0, "quantile": 0.5, "first_clip": 0.2}
    methods = [{"name": "niss", "neighbours": 5, "tau2": 0.0}]
    config = small_config(training={**TWELVE, "late": 0.999999}, privacy=privacy, methods=methods)
    assert [line.clip for line in niss.run(config, **given).rounds] == pytest.approx([0.2] * 4)
