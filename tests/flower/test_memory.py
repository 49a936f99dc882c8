"""Memory is some models for a client, whatever its neighbours, and for the server, whatever its clients."""

from __future__ import annotations

import copy
import gc
import tracemalloc
from uuid import uuid4

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from flower.grid import ODD, PRIVATE, FakeGrid, arrays, global_model
from niss.accounting import Plan
from niss.flower import NissStrategy, niss_mod, transport
from niss.session.server import Session

SIZE, NODES = 200_000, 6
MODEL = 4 * SIZE


class PulledGrid(FakeGrid):
    """One of Flower's: it is left to whoever asks how many replies are there at a time."""

    pull_interval = 0.01
    send_and_receive = InMemoryGrid.send_and_receive

    def __init__(self, *args, **named) -> None:
        super().__init__(*args, **named)
        self.waiting: dict[str, Message] = {}
        self.asked: set[str] = set()

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self.waiting[message.metadata.message_id] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids):
        # Whoever is asked about for the first time needs some more time.
        ready = [one for one in message_ids if one in self.asked and one in self.waiting]
        self.asked.update(message_ids)
        replies = [self._deliver(copy.deepcopy(self.waiting.pop(one))) for one in ready]
        return [reply for reply in replies if reply is not None]


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
    assert few["client"] < 5.5
    assert abs(many["client"] - few["client"]) < 0.5
    assert many["left"] < 1.5, "the upload, and nothing that only a garbage collector would free"
    # The sum, the model as it was sent, and what the tests' grid copies on its way.
    assert many["server"] < 5.0


def peak(nodes: int) -> float:
    app = ClientApp(mods=[niss_mod])

    @app.train()
    def train(message: Message, _context: Context) -> Message:
        weights = message.content["arrays"]["weights"].numpy()
        content = {"arrays": arrays({"weights": weights + np.float32(1e-4)}), "metrics": MetricRecord()}
        return Message(RecordDict(content), reply_to=message)

    plan = Plan(clip=0.5, epsilon=8.0, participations=1, neighbours=3.0)
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=plan)
    model, grid = arrays({"weights": np.zeros(SIZE, dtype=np.float32)}), PulledGrid(nodes, app)
    gc.collect()
    tracemalloc.start()
    try:
        at_first = tracemalloc.get_traced_memory()[0]
        strategy.start(grid, model, num_rounds=1, timeout=60)
        found = (tracemalloc.get_traced_memory()[1] - at_first) / MODEL
    finally:
        tracemalloc.stop()
    assert strategy.rounds[0].survivors == nodes
    return found


def test_the_memory_of_a_server_does_not_depend_on_its_clients(monkeypatch):
    monkeypatch.setattr(transport, "PULLED_BYTES", 1)
    few, many = peak(5), peak(15)
    assert abs(many - few) < 1.0


def test_who_never_answers_is_waited_for_as_long_as_was_said():
    class OneIsMute(PulledGrid):
        def _deliver(self, message):
            mute = message.metadata.dst_node_id == ODD and message.content["niss"]["stage"] == "round"
            return None if mute else super()._deliver(message)

    grid = OneIsMute(6)
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=PRIVATE)
    strategy.start(grid, global_model(), num_rounds=1, timeout=3)
    assert strategy.rounds[0].survivors == 5
    assert strategy.rounds[0].lost == {str(ODD): "no answer in time"}
