"""A hospital: it names model and records; the mod draws batches from them, clips every gradient and hides the sum."""

from __future__ import annotations

from flwr.app import Context
from flwr.clientapp import ClientApp

from niss.flower import NissMod
from niss.records import Records
from silos_hospitals.task import MODEL, hospital_data


def records(context: Context) -> Records:
    """What this hospital holds, and what is learned from it. Nothing else of it leaves, no count and no loss."""
    return Records(MODEL, hospital_data(int(context.node_config["partition-id"])))


app = ClientApp(mods=[NissMod(records=records)])


@app.train()
def not_called(*_: object) -> None:
    """Flower wants a function for training. The mod answers in its place: a step of an app's own has no bound."""
