"""Metrics inside the upload: within the clip whatever the app reports, exact without noise, as noisy as they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result
from scipy.stats import chi2

from flower.grid import (
    FIRST,
    NODES,
    ODD,
    PRIVATE,
    SHAPES,
    WITHOUT_NOISE,
    FakeGrid,
    body_of,
    holds,
    make_app,
    play,
    values,
)
from niss.errors import ConfigError
from niss.flower import NissMod, NissStrategy
from niss.protocol.messages import Refusal, Upload, decode
from niss.session.server import Session

SIZE = sum(math.prod(shape) for shape in SHAPES.values())
RANGES = {"accuracy": (0.0, 1.0), "loss": (0.0, 8.0)}
REPAIRED = replace(WITHOUT_NOISE, mode="repair")


def reported(node: int, server_round: int) -> dict[str, float]:
    """What the app of a node reports, the same whoever asks."""
    rng = np.random.default_rng([node % 1000, server_round, 7])
    return {"accuracy": float(rng.uniform()), "loss": float(rng.uniform(0.0, 8.0))}


def reporting_app(
    mod: NissMod | None = None, report: Callable[[int, int], dict[str, float]] = reported
) -> ClientApp:
    """`make_app` with other metrics."""
    mods = [NissMod(metrics=RANGES) if mod is None else mod]
    return make_app(mods, report=lambda node, now: {"num-examples": 10, **report(node, now)})


def start(grid: FakeGrid, rounds: int = 3, **options) -> tuple[NissStrategy, Result]:
    return play(grid, rounds, **{"plan": WITHOUT_NOISE, "metrics": RANGES, **options})


def uploads(grid: FakeGrid) -> list[Upload]:
    return [decode(body_of(reply)) for reply in grid.received if holds(reply, Upload)]


class TestSettings:
    def test_settings_that_contradict_each_other(self) -> None:
        with pytest.raises(ConfigError, match="clear_metrics"):
            NissMod(metrics=RANGES, clear_metrics=("loss",))
        for use in (NissMod, partial(NissStrategy, FedAvg(), plan=PRIVATE)):
            with pytest.raises(ConfigError, match=r"metrics\.loss"):
                use(metrics={"loss": (1, 0)})
        with pytest.raises(ConfigError, match="the weight of a result"):
            NissStrategy(FedAvg(weighted_by_key="loss"), plan=PRIVATE, metrics=RANGES)
        for part in (0.0, 1.0, -0.1, math.nan):
            with pytest.raises(ConfigError, match="metric_part"):
                NissStrategy(FedAvg(), plan=PRIVATE, metrics=RANGES, metric_part=part)


class TestRuns:
    @pytest.mark.parametrize("mode", ["tolerate", "repair"])
    def test_without_noise_the_means_are_exact_and_the_model_is_as_without_metrics(self, mode) -> None:
        plan = WITHOUT_NOISE if mode == "tolerate" else REPAIRED
        strategy, result = start(FakeGrid(NODES, reporting_app()), plan=plan)
        for number in (1, 2, 3):
            seen = result.train_metrics_clientapp[number]
            for name in RANGES:
                mean = np.mean([reported(FIRST + node, number)[name] for node in range(NODES)])
                assert seen[name] == pytest.approx(mean, abs=1e-4)
                assert seen[f"{name}_noise_sd"] == 0.0
            names = {f"{name}{of}" for name in RANGES for of in ("", "_noise_sd")}
            assert set(seen) == names | {"niss-survivors", "niss-lost"}
        _, alone = play(FakeGrid(NODES), 3, plan=plan)
        np.testing.assert_allclose(values(result.arrays), values(alone.arrays), rtol=0, atol=1e-5)
        assert any(
            "inside the noisy sum, protected as the updates are: accuracy, loss" in one
            for one in strategy.statement.caveats
        )
        assert not any("in the clear" in one for one in strategy.statement.caveats)

    @pytest.mark.parametrize("mode", ["tolerate", "repair"])
    def test_who_is_lost_is_not_in_the_mean(self, mode) -> None:
        """Where the lost client's shares stay in the sum, they are in the noise that is reported."""
        grid = FakeGrid(NODES, reporting_app())
        grid.lose_uploads()
        plan = WITHOUT_NOISE if mode == "tolerate" else REPAIRED
        strategy, result = start(grid, rounds=1, plan=plan)
        assert strategy.rounds[0].survivors == NODES - 1
        seen = result.train_metrics_clientapp[1]
        mean = np.mean([reported(node, 1)["accuracy"] for node in grid.contexts if node != ODD])
        if mode == "repair":
            assert seen["accuracy"] == pytest.approx(mean, abs=1e-4)
            assert seen["accuracy_noise_sd"] == 0.0
        else:
            # Nine deviations.
            assert seen["accuracy"] == pytest.approx(mean, abs=9 * seen["accuracy_noise_sd"])
            assert seen["accuracy_noise_sd"] > 0.0

    @pytest.mark.parametrize("lost", [False, True])
    def test_the_noise_is_as_large_as_reported(self, lost) -> None:
        """Forty metrics in three rounds, chi-squared; false alarms: two in 10^9."""
        many = {f"m{number:02}": (-1.0, 3.0) for number in range(40)}
        grid = FakeGrid(NODES, reporting_app(NissMod(metrics=many), lambda *_: dict.fromkeys(many, 2.0)))
        if lost:
            grid.lose_uploads()
        strategy, result = start(grid, plan=replace(PRIVATE, neighbours=5.0), metrics=many, metric_part=0.5)
        assert [one.survivors for one in strategy.rounds] == [NODES - lost] * 3
        squares = [
            ((record[name] - 2.0) / record[f"{name}_noise_sd"]) ** 2
            for record in result.train_metrics_clientapp.values()
            for name in many
        ]
        low, high = chi2.ppf([1e-9, 1.0 - 1e-9], len(squares))
        assert len(squares) == 120
        assert low < sum(squares) < high
        scale = 0.5 * strategy.plan.clip / math.sqrt(len(many))
        for one, record in zip(strategy.rounds, result.train_metrics_clientapp.values(), strict=True):
            assert record["m00_noise_sd"] == pytest.approx(2.0 * one.noise.variance**0.5 / scale)

    def test_an_app_that_fails_counts_with_the_middle_of_the_range(self) -> None:
        grid = FakeGrid(NODES, reporting_app())

        def fails(_message: Message, _context: Context) -> Message:
            raise IndexError("4312")

        odd = ClientApp(mods=[NissMod(metrics=RANGES)])
        odd.train()(fails)
        grid.apps[ODD] = odd
        strategy, result = start(grid, rounds=1)
        assert strategy.rounds[0].survivors == NODES
        others = [reported(node, 1)["loss"] for node in grid.contexts if node != ODD]
        assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(
            (sum(others) + 4.0) / NODES, abs=1e-3
        )

    @pytest.mark.parametrize(
        "more",
        [{"metrics": RANGES}, {"weight_cap": 50}, {"quantile": 0.5, "first_clip": 0.05}],
        ids=["metrics", "weights", "a clip that moves"],
    )
    def test_a_round_costs_what_it_costs_without(self, tmp_path: Path, more: dict[str, Any]) -> None:
        """Whatever travels inside the uploads is charged with them."""
        spent = []
        for folder, options in (("with", more), ("without", {})):
            agreed = NissMod(metrics={**RANGES, "num-examples": (0, 50)})
            grid = FakeGrid(NODES, reporting_app(agreed)).keep_state(tmp_path / folder)
            strategy, _ = play(grid, 3, plan=replace(PRIVATE, neighbours=5.0), **options)
            assert [one.survivors for one in strategy.rounds] == [NODES] * 3
            spent.append(grid.ledger().spent("self"))
        assert spent[0] == pytest.approx(spent[1], rel=1e-9)
        assert spent[0] > 0.0


