"""Memory is some models for a client, whatever its neighbours, and one upload a client for the server."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flower.grid import FakeGrid, arrays
from niss.accounting import Plan
from niss.flower import NissStrategy, niss_mod
from niss.session.server import Session

SIZE, NODES = 200_000, 6
MODEL = 4 * SIZE


class LeanGrid(FakeGrid):
    """Keeps nothing of what it carries."""

    def send_and_receive(self, messages, *, timeout=None):
        replies = list(super().send_and_receive(messages, timeout=timeout))
        self.sent.clear()
        self.received.clear()
        return replies


def played(neighbours: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """In models: the peak of a client beyond what was there, what its answer leaves, what the server holds at last."""
    seen: dict[str, float] = {}

    def watched(message: Message, context: Context, call_next) -> Message:
        if message.content["niss"]["stage"] != "round":
            return call_next(message, context)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        reply = call_next(message, context)
        now, peak = tracemalloc.get_traced_memory()
        seen["client"] = max(seen.get("client", 0.0), (peak - before) / MODEL)
        seen["left"] = max(seen.get("left", 0.0), (now - before) / MODEL)
        return reply

    app = ClientApp(mods=[watched, niss_mod])

    @app.train()
    def train(message: Message, _context: Context) -> Message:
        weights = message.content["arrays"]["weights"].numpy()
        content = {"arrays": arrays({"weights": weights + np.float32(1e-4)}), "metrics": MetricRecord()}
        return Message(RecordDict(content), reply_to=message)

    take = Session._take_uploads

    def taken(session: Session, replies) -> None:
        take(session, replies)
        seen["server"] = (tracemalloc.get_traced_memory()[0] - at_first) / MODEL

    monkeypatch.setattr(Session, "_take_uploads", taken)
    plan = Plan(clip=0.5, epsilon=8.0, participations=1, neighbours=neighbours)
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=plan)
    model = arrays({"weights": np.zeros(SIZE, dtype=np.float32)})
    grid = LeanGrid(NODES, app)
    gc.collect()
    gc.disable()  # What is held by references alone: the collector comes when it likes.
    tracemalloc.start()
    try:
        at_first = tracemalloc.get_traced_memory()[0]
        strategy.start(grid, model, num_rounds=1, timeout=1)
    finally:
        tracemalloc.stop()
        gc.enable()
    assert strategy.rounds[0].survivors == NODES
    return seen


def test_the_memory_of_a_round_does_not_depend_on_the_neighbours(monkeypatch):
    few, many = (played(neighbours, monkeypatch) for neighbours in (2.0, 5.0))
    assert few["client"] < 11.0
    assert abs(many["client"] - few["client"]) < 0.5
    assert many["left"] < 1.5, "the upload, and nothing that only a garbage collector would free"
    # The uploads, the model as it was sent and as numbers, and what the tests' grid copies on its way.
    assert many["server"] < NODES + 4.0
