"""Strategies with code of their own: what NISS serves works, what it cannot is refused before anyone pays."""

from __future__ import annotations

import json
from logging import INFO
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log
from flwr.serverapp.strategy import FedAdagrad, FedAvg, Result

from flower.grid import PRIVATE, WITHOUT_NOISE, FakeGrid, arrays, global_model, survivors, values
from niss.errors import ConfigError
from niss.flower import NissStrategy


class Advanced(FedAdagrad):
    """As the published app `advanced-pytorch` has it: a start of its own that runs the rounds, logs each to a service,
    and writes a checkpoint of the best model; and a learning rate that decays."""

    def set_save_path(self, path: Path) -> None:
        self.save_path = path

    def configure_train(self, server_round, arrays, config, grid):
        if server_round % 2 == 0 and server_round > 0:
            config["lr"] *= 0.5
        return super().configure_train(server_round, arrays, config, grid)

    def _update_best(self, current_round, accuracy, arrays) -> None:
        if accuracy > self.best:
            self.best = accuracy
            (self.save_path / f"round_{current_round}.json").write_text(json.dumps(list(arrays)))

    def start(
        self,
        grid,
        initial_arrays,
        num_rounds=3,
        timeout=3600,
        train_config=None,
        evaluate_config=None,
        evaluate_fn=None,
    ) -> Result:
        self.best, self.logged = 0.0, []
        log(INFO, "Starting %s strategy:", self.__class__.__name__)
        self.summary()
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        result, arrays = Result(), initial_arrays
        for current_round in range(1, num_rounds + 1):
            replies = grid.send_and_receive(
                messages=self.configure_train(current_round, arrays, train_config, grid), timeout=timeout
            )
            made, metrics = self.aggregate_train(current_round, replies)
            if made is not None:
                result.arrays = arrays = made
            if metrics is not None:
                result.train_metrics_clientapp[current_round] = metrics
                self.logged.append(dict(metrics))
            replies = grid.send_and_receive(
                messages=self.configure_evaluate(current_round, arrays, evaluate_config, grid),
                timeout=timeout,
            )
            self.aggregate_evaluate(current_round, replies)
            if evaluate_fn and (metrics := evaluate_fn(current_round, arrays)) is not None:
                result.evaluate_metrics_serverapp[current_round] = metrics
                self._update_best(current_round, metrics["accuracy"], arrays)
        return result


class Through(FedAvg):
    """One that leaves the rounds to Flower, and does something before and after."""

    def start(self, *args, **named) -> Result:
        self.began = True
        return super().start(*args, **named)


def accuracy(server_round: int, _arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"accuracy": server_round / 10.0})


def advanced(path: Path) -> Advanced:
    path.mkdir(exist_ok=True)
    strategy = Advanced(fraction_evaluate=0.0, eta=0.05, tau=0.1)
    strategy.set_save_path(path)
    return strategy


