"""What a round of Flower costs: plain FedAvg, NISS around it, and Flower's own SecAgg+, in one run on one machine.

    python benchmarks/flower.py --quick            # smoke test: few clients, a small model
    python benchmarks/flower.py --json flower.json # 30 clients, 199,210 parameters
    python benchmarks/flower.py --large --json large.json # 100,000,000 parameters, in processes

Plain FedAvg and NISS run as apps do: a strategy, a ClientApp for each client, messages that are encoded and decoded on
their way. SecAgg+ exists for the older API only and runs through its own mod and workflow, as in `protocol.py`; putting
its messages on the wire is not timed. Nothing is trained: each client adds a fixed update, and the time that takes is
left out. All times are CPU time with one thread. Two sums are shown of the time a round takes beyond plain FedAvg:
`one machine`, where the clients run one after the other, and `federation`, where they run at once and the round waits
for the slowest (here: the median, since all do the same). In `niss carried` twice as many clients take turns, so that
rounds are of the same size, and each shares noise with everyone of its round, of the one before and of the next.

With `--large` the server and every answer of a client are processes of their own, as in a deployment; messages go from
one to the other through a file, and what Flower takes to send them is left out. Eleven clients share noise with each
other, some of them upload, and the others are lost. Memory is the most beyond a process that has imported everything,
in models of float32: of a client until its app has trained and while NISS hides, and of the server. Seconds are CPU
time of all threads, of all that NISS does to a client's update.
"""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from uuid import uuid4

import numpy as np
from harness import Report, Row, answer, command_line, elsewhere, medians, peak
from threadpoolctl import threadpool_limits

from niss.accounting import Plan

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
    from flwr.proto.recorddict_pb2 import RecordDict as Proto
    from flwr.serverapp.strategy import FedAvg, Strategy
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid.inmemory_grid import InMemoryGrid

    from niss.flower import NissStrategy, niss_mod

PLAIN, RIVAL = "fedavg", "secagg+ complete"
CLIP = 0.5
SEPARATION = 2


Cost = dict[str, float]


def cost(clients: list[float], server: float, upload: int) -> Cost:
    """Of a round: CPU seconds of each client and of the server, and bytes that one client sends."""
    return {"one machine": sum(clients) + server, "federation": median(clients) + server, "upload": upload}


class MeasuringGrid(InMemoryGrid):
    """Every node in this process; what clients do is timed apart from what the strategy does."""

    pull_interval = 0.0

    def __init__(self, clients: int, app: ClientApp) -> None:
        self._app, self._waiting = app, dict[str, Message]()
        self._contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in range(1, clients + 1)}
        self.reset()

    def reset(self) -> None:
        self.spent = dict.fromkeys(self._contexts, 0.0)
        self.sent = dict.fromkeys(self._contexts, 0)
        self.outside = 0.0

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = name = str(uuid4())
            self._waiting[name] = message
        return list(self._waiting)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        started = process_time()
        replies = [self._ask(self._waiting.pop(name)) for name in list(message_ids)]
        self.outside += process_time() - started
        return replies

    def _ask(self, message: Message) -> Message:
        """As it would arrive: encoded and decoded; a client decodes and encodes in its own time."""
        node = message.metadata.dst_node_id
        carried = recorddict_to_proto(message.content).SerializeToString()
        before, trained = process_time(), TRAINING.seconds
        received = Message(_decoded(carried), dst_node_id=node, message_type=message.metadata.message_type)
        received.metadata.__dict__["_message_id"] = message.metadata.message_id
        reply = self._app(received, self._contexts[node])
        back = recorddict_to_proto(reply.content).SerializeToString()
        self.spent[node] += process_time() - before - (TRAINING.seconds - trained)
        self.sent[node] += len(back)
        return Message(_decoded(back), reply_to=message)


def _decoded(data: bytes) -> RecordDict:
    return recorddict_from_proto(Proto.FromString(data))


class Training:
    """Adds a fixed update, and keeps the time it takes out of the accounts."""

    def __init__(self) -> None:
        self.seconds, self.peak = 0.0, 0.0
        self.updates: dict[int, np.ndarray | np.float32] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        started = process_time()
        weights = message.content["arrays"]["weights"].numpy()
        weights += self.updates[context.node_id]
        moved = Array(weights)
        content = RecordDict(
            {"arrays": ArrayRecord({"weights": moved}), "metrics": MetricRecord({"num-examples": 1})}
        )
        self.peak, self.seconds = peak(), self.seconds + process_time() - started
        return Message(content, reply_to=message)


TRAINING = Training()


def play(strategy: Strategy, clients: int, rounds: int) -> list[Cost]:
    """Some rounds through the strategy's own methods, as `Strategy.start` calls them."""
    app = ClientApp(mods=[niss_mod] if isinstance(strategy, NissStrategy) else [])
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
        costs.append(cost([grid.spent[node] for node in asked], server, max(grid.sent.values())))
        if found is None:
            raise RuntimeError("no result")
        expected = np.mean([TRAINING.updates[node] for node in asked], axis=0)
        _check(strategy, found["weights"].numpy() - arrays["weights"].numpy(), expected)
        arrays = found
    return costs


