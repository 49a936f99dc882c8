"""A grid in one process: every node is a ClientApp with its own Context, and the relay can be told to misbehave."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from niss.accounting import LedgerFile, Plan
from niss.errors import ProtocolError
from niss.flower import NissStrategy, niss_mod
from niss.protocol.keyfile import create_keyfile, load_identity
from niss.protocol.keys import Identity
from niss.protocol.messages import Upload, decode

SHAPES = {"dense": (3, 4), "bias": (4,)}
FIRST = 2**63 + 11
"""Node ids are 64 bits wide: one that does not survive a float."""
OPEN = {"niss-uncalibrated": True}
"""Many tests compare sums, and run plans without noise."""
NODES, ODD = 6, FIRST + 2
# Everyone with everyone: what a round costs does not depend on the graph that is drawn.
PLAN = Plan(clip=0.5, epsilon=8.0, participations=4, neighbours=NODES - 1, kappa=2.0, mode="tolerate")
WITHOUT_NOISE = Plan(tau2=0.0, clip=5.0, participations=3, neighbours=3)
PRIVATE = Plan(clip=0.5, epsilon=8.0, participations=3, neighbours=3, kappa=2.0, mode="tolerate")

Change = Callable[[Message], object]
"""Of a message on its way, in place."""


def global_model() -> ArrayRecord:
    rng = np.random.default_rng(5)
    return arrays({name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()})


def arrays(values: dict[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in values.items()})


def values(record: ArrayRecord) -> np.ndarray:
    """All arrays of a model as one vector."""
    return np.concatenate([array.numpy().astype(np.float64).ravel() for array in record.values()])


def step_of(node: int, server_round: int, size: float = 0.02) -> dict[str, np.ndarray]:
    """The update a node makes in a round, the same whoever asks."""
    rng = np.random.default_rng([node % 1000, server_round])
    return {name: (size * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


def model_after(rounds: Mapping[int, Collection[int]], size: int | None = None) -> np.ndarray:
    """The model after rounds in which these nodes were summed, with weight 1 / size or as many as they are."""
    moved = values(global_model())
    for number, nodes in rounds.items():
        steps = (
            np.concatenate([part.astype(np.float64).ravel() for part in step_of(node, number).values()])
            for node in nodes
        )
        moved = moved + sum(steps) / (size or len(nodes))
    return moved


def examples_and_loss(node: int, _server_round: int) -> dict[str, float]:
    return {"num-examples": 10 + node % 7, "loss": 0.5}


def make_app(
    mods: list[Any] | None = None, size: float = 0.02, report: Callable[[int, int], Any] = examples_and_loss
) -> ClientApp:
    """An app that adds `step_of` to the weights it is sent, and reports metrics by node and round."""
    app = ClientApp(mods=[niss_mod] if mods is None else mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        assert list(message.content.config_records) == ["config"], "the app must not see the record of NISS"
        now = int(message.content["config"]["server-round"])
        moved = {
            name: array.numpy() + step_of(context.node_id, now, size)[name]
            for name, array in message.content["arrays"].items()
        }
        metrics = MetricRecord(report(context.node_id, now))
        return Message(RecordDict({"arrays": arrays(moved), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        assert "niss" not in message.content
        metrics = MetricRecord({"num-examples": 1, "node": float(context.node_id % 1000)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class Killed(BaseException):
    """Stands for kill -9: nothing may run after it but what frees locks."""


class FakeGrid(Grid):
    """`tamper(message)` may change what is sent, `mangle(reply)` what comes back; None: it is lost."""

    def __init__(self, nodes: int = 6, app: ClientApp | None = None, **node_config: Any) -> None:
        self.app = make_app() if app is None else app
        self.apps: dict[int, ClientApp] = {}
        self.contexts = {
            FIRST + number: Context(1, FIRST + number, {**OPEN, **node_config}, RecordDict(), {})
            for number in range(nodes)
        }
        self.dead: set[int] = set()
        self.silent: set[int] = set()
        self.tamper: Callable[[Message], Message | None] = lambda message: message
        self.mangle: Callable[[Message], Message | None] = lambda reply: reply
        self.sent: list[Message] = []
        self.received: list[Message] = []

    def keep_state(self, folder: Path) -> Self:
        """Give each node a state folder, named like it; one that is there is used as it is."""
        for node, context in self.contexts.items():
            home = folder / str(node)
            if not home.exists():
                create_keyfile(home / "identity.key", Identity.generate(os.urandom))
            context.node_config["niss-state"] = str(home)
        return self

    def home(self, node: int = ODD) -> Path:
        """The state folder of a node."""
        return Path(self.contexts[node].node_config["niss-state"])

    def identity(self, node: int = ODD) -> Identity:
        """Of a node with a state folder."""
        return load_identity(self.home(node) / "identity.key")

    def ledger(self, node: int = ODD) -> LedgerFile:
        return LedgerFile.read(self.home(node) / "ledger.jsonl")

    def stage_of(self, reply: Message) -> str:
        """What a reply is about; empty where that is not for NISS."""
        (sent,) = [one for one in self.sent if one.metadata.message_id == reply.metadata.reply_to_message_id]
        return sent.content["niss"]["stage"] if "niss" in sent.content else ""

    def on_request(self, stage: str, change: Change, node: int | None = ODD) -> None:
        """Have what a node, or each, is sent in a stage changed on the way."""

        def tamper(message: Message) -> Message:
            to = message.metadata.dst_node_id
            if node in (None, to) and "niss" in message.content and message.content["niss"]["stage"] == stage:
                change(message)
            return message

        self.tamper = tamper

    def on_reply(self, stage: str, change: Change, node: int | None = ODD) -> None:
        """Have what a node, or each, answers in a stage changed on the way."""

        def mangle(reply: Message) -> Message:
            if node in (None, reply.metadata.src_node_id) and self.stage_of(reply) == stage:
                change(reply)
            return reply

        self.mangle = mangle

    @contextmanager
    def killing(self, server_round: int) -> Iterator[None]:
        """The server that runs in here is killed when it asks the first node to train in that round."""

        def die(message: Message) -> None:
            if message.content["config"]["server-round"] == server_round:
                raise Killed

        self.on_request("round", die, node=None)
        with pytest.raises(Killed):
            yield
        self.tamper = lambda message: message

    def kept(self, stage: str) -> list[Message]:
        """Filled with copies of what the odd node is sent in a stage."""
        letters: list[Message] = []
        self.on_request(stage, lambda message: letters.append(copy.deepcopy(message)))
        return letters

    def lose_uploads(self) -> None:
        """Those of the odd node."""
        self.mangle = lambda reply: (
            None if holds(reply, Upload) and reply.metadata.src_node_id == ODD else reply
        )

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **named: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [node for node in self.contexts if node not in self.dead]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        assert timeout is not None, "a stage without an end would wait for the dead"
        replies = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self.sent.append(message)
            arrived = self.tamper(copy.deepcopy(message))
            reply = None if arrived is None else self._deliver(arrived)
            reply = None if reply is None else self.mangle(reply)
            if reply is not None:
                self.received.append(copy.deepcopy(reply))
                replies.append(reply)
        return replies

    def _deliver(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if node in self.silent:
            return None
        if node in self.dead:
            reply = Message(Error(3, "Node unavailable"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1  # As the SuperLink reports a node that went away.
            return reply
        try:
            reply = self.apps.get(node, self.app)(message, self.contexts[node])
        except Exception as error:
            return Message(Error(2, f"{type(error)}:<{error}>"), reply_to=message)
        kept = self.contexts[node]
        kept.state = recorddict_from_proto(
            recorddict_to_proto(kept.state)
        )  # As it is saved between messages.
        return copy.deepcopy(reply)


def play(
    grid: Grid, rounds: int, inner: Strategy | None = None, **options: Any
) -> tuple[NissStrategy, Result]:
    """A run, also one in which no round took place; its strategy, and what Flower made of it."""
    strategy, result = NissStrategy(inner or FedAvg(fraction_evaluate=0.0), **options), Result()
    with perhaps_without_a_round():
        result = strategy.start(grid, global_model(), num_rounds=rounds, timeout=1)
    return strategy, result


def start(grid: FakeGrid, rounds: int = 2, **options: Any) -> NissStrategy:
    """A run of the plan, or of another; its strategy."""
    return play(grid, rounds, **{"plan": PLAN, **options})[0]


def survivors(strategy: NissStrategy) -> list[int]:
    return [record.survivors for record in strategy.rounds]


def body_of(message: Message) -> bytes:
    """The message of the protocol in a request or a reply."""
    record = message.content["niss"]
    return record["body"] if "body" in record else message.content["niss-upload"]["body"].numpy().tobytes()


def with_body(change: Callable[[bytes], bytes]) -> Change:
    """Of the message of the protocol in a request or a reply."""

    def apply(message: Message) -> None:
        body = change(body_of(message))
        if "body" in message.content["niss"]:
            message.content["niss"]["body"] = body
        else:
            message.content["niss-upload"]["body"] = Array(np.frombuffer(body, dtype=np.uint8))

    return apply


def holds(reply: Message, kind: type) -> bool:
    """Whether a reply has a message of the protocol of this kind."""
    if reply.has_error() or body_of(reply).startswith(b"niss enrolment"):
        return False
    return isinstance(decode(body_of(reply)), kind)


@contextmanager
def perhaps_without_a_round() -> Iterator[None]:
    """For runs that are all about a refusal: that one without a single round raises is tested elsewhere."""
    try:
        yield
    except ProtocolError as error:
        if not error.message.startswith("no round took place: "):
            raise
