"""Apps as people bring them: with the two lines they end where they ended without, and with noise they still run.

The patterns are those of Flower's own examples, written anew on made-up data and without their frameworks: what a
strategy and a mod see of JAX or Keras is a list of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, Strategy
from torch import nn
from torch.nn import functional

from flower.grid import FakeGrid, values
from niss.accounting import Plan
from niss.flower import NissStrategy, niss_mod

NODES, ROUNDS, EXAMPLES, FEATURES, CLASSES = 4, 3, 60, 6, 3
EXACT = Plan(tau2=0.0, clip=100.0, participations=ROUNDS, neighbours=3)
PRIVATE = Plan(clip=5.0, epsilon=8.0, participations=ROUNDS, neighbours=3)
CENTRES = 2.0 * np.random.default_rng(1).normal(size=(CLASSES, FEATURES))


def data_of(node: int) -> tuple[np.ndarray, np.ndarray]:
    """Three classes around centres; node -1 has the test data."""
    rng = np.random.default_rng([5, node + 1])
    labels = rng.integers(0, CLASSES, EXAMPLES)
    return CENTRES[labels] + rng.normal(size=(EXAMPLES, FEATURES)), labels


def mine(context: Context) -> tuple[np.ndarray, np.ndarray]:
    return data_of(context.node_id % 100)


def answer(message: Message, arrays: ArrayRecord, **metrics: float) -> Message:
    content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": EXAMPLES, **metrics})}
    return Message(RecordDict(content), reply_to=message)


def softmax_step(weights: np.ndarray, bias: np.ndarray, data: tuple[np.ndarray, np.ndarray], steps: int = 20):
    """Gradient descent on the cross-entropy of a linear model, in place."""
    inputs, labels = data
    for _ in range(steps):
        scores = inputs @ weights + bias
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        chances[np.arange(len(labels)), labels] -= 1.0
        weights -= 0.1 * inputs.T @ chances / len(labels)
        bias -= 0.1 * chances.mean(axis=0)


def accuracy_of(weights: np.ndarray, bias: np.ndarray) -> float:
    inputs, labels = data_of(-1)
    return float(((inputs @ weights + bias).argmax(axis=1) == labels).mean())


@dataclass(frozen=True)
class Ported:
    """An app: how it trains, its first arrays, how good they are, and its strategy."""

    train: Callable[[Message, Context], Message]
    initial: Callable[[], ArrayRecord]
    accuracy: Callable[[ArrayRecord], float]
    strategy: Callable[[], Strategy] = lambda: FedAvg(fraction_evaluate=0.0)

    def app(self, mods: list[Any]) -> ClientApp:
        made = ClientApp(mods=mods)
        made.train()(self.train)
        return made


def _sklearn() -> Ported:
    """quickstart-sklearn: `coef_` [classes, features] and `intercept_` of a linear model, in float64, as a list."""

    def train(message: Message, context: Context) -> Message:
        coef, intercept = (one.copy() for one in message.content["arrays"].to_numpy_ndarrays())
        weights = coef.T.copy()
        softmax_step(weights, intercept, mine(context))
        return answer(message, ArrayRecord([np.ascontiguousarray(weights.T), intercept]), train_logloss=0.5)

    def accuracy(record: ArrayRecord) -> float:
        coef, intercept = record.to_numpy_ndarrays()
        return accuracy_of(coef.T, intercept)

    return Ported(train, lambda: ArrayRecord([np.zeros((CLASSES, FEATURES)), np.zeros(CLASSES)]), accuracy)


def _numpy() -> Ported:
    """quickstart-numpy: one array under a name of its own, Fortran-ordered, with a scalar beside it."""

    def train(message: Message, context: Context) -> Message:
        (whole,) = message.content["arrays"].to_numpy_ndarrays(keep_input=True)
        weights, bias = whole[:-1].astype(np.float64), whole[-1].astype(np.float64)
        softmax_step(weights, bias, mine(context))
        moved = np.asfortranarray(np.vstack([weights, bias]).astype(np.float32))
        return answer(message, ArrayRecord([moved]))

    def accuracy(record: ArrayRecord) -> float:
        (whole,) = record.to_numpy_ndarrays()
        return accuracy_of(whole[:-1], whole[-1])

    first = np.zeros((FEATURES + 1, CLASSES), dtype=np.float32, order="F")
    return Ported(train, lambda: ArrayRecord([first]), accuracy)


def _jax() -> Ported:
    """quickstart-jax: a tree of parameters whose leaves travel as a list and are put back by their place."""

    def leaves(tree: dict[str, dict[str, np.ndarray]]) -> list[np.ndarray]:
        return [tree[layer][name] for layer in sorted(tree) for name in sorted(tree[layer])]

    def tree_of(values: list[np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
        return {
            "dense": {"bias": values[0].copy(), "kernel": values[1].copy()},
            "scale": {"s": values[2].copy()},
        }

    def train(message: Message, context: Context) -> Message:
        tree = tree_of(message.content["arrays"].to_numpy_ndarrays())
        weights, bias = (tree["dense"][name].astype(float) for name in ("kernel", "bias"))
        softmax_step(weights, bias, mine(context))
        tree["dense"] = {"bias": bias.astype(np.float32), "kernel": weights.astype(np.float32)}
        tree["scale"]["s"] += np.float32(0.25)
        return answer(message, ArrayRecord([np.asarray(leaf) for leaf in leaves(tree)]))

    def initial() -> ArrayRecord:
        shapes = ((CLASSES,), (FEATURES, CLASSES), ())
        return ArrayRecord([np.zeros(shape, dtype=np.float32) for shape in shapes])

    def accuracy(record: ArrayRecord) -> float:
        dense = tree_of(record.to_numpy_ndarrays())["dense"]
        return accuracy_of(dense["kernel"], dense["bias"])

    return Ported(train, initial, accuracy)


def _keras() -> Ported:
    """quickstart-tensorflow: `get_weights()`, with the moving mean and variance of a batch normalisation among them."""

    def normal(inputs: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return (inputs - mean) / np.sqrt(variance + 1e-3)

    def train(message: Message, context: Context) -> Message:
        mean, variance, kernel, bias = (
            one.astype(np.float64) for one in message.content["arrays"].to_numpy_ndarrays()
        )
        inputs, labels = mine(context)
        mean += 0.5 * (inputs.mean(axis=0) - mean)
        variance += 0.5 * (inputs.var(axis=0) - variance)
        softmax_step(kernel, bias, (normal(inputs, mean, variance), labels))
        weights = [one.astype(np.float32) for one in (mean, variance, kernel, bias)]
        return answer(message, ArrayRecord(weights), accuracy=0.5)

    def initial() -> ArrayRecord:
        kernel = np.zeros((FEATURES, CLASSES), dtype=np.float32)
        first = np.zeros(FEATURES, dtype=np.float32), np.ones(FEATURES, dtype=np.float32)
        return ArrayRecord([*first, kernel, np.zeros(CLASSES, dtype=np.float32)])

    def accuracy(record: ArrayRecord) -> float:
        mean, variance, kernel, bias = record.to_numpy_ndarrays()
        inputs, labels = data_of(-1)
        return float(((normal(inputs, mean, variance) @ kernel + bias).argmax(axis=1) == labels).mean())

    return Ported(train, initial, accuracy)


def _network(norm: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        middle = [nn.BatchNorm1d(16)] if norm else []
        return nn.Sequential(nn.Linear(FEATURES, 16), *middle, nn.ReLU(), nn.Linear(16, CLASSES))


def _fit(model: nn.Module, data: tuple[np.ndarray, np.ndarray], rate: float, epochs: int = 3) -> None:
    inputs, labels = torch.from_numpy(data[0]).float(), torch.from_numpy(data[1])
    optimiser = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=rate)
    model.train()
    for _ in range(epochs):
        for chosen in torch.arange(len(labels)).split(20):
            optimiser.zero_grad()
            functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimiser.step()


@torch.no_grad()
def _named_rightly(model: nn.Module) -> float:
    inputs, labels = data_of(-1)
    model.eval()
    return float((model(torch.from_numpy(inputs).float()).argmax(dim=1).numpy() == labels).mean())


def _torch(norm: bool) -> Ported:
    """quickstart-pytorch and fl-tabular: a `state_dict`; with batch normalisation, its counter is a whole number."""

    def train(message: Message, context: Context) -> Message:
        model = _network(norm)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        _fit(model, mine(context), 0.1)
        return answer(message, ArrayRecord(model.state_dict()), train_loss=0.1)

    def accuracy(record: ArrayRecord) -> float:
        model = _network(norm)
        model.load_state_dict(record.to_torch_state_dict())
        return _named_rightly(model)

    return Ported(train, lambda: ArrayRecord(_network(norm).state_dict()), accuracy)


class Decaying(FedAvg):
    """advanced-pytorch: a strategy of one's own that lowers the rate over the rounds and keeps the best model."""

    kept: list[ArrayRecord]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        config["lr"] = 0.1 / server_round
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None:
            self.kept = [*getattr(self, "kept", []), arrays]
        return arrays, metrics


