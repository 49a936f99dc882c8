"""What a run says of an outsider is computed in the statement's own relation, from the noise that was in the sum."""

from __future__ import annotations

import math

import pytest
from scipy import optimize, stats

import niss
from niss.settings import to_values
from support.federation import small_config

RATE, SIZE, CLIP = 0.5, 6, 1.0
UNITS = [("client", "zero-out"), ("client", "replace-one")]


def config_of(unit: str, relation: str, sampling: str, method: dict[str, object], **more: object):
    training = {
        "participants": SIZE,
        "epochs": 1,
        "batch_size": 10,
        "learning_rate": RATE,
        "sampling": sampling,
    }
    privacy = {"unit": unit, "relation": relation, "epsilon": 5.0, "clip": CLIP}
    return small_config(training=training, privacy=privacy, methods=[method], **more)


def gaussian_epsilon(mu: float, delta: float = 1e-5) -> float:
    def spent(epsilon: float) -> float:
        tail = math.exp(epsilon + stats.norm.logcdf(-epsilon / mu - mu / 2))
        return float(stats.norm.cdf(-epsilon / mu + mu / 2) - tail)

    return float(optimize.brentq(lambda epsilon: spent(epsilon) - delta, 0.0, 500.0))


@pytest.mark.parametrize("sampling", ["shuffled", "uniform"])
@pytest.mark.parametrize(("unit", "relation"), UNITS)
def test_the_server_of_central_dp_and_the_outsider_are_told_the_same(
    given, unit: str, relation: str, sampling: str
) -> None:
    """Both claims are about someone who sees the released models; without amplification they are one number."""
    config = config_of(unit, relation, sampling, {"name": "central-dp"}, rounds=2)
    statement = niss.run(config, **given).statement
    assert statement.relation == relation
    assert statement.epsilon_joint is not None
    if sampling == "shuffled":
        assert statement.epsilon_outsider == pytest.approx(statement.epsilon_joint, rel=1e-6)
    assert statement.epsilon_outsider <= statement.epsilon_joint
    assert f"DP ({relation}) against" in statement.outsider


@pytest.mark.parametrize("method", ["dp-fedavg", "niss"])
@pytest.mark.parametrize(("unit", "relation"), UNITS)
def test_the_outsider_recomputed_from_the_noise_in_the_sum(
    given, unit: str, relation: str, method: str
) -> None:
    config = config_of(unit, relation, "shuffled", {"name": method, "neighbours": 3}, rounds=4)
    result = niss.run(config, **given)
    moved = {"zero-out": 1.0, "replace-one": 2.0}[relation] * CLIP / SIZE
    variances = sorted(line.aggregate_variance_predicted for line in result.rounds)
    # Every client is in two of the four rounds.
    mu = math.sqrt(sum(moved**2 / variance for variance in variances[:2]))
    found = result.statement.epsilon_outsider
    assert found <= result.statement.epsilon_joint
    assert found == pytest.approx(gaussian_epsilon(mu), rel=1e-6)
    for line in result.rounds:
        outsider = moved / math.sqrt(line.aggregate_variance_predicted)
        assert line.mu_outsider == pytest.approx(outsider, rel=1e-6)


def test_through_the_protocol_a_replacement_moves_the_sum_twice_as_far(given) -> None:
    method = {"name": "niss", "neighbours": 3}
    config = config_of("client", "replace-one", "shuffled", method, rounds=1, exchange="protocol")
    result = niss.run(config, **given)
    [line] = result.rounds
    mu = 2.0 * CLIP / SIZE / math.sqrt(line.aggregate_variance_predicted)
    assert line.mu_outsider == pytest.approx(mu)
    assert result.statement.epsilon_outsider == pytest.approx(gaussian_epsilon(mu), rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy": {"epsilon": [4.0 + 0.5 * k for k in range(12)], "clip": CLIP}},
        {"training": {"weights": "declared"}},
    ],
)
def test_clients_that_are_not_alike_get_no_credit_for_being_drawn_in_secret(given, changes) -> None:
    config = to_values(config_of("client", "zero-out", "uniform", {"name": "central-dp"}, rounds=2))
    for section, values in changes.items():
        config[section] |= values
    statement = niss.run(niss.make_config(config), **given).statement
    assert "differ" in statement.outsider


@pytest.mark.parametrize("distortion", ["scalar", "coordinate"])
def test_noise_that_is_no_gaussian_gets_no_number_from_its_variance(given, distortion: str) -> None:
    method = {"name": "niss", "neighbours": 3, "tau2": 0.5, "distortion": distortion}
    config = config_of("client", "zero-out", "shuffled", method, rounds=2)
    statement = niss.run(config, **given).statement
    assert statement.outsider is None
    assert statement.epsilon_outsider == statement.epsilon_joint
