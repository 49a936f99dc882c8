"""FedAvg that lowers the rate, keeps the best model, and writes down what came out of each round."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result


class CustomFedAvg(FedAvg):
    def set_save_path(self, path: Path) -> None:
        path.mkdir()
        self.save_path, self.best = path, 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round == 2:
            config["lr"] = 0.5 * float(config["lr"])
        return super().configure_train(server_round, arrays, config, grid)

    def keep_best(self, server_round: int, arrays: ArrayRecord, metrics: MetricRecord) -> None:
        """Save the model if no round before it was as good, and what was measured."""
        if metrics["accuracy"] > self.best:
            self.best = float(metrics["accuracy"])
            torch.save(arrays.to_torch_state_dict(), self.save_path / f"best_{server_round}.pth")
        with (self.save_path / "results.jsonl").open("a") as results:
            results.write(json.dumps({"round": server_round, **metrics}) + "\n")

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        result, arrays = Result(), initial_arrays
        for server_round in range(1, num_rounds + 1):
            messages = self.configure_train(server_round, arrays, train_config, grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            trained, metrics = self.aggregate_train(server_round, replies)
            if trained is not None:
                result.arrays = arrays = trained
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            asked = self.configure_evaluate(server_round, arrays, evaluate_config or ConfigRecord(), grid)
            self.aggregate_evaluate(server_round, grid.send_and_receive(asked, timeout=timeout))
            if evaluate_fn and (measured := evaluate_fn(server_round, arrays)) is not None:
                result.evaluate_metrics_serverapp[server_round] = measured
                self.keep_best(server_round, arrays, measured)
        return result