def _advanced() -> Ported:
    """advanced-pytorch: the rate comes with the message, and the last layer stays with the client, in its Context."""

    def shared(model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: one for name, one in model.state_dict().items() if name.startswith("0.")}

    def train(message: Message, context: Context) -> Message:
        model = _network(norm=False)
        own = context.state.get("last-layer")
        if own is not None:
            model.load_state_dict(own.to_torch_state_dict(), strict=False)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        _fit(model, mine(context), float(message.content["config"]["lr"]))
        head = {name: one for name, one in model.state_dict().items() if not name.startswith("0.")}
        context.state["last-layer"] = ArrayRecord(head)
        return answer(message, ArrayRecord(shared(model)))

    return Ported(
        train,
        lambda: ArrayRecord(shared(_network(norm=False))),
        lambda _record: 1.0,
        lambda: Decaying(fraction_evaluate=0.0),
    )


def _adam() -> Ported:
    """The PyTorch app under a strategy with a state of its own."""
    return Ported(
        *(getattr(_torch(norm=False), name) for name in ("train", "initial", "accuracy")),
        strategy=lambda: FedAdam(eta=0.05, fraction_evaluate=0.0),
    )


PORTED = {
    "sklearn": _sklearn(),
    "numpy": _numpy(),
    "jax": _jax(),
    "tensorflow": _keras(),
    "pytorch with batch normalisation": _torch(norm=True),
    "tabular": _torch(norm=False),
    "advanced pytorch": _advanced(),
    "adam": _adam(),
}


