"""What a model is made of survives the aggregation: dtypes, whole numbers, order; over several rounds."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAdam, FedAvg

from flower.grid import FakeGrid, arrays
from niss.accounting import Plan
from niss.flower import NissStrategy, niss_mod

ROUNDS = 3
WITHOUT_NOISE = Plan(tau2=0.0, clip=1.0, participations=ROUNDS, neighbours=3)


def counting_app(steps: int = 10) -> ClientApp:
    """An app with a counter of batches, as batch normalisation has one; it checks what arrives."""
    app = ClientApp(mods=[niss_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        values = {name: array.numpy() for name, array in message.content["arrays"].items()}
        assert {name: str(value.dtype) for name, value in values.items()} == {
            "weight": "float32",
            "half": "float16",
            "num_batches_tracked": "int64",
        }
        moved = {
            "num_batches_tracked": np.asarray(values["num_batches_tracked"] + steps),
            "half": values["half"] + np.float16(0.125),
            "weight": values["weight"] + np.float32(0.25),
        }
        if context.node_id % 2:
            moved = dict(reversed(moved.items()))
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays(moved), "metrics": metrics}), reply_to=message)

    return app


def model() -> ArrayRecord:
    return arrays(
        {
            "weight": np.zeros(4, dtype=np.float32),
            "half": np.zeros(2, dtype=np.float16),
            "num_batches_tracked": np.array(7, dtype=np.int64),
        }
    )


@pytest.mark.parametrize("inner", [FedAvg, FedAdam, flower.FedAvgM, flower.FedYogi, flower.FedAdagrad])
def test_whole_numbers_and_dtypes_are_the_same_in_every_round(inner):
    strategy = NissStrategy(inner(fraction_evaluate=0.0), plan=WITHOUT_NOISE)
    result = strategy.start(FakeGrid(app=counting_app()), model(), num_rounds=ROUNDS, timeout=1)
    assert list(result.arrays) == list(model())
    for name, before in model().items():
        assert result.arrays[name].numpy().dtype == before.numpy().dtype
        assert result.arrays[name].numpy().shape == before.numpy().shape
    assert result.arrays["num_batches_tracked"].numpy() == 7


def test_a_counter_takes_no_part_of_the_clip():
    """Ten batches a round would be 10 of an update of norm 10.02: the weights would stand nearly still."""
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=WITHOUT_NOISE)
    result = strategy.start(FakeGrid(app=counting_app()), model(), num_rounds=ROUNDS, timeout=1)
    np.testing.assert_allclose(result.arrays["weight"].numpy(), ROUNDS * 0.25, atol=1e-5)
    np.testing.assert_allclose(result.arrays["half"].numpy(), ROUNDS * 0.125, atol=1e-3)
