"""A silo: it names model and records; the mod draws batches from them, clips every gradient and hides the sum."""

from __future__ import annotations

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp

from niss.flower import NissMod
from niss.records import Records
from silos_images.task import make_model, silo_data

torch.set_num_threads(1)


def records(context: Context) -> Records:
    """What this silo holds, and what is learned from it. Nothing else of it leaves, no count and no loss."""
    mine, silos = (int(context.node_config[name]) for name in ("partition-id", "num-partitions"))
    return Records(make_model(), silo_data(mine, silos))


app = ClientApp(mods=[NissMod(records=records)])


@app.train()
def not_called(*_: object) -> None:
    """Flower wants a function for training. The mod answers in its place: a step of an app's own has no bound."""
