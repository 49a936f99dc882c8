"""The real protocol inside the simulator: the same sums, the same noise, dropouts survived."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from torch import nn

import niss
from niss.accounting import make_plan
from niss.simulation.exchange import ProtocolExchange
from support.federation import small_config


def noise_of(exchange: ProtocolExchange, members: int, coordinates: int, number: int = 0) -> np.ndarray:
    update = np.zeros(coordinates)
    played = exchange.play(number, np.arange(members), lambda _seat: update, charge=lambda _mu: None)
    assert played.outcome.exact
    return np.asarray(played.outcome.total / np.sqrt(played.predicted_variance))


def test_protocol_noise_has_the_simulated_distribution() -> None:
    """Aggregate noise over its predicted deviation is standard normal; Kolmogorov-Smirnov at 1e-6.

    The simulated path is held to the same law by the statistical tests of `add_shares`.
    """
    plan = make_plan(participants=8, neighbours=3, clip=1.0, epsilon=3.0, kappa=2.0).plan
    noise = noise_of(ProtocolExchange(plan, rounds=1, coordinates=20_000), 8, 20_000)
    assert stats.kstest(noise, "norm").pvalue > 1e-6
    # 6 standard deviations of a sample variance of 20,000.
    assert abs(np.var(noise) - 1.0) < 0.06


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_without_distortion_the_sum_is_right_to_grid_precision(mode: str) -> None:
    plan = niss.Plan(clip=1.0, epsilon=3.0, neighbours=4, tau2=0.0, revealed=4, dropped=2, participations=1)
    exchange = ProtocolExchange(plan, rounds=2, coordinates=50, mode=mode)
    updates = niss.SimStream(2).generator().standard_normal((9, 50)) * 0.05
    absent = [] if mode == "tolerate" else [3]
    played = exchange.play(
        0, np.arange(9), lambda seat: updates[seat], charge=lambda _mu: None, absent=absent
    )
    kept = [seat for seat in range(9) if seat not in absent]
    assert played.outcome.exact
    assert np.abs(played.outcome.total - updates[kept].sum(axis=0) / 9).max() < 9 * 2.0**-24


def test_clients_answer_round_after_round_with_fresh_prekeys() -> None:
    plan = make_plan(participants=5, neighbours=3, clip=1.0, epsilon=3.0, kappa=1.0).plan
    exchange = ProtocolExchange(plan, rounds=6, coordinates=300)
    noises = [noise_of(exchange, 5, 300, number) for number in range(6)]
    # Independent normal vectors of 300: correlations stay below 6 / sqrt(300).
    correlations = np.corrcoef(noises) - np.eye(6)
    assert np.abs(correlations).max() < 6 / np.sqrt(300)


def test_a_run_through_the_protocol_learns_and_keeps_its_promise(datasets, held_out, linear) -> None:
    config = small_config(exchange="protocol")
    result = niss.run(config, model=linear, clients=datasets, test=held_out)
    simulated = niss.run(small_config(), model=linear, clients=datasets, test=held_out)
    assert result.statement.epsilon_joint <= 50.0 * (1 + 1e-9)
    assert result.summary["accuracy"] > 0.8
    ratio = result.summary["aggregate_variance_predicted"] / simulated.summary["aggregate_variance_predicted"]
    assert 1.0 <= ratio < 1.3
    assert any("Rounding to the grid" in caveat for caveat in result.statement.caveats)


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_dropouts_are_survived_and_told(datasets, held_out, linear, mode: str) -> None:
    config = small_config(
        exchange="protocol",
        rounds=3,
        training={"participants": 12, "epochs": 1, "batch_size": 4, "learning_rate": 0.1},
        privacy={"epsilon": 50.0, "clip": 1.0, "revealed": 8, "dropped": 5},
        protocol={"mode": mode, "dropout": 0.2},
        methods=[{"name": "niss", "neighbours": 11, "graph": "complete"}],
    )
    result = niss.run(config, model=linear, clients=datasets, test=held_out)
    dropped = sum(line["dropped"] for line in result.metrics)
    assert dropped > 0
    assert any(f"{dropped} uploads never arrived" in caveat for caveat in result.statement.caveats)
    assert result.statement.epsilon_joint <= 50.0 * (1 + 1e-9)


def test_a_coarse_grid_and_an_unfit_setting_are_refused(datasets, held_out) -> None:
    config = small_config(exchange="protocol", protocol={"grid_bits": 2})
    with pytest.raises(niss.ConfigError, match="grid_bits"):
        niss.run(config, model=nn.Linear(5, 3), clients=datasets, test=held_out)
    with pytest.raises(niss.ConfigError, match="exchange"):
        small_config(protocol={"dropout": 0.1})
    with pytest.raises(niss.ConfigError, match="exchange"):
        small_config(exchange="protocol", training={"participants": 6, "weights": "declared"})
