"""Capped weights inside the upload: FedAvg's weighted mean without noise, the same charge, and only where agreed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result
from hypothesis import given
from hypothesis import strategies as st

from flower.grid import FIRST, FakeGrid, arrays, global_model, perhaps_without_a_round, step_of
from flower.test_drop_in import PRIVATE, WITHOUT_NOISE, values
from flower.test_metrics import _is_upload, _terms
from flower.test_trust import with_folders
from niss.accounting import LedgerFile, Plan
from niss.errors import ConfigError
from niss.flower import NissMod, NissStrategy
from niss.mechanism import l2_norm
from niss.session.books import Books
from niss.session.metrics import WEIGHT, NoisyMetrics, with_own

NODES, CAP = 6, 50
AGREED = {"num-examples": (0, CAP)}


def examples(node: int) -> int:
    return 5 + 7 * (node % NODES)


def weighted_app(mods: list, count=examples) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        step = step_of(context.node_id, int(message.content["config"]["server-round"]))
        moved = {name: array.numpy() + step[name] for name, array in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": count(context.node_id)})
        return Message(RecordDict({"arrays": arrays(moved), "metrics": metrics}), reply_to=message)

    return app


def start(grid: FakeGrid, rounds: int = 3, **options) -> tuple[NissStrategy, Result]:
    settings = {"plan": WITHOUT_NOISE, "weight_cap": CAP, **options}
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), **settings)
    result = Result()
    with perhaps_without_a_round():
        result = strategy.start(grid, global_model(), num_rounds=rounds, timeout=1)
    return strategy, result


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
@pytest.mark.parametrize("cap", [CAP, 20])
def test_without_noise_it_is_the_weighted_mean_of_fedavg(mode, cap) -> None:
    plan = WITHOUT_NOISE if mode == "tolerate" else replace(WITHOUT_NOISE, dropped=1, revealed=2)
    mod = NissMod(metrics={"num-examples": (0, cap)})
    grid = FakeGrid(NODES, weighted_app([mod]))
    strategy, result = start(grid, plan=plan, mode=mode, weight_cap=cap)
    assert [one.survivors for one in strategy.rounds] == [NODES] * 3
    capped = weighted_app([], lambda node: min(examples(node), cap))
    plain = FedAvg(fraction_evaluate=0.0)
    alone = plain.start(FakeGrid(NODES, capped), global_model(), num_rounds=3, timeout=1)
    np.testing.assert_allclose(values(result.arrays), values(alone.arrays), rtol=0, atol=2e-5)
    equal = FedAvg(fraction_evaluate=0.0).start(
        FakeGrid(NODES, weighted_app([], lambda _: 1)), global_model(), num_rounds=3, timeout=1
    )
    assert np.abs(values(equal.arrays) - values(alone.arrays)).max() > 1e-3, "else weights would not matter"
    mean = np.mean([min(examples(FIRST + node), cap) for node in range(NODES)])
    name = f"{WEIGHT}num-examples"
    assert result.train_metrics_clientapp[1][name] == pytest.approx(mean, abs=0.01)
    told = " ".join(strategy.statement.caveats)
    assert f"weighted by 'num-examples', up to {cap}" in told
    assert "inside the noisy sum" not in told


def test_who_is_lost_weighs_nothing() -> None:
    grid = FakeGrid(NODES, weighted_app([NissMod(metrics=AGREED)]))
    grid.mangle = lambda reply: (
        None if _is_upload(reply) and reply.metadata.src_node_id == FIRST + 2 else reply
    )
    plan = replace(WITHOUT_NOISE, dropped=1, revealed=2)
    strategy, result = start(grid, rounds=1, plan=plan, mode="repair")
    assert strategy.rounds[0].survivors == NODES - 1
    here = [FIRST + node for node in range(NODES) if node != 2]
    total = sum(examples(node) for node in here)
    expected = {
        name: array.numpy() + sum(examples(node) / total * step_of(node, 1)[name] for node in here)
        for name, array in global_model().items()
    }
    for name, array in result.arrays.items():
        np.testing.assert_allclose(array.numpy(), expected[name], rtol=0, atol=2e-5)


@given(
    update=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    count=st.floats() | st.integers() | st.sampled_from([None, "many", True, 10**400, -(10**400)]),
    cap=st.floats(1e-3, 1e9),
    part=st.floats(0.01, 0.9),
    clip=st.floats(1e-6, 1e6),
)
def test_a_weight_only_makes_an_upload_shorter(update, count, cap, part, clip) -> None:
    metrics = NoisyMetrics.of({f"{WEIGHT}n": (0.0, cap)}, part)
    terms = replace(_terms(), clip=clip)
    joined = metrics.joined(np.array(update), {"n": count}, terms, 10)
    assert l2_norm(joined) <= clip
    room = clip * math.sqrt(1.0 - part**2)
    share = 0.5 + 0.5 * joined[-1] / (part * clip)
    assert -1e-9 <= share <= 1.0 + 1e-9
    assert l2_norm(joined[:-1]) <= room * max(share, 0.0) * (1.0 + 1e-9) + 1e-9 * clip


def test_a_round_costs_what_it_costs_with_equal_weights(tmp_path: Path) -> None:
    spent = []
    for folder, cap in (("weighted", CAP), ("equal", None)):
        grid = FakeGrid(NODES, weighted_app([NissMod(metrics=AGREED)]))
        with_folders(grid, tmp_path / folder)
        strategy, _ = start(grid, rounds=2, plan=replace(PRIVATE, neighbours=5.0), weight_cap=cap)
        assert [one.survivors for one in strategy.rounds] == [NODES] * 2
        spent.append(LedgerFile.read(tmp_path / folder / str(FIRST) / "ledger.jsonl").spent("self"))
    assert spent[0] == pytest.approx(spent[1], rel=1e-9)
    assert spent[0] > 0.0


@pytest.mark.parametrize("agreed", [None, {"num-examples": (0, CAP + 1)}, {"other": (0, CAP)}])
def test_a_client_that_has_not_agreed_does_not_join(agreed) -> None:
    grid = FakeGrid(NODES, weighted_app([NissMod(metrics=AGREED)]))
    grid.apps[FIRST + 1] = weighted_app([NissMod(metrics=agreed)])
    strategy, _ = start(grid, rounds=1)
    assert strategy.rounds[0].survivors == NODES - 1
    why = strategy.session.members.left_out[FIRST + 1]
    assert "'num-examples' between 0 and 50, which this client has not agreed to send" in why


def test_noise_in_the_weights_is_averaged_over_the_rounds_and_never_divides_by_nothing() -> None:
    session = NissStrategy(FedAvg(), plan=PRIVATE).session
    books = session.books
    assert books.weigh(None) == 1.0
    assert books.weights == []
    assert books.weigh(0.6) == 0.6
    assert books.weigh(0.2) == pytest.approx(0.4)
    again = Books(session.proposal, session.members, books.assess)
    again.restore(books.saved())
    assert again.weigh(0.4) == pytest.approx(0.4)
    assert Books(session.proposal, session.members, books.assess).weigh(-3.0) == 0.05


def test_settings_that_cannot_be() -> None:
    for cap in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="weight_cap"):
            NissStrategy(FedAvg(), plan=PRIVATE, weight_cap=cap)
    carried = Plan(
        method="niss-carried", graph="complete", kappa=20.0, participants=5, participations=2, separation=2
    )
    with pytest.raises(ConfigError, match="noise of one round out in another"):
        with_own(carried, None, None, "num-examples", 10)
    for ranges in ({f"{WEIGHT}a": (0, 1), f"{WEIGHT}b": (0, 1)}, {f"{WEIGHT}a": (1, 2)}, {WEIGHT: (0, 1)}):
        with pytest.raises(ConfigError, match="metrics"):
            NoisyMetrics.of(ranges)
