"""What a round of Flower costs: plain FedAvg, NISS around it, and Flower's own SecAgg+, in one run on one machine.

    python benchmarks/flower.py --quick            # smoke test: few clients, a small model
    python benchmarks/flower.py --json flower.json # 30 clients, 199,210 parameters

Plain FedAvg and NISS run as apps do: a strategy, a ClientApp for each client, messages that are encoded and decoded on
their way. SecAgg+ exists for the older API only and runs through its own mod and workflow, as in `protocol.py`; putting
its messages on the wire is not timed. Nothing is trained: each client adds a fixed update, and the time that takes is
left out. All times are CPU time with one thread. Two sums are shown of the time a round takes beyond plain FedAvg:
`one machine`, where the clients run one after the other, and `federation`, where they run at once and the round waits
for the slowest (here: the median, since all do the same). In `niss carried` twice as many clients take turns, so that
rounds are of the same size, and each shares noise with everyone of its round, of the one before and of the next.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from time import process_time
from typing import Any
from uuid import uuid4

import numpy as np
from harness import Report, Row, command_line
from threadpoolctl import threadpool_limits

from niss.accounting import Plan

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
    from flwr.proto.recorddict_pb2 import RecordDict as Proto
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg, Strategy
    from flwr.supercore.task_identity import TaskIdentity

    from niss.flower import NissStrategy, niss_mod

PLAIN, RIVAL = "fedavg", "secagg+ complete"
CLIP = 0.5
SEPARATION = 2


@dataclass
class Cost:
    """CPU seconds of each client in a round, of the server, and bytes that one client sends."""

    clients: list[float]
    server: float
    upload: int

    @property
    def numbers(self) -> dict[str, float]:
        return {
            "one machine": sum(self.clients) + self.server,
            "federation": median(self.clients) + self.server,
            "upload": self.upload,
        }


class MeasuringGrid(Grid):
    """Every node in this process; what clients do is timed apart from what the strategy does."""

    def __init__(self, clients: int, app: ClientApp) -> None:
        self._app = app
        self._contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in range(1, clients + 1)}
        self.reset()

    def reset(self) -> None:
        self.spent = dict.fromkeys(self._contexts, 0.0)
        self.sent = dict.fromkeys(self._contexts, 0)
        self.outside = 0.0

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        del timeout
        messages = list(messages)
        started = process_time()
        replies = [self._ask(message) for message in messages]
        self.outside += process_time() - started
        return replies

    def _ask(self, message: Message) -> Message:
        """As it would arrive: encoded and decoded; a client decodes and encodes in its own time."""
        node = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = str(uuid4())
        carried = recorddict_to_proto(message.content).SerializeToString()
        before, trained = process_time(), TRAINING.seconds
        received = Message(_decoded(carried), dst_node_id=node, message_type=message.metadata.message_type)
        received.metadata.__dict__["_message_id"] = message.metadata.message_id
        reply = self._app(received, self._contexts[node])
        back = recorddict_to_proto(reply.content).SerializeToString()
        self.spent[node] += process_time() - before - (TRAINING.seconds - trained)
        self.sent[node] += len(back)
        return Message(_decoded(back), reply_to=message)

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    run = property(_unused)
    set_run = create_message = push_messages = pull_messages = _unused


def _decoded(data: bytes) -> RecordDict:
    return recorddict_from_proto(Proto.FromString(data))


class Training:
    """Adds a fixed update, and keeps the time it takes out of the accounts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.updates: dict[int, np.ndarray] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        started = process_time()
        weights = message.content["arrays"]["weights"].numpy()
        moved = Array(weights + self.updates[context.node_id])
        content = RecordDict(
            {"arrays": ArrayRecord({"weights": moved}), "metrics": MetricRecord({"num-examples": 1})}
        )
        self.seconds += process_time() - started
        return Message(content, reply_to=message)


TRAINING = Training()


