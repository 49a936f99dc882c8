"""The server's optimisers against torch and against the formulas of the paper, and what is said of noise with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import niss
from niss.methods import METHODS
from niss.randomness import SimStream
from niss.runs import SumNoise
from niss.simulation import with_overrides
from niss.simulation.method_run import MethodRun
from niss.simulation.server import FRESH, Optimizer
from support.federation import small_config

ROUNDS, SIZE = 12, 31


def sums() -> np.ndarray:
    """What the rounds of a run released; the last coordinate never moves."""
    found = SimStream(5).generator().standard_normal((ROUNDS, SIZE)) * np.logspace(-3, 1, SIZE)
    found[:, -1] = 0.0
    return found


def moved(optimizer: str, schedule: str = "constant", **settings: float) -> np.ndarray:
    """The models after every round, by the optimiser of the settings."""
    training = {
        "participants": 6,
        "server_optimizer": optimizer,
        "server_rate_schedule": schedule,
        **settings,
    }
    config = small_config(rounds=ROUNDS, training=training)
    server, state, models = (
        Optimizer.of(config.training, config.plan(config.methods[0]), config.rounds),
        FRESH,
        [np.zeros(SIZE)],
    )
    for number, total in enumerate(sums()):
        step, state = server.step(state, total, number, SumNoise())
        models.append(models[-1] + step)
    return np.stack(models[1:])


def by_torch(optimizer: torch.optim.Optimizer, weights: torch.Tensor) -> np.ndarray:
    models = []
    for total in sums():
        weights.grad = torch.from_numpy(-total)
        optimizer.step()
        models.append(weights.detach().numpy().copy())
    return np.stack(models)


def test_momentum_is_that_of_torch() -> None:
    weights = torch.zeros(SIZE, dtype=torch.float64, requires_grad=True)
    expected = by_torch(torch.optim.SGD([weights], lr=0.3, momentum=0.8), weights)
    found = moved("momentum", server_rate=0.3, server_momentum=0.8)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_momentum_zero_is_sgd() -> None:
    np.testing.assert_array_equal(
        moved("momentum", server_momentum=0.0, schedule="cosine"), moved("sgd", schedule="cosine")
    )


def test_adam_is_that_of_torch_without_the_correction_of_its_bias() -> None:
    """After a million steps torch corrects nothing; its moments are then set to where the paper starts."""
    weights = torch.zeros(SIZE, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05, betas=(0.7, 0.95), eps=0.01)
    optimizer.state[weights] = {
        "step": torch.tensor(1e6),
        "exp_avg": torch.zeros(SIZE, dtype=torch.float64),
        "exp_avg_sq": torch.full((SIZE,), 0.01**2, dtype=torch.float64),
    }
    found = moved("adam", server_rate=0.05, server_momentum=0.7, server_beta2=0.95, server_epsilon=0.01)
    np.testing.assert_allclose(found, by_torch(optimizer, weights), rtol=1e-12, atol=1e-15)


def test_yogi_is_the_formula_of_the_paper() -> None:
    rate, beta1, beta2, tau = 0.05, 0.7, 0.95, 0.01
    expected = np.zeros((ROUNDS, SIZE))
    for place in range(SIZE):
        x, m, v = 0.0, 0.0, tau**2
        for number, delta in enumerate(sums()[:, place]):
            m = beta1 * m + (1 - beta1) * delta
            v = v - (1 - beta2) * delta**2 * math.copysign(1.0, v - delta**2)
            x = x + rate * m / (math.sqrt(v) + tau)
            expected[number, place] = x
    found = moved("yogi", server_rate=rate, server_momentum=beta1, server_beta2=beta2, server_epsilon=tau)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "yogi"])
def test_the_defaults_are_those_of_the_paper_and_the_rate_falls_as_planned(optimizer: str) -> None:
    given = {"server_momentum": 0.9}
    if optimizer != "momentum":
        given |= {"server_beta2": 0.99, "server_epsilon": 1e-3}
    np.testing.assert_array_equal(moved(optimizer), moved(optimizer, **given))
    constant, falling = (
        np.diff(moved(optimizer, schedule), axis=0, prepend=0.0) for schedule in ("constant", "linear")
    )
    factors = 1.0 - np.arange(ROUNDS)[:, None] / ROUNDS
    np.testing.assert_allclose(falling, factors * constant, rtol=1e-9, atol=1e-12)


def test_two_sums_in_one_step_have_the_noise_of_both() -> None:
    """Against the covariance matrix of four rounds, of which the last two are added up."""
    root = SimStream(3).generator().standard_normal((4, 4))
    covariance = root @ root.T
    noises = [
        SumNoise(covariance[t, t], tuple(covariance[t, s] for s in reversed(range(t)))) for t in range(4)
    ]
    joined = noises[2].joined(noises[3])
    adding = np.array([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]])
    expected = adding @ covariance @ adding.T
    assert joined.variance == pytest.approx(expected[2, 2])
    assert joined.covariances == pytest.approx((expected[2, 1], expected[2, 0]))
    assert noises[2].joined(SumNoise(2.0)) == SumNoise(covariance[2, 2] + 2.0, noises[2].covariances)


class TestRuns:
    @pytest.mark.parametrize("optimizer", ["adam", "yogi"])
    @pytest.mark.parametrize("method", METHODS)
    def test_adaptive_optimisers_cost_nothing_and_predict_no_noise(self, given, method, optimizer) -> None:
        plain = small_config(
            methods=[{"name": method, "neighbours": 3}], privacy={"epsilon": 8.0, "clip": 1.0}
        )
        changes = {"training.server_optimizer": optimizer, "training.server_rate": 0.05}
        result, usual = niss.run(with_overrides(plain, changes), **given), niss.run(plain, **given)
        assert result.epsilon == usual.epsilon
        assert [line.model_noise_variance for line in result.rounds] == [None] * 4
        assert not any(line.carried_variance for line in result.rounds)
        warned = any("does not cancel exactly" in caveat for caveat in result.statement.caveats)
        assert warned == METHODS[method].correlates

    @pytest.mark.parametrize("optimizer", ["momentum", "adam", "yogi"])
    def test_engines_end_with_the_same_model(self, given, optimizer) -> None:
        config = with_overrides(
            small_config(), {"training.server_optimizer": optimizer, "training.server_rate": 0.05}
        )
        cohort, plain = (
            niss.run(with_overrides(config, {"training.engine": engine}), **given)
            for engine in ("cohort", "plain")
        )
        for name, tensor in cohort.state_dict.items():
            torch.testing.assert_close(tensor, plain.state_dict[name], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("optimizer", ["momentum", "adam"])
    def test_a_lost_round_moves_nothing(self, given, monkeypatch, optimizer) -> None:
        models, states = [], []
        record = MethodRun.record

        def recording(run, result, seconds):
            models.append(result.weights)
            states.append(result.server)
            record(run, result, seconds)

        monkeypatch.setattr(MethodRun, "record", recording)
        config = small_config(
            rounds=8,
            methods=[{"name": "secagg-ddg", "threshold": 5}],
            privacy={"epsilon": 20.0, "clip": 1.0, "dropout": 0.25},
            training={"participants": 6, "server_optimizer": optimizer, "server_rate": 0.1},
        )
        result = niss.run(config, **given)
        lost = [line.void for line in result.rounds]
        assert any(lost[1:]), "the seed loses some"
        assert not all(lost[1:]), "and keeps some"
        for number in range(1, 8):
            assert torch.equal(models[number], models[number - 1]) == lost[number]
            assert (states[number] is states[number - 1]) == lost[number]
