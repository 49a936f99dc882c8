"""The rivals in whole runs: noise measured over rounds, claims recomputed without the package, and what they say."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

import niss
from niss.mechanism import gdp_mu
from niss.mechanism.noise import correlated_noise
from niss.methods import METHODS
from niss.randomness import SimStream
from support.federation import WideRun, small_config

CLIENTS, COHORT, ROUNDS = 6, 2, 7
COORDINATES = 400 * 50 + 50
# Six deviations of a mean of squares over all coordinates: a false alarm has a probability of 2e-9.
CLOSE = 6.0 * math.sqrt(2.0 / COORDINATES)


def wide_run(monkeypatch, method: dict, training: dict | None = None, **changes):
    """A run whose clients learn next to nothing, and the noise that each of its rounds added to the model."""
    training = {"sampling": "shuffled", **(training or {})}
    wide = WideRun(monkeypatch, method, clients=CLIENTS, cohort=COHORT, training=training, **changes)
    return wide.result, wide.added


def banded(bands: int, strategy: str = "optimised") -> np.ndarray:
    """The covariance, up to its scale, of noise that has so many bands."""
    if strategy == "optimised":
        inverse = correlated_noise(ROUNDS, 3, bands).inverse
        return inverse @ inverse.T
    coefficients = [math.comb(2 * lag, lag) / 4.0**lag for lag in range(bands)]
    matrix = sum(c * np.eye(ROUNDS, k=-lag) for lag, c in enumerate(coefficients))
    return np.linalg.inv(matrix.T @ matrix)


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ({"name": "central-mf"}, banded(3)),
        ({"name": "central-mf", "bands": 2}, banded(2)),
        ({"name": "central-mf", "strategy": "square-root"}, banded(3, "square-root")),
    ],
    ids=["banded", "fewer bands", "square root"],
)
def test_correlated_noise_has_its_covariance_and_costs_what_is_claimed(monkeypatch, method, shape):
    """The covariance over all rounds, drawn and measured, and mu of every cohort from it; three rounds apart."""
    result, noise = wide_run(monkeypatch, method)
    measured = noise @ noise.T / COORDINATES
    scale2 = measured[0, 0] / shape[0, 0]
    tolerance = CLOSE * scale2 * np.sqrt(np.outer(np.diag(shape), np.diag(shape)))
    assert np.all(np.abs(measured - scale2 * shape) < 2.0 * tolerance)

    moved, budget = 0.5 / COHORT, gdp_mu(3.0, 1e-5)
    precision = np.linalg.inv(measured)
    for first in range(3):
        pattern = list(range(first, ROUNDS, 3))
        cost = moved**2 * precision[np.ix_(pattern, pattern)].sum()
        cohort = [client for client in result.statement.clients if client.participations == len(pattern)]
        claimed = [client.mu_joint**2 for client in cohort]
        assert any(math.isclose(cost, mu2, rel_tol=0.1) for mu2 in claimed)
        assert cost <= budget**2 * 1.1
    most = max(client.mu_joint for client in result.statement.clients)
    assert most <= budget * (1.0 + 1e-9)
    assert most == pytest.approx(budget, rel=1e-6)
    assert result.epsilon == pytest.approx(3.0, rel=1e-6)
    for line in result.rounds:
        assert line.aggregate_variance == pytest.approx(line.aggregate_variance_predicted, rel=CLOSE)


def test_correlated_noise_leaves_less_in_the_model_than_independent_noise(monkeypatch):
    finals = {}
    for name in ("central-dp", "central-mf"):
        result, noise = wide_run(monkeypatch, {"name": name})
        finals[name] = float(np.mean(noise.sum(axis=0) ** 2))
        assert result.epsilon <= 3.0 * (1.0 + 1e-9)
    assert finals["central-mf"] < 0.75 * finals["central-dp"]


def test_the_outsider_of_correlated_noise_is_not_counted_round_by_round(monkeypatch):
    """A round alone carries much noise that another takes out again: its multiplier must not be composed."""
    result, _ = wide_run(monkeypatch, {"name": "central-mf"})
    assert result.statement.epsilon_outsider == result.statement.epsilon_joint == pytest.approx(3.0)


def test_secret_sampling_claims_what_dp_accounting_finds(monkeypatch):
    result, noise = wide_run(
        monkeypatch,
        {"name": "central-dp-sampled"},
        training={"participants": 3},
    )
    assert len({line.participants for line in result.rounds}) > 1
    deviation = math.sqrt(result.rounds[0].aggregate_variance_predicted)
    accountant = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(deviation / (0.5 / 3)))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, ROUNDS))
    assert result.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert 2.99 < result.epsilon <= 3.0
    assert np.mean(noise**2, axis=1) == pytest.approx(np.full(ROUNDS, deviation**2), rel=CLOSE)

    statement = result.statement
    assert "does not learn who took part" in statement.adversary
    assert "over 7 rounds that each draw a client in secret with probability 0.5" in statement.words
    assert statement.budget_epsilon is None
    (known,) = (caveat for caveat in statement.caveats if "knows who took part" in caveat)
    assert float(known.split("epsilon = ")[1].split()[0]) > 3.0
    assert all(client.mu_joint is None for client in statement.clients)


def test_a_secret_draw_may_find_nobody(given):
    """Two of twelve on average: of 40 rounds some are empty, and release noise like the others."""
    config = small_config(
        rounds=40,
        training={"participants": 2, "epochs": 1, "batch_size": 4, "learning_rate": 0.1},
        privacy={"epsilon": 8.0, "clip": 1.0},
        methods=[{"name": "central-dp-sampled"}],
    )
    stream = SimStream(config.seed).child("participants")
    sizes = [int((stream.child("poisson", t).generator().random(12) < 1 / 6).sum()) for t in range(40)]
    assert 0 in sizes
    result = niss.run(config, **given)
    assert [line.participants for line in result.rounds] == [max(size, 1) for size in sizes]
    assert len({line.aggregate_variance_predicted for line in result.rounds}) == 1


def test_secure_aggregation_loses_rounds_below_its_threshold(monkeypatch):
    result, noise = wide_run(
        monkeypatch,
        {"name": "secagg-ddg", "threshold": 5},
        rounds=7,
        training={"participants": 6},
        privacy={"epsilon": 3.0, "clip": 0.5, "collusion": 1 / 6, "dropout": 0.2},
    )
    lost = [line for line in result.rounds if line.dropped > 1]
    assert lost
    assert [line.void for line in result.rounds] == [line.dropped > 1 for line in result.rounds]
    own = (0.5 / 6 / (gdp_mu(3.0, 1e-5) / math.sqrt(7))) ** 2
    for line, added in zip(result.rounds, noise, strict=True):
        arrived = 6 - line.dropped
        expected = 0.0 if line.void else own / 4 * arrived * (6 / arrived) ** 2
        assert np.mean(added**2) == pytest.approx(expected, rel=CLOSE, abs=1e-15)
    assert {client.participations for client in result.statement.clients} == {7}
    assert any(f"{len(lost)} round" in caveat and "lost" in caveat for caveat in result.statement.caveats)
    assert "up to 16.7 % of a round's participants" in result.statement.adversary
    assert result.epsilon == pytest.approx(3.0)


def test_secure_aggregation_plans_for_the_dropout_rate():
    def plan(**trust):
        config = small_config(
            data={"clients": 100},
            training={"participants": 100, "epochs": 1, "batch_size": 4, "learning_rate": 0.1},
            privacy={"epsilon": 20.0, "clip": 1.0, **trust},
            methods=[{"name": "secagg-ddg"}],
        )
        return config.plan(config.methods[0])

    assert plan().kind.own["threshold"] is None
    assert 65 < plan(dropout=0.1).kind.own["threshold"] < 85


def test_all_methods_are_compared_on_the_same_clients(tmp_path, given):
    from niss.report import read_report_input, summary_rows

    config = small_config(
        privacy={"epsilon": 8.0, "clip": 1.0},
        methods=[{"name": name, "neighbours": 3} for name in METHODS],
    )
    comparison = niss.compare(config, **given, out=tmp_path / "all")
    for result in comparison:
        private = METHODS[result.method].private
        assert (result.epsilon is not None) == private
        if private:
            assert 7.92 < result.epsilon <= 8.0 * (1 + 1e-9)
        if result.method in ("dp-fedavg", "central-dp", "niss"):
            assert {client.participations for client in result.statement.clients} == {2}
    _, rows = summary_rows(read_report_input(tmp_path / "all"))
    assert len(rows) == len(METHODS)
