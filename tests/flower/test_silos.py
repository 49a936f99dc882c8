"""Silos on Flower: the mod draws, clips and hides single records; the app's own training is not called."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, Strategy
from torch import nn

from flower.grid import FIRST, FakeGrid, Killed, arrays, body_of, holds, values
from niss.accounting import Plan
from niss.errors import ConfigError
from niss.flower import NissMod, NissStrategy
from niss.mechanism import Slots
from niss.protocol.messages import Upload
from niss.records import LogisticRegression, Records

SILOS, EACH, FEATURES, ROUNDS = 5, 60, 4, 4
# Every record in every batch: what rounds cost is found at once. One test draws batches.
PLAN = Plan(
    unit="record",
    batch=1.0,
    records=SILOS * EACH,
    clip=1.0,
    epsilon=8.0,
    participations=ROUNDS,
    neighbours=SILOS - 1.0,
    kappa=4.0,
)
REPAIRED = replace(PLAN, mode="repair")


def examples(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Two clouds, one for each class; the last silo has records of one class alone."""
    rng = np.random.default_rng(number)
    labels = np.ones(EACH, dtype=np.int64) if number == SILOS - 1 else rng.integers(0, 2, EACH)
    return rng.normal(size=(EACH, FEATURES)) + 1.5 * (2 * labels[:, None] - 1), labels


def regression(context: Context) -> Records:
    return Records(LogisticRegression(FEATURES), examples((context.node_id - FIRST) % SILOS))


