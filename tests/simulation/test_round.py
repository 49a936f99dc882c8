"""A round does what its methods promise, on whatever model and data the user brings."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import niss
from niss.accounting import LedgerFile
from niss.mechanism import gdp_epsilon, gdp_mu
from niss.randomness import SimStream
from niss.settings import to_values
from support.federation import small_config

TWELVE = {"participants": 12, "epochs": 1, "batch_size": 4, "learning_rate": 0.1}


def vector(result):
    return torch.cat([tensor.reshape(-1) for tensor in result.state_dict.values()]).numpy()


def test_niss_without_distortion_learns_exactly_what_clipped_averaging_learns(given):
    shared = small_config(methods=[{"name": "niss", "tau2": 0.0, "neighbours": 3}])
    noiseless = small_config(
        methods=[{"name": "niss", "tau2": 0.0, "neighbours": 3}], privacy={"epsilon": 1e9, "clip": 1.0}
    )
    with_noise = vector(niss.run(shared, **given))
    without = vector(niss.run(noiseless, **given))
    assert np.abs(with_noise - without).max() < 1e-5
    assert np.abs(without).max() > 0.1


def test_fedavg_equals_a_hand_written_average(given):
    """One local step on the full batch of every client, averaged: plain gradient descent on the mean."""
    config = small_config(
        rounds=1,
        training={"participants": 12, "epochs": 1, "batch_size": 100, "learning_rate": 0.5},
        methods=[{"name": "fedavg"}],
    )
    learned = niss.run(config, **given).state_dict
    expected = torch.zeros(3, 5)
    for inputs, labels in given["clients"]:
        weight = torch.zeros(3, 5, requires_grad=True)
        bias = torch.zeros(3, requires_grad=True)
        scores = nn.functional.linear(torch.from_numpy(inputs), weight, bias)
        nn.functional.cross_entropy(scores, torch.from_numpy(labels)).backward()
        expected -= 0.5 * weight.grad / len(given["clients"])
    assert torch.allclose(learned["weight"], expected, atol=1e-6)


@pytest.mark.parametrize("method", ["dp-fedavg", "central-dp", "niss"])
def test_measured_noise_agrees_with_the_prediction(method):
    """Chi-square interval over all coordinates of one round; false-alarm rate 1e-6."""
    model = nn.Linear(400, 50)
    generator = SimStream(1).generator()
    data = [(generator.standard_normal((3, 400), dtype=np.float32), np.array([0, 1, 2])) for _ in range(8)]
    config = small_config(
        rounds=1,
        training={"participants": 8, "epochs": 1, "batch_size": 10, "learning_rate": 0.01},
        privacy={"epsilon": 1.0, "clip": 0.5},
        methods=[{"name": method, "neighbours": 3}],
    )
    result = niss.run(config, model=model, clients=data, test=data[0])
    line = result.rounds[0]
    count = 400 * 50 + 50
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], count) / count
    assert low < line.aggregate_variance / line.aggregate_variance_predicted < high


def test_aggregate_noise_per_method_is_in_the_predicted_order(given):
    predicted = {}
    for method in (
        {"name": "dp-fedavg"},
        {"name": "central-dp"},
        {"name": "niss", "neighbours": 3, "kappa": 4},
    ):
        result = niss.run(small_config(rounds=1, methods=[method]), **given)
        predicted[method["name"]] = result.rounds[0].aggregate_variance_predicted
    sigma2 = (1.0 / 6 / (gdp_mu(20.0, 1e-5) / math.sqrt(1))) ** 2
    assert predicted["central-dp"] == pytest.approx(sigma2)
    assert predicted["dp-fedavg"] == pytest.approx(6 * sigma2)
    assert sigma2 < predicted["niss"] < 1.5 * sigma2


def test_calibrated_methods_spend_exactly_their_target(given):
    for method in ("dp-fedavg", "central-dp", "niss"):
        result = niss.run(small_config(methods=[{"name": method, "neighbours": 3}]), **given)
        assert result.statement.epsilon_joint == pytest.approx(20.0, rel=1e-2)
        assert result.statement.epsilon_joint <= 20.0 * (1 + 1e-9)
        assert {client.participations for client in result.statement.clients} == {2}


def test_as_printed_there_is_no_joint_guarantee_but_a_marginal_one(given):
    config = small_config(methods=[{"name": "niss", "tau2": 0.0, "distortion": "scalar", "neighbours": 3}])
    result = niss.run(config, **given)
    assert result.summary["epsilon_joint"] is None
    assert 0 < result.summary["epsilon_marginal"] < 20.0
    assert "No guarantee" in result.summary["guarantee"]


@pytest.mark.parametrize("distortion", ["scalar", "coordinate"])
def test_a_distortion_that_multiplies_is_charged_for_the_worst_factors_really_drawn(given, distortion):
    drawn, fresh = (
        niss.run(
            small_config(methods=[{"name": "niss", "tau2": 0.5, "distortion": name, "neighbours": 3}]),
            **given,
        ).statement.epsilon_joint
        for name in (distortion, "additive")
    )
    assert drawn is not None
    assert drawn > fresh


def test_clients_may_ask_for_different_epsilons(given):
    epsilons = [20.0 + number for number in range(12)]
    config = small_config(privacy={"epsilon": epsilons, "clip": 1.0})
    clients = niss.run(config, **given).statement.clients
    for wanted, client in zip(epsilons, clients, strict=True):
        assert client.epsilon_joint <= wanted * (1 + 1e-9)


def test_a_diverging_client_sends_zero_and_only_the_diagnostics_say_so(given, tmp_path):
    """How many diverged follows from their data, exactly: no noise hides it, so no claim is made beside it."""
    poisoned = [(inputs.copy(), labels) for inputs, labels in given["clients"]]
    poisoned[4][0][:] = np.nan
    result = niss.run(small_config(), **{**given, "clients": poisoned}, out=tmp_path / "run")
    lines = (tmp_path / "run" / "diagnostics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]
    assert sum(json.loads(line)["zeroed_updates"] for line in lines) == 2
    assert np.isfinite(vector(result)).all()
    zeroed = {"round", "accuracy", "loss"}  # What follows from the model alone.
    healthy = niss.run(small_config(), **given)
    for one, other in zip(result.rounds, healthy.rounds, strict=True):
        differing = {name for name, value in asdict(one).items() if value != asdict(other)[name]}
        assert differing <= zeroed | {"aggregate_variance"}
    assert result.statement.caveats == healthy.statement.caveats


def test_record_unit_takes_one_clipped_step_and_composes(given):
    config = small_config(
        training={"participants": 6, "epochs": 1, "batch_size": 10, "learning_rate": 0.5},
        privacy={"unit": "record", "epsilon": 8.0, "clip": 1.0},
        methods=[{"name": "niss", "neighbours": 3}],
    )
    result = niss.run(config, **given)
    assert result.statement.unit == "record"
    assert result.statement.epsilon_joint == pytest.approx(8.0, rel=0.2)
    assert result.statement.epsilon_joint <= 8.0 * (1 + 1e-9)


def test_a_spent_budget_keeps_clients_out(given):
    """Two participations allowed, uniform sampling of 6 of 12: after 4 rounds everybody has had both."""
    config = small_config(
        rounds=4,
        training={
            "participants": 6,
            "sampling": "uniform",
            "epochs": 1,
            "batch_size": 4,
            "learning_rate": 0.1,
        },
        privacy={"epsilon": 50.0, "clip": 1.0, "participations": 2},
        methods=[{"name": "dp-fedavg"}],
    )
    statement = niss.run(config, **given).statement
    assert max(client.participations for client in statement.clients) <= 2
    longer = small_config(**{**to_values(config), "rounds": 9})
    with pytest.raises(niss.errors.PrivacyError, match="budget left"):
        niss.run(longer, **given)


def test_a_target_per_round_is_no_budget_for_the_training(given):
    """Every client takes part in all three rounds, and the total is composed, not refused."""
    config = small_config(
        rounds=3,
        training=TWELVE,
        privacy={"epsilon": 5.0, "clip": 1.0, "scope": "round"},
    )
    statement = niss.run(config, **given).statement
    assert {client.participations for client in statement.clients} == {3}
    assert statement.budget_epsilon is None
    three = gdp_epsilon(math.sqrt(3) * gdp_mu(5.0, 1e-5), 1e-5)
    assert statement.epsilon_joint == pytest.approx(three, rel=0.02)
    assert statement.epsilon_joint <= three * (1 + 1e-9)


def test_a_target_per_round_pays_for_every_round_in_which_the_bound_on_colluders_may_fail(given, tmp_path):
    """A tenth of delta for each of fifteen rounds: more than delta itself, so the training has a larger one."""
    config = small_config(
        rounds=15,
        training=TWELVE,
        privacy={"epsilon": 5.0, "clip": 1.0, "scope": "round", "colluders": 1},
    )
    plan = config.plan(config.methods[0])
    assert plan.corruption.failure == pytest.approx(1e-6)
    result = niss.run(config, **given, out=tmp_path / "run")
    statement = result.statement
    # Each of the 15 rounds has its own failure and its own part for the grid.
    assert statement.delta == pytest.approx(8.8e-6 + 15e-6 + 15 * 0.2e-6)
    assert "2.68e-05" in statement.words
    assert any("2.68e-05" in caveat for caveat in statement.caveats)
    spent = max(client.mu_joint for client in statement.clients)
    assert statement.epsilon_joint == pytest.approx(gdp_epsilon(spent, 9e-6), rel=1e-9)
    ledger = LedgerFile.read(tmp_path / "run" / "ledger.jsonl")
    assert ledger.header.delta == pytest.approx(2.68e-5)
    assert ledger.epsilon(spent) == pytest.approx(statement.epsilon_joint, rel=1e-9)


def test_declared_sizes_weight_the_clients_and_are_capped():
    from niss.simulation.federation import aggregation_weights

    sizes = np.array([10, 20, 100])
    assert aggregation_weights(sizes, rule="equal", cap=None) == pytest.approx([1 / 3] * 3)
    assert aggregation_weights(sizes, rule="declared", cap=None) == pytest.approx(sizes / 130)
    assert aggregation_weights(sizes, rule="declared", cap=20) == pytest.approx([0.2, 0.4, 0.4])


def test_batchnorm_and_dropout_models_run_and_keep_integer_buffers(datasets, held_out):
    def factory():
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    config = small_config(training={"participants": 6, "epochs": 1, "batch_size": 3, "learning_rate": 0.1})
    wide = [(np.tile(inputs, (3, 1)), np.tile(labels, 3)) for inputs, labels in datasets]
    first = niss.run(config, model=factory, clients=wide, test=held_out)
    second = niss.run(config, model=factory, clients=wide, test=held_out)
    assert int(first.state_dict["1.num_batches_tracked"]) == 0
    assert np.array_equal(vector(first), vector(second))


def test_coalitions_share_only_among_themselves(given):
    groups = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    config = small_config(
        training=TWELVE,
        methods=[{"name": "niss", "graph": "coalition", "groups": groups, "neighbours": 3}],
    )
    statement = niss.run(config, **given).statement
    assert statement.epsilon_joint == pytest.approx(20.0, rel=2e-3)


def test_the_random_list_costs_and_the_statement_says_so(given):
    plain, regular = (
        niss.run(
            small_config(
                training=TWELVE, methods=[{"name": "niss", "graph": graph, "neighbours": 3, "tau2": 0.3}]
            ),
            **given,
        ).statement
        for graph in ("random", "regular")
    )
    assert plain.epsilon_joint is None or plain.epsilon_joint > regular.epsilon_joint
    assert any("random list" in caveat for caveat in plain.caveats)
    assert any("times the shares they sent; the worst-off kept" in caveat for caveat in plain.caveats)
    assert not any("shares they sent" in caveat for caveat in regular.caveats)
