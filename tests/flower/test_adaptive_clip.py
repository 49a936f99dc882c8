"""A clip that follows a quantile of the norms: without noise to the quantile, at the same charge, within all limits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg, Result

from flower.grid import FIRST, NODES, PRIVATE, WITHOUT_NOISE, FakeGrid, play, step_of
from flower.test_metrics import RANGES, reporting_app, uploads
from niss.errors import ConfigError
from niss.flower import NissMod, NissStrategy
from niss.mechanism.clipping import RATE
from niss.session.metrics import BELOW_CLIP, PART

ROOM = math.sqrt(1.0 - PART**2)


def norm_of(node: int, server_round: int) -> float:
    step = step_of(node, server_round)
    return math.sqrt(sum(float(np.sum(one.astype(float) ** 2)) for one in step.values()))


def start(grid: FakeGrid, rounds: int = 3, **options) -> tuple[NissStrategy, Result]:
    settings = {"plan": WITHOUT_NOISE, "quantile": 0.5, "first_clip": 0.05, **options}
    return play(grid, rounds, **settings)


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_without_noise_it_moves_by_the_fraction_of_short_updates(mode) -> None:
    strategy, result = start(FakeGrid(NODES), rounds=8, plan=replace(WITHOUT_NOISE, mode=mode))
    clip, fractions = 0.05, set()
    for number, one in enumerate(strategy.rounds, start=1):
        assert one.survivors == NODES
        assert one.clip == pytest.approx(clip, rel=1e-4)
        short = np.mean([norm_of(FIRST + node, number) <= ROOM * one.clip for node in range(NODES)])
        assert result.train_metrics_clientapp[number][BELOW_CLIP] == pytest.approx(short, abs=1e-3)
        clip *= math.exp(-RATE * (short - 0.5))
        fractions.add(short)
    assert len(fractions) > 1, "it came among the norms"


def test_it_is_said_in_the_statement_and_in_the_report(tmp_path: Path) -> None:
    strategy, _ = start(FakeGrid(NODES), report=tmp_path / "report.json")
    told = " ".join(strategy.statement.caveats)
    assert "The clip followed a quantile of the updates' norms, from 0.05 to " in told
    assert "charged with it" in told
    assert BELOW_CLIP not in told
    report = json.loads((tmp_path / "report.json").read_text())
    assert [one["clip"] for one in report["rounds"]] == [one.clip for one in strategy.rounds]


def test_noise_is_in_proportion_to_the_clip() -> None:
    strategy, _ = start(FakeGrid(NODES), plan=replace(PRIVATE, neighbours=5.0))
    ratios = [one.noise.variance**0.5 / one.clip for one in strategy.rounds]
    assert ratios == pytest.approx([ratios[0]] * 3, rel=1e-6)
    assert len({one.clip for one in strategy.rounds}) > 1  # Noise may bring the third back to the first.


def test_it_stays_below_the_clip_of_the_plan() -> None:
    """Every update is longer."""
    plan = replace(WITHOUT_NOISE, clip=0.01)
    strategy, _ = start(FakeGrid(NODES), plan=plan, first_clip=0.0095)
    assert [one.clip for one in strategy.rounds][1:] == [0.01, 0.01]


def test_what_an_app_says_about_its_norm_counts_nothing() -> None:
    app = reporting_app(NissMod(metrics=RANGES), lambda *_: {BELOW_CLIP: 1.0, "accuracy": 0.5})
    _, result = start(FakeGrid(NODES, app), rounds=1, metrics=RANGES, first_clip=1e-3)
    seen = result.train_metrics_clientapp[1]
    assert isinstance(seen, MetricRecord)
    assert seen[BELOW_CLIP] == pytest.approx(0.0, abs=1e-3)
    assert seen["accuracy"] == pytest.approx(0.5, abs=1e-3)


def test_a_client_sends_one_number_more_and_need_not_agree_to_anything() -> None:
    grid, plain = FakeGrid(NODES), FakeGrid(NODES)
    start(grid, rounds=1)
    start(plain, rounds=1, quantile=None, first_clip=None)
    assert {len(one.vector) for one in uploads(grid)} == {len(one.vector) + 4 for one in uploads(plain)}


def test_a_server_that_raises_the_clip_above_the_plans_is_refused(monkeypatch) -> None:
    from niss.session import server as module

    monkeypatch.setattr(module, "next_clip", lambda *_: 1.01 * WITHOUT_NOISE.clip)
    grid = FakeGrid(NODES)
    strategy, _ = start(grid, rounds=2)
    assert [one.survivors for one in strategy.rounds] == [NODES, 0]
    assert all("exceeds the" in why for why in strategy.rounds[1].lost.values())


def test_a_run_that_is_resumed_goes_on_with_its_clip(tmp_path: Path) -> None:
    """Killed in round 3, which is lost; round 4 then has the clip that round 3 would have had."""
    plan = replace(WITHOUT_NOISE, participations=4)
    whole, _ = start(FakeGrid(NODES), rounds=4, plan=plan)

    grid = FakeGrid(NODES).keep_state(tmp_path)
    with grid.killing(3):
        start(grid, rounds=4, plan=plan, resume=tmp_path / "run")
    resumed, _ = start(grid, rounds=4, plan=plan, resume=tmp_path / "run")
    found = [one.clip for one in resumed.rounds]
    expected = [one.clip for one in whole.rounds]
    assert found[2] is None
    assert [found[0], found[1], found[3]] == pytest.approx(expected[:3], rel=1e-4)
    assert len(set(expected[:3])) == 3


class TestSettings:
    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"quantile": 1.0}, "quantile"),
            ({"quantile": 0.5, "first_clip": 9.0}, "first_clip"),
            ({"quantile": None, "first_clip": 0.5}, "first_clip"),
        ],
    )
    def test_that_cannot_be(self, options, field) -> None:
        with pytest.raises(ConfigError) as refused:
            NissStrategy(FedAvg(), plan=PRIVATE, **options)
        assert refused.value.field == field
