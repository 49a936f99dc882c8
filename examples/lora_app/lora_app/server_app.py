"""The server: an ordinary Flower strategy, wrapped once."""

from __future__ import annotations

import time

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from lora_app.task import accuracy, load_trained_part, make_model, trained_part
from niss.flower import NissStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds, then say how well it works and what was promised."""
    settings = context.run_config
    kind = {"adapters": bool(settings["adapters"]), "rank": int(settings["rank"])}

    def evaluate(_server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = make_model(**kind)
        load_trained_part(model, arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": accuracy(model)})

    while len(list(grid.get_node_ids())) < int(settings["min-nodes"]):
        time.sleep(1.0)
    strategy = NissStrategy.from_run_config(context, FedAvg(fraction_evaluate=0.0))
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(trained_part(make_model(**kind))),
        num_rounds=int(settings["rounds"]),
        timeout=float(settings["timeout"]),
        evaluate_fn=evaluate,
    )
