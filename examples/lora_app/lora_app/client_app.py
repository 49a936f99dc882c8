"""A client: an ordinary Flower ClientApp, and one mod."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from lora_app.task import client_data, load_trained_part, make_model, train, trained_part
from niss.flower import niss_mod

torch.set_num_threads(1)
app = ClientApp(mods=[niss_mod])


@app.train()
def train_round(message: Message, context: Context) -> Message:
    """Train the adapters that were sent, on this client's messages. The mod hides what comes out."""
    settings, mine = context.run_config, int(context.node_config["partition-id"])
    model = make_model(adapters=bool(settings["adapters"]), rank=int(settings["rank"]))
    load_trained_part(model, message.content["arrays"].to_torch_state_dict())
    data = client_data(mine, int(settings["messages-per-client"]))
    train(
        model,
        data,
        epochs=int(settings["local-epochs"]),
        rate=float(settings["learning-rate"]),
        batch=int(settings["batch-size"]),
        seed=int(settings["seed"]) * 1_000_003 + 1009 * int(message.content["config"]["server-round"]) + mine,
    )
    metrics = MetricRecord({"num-examples": len(data[1])})
    content = RecordDict({"arrays": ArrayRecord(trained_part(model)), "metrics": metrics})
    return Message(content, reply_to=message)
