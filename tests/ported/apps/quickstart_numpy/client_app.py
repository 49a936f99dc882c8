"""A client whose training adds numbers of its own to the global model."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def numbers(context: Context, server_round: int) -> np.random.Generator:
    return np.random.default_rng([int(context.node_config["partition-id"]), server_round])


@app.train()
def train(message: Message, context: Context) -> Message:
    rng = numbers(context, int(message.content["config"]["server-round"]))
    model = [
        one + rng.random(one.shape, dtype=one.dtype) for one in message.content["arrays"].to_numpy_ndarrays()
    ]
    metrics = MetricRecord({"random_metric": float(rng.random()), "num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord(model), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"random_metric": numbers(context, 0).random(3).tolist(), "num-examples": 1})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