def linear() -> nn.Module:
    layer = nn.Linear(FEATURES, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Adapted(nn.Module):
    """A frozen layer and what is learned beside it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.base = nn.Linear(FEATURES, 6).requires_grad_(False)
        self.head = linear_head()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(torch.tanh(self.base(inputs)))
        return made


def linear_head() -> nn.Module:
    layer = nn.Linear(6, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def of_torch(make: Any) -> Any:
    def records(context: Context) -> Records:
        inputs, labels = examples((context.node_id - FIRST) % SILOS)
        return Records(make(), (torch.from_numpy(inputs).float(), torch.from_numpy(labels)))

    return records


def app_of(records: Any, **options: Any) -> ClientApp:
    app = ClientApp(mods=[NissMod(records=records, **options)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise AssertionError(f"the app's own training was called: {message}, {context}")

    return app


def trained(module: nn.Module) -> ArrayRecord:
    return arrays(
        {name: one.detach().numpy() for name, one in module.named_parameters() if one.requires_grad}
    )


KINDS = {
    "regression": (regression, lambda: arrays({"w": np.zeros((2, FEATURES)), "b": np.zeros(2)})),
    "torch": (of_torch(linear), lambda: trained(linear())),
    "adapters": (of_torch(Adapted), lambda: trained(Adapted())),
}


def accuracy(kind: str, model: ArrayRecord) -> float:
    """On clouds that belong to nobody."""
    inputs, labels = examples(99)
    vector = values(model)
    if kind == "adapters":
        with torch.no_grad():
            inputs = torch.tanh(Adapted().base(torch.from_numpy(inputs).float())).double().numpy()
    features = inputs.shape[1]
    outputs = inputs @ vector[: 2 * features].reshape(2, features).T + vector[2 * features :]
    return float((outputs.argmax(axis=1) == labels).mean())


def run(
    kind: str = "regression",
    *,
    grid: FakeGrid | None = None,
    inner: Strategy | None = None,
    plan: Plan = REPAIRED,
    rounds: int = ROUNDS,
    **options: Any,
) -> tuple[NissStrategy, FakeGrid, ArrayRecord]:
    records, first = KINDS[kind]
    grid = FakeGrid(SILOS, app_of(records)) if grid is None else grid
    strategy = NissStrategy(inner or FedAvg(fraction_evaluate=0.0), plan=plan, **options)
    result = strategy.start(grid, first(), num_rounds=rounds, timeout=1)
    return strategy, grid, result.arrays


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_silos_learns_whatever_the_model(kind: str) -> None:
    strategy, _, model = run(kind)
    assert [record.survivors for record in strategy.rounds] == [SILOS] * ROUNDS
    assert accuracy(kind, model) > 0.9
    assert "one record" in strategy.statement.words


@pytest.mark.slow
def test_secret_batches_are_drawn_and_charged_as_slots_and_no_upload_shows_them(tmp_path: Path) -> None:
    """Slow: what rounds with secret batches come to takes the accountant seconds."""
    grid = FakeGrid(SILOS, app_of(regression)).keep_state(tmp_path)
    strategy, _, model = run(plan=replace(REPAIRED, batch=0.25), grid=grid)
    assert accuracy("regression", model) > 0.9
    assert len({len(body_of(reply)) for reply in grid.received if holds(reply, Upload)}) == 1
    taken = grid.ledger().spent("self")
    assert isinstance(taken, Slots)
    assert {q for q, *_ in taken.rounds} == {0.25}
    assert taken.epsilon(strategy.plan.gaussian_delta) <= 8.0


@pytest.mark.parametrize(
    "inner",
    [
        FedAvgM(fraction_evaluate=0.0, server_learning_rate=2.0, server_momentum=0.5),
        FedAdam(fraction_evaluate=0.0, eta=0.3),
    ],
    ids=["momentum", "adam"],
)
def test_momentum_and_adam_at_the_server_are_postprocessing(inner: Strategy) -> None:
    strategy, _, model = run(inner=inner)
    assert accuracy("regression", model) > 0.9
    assert strategy.statement.epsilon_joint <= 8.0


def test_ledgers_reports_and_the_plan_agree(tmp_path: Path) -> None:
    grid = FakeGrid(SILOS, app_of(regression)).keep_state(tmp_path)
    strategy, _, _ = run(grid=grid, report=tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    z = 1.0 / float(REPAIRED.round_mu(np.zeros(1, dtype=np.int64))[0])
    for node in grid.contexts:
        ledger = grid.ledger(node)
        assert ledger.header.unit == "record"
        assert ledger.header.dataset == "records"
        assert len(ledger.entries) == ROUNDS
        taken = ledger.spent("self")
        assert isinstance(taken, Slots)
        for entry, played in zip(ledger.entries, report["rounds"], strict=True):
            charge = entry.charges["self"]
            assert charge.slot is not None
            assert charge.slot[0] == 1.0
            assert charge.slot[1] == pytest.approx(1.0 / played["mu_joint"], rel=1e-6)
            assert charge.slot[1] >= z * (1.0 - 1e-9)
        assert taken.epsilon(strategy.plan.gaussian_delta) <= 8.0
    assert report["statement"]["epsilon_joint"] <= 8.0
    # Nothing is left: no node joins another run, whatever it is about.
    more, _ = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=REPAIRED), None
    with pytest.raises(Exception, match="no round took place"):
        more.start(grid, KINDS["regression"][1](), num_rounds=1, timeout=1)


def test_a_run_that_was_killed_goes_on_and_nothing_is_charged_twice(tmp_path: Path) -> None:
    grid = FakeGrid(SILOS, app_of(regression)).keep_state(tmp_path / "nodes")
    seen = 0

    def killed(reply: Message) -> Message:
        nonlocal seen
        seen += holds(reply, Upload)
        if seen == 2 * SILOS:
            raise Killed
        return reply

    grid.mangle = killed
    with pytest.raises(Killed):
        run(grid=grid, resume=tmp_path / "run")
    grid.mangle = lambda reply: reply
    strategy, _, model = run(grid=grid, resume=tmp_path / "run")
    assert [record.survivors for record in strategy.rounds] == [SILOS, 0, SILOS, SILOS]
    assert {len(grid.ledger(node).entries) for node in grid.contexts} == {ROUNDS}
    assert accuracy("regression", model) > 0.85


def spoilt(context: Context) -> Records:
    """One record of every silo overflows, one is not a number."""
    inputs, labels = examples((context.node_id - FIRST) % SILOS)
    inputs[3], inputs[5] = 1e308, np.nan
    return Records(LogisticRegression(FEATURES), (inputs, labels))


def test_records_that_fail_are_zeros_and_the_others_are_learned_from() -> None:
    strategy, _, model = run(grid=FakeGrid(SILOS, app_of(spoilt)))
    assert [record.survivors for record in strategy.rounds] == [SILOS] * ROUNDS
    assert np.all(np.isfinite(values(model)))
    assert accuracy("regression", model) > 0.85


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("metrics", {"accuracy": (0.0, 1.0)}),
        ("clear_metrics", ["loss"]),
        ("allow", ["evaluate"]),
    ],
)
def test_a_mod_with_records_lets_nothing_out_beside_them(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        NissMod(records=regression, **{name: given})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("metrics", {"metrics": {"accuracy": (0.0, 1.0)}}),
        ("quantile", {"quantile": 0.5}),
        ("weight_cap", {"weight_cap": 100.0}),
    ],
)
def test_a_strategy_asks_silos_for_nothing_but_the_sum(name: str, options: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        NissStrategy(FedAvg(), plan=PLAN, **options)


def test_a_model_that_is_not_what_the_node_trains_is_refused_before_it_is_charged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The frozen base was sent along."""
    grid = FakeGrid(SILOS, app_of(of_torch(Adapted))).keep_state(tmp_path)
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=REPAIRED)
    whole = arrays({name: one.numpy() for name, one in Adapted().state_dict().items()})
    with pytest.raises(Exception, match="no round took place"):
        strategy.start(grid, whole, num_rounds=1, timeout=1)
    assert "44 numbers, and 14 are trained on this node" in caplog.text
    assert not (grid.home() / "ledger.jsonl").exists()


def test_a_node_without_records_does_not_join_and_is_told_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = FakeGrid(SILOS)
    with pytest.raises(Exception, match="no round took place"):
        run(grid=grid)
    assert "NissMod(records=...)" in caplog.text