def contestants(clients: int, rounds: int) -> dict[str, tuple[Strategy, int]]:
    """Plain FedAvg, and NISS with ever more neighbours: strategies, and how many clients there are."""
    plain = FedAvg(fraction_evaluate=0.0)
    settings = {"clip": CLIP, "epsilon": 8.0, "kappa": 4.0, "collusion": 0.1 if clients > 2 else 0.0}
    made: dict[str, tuple[Strategy, int]] = {PLAIN: (plain, clients)}
    for name, neighbours in (("niss v=4", 4.0), ("niss v=10", 10.0), ("niss complete", clients - 1.0)):
        turns = {"participations": rounds, "chain_rounds": rounds}
        plan = Plan(**settings, **turns, neighbours=min(neighbours, clients - 1.0))
        made[name] = (NissStrategy(plain, plan=plan), clients)
    plan = Plan(**settings, separation=SEPARATION)
    made["niss carried"] = (NissStrategy(plain, plan=plan, carry=True), SEPARATION * clients)
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
    return cost(each, measured.server_seconds(), max(measured.upload_bytes))


def measure(clients: int, coordinates: int, rounds: int) -> list[Row]:
    """All contestants on the same updates; the first round of a run enrols, and is shown apart."""
    rng = np.random.default_rng(3)
    for node in range(1, SEPARATION * clients + 1):
        drawn = rng.normal(size=coordinates).astype(np.float32)
        TRAINING.updates[node] = (0.9 * CLIP / np.linalg.norm(drawn)) * drawn
    found = {name: play(*one, rounds + 1) for name, one in contestants(clients, rounds + 1).items()}
    nothing = cost([0.0], 0.0, 0)
    found[RIVAL] = [nothing, *(play_secagg(clients, coordinates) for _ in range(max(1, rounds - 1)))]
    middle = {name: medians(costs[1:]) for name, costs in found.items()}
    rows = []
    for name, costs in found.items():
        # SecAgg+ is timed without the wire and without the weights going out: nothing is to be taken off.
        plain = nothing if name == RIVAL else middle[PLAIN]
        rows.append({"contestant": name})
        for kind in ("one machine", "federation"):
            extra = middle[name][kind] - plain[kind]
            rows[-1] |= {f"extra s, {kind}": extra, f"of SecAgg+, {kind}": extra / middle[RIVAL][kind]}
        enrolment = max(0.0, costs[0]["one machine"] - middle[name]["one machine"])
        upload = middle[name]["upload"]
        rows[-1] |= {
            "enrolment s": enrolment,
            "upload B": upload,
            "x plain": upload / middle[PLAIN]["upload"],
        }
    return rows


def answer_one(path: str) -> Row:
    """A process of a node: the reply takes the place of the message in that file."""
    _prepare()
    app, idle = ClientApp(mods=[niss_mod]), peak()
    app.train()(TRAINING)
    message, context = pickle.loads(Path(path).read_bytes())  # noqa: S301
    TRAINING.updates[context.node_id] = np.float32(1e-5)
    started = process_time()
    reply = app(message, context)
    spent = process_time() - started - TRAINING.seconds
    found = {"CPU s": spent, "idle": idle, "training": TRAINING.peak, "hiding": peak()}
    Path(path).write_bytes(pickle.dumps((reply, context)))
    return found


class ProcessGrid(MeasuringGrid):
    """Each message is answered by a process; of the nodes that are to train, only so many answer."""

    def __init__(self, clients: int, answering: int, path: Path) -> None:
        super().__init__(clients, ClientApp())
        self._answering, self._path = answering, path
        self.found: list[Row] = []

    def _ask(self, message: Message) -> Message:
        node, trains = message.metadata.dst_node_id, "arrays" in message.content
        if trains and node > self._answering:
            return Message(Error(3, "lost"), reply_to=message)
        self._path.write_bytes(pickle.dumps((message, self._contexts[node])))
        self.found += [answer(elsewhere("flower.answer_one", str(self._path)))] * trains
        reply, self._contexts[node] = pickle.loads(self._path.read_bytes())  # noqa: S301
        return reply


def serve(clients: int, answering: int, parameters: int) -> Row:
    """The process of the server, in a round of a large model."""
    _prepare()
    plan = Plan(clip=CLIP, epsilon=8.0, participations=1, neighbours=clients - 1.0, mode="tolerate")
    strategy, idle = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=plan), peak()
    with TemporaryDirectory() as folder:
        grid = ProcessGrid(clients, answering, Path(folder) / "message")
        zeros = ArrayRecord({"weights": Array(np.zeros(parameters, dtype=np.float32))})
        strategy.start(grid, zeros, num_rounds=1)
    model, middle = 4 * parameters / 2**20, medians(grid.found)
    beyond = {name: (middle[name] - middle["idle"]) / model for name in ("training", "hiding")}
    row = {"uploads": answering, **beyond, "server": (peak() - idle) / model, "idle MB": middle["idle"]}
    return row | {
        "CPU s": middle["CPU s"],
        "ns a coordinate and share": 1e9 * middle["CPU s"] / parameters / (2 * clients - 2),
    }


def _prepare() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def main() -> None:
    """Measure, print, write."""
    options = command_line(
        __doc__,
        repeats=3,
        clients={"type": int, "default": 30},
        coordinates={"type": int, "default": 199_210},
        large={"type": int, "nargs": "?", "const": 100_000_000, "help": "parameters, in processes"},
    )
    if options.quick:
        options.clients, options.coordinates = 5, 2_000
    report = Report(options, "flwr", "numba")
    _prepare()
    if options.large or options.quick:
        clients, parameters = (4, 10_000) if options.quick else (11, options.large)
        for answering in (2, 4):
            row = answer(elsewhere("flower.serve", clients, answering, parameters))
            report.add(f"{clients} clients, {parameters:,} parameters, in processes", [row])
    if not options.large:
        title = f"{options.clients} clients, {options.coordinates:,} parameters"
        with threadpool_limits(1):
            report.add(title, measure(options.clients, options.coordinates, options.repeats))


if __name__ == "__main__":
    main()