class TestAgreement:
    def test_nothing_but_the_upload_leaves(self) -> None:
        grid = FakeGrid(NODES, reporting_app())
        start(grid, rounds=1)
        assert len(grid.received) == 2 * NODES
        for reply in grid.received:
            assert set(reply.content) == {"niss", "niss-upload"}
            assert set(reply.content["niss"]) == {"step"}
            assert set(reply.content["niss-upload"]) == {"body"}
        assert {len(one.vector) for one in uploads(grid)} == {4 * (SIZE + 2)}

    @pytest.mark.parametrize(
        "agreed",
        [
            None,
            {"accuracy": (0, 1)},
            {"accuracy": (0, 1), "loss": (0, 9)},
            {"accuracy": (0, 1), "Loss": (0, 8)},
        ],
        ids=["to nothing", "to one", "to another range", "to another name"],
    )
    def test_a_client_that_has_not_agreed_does_not_join_and_the_others_go_on(self, agreed) -> None:
        grid = FakeGrid(NODES, reporting_app())
        grid.apps[ODD] = reporting_app(NissMod(metrics=agreed))
        strategy, _ = start(grid, rounds=2)
        assert [one.survivors for one in strategy.rounds] == [NODES - 1] * 2
        assert "which this client has not agreed to send" in strategy.session.members.left_out[ODD]
        from_odd = [reply for reply in grid.received if reply.metadata.src_node_id == ODD]
        assert from_odd
        assert all(isinstance(decode(body_of(reply)), Refusal) for reply in from_odd)

    def test_the_agreement_is_asked_for_in_every_round(self) -> None:
        """The app of a node can change between two rounds."""
        grid = FakeGrid(NODES, reporting_app())

        grid.on_request("round", lambda _message: grid.apps.update({ODD: reporting_app(NissMod())}))
        strategy, _ = start(grid, rounds=1)
        assert "has not agreed to send" in strategy.rounds[0].lost[str(ODD)]

    def test_what_a_client_agrees_to_is_sent_only_where_the_run_wants_it(self) -> None:
        grid = FakeGrid(NODES, reporting_app())
        _, result = start(grid, rounds=1, metrics={"loss": RANGES["loss"]})
        assert {len(one.vector) for one in uploads(grid)} == {4 * (SIZE + 1)}
        assert "accuracy" not in result.train_metrics_clientapp[1]
        grid = FakeGrid(NODES, reporting_app())
        _, result = start(grid, rounds=1, metrics=None)
        assert {len(one.vector) for one in uploads(grid)} == {4 * SIZE}
        assert set(result.train_metrics_clientapp[1]) == {"niss-survivors", "niss-lost"}

    @pytest.mark.parametrize("metrics", [None, RANGES])
    def test_a_round_with_more_coordinates_than_were_agreed_is_refused(self, metrics, monkeypatch) -> None:
        begin = Session.begin

        def begin_with_more(session: Session, number: int, nodes, *, coordinates: int, **rest) -> None:
            begin(session, number, nodes, coordinates=coordinates + 1, **rest)

        monkeypatch.setattr(Session, "begin", begin_with_more)
        grid = FakeGrid(NODES, reporting_app())
        strategy, _ = start(grid, rounds=1, metrics=metrics)
        assert uploads(grid) == []
        assert all("another number of coordinates" in why for why in strategy.rounds[0].lost.values())
        assert len(strategy.rounds[0].lost) == NODES

    def test_metrics_sent_in_the_clear_do_not_replace_those_in_the_sum(self) -> None:
        grid = FakeGrid(NODES, reporting_app())

        clear = MetricRecord({"accuracy": 9.0, "accuracy_noise_sd": 9.0})
        grid.on_reply("round", lambda reply: reply.content.update(metrics=clear), node=None)
        _, result = start(grid, rounds=1)
        assert result.train_metrics_clientapp[1]["accuracy"] < 1.1
        assert result.train_metrics_clientapp[1]["accuracy_noise_sd"] == 0.0
