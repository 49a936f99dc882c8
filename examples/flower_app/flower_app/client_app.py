"""A client: an ordinary Flower ClientApp, and one mod."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_app.task import METRICS, accuracy_on, client_data, held_out, make_model, train
from niss.flower import NissMod

torch.set_num_threads(1)
# The accuracy may leave inside the noisy upload, if the run wants it; nothing else does.
app = ClientApp(mods=[NissMod(metrics=METRICS)])


@app.train()
def train_round(message: Message, context: Context) -> Message:
    """Train from the weights that were sent, on this client's digits. The mod hides what comes out."""
    settings, mine = context.run_config, int(context.node_config["partition-id"])
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = client_data(mine, int(context.node_config["num-partitions"]))
    metrics = MetricRecord()  # None of them leaves this client in the clear.
    if settings["noisy-accuracy"]:
        # The global model, before it is trained further, on digits that this client never trains on.
        data, test_data = held_out(data)
        metrics["accuracy"] = accuracy_on(model, test_data)
    metrics["train-loss"] = train(
        model,
        data,
        epochs=int(settings["local-epochs"]),
        rate=float(settings["learning-rate"]),
        batch=int(settings["batch-size"]),
        seed=int(settings["seed"]) * 1_000_003 + 1009 * int(message.content["config"]["server-round"]) + mine,
    )
    metrics["num-examples"] = len(data[1])
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
