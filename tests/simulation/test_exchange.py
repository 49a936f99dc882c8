"""The real protocol inside the simulator: the same sums, the same noise, dropouts survived."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import niss
from niss.accounting import forecast
from niss.claims import digits
from niss.errors import RunFolderError
from niss.mechanism import gdp_epsilon, gdp_mu
from niss.protocol.keys import LINKS_PER_ROUND
from niss.randomness import SimStream
from niss.runs import RoundRecord
from niss.simulation.method_run import MethodRun
from niss.simulation.uploads import Played
from support.federation import WideRun, exchange_of, killed, small_config

WIDTH = 40


def redrawn(plan: niss.Plan) -> niss.Plan:
    """The plan with as many attempts as a run has: about one graph in a hundred of so few clients is too dear."""
    return replace(plan, attempts=LINKS_PER_ROUND)


def noise_of(exchange: Played, members: int, coordinates: int, number: int = 0) -> np.ndarray:
    update = np.zeros(coordinates)
    summed = exchange.exchange(number, np.arange(members), lambda _seat: update)
    assert summed.record.exact
    return np.asarray(summed.total / np.sqrt(summed.record.aggregate_variance_predicted))


def test_protocol_noise_has_the_simulated_distribution() -> None:
    """Aggregate noise over its predicted deviation is standard normal; Kolmogorov-Smirnov at 1e-6.

    The simulated path is held to the same law by the statistical tests of `add_shares`.
    """
    plan = redrawn(forecast(participants=8, neighbours=3, clip=1.0, epsilon=3.0, kappa=2.0).plan)
    noise = noise_of(exchange_of(plan, rounds=1, coordinates=20_000), 8, 20_000)
    assert stats.kstest(noise, "norm").pvalue > 1e-6
    # 6 standard deviations of a sample variance of 20,000.
    assert abs(np.var(noise) - 1.0) < 0.06


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_without_distortion_the_sum_is_right_to_grid_precision(mode: str) -> None:
    plan = niss.Plan(clip=1.0, epsilon=3.0, neighbours=4, tau2=0.0, mode=mode, participations=2)
    exchange = exchange_of(plan, rounds=2, coordinates=50)
    updates = SimStream(2).generator().standard_normal((9, 50)) * 0.05
    absent = [] if mode == "tolerate" else [3]
    summed = exchange.exchange(0, np.arange(9), lambda seat: updates[seat], absent=absent)
    kept = [seat for seat in range(9) if seat not in absent]
    assert summed.record.exact
    assert np.abs(summed.total - updates[kept].sum(axis=0) / 9).max() < 9 * 2.0**-24


def test_clients_answer_round_after_round_with_fresh_prekeys() -> None:
    plan = forecast(participants=5, neighbours=3, clip=1.0, epsilon=3.0, kappa=1.0, participations=6).plan
    plan = redrawn(plan)
    exchange = exchange_of(plan, rounds=6, coordinates=300)
    noises = [noise_of(exchange, 5, 300, number) for number in range(6)]
    # Independent normal vectors of 300: correlations stay below 6 / sqrt(300).
    correlations = np.corrcoef(noises) - np.eye(6)
    assert np.abs(correlations).max() < 6 / np.sqrt(300)


def test_a_run_through_the_protocol_learns_and_keeps_its_promise(given) -> None:
    config = small_config(exchange="protocol")
    result = niss.run(config, **given)
    simulated = niss.run(small_config(), **given)
    assert result.statement.epsilon_joint <= 20.0 * (1 + 1e-9)
    assert result.summary["accuracy"] > 0.8
    ratio = result.summary["aggregate_variance_predicted"] / simulated.summary["aggregate_variance_predicted"]
    assert 1.0 <= ratio < 1.3
    caveats = " ".join(result.statement.caveats)
    assert "Rounding to the grid" in caveats
    assert "from the operating system's entropy" in caveats
    assert "comes from a seed" not in caveats


def test_metrics_hold_what_the_terms_of_the_round_were(given) -> None:
    """Without dropouts eta^2 is the m-th part of the sum's noise, tau^2 = eta^2 / (kappa sigma_k^2)."""
    config = small_config(exchange="protocol", methods=[{"name": "niss", "neighbours": 3, "kappa": 2.0}])
    plan = config.plan(config.methods[0])
    own = (1.0 / 6 / plan.round_mu(np.zeros(1, dtype=np.int64))[0]) ** 2
    result = niss.run(config, **given)
    for line in result.rounds:
        left = line.aggregate_variance_predicted
        assert line.tau2 == pytest.approx(left / 6 / (2.0 * own))
        assert line.mu_outsider == pytest.approx(1.0 / 6 / np.sqrt(left))
        assert line.mu_marginal == pytest.approx(1.0 / 6 / np.sqrt(2 * 2.0 * own + left / 6))
    assert result.summary["tau2"] == pytest.approx(np.mean([line.tau2 for line in result.rounds]))
    spent = [client.mu_marginal for client in result.statement.clients if client.participations]
    assert max(spent) <= np.sqrt(sum(line.mu_marginal**2 for line in result.rounds)) * (1 + 1e-9)


