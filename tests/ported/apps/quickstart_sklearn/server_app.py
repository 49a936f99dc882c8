"""The server: FedAvg that asks everyone to train and to evaluate."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from quickstart_sklearn.task import get_params, make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(get_params(make_model())),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    np.savez("final_model", *result.arrays.to_numpy_ndarrays())
