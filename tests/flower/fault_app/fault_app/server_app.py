"""The server: averages, and writes down the weights after each round."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fault_app import SIZE
from niss import Plan
from niss.flower import NissStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    rounds, tau2 = int(settings["rounds"]), float(settings["tau2"])
    plan = Plan(
        clip=float(settings["clip"]),
        epsilon=float(settings["epsilon"]),
        participations=rounds,
        neighbours=20.0,
        tau2=None if tau2 < 0.0 else tau2,
        mode=str(settings["mode"]),
        separation=int(settings["separation"]) if settings["carry"] else 1,
    )
    while len(list(grid.get_node_ids())) < int(settings["min-nodes"]):
        time.sleep(0.5)
    report = Path(str(settings["report"]))
    inner = FedAvg(fraction_evaluate=float(settings["evaluate"]), min_train_nodes=2, min_available_nodes=2)
    strategy = NissStrategy.from_run_config(context, inner, plan=plan)
    kept = report.with_name("weights.json")
    weights: dict[str, list[float]] = (
        json.loads(kept.read_text()) if settings["resume"] and kept.exists() else {}
    )

    def keep(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        weights[str(server_round)] = arrays["weights"].numpy().tolist()
        kept.write_text(json.dumps(weights))
        if server_round and server_round == settings["pause-after"]:
            time.sleep(600.0)
        return None

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"weights": Array(np.zeros(SIZE))}),
        num_rounds=rounds,
        timeout=float(settings["timeout"]),
        evaluate_fn=keep,
    )
    evaluated = {number: dict(found) for number, found in result.evaluate_metrics_clientapp.items()}
    report.with_name("evaluated.json").write_text(json.dumps(evaluated))