@pytest.mark.parametrize("epsilon", [3.0, 20.0])
def test_what_the_grid_costs_is_part_of_delta_and_told(given, epsilon: float) -> None:
    config = small_config(exchange="protocol", rounds=1, privacy={"epsilon": epsilon, "clip": 1.0})
    result = niss.run(config, **given)
    [note] = [caveat for caveat in result.statement.caveats if caveat.startswith("Rounding to the grid")]
    assert f"at most {digits(result.rounds[0].grid_delta, 2)} of delta, which is part of it" in note
    assert 0.0 < result.rounds[0].grid_delta <= 0.02 * 1e-5


def test_an_epsilon_too_large_for_the_sampler_is_refused(given) -> None:
    """What the sampler costs grows with e^epsilon: at 50 no part of delta would pay for it."""
    config = small_config(exchange="protocol", rounds=1, privacy={"epsilon": 50.0, "clip": 1.0})
    with pytest.raises(niss.errors.ConfigError, match="precise enough") as caught:
        niss.run(config, **given)
    assert "smaller epsilon" in str(caught.value.hint)


def test_who_drops_out_again_and_again_still_has_keys() -> None:
    plan = niss.Plan(clip=1.0, epsilon=3.0, neighbours=4, participations=6)
    exchange = exchange_of(plan, rounds=6, coordinates=5)
    for number in range(6):
        absent = [0] if number < 5 else []
        summed = exchange.exchange(number, np.arange(5), lambda _seat: np.zeros(5), absent=absent)
    assert summed.record.survivors == 5


def test_a_repair_beyond_what_was_planned_leaves_noise_and_says_so() -> None:
    plan = niss.Plan(clip=1.0, epsilon=3.0, neighbours=5, mode="repair", dropout=1e-4)
    assert plan.assumed(6).dropped == 1
    exchange = exchange_of(plan, rounds=1, coordinates=5)
    record = exchange.exchange(0, np.arange(6), lambda _seat: np.zeros(5), absent=[1, 2]).record
    assert exchange.session.round.summed.survivors == (0, 3, 4, 5)
    assert not record.exact
    residual = exchange.session.round.agreed.terms.residual_variance
    assert record.aggregate_variance_predicted > 4 * residual


def test_a_smaller_round_is_played_at_the_same_price() -> None:
    plan = niss.Plan(clip=1.0, epsilon=3.0, neighbours=5, graph="complete", participations=2)
    exchange = exchange_of(plan, rounds=2, coordinates=5)
    mus = [
        exchange.exchange(number, np.arange(size), lambda _seat: np.zeros(5)).record.mu_joint
        for number, size in enumerate((6, 4))
    ]
    assert mus == pytest.approx([plan.round_mu(np.zeros(1, dtype=np.int64))[0]] * 2)


def test_one_lost_upload_is_told_in_the_singular(given) -> None:
    config = small_config(
        exchange="protocol",
        rounds=1,
        seed=5,
        privacy={"epsilon": 20.0, "clip": 1.0, "dropout": 0.15},
        methods=[{"name": "niss", "neighbours": 5, "graph": "complete"}],
    )
    result = niss.run(config, **given)
    assert result.rounds[0].dropped == 1
    assert any(caveat.startswith("1 upload never arrived") for caveat in result.statement.caveats)
    assert any("In 1 round noise" in caveat for caveat in result.statement.caveats)


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_dropouts_are_survived_and_told(given, mode: str) -> None:
    config = small_config(
        exchange="protocol",
        rounds=3,
        training={"participants": 12, "epochs": 1, "batch_size": 4, "learning_rate": 0.1},
        privacy={"epsilon": 20.0, "clip": 1.0, "mode": mode, "dropout": 0.2},
        methods=[{"name": "niss", "neighbours": 11, "graph": "complete"}],
    )
    result = niss.run(config, **given)
    dropped = sum(line.dropped for line in result.rounds)
    assert dropped > 0
    assert any(f"{dropped} uploads never arrived" in caveat for caveat in result.statement.caveats)
    assert all(line.exact for line in result.rounds) == (mode == "repair")
    assert result.statement.epsilon_joint <= 20.0 * (1 + 1e-9)


def test_a_coarse_grid_is_refused(given) -> None:
    config = small_config(exchange="protocol", protocol={"grid_bits": 2})
    with pytest.raises(niss.errors.ConfigError, match="grid_bits"):
        niss.run(config, **given)


# Rounds that carry noise to one another.


def carried(monkeypatch, method: dict | None = None, exchange: str = "protocol", **changes) -> niss.RunResult:
    method = {"name": "niss-carried", **(method or {})}
    return WideRun(monkeypatch, method, width=WIDTH, exchange=exchange, **changes).result


