"""Runs with carried shares through the real protocol, in one process."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

import niss
from niss.errors import RunFolderError
from niss.randomness import SimStream
from niss.simulation.exchange import Played
from support.federation import small_config

CLIENTS, COHORT, ROUNDS, APART, WIDTH = 12, 4, 7, 3, 40
TRAINING = {
    "participants": COHORT,
    "sampling": "cyclic",
    "epochs": 1,
    "batch_size": 10,
    "learning_rate": 1e-9,
}


def data() -> list[tuple[np.ndarray, np.ndarray]]:
    generator = SimStream(1).generator()
    return [
        (generator.standard_normal((3, WIDTH), dtype=np.float32), np.array([0, 1, 2])) for _ in range(CLIENTS)
    ]


def played(out=None, method: dict | None = None, **changes) -> niss.RunResult:
    settings = {
        "rounds": ROUNDS,
        "exchange": "protocol",
        "data": {"clients": CLIENTS},
        "training": TRAINING,
        "privacy": {"epsilon": 3.0, "clip": 0.5},
        **changes,
        "methods": [{"name": "niss-carried", **(method or {})}],
    }
    rows = data()
    return niss.run(small_config(**settings), model=nn.Linear(WIDTH, 50), clients=rows, test=rows[0], out=out)


@pytest.mark.parametrize(
    "method",
    [{}, {"closing": True}],
    ids=["plain", "closing"],
)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_a_run_costs_and_leaves_what_the_simulated_one_does(method: dict, optimizer: str) -> None:
    """The same noise, planned with the part of delta that pays for the grid; measured within six deviations."""
    how = {"method": method, "training": TRAINING | {"server_optimizer": optimizer}}
    real, simulated = played(**how), played(**how, exchange="simulated")
    assert real.statement.epsilon_joint <= 3.0 * (1 + 1e-9)
    assert real.statement.epsilon_joint == pytest.approx(simulated.statement.epsilon_joint, rel=1e-3)
    coordinates = 50 * (WIDTH + 1)
    for line, other in zip(real.rounds, simulated.rounds, strict=True):
        assert line.exact
        assert line.model_noise_variance == pytest.approx(other.model_noise_variance, rel=0.01)
        assert line.mu_joint == pytest.approx(other.mu_joint, rel=0.01)
        assert line.mu_marginal == pytest.approx(other.mu_marginal, rel=0.01)
        measured, predicted = line.aggregate_variance, line.aggregate_variance_predicted
        assert predicted == pytest.approx(other.aggregate_variance_predicted, rel=0.01)
        assert abs(measured / predicted - 1.0) < 6.0 * np.sqrt(2.0 / coordinates)
    assert f"{ROUNDS} committed rounds" in real.statement.adversary
    assert f"{APART} rounds apart" in real.statement.adversary
    assert any("cost at most" in caveat for caveat in real.statement.caveats)


def test_who_drops_out_leaves_noise_and_is_told_of() -> None:
    """Lost clients leave both their shares within the round and those carried to or from them; all of it is counted."""
    result = played(protocol={"dropout": 0.3}, seed=3)
    coordinates = 50 * (WIDTH + 1)
    lost = sum(line.dropped for line in result.rounds)
    assert lost > 0
    for line in result.rounds:
        measured, predicted = line.aggregate_variance, line.aggregate_variance_predicted
        assert abs(measured / predicted - 1.0) < 6.0 * np.sqrt(2.0 / coordinates)
    assert not all(line.exact for line in result.rounds)
    assert any("noise that should have cancelled" in caveat for caveat in result.statement.caveats)
    assert result.statement.epsilon_joint <= 3.0 * (1 + 1e-9)


def test_clients_that_come_back_at_different_times_pay_for_what_they_did() -> None:
    training = {**TRAINING, "sampling": "uniform", "separation": 2}
    result = played(training=training)
    spent = {client.mu_joint for client in result.statement.clients if client.participations}
    assert len(spent) > 2
    assert result.statement.epsilon_joint <= 3.0 * (1 + 1e-9)


def test_a_run_that_was_stopped_is_not_played_on_with_other_keys(tmp_path, monkeypatch) -> None:
    """The next cohort subtracts with keys that were announced before: without them the noise would stay unseen."""
    from niss.simulation.method_run import MethodRun

    record = MethodRun.record

    def stopping(run, result, seconds):
        record(run, result, seconds)
        if result.record.round == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MethodRun, "record", stopping)
        with pytest.raises(KeyboardInterrupt):
            played(tmp_path / "run")
    rows = data()
    with pytest.raises(RunFolderError, match="round 3 of a run whose noise is carried over"):
        niss.resume(tmp_path / "run", model=nn.Linear(WIDTH, 50), clients=rows, test=rows[0])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("method", [{}, {"closing": True}], ids=["", "closing"])
def test_what_dropouts_leave_is_repaired_as_in_the_simulated_run(method: dict, optimizer: str) -> None:
    """The same clients are lost in both: same charges, same noise; repaired within the round and one round later."""
    how = {"protocol": {"mode": "repair", "dropout": 0.15}, "seed": 4, "method": method}
    how["training"] = TRAINING | {"server_optimizer": optimizer}
    how["privacy"] = {"epsilon": 3.0, "clip": 0.5, "dropped": 2}
    real, simulated = played(**how), played(**how, exchange="simulated")
    assert real.statement.epsilon_joint <= 3.0 * (1 + 1e-9)
    coordinates = 50 * (WIDTH + 1)
    assert sum(line.dropped for line in real.rounds) > 2
    for line, other in zip(real.rounds, simulated.rounds, strict=True):
        assert line.dropped == other.dropped <= 2
        assert line.exact
        assert line.model_noise_variance == pytest.approx(other.model_noise_variance, rel=0.01)
        assert line.mu_joint == pytest.approx(other.mu_joint, rel=0.01)
        measured, predicted = line.aggregate_variance, line.aggregate_variance_predicted
        assert predicted == pytest.approx(other.aggregate_variance_predicted, rel=0.01)
        assert abs(measured / predicted - 1.0) < 6.0 * np.sqrt(2.0 / coordinates)


def test_without_fresh_noise_the_sum_of_a_run_is_plain_averaging_to_the_last_bit() -> None:
    plan = niss.Plan(
        method="niss-carried",
        graph="complete",
        clip=1.0,
        epsilon=3.0,
        kappa=2.0,
        tau2=0.0,
        horizon=5,
        participations=3,
        separation=2,
        participants=COHORT,
        on_grid=True,
    )
    exchange = Played(plan, rounds=5, participants=COHORT, coordinates=30, grid_bits=20)
    generator, whole, plain = SimStream(5).generator(), np.zeros(30), np.zeros(30)
    cohorts = [np.arange(4), np.arange(4, 8)]
    for number in range(5):
        # Multiples of the grid's step once they are averaged, so that rounding leaves them alone.
        steps = generator.integers(-(2**15), 2**15, (COHORT, 30))
        after = cohorts[(number + 1) % 2] if number < 4 else np.zeros(0, dtype=np.int64)
        total, record = exchange.exchange(
            number,
            cohorts[number % 2],
            lambda seat, steps=steps: steps[seat] * COHORT * 2.0**-20,
            following=after,
        )
        whole += total
        plain += steps.sum(axis=0) * 2.0**-20
        assert record.exact
        assert np.array_equal(whole, plain) == (number == 4)
