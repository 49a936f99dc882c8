"""Runs whose clients carry noise from round to round: what was drawn, what it cost, and what is left in the model."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import niss
from niss.accounting import LedgerFile, forecast
from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.mechanism import gdp_epsilon, gdp_mu
from niss.methods import METHODS
from niss.randomness import SimStream
from niss.simulation.federation import choose_participants
from niss.views import RoundNoise, RunNoise, run_mu2
from support.federation import WideRun, small_config

CLIENTS, COHORT, ROUNDS, APART = 12, 4, 7, 3
COORDINATES = 400 * 50 + 50
# Six deviations of a mean of squares over all coordinates: a false alarm has a probability of 2e-9.
CLOSE = 6.0 * math.sqrt(2.0 / COORDINATES)


def watched_run(monkeypatch, method: dict | None = None, **changes) -> WideRun:
    return WideRun(monkeypatch, {"name": "niss-carried", **(method or {})}, **changes)


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


@pytest.mark.parametrize("method", [{}, {"carried_to_residual": 4.0, "kappa": 2.0}], ids=["", "given ratio"])
def test_the_uploads_of_all_rounds_have_the_covariance_that_is_accounted_for(monkeypatch, method):
    watched = watched_run(monkeypatch, method)
    run = noise_of(watched)
    sigma = covariance(run)
    rows = np.concatenate(watched.uploads)
    measured = rows @ rows.T / COORDINATES
    scale = np.sqrt(np.diag(sigma))
    assert np.all(np.abs(measured - sigma) < CLOSE * np.outer(scale, scale))
    assert np.abs(sigma[0, COHORT]) > 0.0

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
    if not method:
        # A simulation has no grid, and states what it spent with the part of delta that a grid would have had.
        assert watched.result.epsilon == pytest.approx(gdp_epsilon(gdp_mu(3.0, 0.98e-5), 1e-5), rel=1e-6)


@pytest.mark.parametrize("colluders", [1, 2])
def test_against_colluders_the_statement_is_the_cost_of_any_that_many(monkeypatch, colluders):
    watched = watched_run(monkeypatch, privacy={"epsilon": 3.0, "clip": 0.5, "colluders": colluders})
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
    assert f"up to {colluders} participants" in watched.result.statement.words


def test_without_fresh_noise_the_sum_over_all_rounds_is_that_of_fedavg(monkeypatch):
    watched = watched_run(monkeypatch, {"tau2": 0.0})
    between, final = np.abs(watched.models[:-1]).max(axis=1), np.abs(watched.models[-1]).max()
    assert between.min() > 0.1
    assert final < 1e-5 * between.max()
    assert watched.result.epsilon is None
    assert "cancel exactly" in watched.result.statement.words


def test_the_noise_in_the_model_is_as_predicted_and_below_a_trusted_servers(monkeypatch):
    watched = watched_run(monkeypatch, {"kappa": 50.0})
    predicted = [line.model_noise_variance for line in watched.result.rounds]
    np.testing.assert_allclose(np.mean(watched.models**2, axis=1), predicted, rtol=CLOSE)
    planned = forecast(
        carry=True,
        participants=COHORT,
        clients=CLIENTS,
        rounds=ROUNDS,
        kappa=50.0,
        clip=0.5,
    )
    np.testing.assert_allclose(predicted, planned.noise, rtol=1e-9)
    assert np.mean(predicted) < np.mean(planned.noise_central)
    lines = watched.result.rounds
    assert [line.carried_variance > 0.0 for line in lines] == [True] * (ROUNDS - 1) + [False]
    assert any("ended early" in caveat for caveat in watched.result.statement.caveats)
    for line in lines:
        assert line.aggregate_variance == pytest.approx(line.aggregate_variance_predicted, rel=CLOSE)


MOMENTUM = {"server_optimizer": "momentum", "server_momentum": 0.6}


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
    watched = watched_run(monkeypatch, {"name": name}, training=training)
    predicted = [line.model_noise_variance for line in watched.result.rounds]
    np.testing.assert_allclose(np.mean(watched.models**2, axis=1), predicted, rtol=CLOSE)


@pytest.mark.parametrize("method", [{}, {"closing": True}])
def test_without_fresh_noise_the_model_ends_where_fedavg_ends(monkeypatch, method):
    """Whatever the clients learned."""
    training = {"server_rate": 0.7}

    def updates(number, shape):
        return 0.4 * SimStream(number).generator().standard_normal(shape) / math.sqrt(shape[1])

    carried = watched_run(monkeypatch, {"tau2": 0.0, **method}, updates=updates, training=training)
    plain = watched_run(
        monkeypatch, {"name": "fedavg"}, updates=updates, training=training | {"sampling": "cyclic"}
    )
    noise = np.abs(carried.models - plain.models).max(axis=1)
    assert noise[:-1].min() > 0.02
    assert noise[-1] < 1e-5 * noise.max()
    assert np.abs(plain.models[-1]).max() > 1e-3


def test_what_is_under_way_is_all_but_the_fresh_noise(monkeypatch):
    watched = watched_run(monkeypatch, training={"server_rate": 0.7})
    fresh = 0.0
    for number, line in enumerate(watched.result.rounds):
        fresh += 0.7**2 * watched.plans[number].residual_variance.sum()
        left = line.model_noise_variance - line.carried_variance
        assert left == pytest.approx(fresh, rel=1e-9)


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
@pytest.mark.parametrize("method", [{}, {"closing": True}])
def test_momentum_lets_carried_noise_fade_as_predicted(monkeypatch, method, mode):
    watched = watched_run(
        monkeypatch,
        method,
        training={"server_rate": 0.7, **MOMENTUM},
        protocol={"dropout": 0.2, "mode": mode},
        privacy={"epsilon": 3.0, "clip": 0.5, "dropped": 2},
    )
    lines = watched.result.rounds
    assert sum(line.dropped for line in lines) >= 2
    predicted = [line.model_noise_variance for line in lines]
    np.testing.assert_allclose(np.mean(watched.models**2, axis=1), predicted, rtol=CLOSE)
    assert not any(line.carried_variance for line in lines), "no later round takes out just that"
    assert any(f"the model has {predicted[-1]:.2g}" in one for one in watched.result.statement.caveats)


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_what_dropouts_leave_in_the_model_is_as_predicted(monkeypatch, mode, closing):
    protocol, privacy = {"dropout": 0.35, "mode": mode}, {"epsilon": 3.0, "clip": 0.5, "dropped": 2}
    watched = watched_run(monkeypatch, {"closing": closing}, protocol=protocol, privacy=privacy)
    lines = watched.result.rounds
    assert sum(line.dropped for line in lines) >= 4
    predicted = [line.model_noise_variance for line in lines]
    np.testing.assert_allclose(np.mean(watched.models**2, axis=1), predicted, rtol=CLOSE)
    assert watched.result.epsilon <= 3.0 * (1.0 + 1e-9)
    repaired = [line.exact for line in lines if line.dropped]
    assert any(repaired) == (mode == "repair")
    if all(repaired):
        fresh = sum((COHORT - line.dropped) for line in lines) * watched.plans[0].residual_variance[0]
        assert predicted[-1] <= fresh + COHORT * watched.plans[0].residual_variance[0] * closing + 1e-12


def test_dropouts_are_planned_for():
    """What is repaired does not stay in the model, so much can be carried; where nothing is, little."""
    ratios, residuals = {}, {}
    for label, protocol in {
        "none": {},
        "tolerate": {"dropout": 0.1},
        "repair": {"dropout": 0.1, "mode": "repair"},
    }.items():
        config = small_config(
            rounds=100,
            data={"clients": 1000},
            training={"participants": 100, "sampling": "cyclic"},
            protocol=protocol,
            methods=[{"name": "niss-carried"}],
        )
        plan = config.plan(config.methods[0])
        noise = plan.committed(100).noise
        ratios[label], residuals[label] = noise.carried / noise.residual, noise.residual
        assert (plan.dropped, plan.revealed) == ((27, 27) if label == "repair" else (0, 0))
        assert noise.known == plan.dropped
    assert ratios["tolerate"] < 0.3 * ratios["none"]
    assert ratios["repair"] > 0.8 * ratios["none"]
    assert residuals["repair"] > residuals["none"]


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
            "method": "niss-carried", "heuristic": False, "colluders": 0, "dropped": 0, "rounds": 4, "separation": 2,
            "pattern": "cyclic",
        }  # fmt: skip
    assert max(ledger.spent(client) for client in ledger.clients) == pytest.approx(plan.mu, rel=1e-9)
    statement = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "a run of 4 committed rounds" in statement["words"]
    assert "exactly 2 rounds apart" in statement["words"]


def test_the_ledger_is_explained(tmp_path, given):
    from niss.cli.account import _notes

    config = small_config(methods=[{"carry": True}], privacy={"epsilon": 8.0, "clip": 1.0})
    niss.run(config, out=tmp_path / "run", **given)
    notes = " ".join(_notes(LedgerFile.read(tmp_path / "run" / "ledger.jsonl"), None))
    assert "adds to mu^2 over the whole committed run of 4 rounds" in notes
    assert "exactly 2 rounds apart" in notes


def test_a_single_round_of_it_is_no_target_of_an_attack():
    from niss.attacks.rounds import simulate_round

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
    run = small_config(methods=[{"name": "niss-carried"}]).plan(
        small_config(methods=[{"name": "niss-carried"}]).methods[0]
    ).committed(6)  # fmt: skip
    with pytest.raises(PrivacyError, match="comes 1 after round 0"):
        run.charge(1, [0])
    with pytest.raises(PrivacyError, match="past the committed end"):
        run.charge(4, [0, 2])
    with pytest.raises(PrivacyError, match="past the committed end"):
        run.cost(4, [])