def run(ported: Ported, mods: list[Any], plan: Plan | None) -> tuple[ArrayRecord, Strategy]:
    inner = ported.strategy()
    strategy = inner if plan is None else NissStrategy(inner, plan=plan)
    result = strategy.start(
        FakeGrid(NODES, app=ported.app(mods)), ported.initial(), num_rounds=ROUNDS, timeout=1
    )
    return result.arrays, strategy


@pytest.mark.parametrize("name", PORTED)
def test_an_app_ends_where_it_ended_without_the_two_lines(name: str) -> None:
    ported = PORTED[name]
    alone, _ = run(ported, [], None)
    together, strategy = run(ported, [niss_mod], EXACT)
    assert isinstance(strategy, NissStrategy)
    assert [one.survivors for one in strategy.rounds] == [NODES] * ROUNDS
    before = ported.initial()
    assert list(together) == list(before)
    for key, first in before.items():
        assert together[key].numpy().dtype == first.numpy().dtype
        if first.numpy().dtype.kind == "i":
            assert together[key].numpy() == first.numpy()
    floats = [key for key, one in before.items() if one.numpy().dtype.kind == "f"]
    moved = max(np.abs(alone[key].numpy() - before[key].numpy()).max() for key in floats)
    assert moved > 0.1
    for key in floats:
        # Gradients of the next round differ by what the grid cut off in this one; Adam divides by small roots.
        allowed = 2e-5 + (5e-3 * moved if name == "adam" else 0.0)
        np.testing.assert_allclose(together[key].numpy(), alone[key].numpy(), rtol=0, atol=allowed)
    assert ported.accuracy(together) > 0.8


@pytest.mark.parametrize("name", PORTED)
def test_an_app_runs_under_noise(name: str) -> None:
    ported = PORTED[name]
    found, strategy = run(ported, [niss_mod], PRIVATE)
    assert isinstance(strategy, NissStrategy)
    assert [one.survivors for one in strategy.rounds] == [NODES] * ROUNDS
    assert strategy.statement.epsilon_joint is not None
    assert np.all(np.isfinite(values(found)))


def test_the_strategy_of_ones_own_keeps_what_it_keeps() -> None:
    ported = PORTED["advanced pytorch"]
    found, strategy = run(ported, [niss_mod], EXACT)
    assert isinstance(strategy, NissStrategy)
    assert isinstance(strategy.inner, Decaying)
    assert len(strategy.inner.kept) == ROUNDS
    np.testing.assert_array_equal(values(strategy.inner.kept[-1]), values(found))


class TestCustomMods:
    """custom-mods: mods after NISS see app and update, those before it see noise alone."""

    def test_mods_after_it_count_and_change_what_the_app_sees(self) -> None:
        seen: list[tuple[str, set[str]]] = []

        def watching(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
            seen.append(("in", set(message.content)))
            reply = call_next(message, context)
            seen.append(("out", set(reply.content)))
            reply.content["metrics"]["seconds"] = 1.0
            return reply

        ported = PORTED["tabular"]
        alone, _ = run(ported, [], None)
        found, _ = run(ported, [niss_mod, watching], EXACT)
        assert seen == [("in", {"arrays", "config"}), ("out", {"arrays", "metrics"})] * (NODES * ROUNDS)
        np.testing.assert_allclose(values(found), values(alone), rtol=0, atol=2e-5)

    def test_a_mod_before_it_sees_no_update(self) -> None:
        seen: list[set[str]] = []

        def spying(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
            reply = call_next(message, context)
            seen.append(set(reply.content))
            return reply

        run(PORTED["tabular"], [spying, niss_mod], EXACT)
        assert all("arrays" not in one and "metrics" not in one for one in seen)
        assert len(seen) == NODES * (ROUNDS + 1)

    def test_a_mod_that_clips_or_fails_is_part_of_the_app(self) -> None:
        def failing(_message: Message, _context: Context, _call_next: Callable[..., Message]) -> Message:
            raise RuntimeError("42 patients")

        ported = PORTED["tabular"]
        found, strategy = run(ported, [niss_mod, failing], EXACT)
        assert isinstance(strategy, NissStrategy)
        assert [one.survivors for one in strategy.rounds] == [NODES] * ROUNDS
        np.testing.assert_allclose(values(found), values(ported.initial()), rtol=0, atol=1e-6)
