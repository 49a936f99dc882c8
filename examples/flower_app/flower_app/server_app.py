"""The server: an ordinary Flower strategy, wrapped once."""

from __future__ import annotations

import time

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flower_app.task import METRICS, accuracy, make_model
from niss.flower import NissStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds, then say how well it works and what was promised."""
    settings = context.run_config
    # Wait for them once: as a minimum of the strategy, one node lost on the way would stop the run.
    while len(list(grid.get_node_ids())) < int(settings["min-nodes"]):
        time.sleep(1.0)
    strategy = NissStrategy.from_run_config(
        context, FedAvg(fraction_evaluate=0.0), metrics=METRICS if settings["noisy-accuracy"] else None
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_model().state_dict()),
        num_rounds=int(settings["rounds"]),
        timeout=float(settings["timeout"]),
        evaluate_fn=evaluate,
    )


def evaluate(_server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """How many test digits the global model names rightly; the test digits belong to nobody."""
    model = make_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": accuracy(model)})
