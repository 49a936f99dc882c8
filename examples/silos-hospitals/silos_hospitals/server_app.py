"""The server: one of Flower's own strategies, which steps with the mean of the clipped gradients."""

from __future__ import annotations

import time

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvgM

from niss.flower import NissStrategy
from silos_hospitals.task import accuracy, first_weights

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds, then say how well it works and what was promised for each record."""
    settings = context.run_config
    while len(list(grid.get_node_ids())) < int(settings["min-nodes"]):
        time.sleep(1.0)
    # Steps and momentum are taken from sums that are private already: they cost nothing.
    steps = FedAvgM(
        fraction_evaluate=0.0,
        server_learning_rate=float(settings["learning-rate"]),
        server_momentum=float(settings["momentum"]),
    )
    strategy = NissStrategy.from_run_config(context, steps)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(first_weights()),
        num_rounds=int(settings["rounds"]),
        timeout=float(settings["timeout"]),
        evaluate_fn=evaluate,
    )


def evaluate(_server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """How often the model is right about patients who belong to no hospital."""
    return MetricRecord({"accuracy": accuracy(arrays.to_numpy_ndarrays())})