class TestAStartOfItsOwn:
    def played(
        self, tmp_path: Path, grid: FakeGrid, rounds: int = 4, **options
    ) -> tuple[NissStrategy, Result]:
        strategy = NissStrategy(advanced(tmp_path / "saved"), **options)
        result = strategy.start(
            grid,
            global_model(),
            num_rounds=rounds,
            timeout=1,
            train_config=ConfigRecord({"lr": 0.4}),
            evaluate_fn=accuracy,
        )
        return strategy, result

    def test_runs_and_report_statement_and_horizon_are_there(self, tmp_path):
        grid, report, sent = FakeGrid(), tmp_path / "report.json", []
        grid.on_request("round", lambda message: sent.append(message.content["config"]["lr"]))
        strategy, result = self.played(tmp_path, grid, plan=WITHOUT_NOISE, report=report)
        assert survivors(strategy) == [6, 6, 6, 6]
        assert strategy.inner.logged == [{"niss-survivors": 6, "niss-lost": 0}] * 4
        assert len(list((tmp_path / "saved").iterdir())) == 4
        assert sent == [0.4, 0.2, 0.2, 0.1]
        said = json.loads(report.read_text())
        assert len(said["rounds"]) == 4
        assert said["metrics"]["server"]["4"] == {"accuracy": 0.4}
        assert strategy.session.proposal.plan.possible_rounds >= 4
        assert result.evaluate_metrics_serverapp[4] == {"accuracy": 0.4}
        assert result.train_metrics_clientapp[4] == {"niss-survivors": 6, "niss-lost": 0}
        # Its own hooks are its own again.
        assert not {"configure_train", "aggregate_train"} & vars(strategy.inner).keys()

    def test_ends_as_one_that_leaves_the_rounds_to_flower(self, tmp_path):
        _, own = self.played(tmp_path, FakeGrid(), rounds=3, plan=WITHOUT_NOISE)
        usual = FedAdagrad(fraction_evaluate=0.0, eta=0.05, tau=0.1)
        theirs = NissStrategy(usual, plan=WITHOUT_NOISE).start(
            FakeGrid(), global_model(), num_rounds=3, timeout=1
        )
        np.testing.assert_allclose(values(own.arrays), values(theirs.arrays), atol=1e-6)

    def test_is_gone_on_with(self, tmp_path):
        grid = FakeGrid().keep_state(tmp_path / "nodes")
        options = {"plan": WITHOUT_NOISE, "resume": tmp_path / "run"}
        with grid.killing(3):
            self.played(tmp_path, grid, **options)
        strategy, result = self.played(tmp_path, grid, **options)
        assert survivors(strategy) == [6, 6, 0, 6]
        assert [*result.evaluate_metrics_serverapp] == [1, 2, 4]

    def test_may_end_with_the_budget(self, tmp_path):
        """Its loop is left where too few can pay for another round, as Flower's is."""
        grid = FakeGrid(4).keep_state(tmp_path / "nodes")
        NissStrategy(FedAvg(fraction_evaluate=0.0), plan=PRIVATE).start(
            grid, global_model(), num_rounds=2, timeout=1
        )
        strategy, result = self.played(tmp_path, grid, rounds=3, plan=PRIVATE)
        assert survivors(strategy) == [4, 0]
        assert result.arrays

    def test_may_leave_the_rounds_to_flower(self):
        strategy = NissStrategy(Through(fraction_evaluate=0.0), plan=PRIVATE)
        strategy.start(FakeGrid(), global_model(), num_rounds=2, timeout=1)
        assert strategy.inner.began
        assert survivors(strategy) == [6, 6]

    def test_that_would_train_without_niss_is_refused(self):
        class Around(FedAvg):
            def start(self, grid, initial_arrays, num_rounds=3, **named) -> Result:
                for _ in range(num_rounds):
                    grid.send_and_receive([], timeout=named["timeout"])
                return Result(arrays=initial_arrays)

        with pytest.raises(ConfigError, match=r"Around has a start.*without NISS") as e:
            NissStrategy(Around(), plan=PRIVATE)
        assert "self.configure_train" in e.value.hint


class Loss(FedAvg):
    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        made, metrics = super().aggregate_train(server_round, replies)
        return made, MetricRecord(
            {"worst": max(one.content["metrics"]["loss"] for one in replies)}
        ) or metrics


class Median(FedAvg):
    def aggregate_train(self, server_round, replies):
        del server_round
        models = [one.content["arrays"] for one in replies]
        names = list(models[0])
        return arrays({n: np.median([one[n].numpy() for one in models], axis=0) for n in names}), None


class Largest(FedAvg):
    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        norms = [float(np.linalg.norm(values(one.content["arrays"]))) for one in replies]
        return super().aggregate_train(server_round, [replies[int(np.argmax(norms))]])


class Watched(FedAdagrad):
    """An override that NISS serves: it looks at the model, not at who sent what."""

    def aggregate_train(self, server_round, replies):
        made, metrics = super().aggregate_train(server_round, replies)
        if server_round:
            self.norms = [*getattr(self, "norms", []), float(np.linalg.norm(values(made)))]
        return made, metrics


class Locked(Median):
    """What it holds cannot be copied, so it cannot be tried."""

    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle a lock")


class TestAnAggregationOfItsOwn:
    def run(self, inner: FedAvg, grid: FakeGrid) -> NissStrategy:
        strategy = NissStrategy(inner, plan=PRIVATE)
        strategy.start(grid, global_model(), num_rounds=2, timeout=1)
        return strategy

    @pytest.mark.parametrize(
        ("inner", "why"),
        [
            (
                Loss,
                r"fails on what it is given under NISS \(KeyError: 'loss'\).*with the metrics num-examples",
            ),
            (Median, "something else of three updates than of their mean"),
            (Largest, "something else of three updates than of their mean"),
        ],
    )
    def test_that_needs_single_clients_is_refused_before_anyone_is_asked(self, inner, why):
        grid = FakeGrid()
        with pytest.raises(ConfigError, match=why):
            self.run(inner(fraction_evaluate=0.0), grid)
        assert not grid.sent

    def test_that_needs_the_mean_alone_works_and_is_left_as_it_was(self):
        strategy = self.run(Watched(fraction_evaluate=0.0), FakeGrid())
        assert survivors(strategy) == [6, 6]
        assert len(strategy.inner.norms) == 2

    def test_that_cannot_be_tried_is_warned_of_before_anyone_is_asked(self, caplog):
        grid = FakeGrid()

        def warned(_message):
            assert "could not be tried before the first round (TypeError)" in caplog.text

        grid.on_request("enrol", warned, node=None)
        self.run(Locked(fraction_evaluate=0.0), grid)
        assert grid.sent