def is_as_predicted(line: RoundRecord) -> bool:
    """The noise measured in the sum, within six deviations."""
    ratio = line.aggregate_variance / line.aggregate_variance_predicted
    return abs(ratio - 1.0) < 6.0 * np.sqrt(2.0 / (50 * (WIDTH + 1)))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("closing", [False, True], ids=["plain", "closing"])
@pytest.mark.parametrize("repairing", [False, True], ids=["whole", "repaired"])
def test_a_run_that_carries_noise_costs_and_leaves_what_the_simulated_one_does(
    monkeypatch, repairing: bool, closing: bool, optimizer: str
) -> None:
    """The same noise; a simulation has no grid to spend its part of delta on. The same clients are lost in both, and
    repaired within the round and one round later."""
    how: dict = {"training": {"server_optimizer": optimizer}}
    if repairing:
        how |= {"seed": 4, "privacy": {"epsilon": 3.0, "clip": 0.5, "mode": "repair", "dropout": 0.15}}
    real, simulated = (
        carried(monkeypatch, {"closing": closing}, exchange, **how) for exchange in ("protocol", "simulated")
    )
    assert real.statement.epsilon_joint <= 3.0 * (1 + 1e-9)
    assert (sum(line.dropped for line in real.rounds) > 2) == repairing
    for line, other in zip(real.rounds, simulated.rounds, strict=True):
        assert line.dropped == other.dropped <= 2
        assert line.exact
        for name in ("model_noise_variance", "mu_joint", "mu_marginal", "aggregate_variance_predicted"):
            assert getattr(line, name) == pytest.approx(getattr(other, name), rel=0.01)
        assert is_as_predicted(line)
    if not repairing:
        assert real.statement.epsilon_joint == pytest.approx(3.0, rel=1e-3)
        ungridded = gdp_epsilon(gdp_mu(3.0, 0.98e-5), 1e-5)
        assert simulated.statement.epsilon_joint == pytest.approx(ungridded, rel=1e-3)
    assert "7 committed rounds" in real.statement.adversary
    assert "3 rounds apart" in real.statement.adversary
    assert any("cost at most" in caveat for caveat in real.statement.caveats)


def test_who_drops_out_leaves_noise_and_is_told_of(monkeypatch) -> None:
    """Lost clients leave both their shares within the round and those carried to or from them; all of it is counted."""
    result = carried(monkeypatch, privacy={"epsilon": 3.0, "clip": 0.5, "dropout": 0.3}, seed=3)
    assert sum(line.dropped for line in result.rounds) > 0
    assert all(map(is_as_predicted, result.rounds))
    assert not all(line.exact for line in result.rounds)
    assert any("noise that should have cancelled" in caveat for caveat in result.statement.caveats)
    assert result.statement.epsilon_joint <= 3.0 * (1 + 1e-9)


def test_clients_that_come_back_at_different_times_pay_for_what_they_did(monkeypatch) -> None:
    result = carried(monkeypatch, training={"sampling": "uniform", "separation": 2})
    spent = {client.mu_joint for client in result.statement.clients if client.participations}
    assert len(spent) > 2
    assert result.statement.epsilon_joint <= 3.0 * (1 + 1e-9)


def test_a_run_that_was_stopped_is_not_played_on_with_other_keys(tmp_path, monkeypatch, given) -> None:
    """The next cohort subtracts with keys that were announced before: without them the noise would stay unseen."""
    config = small_config(exchange="protocol", methods=[{"name": "niss-carried"}])
    with killed(monkeypatch, MethodRun, "record", lambda run, *_: run.rounds_done == 2, after=True):
        niss.run(config, out=tmp_path / "run", **given)
    with pytest.raises(RunFolderError, match="round 3 of a run whose noise is carried over"):
        niss.resume(tmp_path / "run", **given)


def test_without_fresh_noise_the_sum_of_a_run_is_plain_averaging_to_the_last_bit() -> None:
    rounds = {"horizon": 5, "participations": 3, "separation": 2, "participants": 4}
    plan = niss.Plan(method="niss-carried", graph="complete", clip=1.0, kappa=2.0, tau2=0.0, **rounds)
    exchange = exchange_of(plan, rounds=5, participants=4, coordinates=30, grid_bits=20)
    generator, whole, plain = SimStream(5).generator(), np.zeros(30), np.zeros(30)
    cohorts = [np.arange(4), np.arange(4, 8)]
    for number in range(5):
        # Multiples of the grid's step once they are averaged, so that rounding leaves them alone.
        steps = generator.integers(-(2**15), 2**15, (4, 30))
        after = cohorts[(number + 1) % 2] if number < 4 else np.zeros(0, dtype=np.int64)
        summed = exchange.exchange(
            number,
            cohorts[number % 2],
            lambda seat, steps=steps: steps[seat] * 4 * 2.0**-20,
            following=after,
        )
        whole += summed.total
        plain += steps.sum(axis=0) * 2.0**-20
        assert summed.record.exact
        assert np.array_equal(whole, plain) == (number == 4)
