"""A round does what its methods promise, on whatever model and data the user brings."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn

import niss
from niss.accounting import LedgerFile, forecast
from niss.attacks.rounds import simulate_round
from niss.cli.account import _notes
from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.mechanism import gdp_epsilon, gdp_mu
from niss.methods import METHODS
from niss.randomness import SimStream
from niss.settings import to_values
from niss.simulation.federation import choose_participants
from niss.views import RoundNoise, RunNoise, run_mu2
from support.federation import WideRun, small_config

TWELVE = {"participants": 12, "epochs": 1, "batch_size": 4, "learning_rate": 0.1}


def vector(result):
    return torch.cat([tensor.reshape(-1) for tensor in result.state_dict.values()]).numpy()


def test_niss_without_distortion_learns_exactly_what_clipped_averaging_learns(given):
    methods = [{"name": "niss", "tau2": 0.0, "neighbours": 3}]
    with_noise, without = (
        vector(niss.run(small_config(methods=methods, privacy={"epsilon": epsilon, "clip": 1.0}), **given))
        for epsilon in (20.0, 1e9)
    )
    assert np.abs(with_noise - without).max() < 1e-5
    assert np.abs(without).max() > 0.1


CARRIED = {"name": "niss-carried"}
COHORT, ROUNDS, APART = 4, 7, 3  # of 12 clients, as a `WideRun` has them
COORDINATES = 400 * 50 + 50
# Six deviations of a mean of squares over all coordinates: a false alarm has a probability of 2e-9.
CLOSE = 6.0 * math.sqrt(2.0 / COORDINATES)
MOMENTUM = {"server_optimizer": "momentum", "server_momentum": 0.6}


def noise_of(watched: WideRun) -> RunNoise:
    """The graphs and variances of the run, for the accountant."""
    rounds = []
    for number, one in enumerate(watched.plans):
        carried = None
        if one.after is not None and number + 1 < ROUNDS:
            carried = ShareGraph.complete((COHORT, COHORT)), METHODS["niss-carried"]._share(one)
        rounds.append(
            RoundNoise(
                clients=tuple(one.participants.tolist()),
                shares=one.graph,
                unit_variance=one.unit_variance,
                residual=one.residual_variance,
                carried=carried,
            )
        )
    return RunNoise(tuple(rounds))


def covariance(run: RunNoise) -> np.ndarray:
    """Sigma over all uploads of all rounds, edge by edge, with nothing of the package but the edges."""
    starts = np.cumsum([0, *(len(one.clients) for one in run.rounds)])
    sigma = np.diag(np.concatenate([np.broadcast_to(one.residual, len(one.clients)) for one in run.rounds]))
    for number, one in enumerate(run.rounds):
        groups = [(one.shares, one.unit_variance)]
        if one.carried is not None:
            groups.append(one.carried)
        for graph, variance in groups:
            for a, b, weight in zip(graph.senders, graph.receivers, graph.weights, strict=True):
                u, v = a + starts[number], b + starts[number + graph.between]
                sigma[u, u] += weight * variance
                sigma[v, v] += weight * variance
                sigma[[u, v], [v, u]] -= weight * variance
    return sigma


@pytest.mark.parametrize(
    "method",
    [{"name": "niss", "graph": "complete"}, CARRIED, {**CARRIED, "carried_to_residual": 4.0, "kappa": 2.0}],
    ids=["within rounds", "carried", "given ratio"],
)
def test_the_uploads_of_all_rounds_have_the_covariance_that_is_accounted_for(monkeypatch, method):
    watched = WideRun(monkeypatch, method)
    run = noise_of(watched)
    sigma = covariance(run)
    rows = np.concatenate(watched.uploads)
    measured = rows @ rows.T / COORDINATES
    scale = np.sqrt(np.diag(sigma))
    assert np.all(np.abs(measured - sigma) < CLOSE * np.outer(scale, scale))
    assert (np.abs(sigma[0, COHORT]) > 0.0) == (method["name"] == "niss-carried")

    # What is stated for each client is what an own computation finds.
    moved, precision = 0.5 / COHORT, np.linalg.inv(sigma)
    found = run_mu2(run, sensitivity=moved)
    for client in watched.result.statement.clients:
        places = [place for vertex, place in run.places.items() if vertex[0] == client.client]
        own = moved**2 * precision[np.ix_(places, places)].sum()
        assert found[client.client] == pytest.approx(own, rel=1e-9)
        assert own == pytest.approx(client.mu_joint**2, rel=1e-9)
    most = max(client.mu_joint for client in watched.result.statement.clients)
    assert most <= gdp_mu(3.0, 0.98e-5) * (1.0 + 1e-9)
    assert watched.result.epsilon <= 3.0 * (1.0 + 1e-9)
    if "kappa" not in method:
        # A simulation has no grid, and states what it spent with the part of delta that a grid would have had.
        assert watched.result.epsilon == pytest.approx(gdp_epsilon(gdp_mu(3.0, 0.98e-5), 1e-5), rel=1e-6)


@pytest.mark.parametrize("colluders", [1, 2])
def test_against_colluders_the_statement_is_the_cost_of_any_that_many(monkeypatch, colluders):
    watched = WideRun(
        monkeypatch, CARRIED, privacy={"epsilon": 3.0, "clip": 0.5, "collusion": colluders / COHORT}
    )
    run = noise_of(watched)
    known = {
        int(client)
        for one in watched.plans[:APART]
        for client in one.participants[1 : 1 + colluders]
    }  # fmt: skip
    found = run_mu2(run, colluders=known, sensitivity=0.5 / COHORT)
    for client in watched.result.statement.clients:
        if client.client not in known:
            assert found[client.client] == pytest.approx(client.mu_joint**2, rel=1e-9)
    assert (
        f"up to {100 * colluders / COHORT:.3g} % of a round's participants" in watched.result.statement.words
    )


def test_carried_noise_in_the_model_is_as_planned_and_below_a_trusted_servers(monkeypatch):
    watched = WideRun(monkeypatch, {**CARRIED, "kappa": 50.0})
    predicted = [line.model_noise_variance for line in watched.result.rounds]
    planned = forecast(carry=True, participants=COHORT, clients=12, rounds=ROUNDS, kappa=50.0, clip=0.5)
    np.testing.assert_allclose(predicted, planned.over_rounds["niss"], rtol=1e-9)
    assert np.mean(predicted) < np.mean(planned.over_rounds["central"])
    lines = watched.result.rounds
    assert [line.carried_variance > 0.0 for line in lines] == [True] * (ROUNDS - 1) + [False]
    assert any("ended early" in caveat for caveat in watched.result.statement.caveats)


@pytest.mark.parametrize("optimizer", [{}, MOMENTUM], ids=["sgd", "momentum"])
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        (name, schedule)
        for name, method in METHODS.items()
        for schedule in ("constant", "linear", "cosine")
        if method.private and (schedule == "constant" or not method.correlates)
    ],
)
def test_every_method_predicts_the_noise_in_its_model(monkeypatch, name, schedule, optimizer):
    training = {"server_rate": 0.7, "server_rate_schedule": schedule, **optimizer}
    watched = WideRun(monkeypatch, {"name": name}, training=training)
    predicted = [line.model_noise_variance for line in watched.result.rounds]
    np.testing.assert_allclose(np.mean(watched.models**2, axis=1), predicted, rtol=CLOSE)
    for line in watched.result.rounds:
        assert line.aggregate_variance == pytest.approx(line.aggregate_variance_predicted, rel=CLOSE)


@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("closing", [False, True])
def test_without_fresh_noise_the_model_ends_where_fedavg_ends(monkeypatch, closing, learning):
    """Whatever the clients learned."""
    training = {"server_rate": 0.7}

    def updates(number, shape):
        return learning * 0.4 * SimStream(number).generator().standard_normal(shape) / math.sqrt(shape[1])

    carried = WideRun(
        monkeypatch, {**CARRIED, "tau2": 0.0, "closing": closing}, updates=updates, training=training
    )
    plain = WideRun(monkeypatch, {"name": "fedavg"}, updates=updates, training=training)
    noise = np.abs(carried.models - plain.models).max(axis=1)
    assert noise[:-1].min() > 0.02
    assert noise[-1] < 1e-5 * noise.max()
    assert (np.abs(plain.models[-1]).max() > 1e-3) == learning
    assert carried.result.epsilon is None
    assert "cancel exactly" in carried.result.statement.words


def test_what_is_under_way_is_all_but_the_fresh_noise(monkeypatch):
    watched = WideRun(monkeypatch, CARRIED, training={"server_rate": 0.7})
    fresh = 0.0
    for number, line in enumerate(watched.result.rounds):
        fresh += 0.7**2 * watched.plans[number].residual_variance.sum()
        left = line.model_noise_variance - line.carried_variance
        assert left == pytest.approx(fresh, rel=1e-9)


def test_a_participation_is_charged_what_it_adds_over_the_whole_run(tmp_path, given):
    config = small_config(methods=[{"name": "niss", "carry": True}], privacy={"epsilon": 8.0, "clip": 1.0})
    assert config.methods[0].title == "niss-carried"
    niss.run(config, out=tmp_path / "run", **given)
    ledger = LedgerFile.read(tmp_path / "run" / "ledger.jsonl")
    plan = config.plan(config.methods[0]).committed(6)
    taken: dict[str, list[int]] = {}
    for entry in ledger.entries:
        for client, charged in entry.charges.items():
            past = taken.setdefault(client, [])
            both = [*past, entry.round - 1]
            added = plan.matrix[np.ix_(both, both)].sum() - plan.matrix[np.ix_(past, past)].sum()
            assert charged.mu2 == pytest.approx(added, rel=1e-9)
            past.append(entry.round - 1)
        assert entry.basis == {
            "method": "niss-carried", "heuristic": False, "collusion": 0.0, "dropout": 0.0, "mode": "tolerate",
            "rounds": 4, "separation": 2, "pattern": "cyclic",
        }  # fmt: skip
    assert max(ledger.spent(client) for client in ledger.clients) == pytest.approx(plan.mu, rel=1e-9)
    statement = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "a run of 4 committed rounds" in statement["words"]
    assert "exactly 2 rounds apart" in statement["words"]
    notes = " ".join(_notes(ledger, None))
    assert "adds to mu^2 over the whole committed run of 4 rounds" in notes
    assert "exactly 2 rounds apart" in notes


def test_a_single_round_of_a_carried_run_is_no_target_of_an_attack():
    plan = niss.Plan(method="niss-carried", graph="complete", horizon=4, separation=2, participations=2)
    with pytest.raises(ConfigError, match="about a whole run"):
        simulate_round(np.zeros((4, 3)), plan, stream=SimStream(1))


def test_random_cohorts_that_rest_are_charged_for_their_own_pattern(given):
    config = small_config(
        rounds=9,
        training={"participants": 3, "sampling": "uniform", "separation": 2, "epochs": 1},
        methods=[{"name": "niss-carried"}],
        privacy={"epsilon": 8.0, "clip": 1.0},
    )
    result = niss.run(config, **given)
    assert "at least 2 rounds apart" in result.statement.words
    (budget,) = [one for one in result.statement.caveats if one.startswith("The budget")]
    assert "in the rounds 1, " in budget
    plan = config.plan(config.methods[0]).committed(3)
    assert plan.pattern == "any"
    patterns: dict[int, list[int]] = {client: [] for client in range(12)}
    for number in range(9):
        rested = np.array([all(number - one >= 2 for one in patterns[client]) for client in range(12)])
        drawn = choose_participants(
            number, sampling="uniform", size=3, eligible=rested, stream=SimStream(3).child("participants")
        )
        for client in drawn.tolist():
            patterns[client].append(number)
    for client in result.statement.clients:
        rounds = patterns[client.client]
        assert client.mu_joint**2 == pytest.approx(plan.matrix[np.ix_(rounds, rounds)].sum(), rel=1e-9)
    assert result.epsilon <= 8.0


def test_a_charge_outside_the_committed_pattern_is_refused():
    config = small_config(methods=[CARRIED])
    run = config.plan(config.methods[0]).committed(6)
    with pytest.raises(PrivacyError, match="comes 1 after round 0"):
        run.charge(1, [0])
    with pytest.raises(PrivacyError, match="past the committed end"):
        run.charge(4, [0, 2])
    with pytest.raises(PrivacyError, match="past the committed end"):
        run.cost(4, [])


def test_aggregate_noise_per_method_is_in_the_predicted_order(given):
    predicted = {}
    for name in ("dp-fedavg", "central-dp", "niss"):
        config = small_config(rounds=1, methods=[{"name": name, "neighbours": 3, "kappa": 4}])
        predicted[name] = niss.run(config, **given).rounds[0].aggregate_variance_predicted
    sigma2 = (1.0 / 6 / (gdp_mu(20.0, 1e-5) / math.sqrt(1))) ** 2
    assert predicted["central-dp"] == pytest.approx(sigma2)
    assert predicted["dp-fedavg"] == pytest.approx(6 * sigma2)
    assert sigma2 < predicted["niss"] < 1.5 * sigma2


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
    poisoned[4][0][:] = 3e38
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


def test_a_spent_budget_keeps_clients_out(given):
    """Two participations allowed, uniform sampling of 6 of 12: after 4 rounds everybody has had both."""
    config = small_config(
        rounds=4,
        training={**TWELVE, "participants": 6, "sampling": "uniform"},
        privacy={"epsilon": 50.0, "clip": 1.0, "participations": 2},
        methods=[{"name": "dp-fedavg"}],
    )
    statement = niss.run(config, **given).statement
    assert max(client.participations for client in statement.clients) <= 2
    longer = small_config(**{**to_values(config), "rounds": 9})
    with pytest.raises(PrivacyError, match="budget left"):
        niss.run(longer, **given)


def test_a_target_per_round_is_no_budget_for_the_training(given):
    """Every client takes part in all three rounds, and the total is composed, not refused."""
    config = small_config(rounds=3, training=TWELVE, privacy={"epsilon": 5.0, "clip": 1.0, "scope": "round"})
    statement = niss.run(config, **given).statement
    assert {client.participations for client in statement.clients} == {3}
    assert statement.budget_epsilon is None
    three = gdp_epsilon(math.sqrt(3) * gdp_mu(5.0, 1e-5), 1e-5)
    assert statement.epsilon_joint == pytest.approx(three, rel=0.02)
    assert statement.epsilon_joint <= three * (1 + 1e-9)


def test_a_target_per_round_pays_for_every_round_in_which_the_bound_on_colluders_may_fail(given, tmp_path):
    """A tenth of delta for the graphs of all fifteen rounds; what a grid may cost comes again with each further one."""
    config = small_config(
        rounds=15,
        training=TWELVE,
        privacy={"epsilon": 5.0, "clip": 1.0, "scope": "round", "collusion": 0.05},
    )
    plan = config.plan(config.methods[0])
    assert plan.failure == pytest.approx(1e-6 / 15)
    result = niss.run(config, **given, out=tmp_path / "run")
    statement = result.statement
    assert statement.delta == pytest.approx(1e-5 + 14 * 0.2e-6)
    assert "1.28e-5" in statement.words
    assert any("1.28e-5" in caveat for caveat in statement.caveats)
    spent = max(client.mu_joint for client in statement.clients)
    assert statement.epsilon_joint == pytest.approx(gdp_epsilon(spent, 9e-6), rel=1e-9)
    ledger = LedgerFile.read(tmp_path / "run" / "ledger.jsonl")
    assert ledger.header.delta == pytest.approx(1.28e-5)
    assert ledger.epsilon(spent) == pytest.approx(statement.epsilon_joint, rel=1e-9)


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
