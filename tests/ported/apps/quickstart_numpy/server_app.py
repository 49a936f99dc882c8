"""The server: FedAvg as it comes."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from quickstart_numpy.task import get_dummy_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg()
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(get_dummy_model()),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    np.savez("final_model", *result.arrays.to_numpy_ndarrays())