def play(strategy: Strategy, mods: list[Any], clients: int, rounds: int) -> list[Cost]:
    """Some rounds through the strategy's own methods, as `Strategy.start` calls them."""
    app = ClientApp(mods=mods)
    app.train()(TRAINING)
    grid = MeasuringGrid(clients, app)
    arrays = ArrayRecord({"weights": Array(np.zeros_like(TRAINING.updates[1]))})
    costs = []
    for number in range(1, rounds + 1):
        grid.reset()
        started = process_time()
        messages = list(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        asked = [message.metadata.dst_node_id for message in messages]
        found, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
        server = process_time() - started - grid.outside
        costs.append(Cost([grid.spent[node] for node in asked], server, max(grid.sent.values())))
        if found is None:
            raise RuntimeError("no result")
        expected = np.mean([TRAINING.updates[node] for node in asked], axis=0)
        _check(strategy, found["weights"].numpy() - arrays["weights"].numpy(), expected)
        arrays = found
    return costs


def contestants(clients: int, rounds: int) -> dict[str, tuple[Strategy, list[Any], int]]:
    """Plain FedAvg, and NISS with ever more neighbours: strategies, mods and how many clients there are."""
    plain = FedAvg(fraction_evaluate=0.0)
    settings = {"clip": CLIP, "epsilon": 8.0, "kappa": 4.0, "collusion": 0.1 if clients > 2 else 0.0}
    made: dict[str, tuple[Strategy, list[Any], int]] = {PLAIN: (plain, [], clients)}
    for name, neighbours in (("niss v=4", 4.0), ("niss v=10", 10.0), ("niss complete", clients - 1.0)):
        plan = Plan(
            **settings, participations=rounds, chain_rounds=rounds, neighbours=min(neighbours, clients - 1.0)
        )
        made[name] = (NissStrategy(plain, plan=plan), [niss_mod], clients)
    turns = Plan(**settings, separation=SEPARATION)
    made["niss carried"] = (NissStrategy(plain, plan=turns, carry=True), [niss_mod], SEPARATION * clients)
    return made


def _check(strategy: Strategy, found: np.ndarray, expected: np.ndarray) -> None:
    """The mean of the updates, but for the noise that was meant to be there."""
    noise = strategy.rounds[-1].noise.variance ** 0.5 if isinstance(strategy, NissStrategy) else 0.0
    off = float(np.sqrt(np.mean((found - expected) ** 2)))
    if not off <= 1.1 * noise + 1e-6:
        raise RuntimeError(f"the result is off by {off:g}, with noise of {noise:g}")


def play_secagg(clients: int, coordinates: int) -> Cost:
    """Flower's SecAgg+ on the complete graph."""
    import protocol

    case = protocol.Case(clients, None, coordinates)
    vectors = np.stack([TRAINING.updates[node] for node in range(1, clients + 1)])
    measured = protocol.secagg(case, vectors, drops=0, factor=1)
    each = [sum(stage[client] for stage in measured.client.values()) for client in range(clients)]
    return Cost(each, measured.server_seconds(), max(measured.upload_bytes))


def measure(clients: int, coordinates: int, rounds: int) -> list[Row]:
    """All contestants on the same updates; the first round of a run enrols, and is shown apart."""
    rng = np.random.default_rng(3)
    for node in range(1, SEPARATION * clients + 1):
        drawn = rng.normal(size=coordinates).astype(np.float32)
        TRAINING.updates[node] = (0.9 * CLIP / np.linalg.norm(drawn)) * drawn
    found = {
        name: play(*contestant, rounds=rounds + 1)
        for name, contestant in contestants(clients, rounds + 1).items()
    }
    nothing = Cost([0.0], 0.0, 0)
    found[RIVAL] = [nothing, *(play_secagg(clients, coordinates) for _ in range(max(1, rounds - 1)))]
    middle = {
        name: {key: median(cost.numbers[key] for cost in costs[1:]) for key in nothing.numbers}
        for name, costs in found.items()
    }
    rows = []
    for name, costs in found.items():
        # SecAgg+ is timed without the wire and without the weights going out: nothing is to be taken off.
        plain = nothing.numbers if name == RIVAL else middle[PLAIN]
        rows.append({"contestant": name})
        for kind in ("one machine", "federation"):
            extra = middle[name][kind] - plain[kind]
            rows[-1] |= {f"extra s, {kind}": extra, f"of SecAgg+, {kind}": extra / middle[RIVAL][kind]}
        enrolment = max(0.0, costs[0].numbers["one machine"] - middle[name]["one machine"])
        upload = middle[name]["upload"]
        rows[-1] |= {
            "enrolment s": enrolment,
            "upload B": upload,
            "x plain": upload / middle[PLAIN]["upload"],
        }
    return rows


def main() -> None:
    """Measure, print, write."""
    options = command_line(
        __doc__,
        repeats=3,
        clients={"type": int, "default": 30},
        coordinates={"type": int, "default": 199_210},
    )
    if options.quick:
        options.clients, options.coordinates = 5, 2_000
    report = Report(options, "flwr")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    title = f"{options.clients} clients, {options.coordinates:,} parameters"
    with threadpool_limits(1):
        report.add(title, measure(options.clients, options.coordinates, options.repeats))


if __name__ == "__main__":
    main()
