"""Capped weights inside the upload: FedAvg's weighted mean without noise, the same charge, and only where agreed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result

from flower.grid import (
    FIRST,
    NODES,
    PRIVATE,
    WITHOUT_NOISE,
    FakeGrid,
    global_model,
    make_app,
    play,
    step_of,
    values,
)
from niss.errors import ConfigError
from niss.flower import NissMod, NissStrategy
from niss.session.metrics import WEIGHT

CAP = 50
AGREED = {"num-examples": (0, CAP)}


def examples(node: int) -> int:
    return 5 + 7 * (node % NODES)


def weighted_app(mods: list, count=examples) -> ClientApp:
    return make_app(mods, report=lambda node, _now: {"num-examples": count(node)})


def start(grid: FakeGrid, rounds: int = 3, **options) -> tuple[NissStrategy, Result]:
    return play(grid, rounds, **{"plan": WITHOUT_NOISE, "weight_cap": CAP, **options})


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
@pytest.mark.parametrize("cap", [CAP, 20])
def test_without_noise_it_is_the_weighted_mean_of_fedavg(mode, cap) -> None:
    plan = replace(WITHOUT_NOISE, mode=mode)
    mod = NissMod(metrics={"num-examples": (0, cap)})
    grid = FakeGrid(NODES, weighted_app([mod]))
    strategy, result = start(grid, plan=plan, weight_cap=cap)
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


def test_the_statement_has_the_mean_weight_of_all_rounds_and_not_of_the_last_one_beside_it() -> None:
    app = make_app([NissMod(metrics=AGREED)], report=lambda _node, now: {"num-examples": 10 * now})
    strategy, result = start(FakeGrid(NODES, app))
    told = " ".join(strategy.statement.caveats)
    assert "by their noisy mean weight over all rounds, 20." in told, "in examples, as the cap is"
    assert told.count("mean weight") == 1
    assert result.train_metrics_clientapp[3][f"{WEIGHT}num-examples"] == pytest.approx(30, abs=0.01)


def test_who_is_lost_weighs_nothing() -> None:
    grid = FakeGrid(NODES, weighted_app([NissMod(metrics=AGREED)]))
    grid.lose_uploads()
    plan = replace(WITHOUT_NOISE, mode="repair")
    strategy, result = start(grid, rounds=1, plan=plan)
    assert strategy.rounds[0].survivors == NODES - 1
    here = [FIRST + node for node in range(NODES) if node != 2]
    total = sum(examples(node) for node in here)
    expected = {
        name: array.numpy() + sum(examples(node) / total * step_of(node, 1)[name] for node in here)
        for name, array in global_model().items()
    }
    for name, array in result.arrays.items():
        np.testing.assert_allclose(array.numpy(), expected[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("agreed", [None, {"num-examples": (0, CAP + 1)}, {"other": (0, CAP)}])
def test_a_client_that_has_not_agreed_does_not_join(agreed) -> None:
    grid = FakeGrid(NODES, weighted_app([NissMod(metrics=AGREED)]))
    grid.apps[FIRST + 1] = weighted_app([NissMod(metrics=agreed)])
    strategy, _ = start(grid, rounds=1)
    assert strategy.rounds[0].survivors == NODES - 1
    why = strategy.session.members.left_out[FIRST + 1]
    assert "'num-examples' between 0 and 50, which this client has not agreed to send" in why


@pytest.mark.parametrize("cap", [0.0, -1.0, math.inf, math.nan])
def test_a_cap_that_cannot_be(cap: float) -> None:
    with pytest.raises(ConfigError, match="weight_cap"):
        NissStrategy(FedAvg(), plan=PRIVATE, weight_cap=cap)
