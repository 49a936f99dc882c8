"""What a round of Flower costs: plain FedAvg, NISS around it, and Flower's own SecAgg+, in one run on one machine.

    python benchmarks/flower.py --quick            # smoke test: few clients, a small model
    python benchmarks/flower.py --json flower.json # 30 clients, 199,210 parameters
    python benchmarks/flower.py --memory --clients 10 --coordinates 10000000

Plain FedAvg and NISS run as apps do: a strategy, a ClientApp for each client, messages that are encoded and decoded on
their way. SecAgg+ exists for the older API only and runs through its own mod and workflow, as in `protocol.py`; putting
its messages on the wire is not timed. Nothing is trained: each client adds a fixed update, and the time that takes is
left out. All times are CPU time with one thread. Two sums are shown of the time a round takes beyond plain FedAvg:
`one machine`, where the clients run one after the other, and `federation`, where they run at once and the round waits
for the slowest (here: the median, since all do the same). In `niss carried` twice as many clients take turns, so that
rounds are of the same size, and each shares noise with everyone of its round, of the one before and of the next.

With `--memory` one round of each is traced instead of timed: the most memory that the answer of one client takes beyond
the message it answers, and the most that all of it takes together, server and messages in flight, in one process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tracemalloc
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import Any
from uuid import uuid4

import numpy as np
from threadpoolctl import threadpool_limits

from niss.accounting import Plan

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
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

    clients: list[float] = field(default_factory=list)
    server: float = 0.0
    upload: int = 0

    @property
    def one_machine(self) -> float:
        return sum(self.clients) + self.server

    @property
    def federation(self) -> float:
        return statistics.median(self.clients) + self.server


class MeasuringGrid(Grid):
    """Every node in this process; what clients do is timed apart from what the strategy does."""

    def __init__(self, clients: int, app: ClientApp) -> None:
        self._app = app
        self._contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in range(1, clients + 1)}
        self.spent = dict.fromkeys(self._contexts, 0.0)
        self.sent = dict.fromkeys(self._contexts, 0)
        self.outside = 0.0
        self.client_peak = 0
        self._peak = 0

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
        held = self._traced()
        reply = self._app(received, self._contexts[node])
        self._traced(held)
        back = recorddict_to_proto(reply.content).SerializeToString()
        self.spent[node] += process_time() - before - (TRAINING.seconds - trained)
        self.sent[node] += len(back)
        return Message(_decoded(back), reply_to=message)

    def _traced(self, held: int | None = None) -> int:
        """Bytes in use; with `held`, those before a client answered, its peak is noted first."""
        now, peak = tracemalloc.get_traced_memory()
        self._peak = max(self._peak, peak)
        if held is not None:
            self.client_peak = max(self.client_peak, peak - held)
        if tracemalloc.is_tracing():
            tracemalloc.reset_peak()
        return now

    @property
    def peak(self) -> int:
        """The most bytes in use so far."""
        self._traced()
        return self._peak

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    run = property(_unused)
    set_run = create_message = push_messages = pull_messages = _unused


def _decoded(data: bytes) -> RecordDict:
    from flwr.proto.recorddict_pb2 import RecordDict as Proto

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


def make_app(mods: list[Any]) -> ClientApp:
    app = ClientApp(mods=mods)
    app.train()(TRAINING)
    return app


def play(strategy: Strategy, mods: list[Any], clients: int, coordinates: int, rounds: int) -> list[Cost]:
    """Some rounds through the strategy's own methods, as `Strategy.start` calls them."""
    from flwr.app import ConfigRecord

    grid = MeasuringGrid(clients, make_app(mods))
    arrays = ArrayRecord({"weights": Array(np.zeros(coordinates, dtype=np.float32))})
    costs = []
    for number in range(1, rounds + 1):
        grid.reset()
        started = process_time()
        messages = list(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        replies = grid.send_and_receive(messages)
        found, _ = strategy.aggregate_train(number, replies)
        server = process_time() - started - grid.outside
        asked = [message.metadata.dst_node_id for message in messages]
        costs.append(Cost([grid.spent[node] for node in asked], server, max(grid.sent.values())))
        if found is None:
            raise RuntimeError("no result")
        expected = np.mean([TRAINING.updates[node] for node in asked], axis=0)
        _check(strategy, found["weights"].numpy() - arrays["weights"].numpy(), expected)
        arrays = found
    return costs


def trace(name: str, strategy: Strategy, mods: list[Any], clients: int, coordinates: int) -> dict[str, Any]:
    """The memory that one round takes; the fixed updates of the clients are there before."""
    from flwr.app import ConfigRecord

    grid = MeasuringGrid(clients, make_app(mods))
    arrays = ArrayRecord({"weights": Array(np.zeros(coordinates, dtype=np.float32))})
    tracemalloc.start()
    messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    strategy.aggregate_train(1, grid.send_and_receive(messages))
    row = {"contestant": name, "client_bytes": grid.client_peak, "together_bytes": grid.peak}
    tracemalloc.stop()
    return row


def measure_memory(clients: int, coordinates: int) -> list[dict[str, Any]]:
    """Plain FedAvg, and NISS with ever more neighbours, in one round each."""
    step = np.full(coordinates, 0.9 * CLIP / coordinates**0.5, dtype=np.float32)
    TRAINING.updates = dict.fromkeys(range(1, clients + 1), step)
    rows = [trace(PLAIN, FedAvg(fraction_evaluate=0.0), [], clients, coordinates)]
    for neighbours in dict.fromkeys((min(4.0, clients - 1.0), clients - 1.0)):
        plan = Plan(
            clip=CLIP, epsilon=8.0, participations=1, kappa=4.0, neighbours=neighbours, chain_rounds=1
        )
        strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=plan)
        rows.append(trace(f"niss v={neighbours:g}", strategy, [niss_mod], clients, coordinates))
    return rows


