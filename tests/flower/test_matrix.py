"""Strategies, kinds of models and modes: at tau = 0 the result is that of the strategy alone, up to the grid.

Where noise is carried from round to round, that holds for the last model, and for strategies that add what they get.

The models are those of apps that people bring: plain weights, half precision, batch normalisation with its counter,
adapters beside a frozen base, the arrays of a linear model of scikit-learn. Whole numbers take no part of the clip: a
counter that moves by 7 in an update of norm 5 would let the weights stand nearly still.
"""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi

from flower.grid import FakeGrid, arrays
from niss.accounting import Plan
from niss.flower import NissStrategy, niss_mod

ROUNDS, NODES = 3, 5
STRATEGIES = {
    "FedAvg": lambda **options: FedAvg(**options),
    "FedProx": lambda **options: FedProx(proximal_mu=0.1, **options),
    "FedAvgM": lambda **options: FedAvgM(server_learning_rate=0.5, server_momentum=0.9, **options),
    "FedAdam": lambda **options: FedAdam(eta=0.01, **options),
    "FedYogi": lambda **options: FedYogi(eta=0.01, **options),
    "FedAdagrad": lambda **options: FedAdagrad(eta=0.01, **options),
}
MODELS = {
    "float32": {"dense": ((3, 4), "float32"), "bias": ((4,), "float32")},
    "float64 of scikit-learn": {"coef": ((3, 5), "float64"), "intercept": ((3,), "float64")},
    "float16": {"dense": ((3, 4), "float16"), "bias": ((), "float16")},
    "batch normalisation": {
        "conv.weight": ((2, 3), "float32"),
        "bn.running_mean": ((2,), "float32"),
        "bn.running_var": ((2,), "float32"),
        "bn.num_batches_tracked": ((), "int64"),
    },
    "adapters": {"lora_A.weight": ((2, 6), "float32"), "lora_B.weight": ((6, 2), "float32")},
}
MODES = ("tolerate", "repair")


def initial(model: str) -> ArrayRecord:
    rng = np.random.default_rng(3)
    return arrays(
        {
            name: np.asarray(rng.normal(size=shape) if dtype != "int64" else 0).astype(dtype)
            for name, (shape, dtype) in MODELS[model].items()
        }
    )


def make_app(model: str, mods: list) -> ClientApp:
    """Adds to each array a step that depends on node and round alone; counts batches in whole numbers.

    With NISS it checks what arrives, reports numbers of examples that must not matter, and every other node gives the
    arrays back in another order.
    """
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        now = int(message.content["config"]["server-round"])
        rng = np.random.default_rng([context.node_id % 1000, now])
        moved = {}
        for name, array in message.content["arrays"].items():
            before = array.numpy()
            step = 7 if before.dtype.kind == "i" else 0.05 * rng.normal(size=before.shape)
            moved[name] = np.asarray(before + step).astype(before.dtype)
            assert not mods or str(before.dtype) == MODELS[model][name][1]
        if mods and context.node_id % 2:
            moved = dict(reversed(moved.items()))
        metrics = MetricRecord({"num-examples": 10 + context.node_id % 7 if mods else 1})
        return Message(RecordDict({"arrays": arrays(moved), "metrics": metrics}), reply_to=message)

    return app


def alone(strategy: str, model: str, grid: FakeGrid | None = None) -> ArrayRecord:
    """What the strategy makes of it without NISS; whole numbers are dropped, since it would make floats of them."""
    floats = ArrayRecord({name: one for name, one in initial(model).items() if "int" not in one.dtype})
    plain = STRATEGIES[strategy](fraction_evaluate=0.0)
    grid = FakeGrid(NODES, app=make_app(model, [])) if grid is None else grid
    return plain.start(grid, floats, num_rounds=ROUNDS, timeout=1).arrays


class InTurns(FakeGrid):
    """Shows one cohort a round."""

    def __init__(self, cohorts: list[set[int]], nodes: int) -> None:
        super().__init__(nodes, app=make_app("", []))
        self._cohorts = cohorts

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if node in self._cohorts[0]]

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if messages:  # Not where nobody is asked to evaluate.
            self._cohorts = self._cohorts[1:]
        return super().send_and_receive(messages, timeout=timeout)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", [name for name in MODELS if name != "float16"])
@pytest.mark.parametrize("strategy", ["FedAvg", "FedProx"])
def test_the_last_model_of_a_carried_run_is_that_of_the_strategy_alone(strategy, model, mode):
    """Half precision is left out: the models in between are noisy, and it has no digits left for what cancels."""
    plan = Plan(tau2=0.0, clip=5.0, separation=2, mode=mode)
    wrapped = NissStrategy(STRATEGIES[strategy](fraction_evaluate=0.0), plan=plan, carry=True)
    grid = FakeGrid(2 * NODES, app=make_app(model, [niss_mod]))
    together = wrapped.start(grid, initial(model), num_rounds=ROUNDS, timeout=1).arrays
    asked = [message for message in grid.sent if message.content["niss"]["stage"] == "round"]
    cohorts = [
        {message.metadata.dst_node_id for message in asked[NODES * number :][:NODES]}
        for number in range(ROUNDS)
    ]
    assert [len(one) for one in cohorts] == [NODES] * ROUNDS
    noise = max(one.carried_variance**0.5 for one in wrapped.rounds)
    for name, expected in alone(strategy, model, InTurns(cohorts, 2 * NODES)).items():
        found = together[name].numpy()
        assert found.dtype == initial(model)[name].numpy().dtype
        # Beside the grid: the weights of the models in between are rounded where the noise has put them.
        allowed = NODES * 2.0**-24 + 2e-6 + 8 * ROUNDS * noise * np.finfo(found.dtype).eps
        assert allowed < 1e-4
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=allowed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_result_is_that_of_the_strategy_alone(strategy, model, mode):
    plan = Plan(tau2=0.0, clip=5.0, participations=ROUNDS, neighbours=4, mode=mode)
    wrapped = NissStrategy(STRATEGIES[strategy](fraction_evaluate=0.0), plan=plan)
    grid = FakeGrid(NODES, app=make_app(model, [niss_mod]))
    together = wrapped.start(grid, initial(model), num_rounds=ROUNDS, timeout=1).arrays
    assert [one.survivors for one in wrapped.rounds] == [NODES] * ROUNDS
    assert all(one.exact for one in wrapped.rounds)
    assert list(together) == list(MODELS[model])
    before = initial(model)
    for name, expected in alone(strategy, model).items():
        found, begun = together[name].numpy(), before[name].numpy()
        assert found.dtype == begun.dtype
        assert found.shape == begun.shape
        moved = np.abs(expected.numpy() - begun).max()
        assert moved > 1e-3
        # Adam and its kin divide by the root of small squares, which multiplies what grid and rounding cut off; half
        # precision has steps of 2^-10 of a weight around 1 to 4, one for each rounding of each round.
        allowed = NODES * 2.0**-24 + 2e-6 + (2e-3 * moved if strategy not in ("FedAvg", "FedProx") else 0.0)
        if begun.dtype == np.float16:
            allowed += 4 * ROUNDS * 2.0**-9
        np.testing.assert_allclose(found.astype(float), expected.numpy().astype(float), rtol=0, atol=allowed)
    for name, (_, dtype) in MODELS[model].items():
        if dtype == "int64":
            assert together[name].numpy() == before[name].numpy()
