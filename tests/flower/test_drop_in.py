"""The two lines: messages, evaluation, metrics and noise of a run; that the model is as without is in `test_matrix`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    PrivacySpent,
    RdpAccountant,
    SamplingMethod,
)
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from flower.grid import (
    FIRST,
    PRIVATE,
    WITHOUT_NOISE,
    FakeGrid,
    global_model,
    make_app,
    play,
    values,
)
from niss.accounting import Plan
from niss.errors import ConfigError, PrivacyError
from niss.flower import NissMod, NissStrategy, niss_mod


def test_one_message_a_round_and_one_enrolment_a_run():
    grid = FakeGrid()
    play(grid, 3, plan=PRIVATE)
    stages = [message.content["niss"]["stage"] for message in grid.sent]
    assert stages == ["enrol"] * 6 + ["round"] * 18


def test_evaluation_that_is_opened_passes_untouched():
    grid = FakeGrid(app=make_app([NissMod(allow=("evaluate",))]))
    strategy, result = play(grid, 1, FedAvg(), plan=PRIVATE)
    assert any("Metrics of `evaluate` travel in the clear" in one for one in strategy.statement.caveats)
    nodes = [(FIRST + number) % 1000 for number in range(6)]
    assert result.evaluate_metrics_clientapp[1]["node"] == pytest.approx(np.mean(nodes))


def test_metrics_travel_only_where_the_client_says_so_and_the_statement_tells():
    open_app = make_app([NissMod(clear_metrics=("loss", "num-examples-not-this"))])
    strategy, result = play(FakeGrid(app=open_app), 1, plan=PRIVATE)
    assert result.train_metrics_clientapp[1]["loss"] == 0.5
    assert any("in the clear" in caveat and "loss" in caveat for caveat in strategy.statement.caveats)


def test_the_noise_is_there_and_as_large_as_reported():
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=replace(PRIVATE, neighbours=5.0))
    model = ArrayRecord([np.zeros(4000, dtype=np.float64)])
    result = strategy.start(FakeGrid(app=_unmoved_app()), model, num_rounds=1, timeout=1)
    seen = values(result.arrays).std()
    assert strategy.rounds[0].noise.variance ** 0.5 == pytest.approx(seen, rel=0.1)
    spent = float(PRIVATE.round_mu(np.zeros(1, dtype=np.int64))[0])
    assert strategy.statement.clients[0].mu_joint == pytest.approx(spent, rel=0.05)


def test_what_was_spent_has_the_shape_of_flowers_own_accountant():
    """Code written for Flower's strategies with an accountant reads these fields after each round."""
    seen = []

    class Watching(FedAvg):
        def aggregate_train(self, server_round, replies):
            if server_round:  # Before the first it is tried on made-up replies.
                seen.append(strategy.privacy_spent())
            return super().aggregate_train(server_round, replies)

    strategy = NissStrategy(Watching(fraction_evaluate=0.0), plan=PRIVATE)
    before = strategy.privacy_spent()
    assert isinstance(before, PrivacySpent)
    assert (before.epsilon, before.delta, before.num_releases) == (0.0, PRIVATE.delta, 0)
    strategy.start(FakeGrid(), global_model(), num_rounds=3, timeout=1)
    assert [spent.num_releases for spent in seen] == [1, 2, 3]
    assert 0.0 < seen[0].epsilon < seen[1].epsilon < seen[2].epsilon <= PRIVATE.epsilon
    after = strategy.privacy_spent()
    assert after == seen[2]
    assert (after.epsilon, after.delta) == (strategy.statement.epsilon_joint, strategy.statement.delta)
    # Flower's own accountant, told of the noise of each round, bounds the same from above, and not by much.
    config = PrivacyConfig(
        after.delta, 6, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    )
    accountant = RdpAccountant(config)
    for record in strategy.rounds:
        accountant.compose(GaussianPrivacyEvent(1.0 / record.mu_joint, 6, 6))
    assert after.epsilon <= accountant.get_privacy_spent().epsilon <= 1.1 * after.epsilon


@pytest.mark.parametrize("after", [False, True])
def test_where_nothing_is_promised_nothing_is_said_to_be_spent(after):
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=WITHOUT_NOISE)
    if after:
        strategy.start(FakeGrid(), global_model(), num_rounds=1, timeout=1)
    assert strategy.privacy_spent() is None


@pytest.mark.parametrize(
    "inner",
    [
        flower.FedMedian,
        flower.FedTrimmedAvg,
        flower.Krum,
        flower.MultiKrum,
        flower.Bulyan,
        lambda: flower.QFedAvg(client_learning_rate=0.1),
        flower.FedXgbBagging,
        lambda: flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 3),
    ],
)
def test_strategies_that_do_not_average_are_refused_with_a_reason(inner):
    with pytest.raises(ConfigError, match=r"cannot be used: .+") as caught:
        NissStrategy(inner(), plan=PRIVATE)
    assert "FedAvg" in caught.value.hint


def test_a_plan_the_protocol_cannot_carry_out_is_refused():
    with pytest.raises(ConfigError, match=r"plan\.distortion"):
        NissStrategy(FedAvg(), plan=Plan(distortion="scalar", tau2=0.0))
    with pytest.raises(PrivacyError, match="a repair needs 3 of 4 participants, but 30% drop out"):
        NissStrategy(FedAvg(), plan=replace(PRIVATE, mode="repair", dropout=0.3), participants=4)


def _unmoved_app() -> ClientApp:
    app = ClientApp(mods=[niss_mod])

    @app.train()
    def train(message, context):  # noqa: ARG001
        metrics = MetricRecord({"num-examples": 3})
        return Message(
            RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message
        )

    return app