def show_memory(rows: list[dict[str, Any]], coordinates: int) -> None:
    model = 4 * coordinates
    print("| | one client, MB | in models | together, MB | in models |")
    print("|---|---|---|---|---|")
    for row in rows:
        cells = [
            f"{row[key] / 1e6:,.1f} | {row[key] / model:.1f}" for key in ("client_bytes", "together_bytes")
        ]
        print(f"| {row['contestant']} | {' | '.join(cells)} |")


def _check(strategy: Strategy, found: np.ndarray, expected: np.ndarray) -> None:
    """The mean of the updates, but for the noise that was meant to be there."""
    noise = strategy.account.noise_of_round() if isinstance(strategy, NissStrategy) else 0.0
    off = float(np.sqrt(np.mean((found - expected) ** 2)))
    if not off <= 1.1 * noise + 1e-6:
        raise RuntimeError(f"the result is off by {off:g}, with noise of {noise:g}")


def play_secagg(clients: int, coordinates: int, rounds: int) -> list[Cost]:
    """Flower's SecAgg+ on the complete graph; every client is real."""
    import protocol as other

    case = other.Case(clients=clients, coordinates=coordinates, neighbours=None, sampled=clients)
    vectors = np.stack([TRAINING.updates[node] for node in range(1, clients + 1)])
    costs = []
    for _ in range(rounds):
        measured = other.secagg(case, vectors, drops=0, factor=1)
        each = [sum(stage[client] for stage in measured.client.values()) for client in range(clients)]
        server = sum(sum(stage) for stage in measured.server.values())
        costs.append(Cost(each, server, max(measured.upload_bytes)))
    return costs


def measure(clients: int, coordinates: int, rounds: int) -> dict[str, list[Cost]]:
    """All contestants on the same updates; the first round of a run enrols, and is shown apart."""
    rng = np.random.default_rng(3)
    for node in range(1, SEPARATION * clients + 1):
        drawn = rng.normal(size=coordinates).astype(np.float32)
        TRAINING.updates[node] = (0.9 * CLIP / np.linalg.norm(drawn)) * drawn
    settings = {"clip": CLIP, "epsilon": 8.0, "kappa": 4.0, "colluders": 1}
    settings |= {"participations": rounds + 1, "rounds": rounds + 1}
    found = {PLAIN: play(FedAvg(fraction_evaluate=0.0), [], clients, coordinates, rounds + 1)}
    for name, neighbours in (("niss v=4", 4.0), ("niss v=10", 10.0), ("niss complete", clients - 1.0)):
        plan = Plan(**settings, neighbours=min(neighbours, clients - 1.0))
        strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=plan)
        found[name] = play(strategy, [niss_mod], clients, coordinates, rounds + 1)
    turns = Plan(**settings, separation=SEPARATION)
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=turns, carry=True)
    found["niss carried"] = play(strategy, [niss_mod], SEPARATION * clients, coordinates, rounds + 1)
    found[RIVAL] = [Cost([0.0]), *play_secagg(clients, coordinates, max(1, rounds - 1))]
    return found


def summarise(found: dict[str, list[Cost]]) -> list[dict[str, Any]]:
    rows = []
    base = {
        name: statistics.median(getattr(cost, name) for cost in found[PLAIN][1:])
        for name in ("one_machine", "federation", "upload")
    }
    for name, costs in found.items():
        later = costs[1:]
        machine = statistics.median(cost.one_machine for cost in later)
        federation = statistics.median(cost.federation for cost in later)
        # SecAgg+ is timed without the wire and without the weights going out: nothing is to be taken off.
        plain = {"one_machine": 0.0, "federation": 0.0} if name == RIVAL else base
        rows.append(
            {
                "contestant": name,
                "extra_seconds_one_machine": machine - plain["one_machine"],
                "extra_seconds_federation": federation - plain["federation"],
                "client_seconds": statistics.median(statistics.median(cost.clients) for cost in later),
                "server_seconds": statistics.median(cost.server for cost in later),
                "enrolment_seconds_one_machine": max(0.0, costs[0].one_machine - machine),
                "upload_bytes": statistics.median(cost.upload for cost in later),
                "upload_ratio": statistics.median(cost.upload for cost in later) / base["upload"],
            }
        )
    rival = rows[-1]
    for row in rows:
        for kind in ("one_machine", "federation"):
            key = f"extra_seconds_{kind}"
            row[f"of_secagg_{kind}"] = row[key] / rival[key]
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("| | extra s/round, one machine | of SecAgg+ | extra s/round, federation | of SecAgg+ | upload |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['contestant']} | {row['extra_seconds_one_machine']:.3f} | {row['of_secagg_one_machine']:.3f} "
            f"| {row['extra_seconds_federation']:.3f} | {row['of_secagg_federation']:.3f} "
            f"| {row['upload_bytes']:,.0f} B, {row['upload_ratio']:.4f}x |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--coordinates", type=int, default=199_210)
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take the median of")
    parser.add_argument("--quick", action="store_true", help="5 clients, 2,000 parameters, 1 round")
    parser.add_argument("--memory", action="store_true", help="trace memory instead of timing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    if options.quick:
        options.clients, options.coordinates, options.rounds = 5, 2_000, 1
    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    with threadpool_limits(1):
        if options.memory:
            rows = measure_memory(options.clients, options.coordinates)
            show_memory(rows, options.coordinates)
        else:
            rows = summarise(measure(options.clients, options.coordinates, options.rounds))
            show(rows)
    if options.json is not None:
        about = {
            "clients": options.clients,
            "coordinates": options.coordinates,
            "rounds": options.rounds,
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "flwr": version("flwr"),
            "rows": rows,
        }
        options.json.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
