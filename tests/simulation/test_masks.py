"""Runs with uniform masks: the residual noise alone is in the sum, and a round that cannot be repaired is void."""

from __future__ import annotations

import json

import numpy as np
import pytest

import niss
from niss.accounting import RoundPlan, forecast
from niss.attacks.rounds import simulate_round
from niss.errors import ConfigError, PrivacyError
from niss.methods import METHODS
from niss.randomness import SimStream
from niss.simulation.exchange import ProtocolExchange
from niss.simulation.uploads import HostUploads
from support.federation import small_config

MASKS = [{"name": "niss", "graph": "complete", "neighbours": 11, "shares": "uniform"}]
TWELVE = {"participants": 12, "epochs": 1, "batch_size": 4, "learning_rate": 0.1}
ROOMY = {"epsilon": 20.0, "clip": 1.0, "revealed": 2, "dropped": 2}


def a_round(size: int = 12, **changes: object) -> RoundPlan:
    settings = {"clip": 1.0, "graph": "complete", "shares": "uniform", "dropped": 3, "revealed": 3, **changes}
    return niss.Plan(**settings).for_round(  # type: ignore[arg-type]
        np.arange(size), weights=1.0 / size, records=1.0, beacon=bytes(32)
    )


def test_a_round_has_the_noise_of_ideal_secure_aggregation_and_no_more() -> None:
    plan = a_round(colluders=2)
    own = float(plan.own_variance[0])
    assert plan.aggregate_variance == pytest.approx(own * 12 / (12 - 2 - 3))
    np.testing.assert_allclose(plan.joint_variance, own)
    assert np.all(np.isinf(plan.marginal_variance))
    rows = HostUploads(np.zeros((12, 40_000)))
    plan.plan.kind.add_client_noise(rows, plan, SimStream(5))
    # Six deviations of a sample variance of that many.
    measured = np.var(rows.rows().sum(axis=0))
    assert measured == pytest.approx(plan.aggregate_variance, rel=6 * np.sqrt(2 / 40_000))


def test_whoever_needs_most_noise_decides() -> None:
    plan = a_round(epsilon=tuple([1.0] + [3.0] * 11), dropped=0, revealed=0)
    assert plan.aggregate_variance == pytest.approx(float(plan.own_variance.max()))
    assert np.all(plan.joint_variance >= plan.own_variance * (1 - 1e-12))


def test_without_a_repair_nothing_comes_of_a_round_that_lost_a_client() -> None:
    kind, plan = METHODS["niss"], a_round()
    assert not kind.loses(plan, [])
    assert not kind.loses(plan, [1], repaired=True)
    assert kind.loses(plan, [1])
    assert not kind.loses(a_round(shares="gaussian"), [1])
    assert kind.left_over_variance(plan, [1, 2], repaired=True) == pytest.approx(
        10 / 12 * plan.aggregate_variance
    )


@pytest.mark.parametrize("exchange", ["simulated", "protocol"])
def test_a_run_leaves_its_model_alone_in_void_rounds_and_says_so(
    datasets, held_out, linear, exchange: str
) -> None:
    config = small_config(
        methods=MASKS,
        training=TWELVE,
        rounds=8,
        privacy=ROOMY | {"participations": 8},
        exchange=exchange,
        protocol={"dropout": 0.15, "mode": "repair"},
    )
    result = niss.run(config, model=linear, clients=datasets, test=held_out)
    void = [line for line in result.metrics if line.get("lost")]
    sound = [line for line in result.metrics if not line.get("lost")]
    # The seed of the simulation loses the same clients in either exchange: some rounds too many, some not.
    assert void
    assert sound
    assert all(line["dropped"] > 2 for line in void)
    assert all(line["dropped"] <= 2 and line.get("exact", True) for line in sound)
    for line in void:
        assert line["aggregate_variance"] == 0.0
        before = result.metrics[line["round"] - 2] if line["round"] > 1 else None
        if before is not None:
            assert (line["accuracy"], line["loss"]) == (before["accuracy"], before["loss"])
            assert line["model_noise_variance"] == before["model_noise_variance"]
    words = " ".join(result.statement.caveats)
    assert f"{len(void)} round" in words
    assert "uniform masks of clients that dropped out could not be taken out" in words
    assert "is void" in words
    assert "noise that should have cancelled" not in words
    # A void round is charged like any other.
    assert result.statement.epsilon_joint == pytest.approx(20.0, rel=0.05)
    json.dumps(result.summary, allow_nan=False)
    assert result.summary["kappa"] is None


def test_a_sound_round_of_the_protocol_has_the_noise_that_was_planned() -> None:
    plan = forecast(
        participants=8, clip=1.0, collusion=0.2, dropout=0.01, mode="repair", shares="uniform"
    ).plan
    exchange = ProtocolExchange(plan, rounds=1, coordinates=20_000, mode="repair")
    update = np.zeros(20_000)
    played = exchange.play(0, np.arange(8), lambda _seat: update, charge=lambda *_: None, absent=[3])
    assert played.outcome.exact
    assert played.tau2 == 0.0
    # 6 standard deviations of a sample variance of 20,000.
    assert np.var(played.outcome.total) == pytest.approx(played.predicted_variance, rel=0.06)
    planned = plan.for_round(np.arange(8), weights=1 / 8, records=1.0, beacon=bytes(32))
    assert played.predicted_variance == pytest.approx(7 / 8 * planned.aggregate_variance)


def test_masks_need_rounds_that_are_repaired() -> None:
    with pytest.raises(ConfigError, match="uniform masks leave no sum"):
        small_config(methods=MASKS, training=TWELVE)
    with pytest.raises(ConfigError, match="uniform"):
        small_config(methods=[MASKS[0] | {"tau2": 0.1}], training=TWELVE, protocol={"mode": "repair"})


def test_a_graph_too_sparse_to_be_connected_is_refused() -> None:
    with pytest.raises(PrivacyError, match="cut a client off"):
        a_round(200, graph="regular", neighbours=4.0, colluders=80)


def test_an_attack_on_single_uploads_has_nothing_to_look_at() -> None:
    plan = niss.Plan(clip=1.0, shares="uniform", graph="complete")
    with pytest.raises(ConfigError, match="no single one"):
        simulate_round(np.zeros((5, 4)), np.zeros(4), plan, stream=SimStream(1))
