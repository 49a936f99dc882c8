"""What a round costs beyond plain FedAvg: the protocol of NISS beside Flower's SecAgg+, in one run.

Every contestant runs through its public API: NISS through `Client` and `Server`, SecAgg+ through `secaggplus_mod`
and `SecAggPlusWorkflow`. Every client does all of its work, and the sum of a round without dropouts is checked.

Messages are passed as objects: putting them on the wire is not timed on either side. Their bytes are counted as
encoded. Durable storage (`persist`, `charge`) is not timed either; Flower keeps its state in memory too. All times
are CPU time, with linear algebra on one thread.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import process_time as clock
from types import SimpleNamespace
from typing import Any

import numpy as np
from harness import Report, Row, command_line, in_turns, medians
from threadpoolctl import threadpool_limits

from niss.accounting import DrawnAccount
from niss.accounting.assumed import committee_size, committee_threshold
from niss.protocol import points
from niss.protocol.agreement import participants_hash, terms_hash
from niss.protocol.client import Client
from niss.protocol.keys import BeaconChain, Identity, verify_prekey
from niss.protocol.messages import Participant, Terms, encode
from niss.protocol.schedule import Policy
from niss.protocol.server import Server
from niss.randomness import secret
from niss.randomness.normal_table import load_loop

if importlib.util.find_spec("flwr"):  # All else runs without it.
    import flwr.common as common
    import flwr.compat.common.recorddict_compat as compat
    from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
    from flwr.client.mod import secaggplus_mod
    from flwr.common.secure_aggregation import secaggplus_constants as constants
    from flwr.common.serde import recorddict_to_proto
    from flwr.server.compat.legacy_context import LegacyContext
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.server.workflow import constant as names
    from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
    from flwr.supercore.task_identity import TaskIdentity

CLIP, NORM = 1.0, 2.0
GRID_BITS, MODULUS_BITS = 16, 32  # a grid on which even 2e11 draws are Gaussian enough for a client
RESIDUAL = 1e-6
"""Residual noise as a share of a client's own: next to none, since the sum is checked."""
THRESHOLD = 0.5
"""Of SecAgg+, as a share of the neighbours."""
GRAPHS = {"sparse": 10, "complete": None}
DROPOUT, FAILURE = 0.05, 1e-7
"""For which the committees of NISS are planned: dropouts, and what the bound on their colluders may fail with."""

Vectors = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One scenario: `neighbours` is the paper's v, None for everyone with everyone."""

    clients: int
    neighbours: int | None
    coordinates: int

    @property
    def degree(self) -> int:
        return self.clients - 1 if self.neighbours is None else min(self.neighbours, self.clients - 1)

    @property
    def colluders(self) -> int:
        return min(3, max(1, self.degree // 3))

    def members(self, drops: int) -> tuple[int, int]:
        """Size and threshold of a committee that can do without so many clients."""
        dropout = max(DROPOUT, drops / self.clients)
        size = committee_size(self.clients, self.colluders, FAILURE, dropout) or self.clients
        return size, committee_threshold(self.clients, size, self.colluders, FAILURE)

    @property
    def title(self) -> str:
        shares = "complete" if self.neighbours is None else f"v = {self.neighbours}"
        return f"m = {self.clients}, {shares}, {self.coordinates:,} coordinates"


@dataclass
class Measured:
    """Seconds by stage: of every client, and of the server; bytes that a client uploads.

    members    bytes that a member of the committee sends beside its upload
    messages   of a client, on average
    """

    client: dict[str, list[float]] = field(default_factory=dict)
    server: dict[str, list[float]] = field(default_factory=dict)
    upload_bytes: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    messages: float = 1.0

    def client_seconds(self, *without: str) -> float:
        return sum(median(spent) for stage, spent in self.client.items() if stage not in without)

    def server_seconds(self) -> float:
        return sum(map(sum, self.server.values()))


@contextmanager
def timed(stages: dict[str, list[float]], stage: str) -> Iterator[None]:
    """Add the seconds of the block to a stage."""
    start = clock()
    yield
    stages.setdefault(stage, []).append(clock() - start)


def make_vectors(case: Case) -> Vectors:
    """The same updates for every contestant: float32, of norm 2, one for each client."""
    drawn = np.random.default_rng(1).standard_normal((case.clients, case.coordinates)).astype(np.float32)
    return np.asarray(drawn * np.float32(NORM) / np.linalg.norm(drawn, axis=1, keepdims=True))


def fedavg(case: Case, vectors: Vectors, *, drops: int) -> Measured:
    """The baseline: float32 to bytes, and the mean of what arrives."""
    measured = Measured()
    for vector in vectors:
        with timed(measured.client, "upload"):
            sent = vector.tobytes()
        measured.upload_bytes.append(len(sent))
    with timed(measured.server, "mean"):
        total = np.zeros(case.coordinates, dtype=np.float64)
        for _ in range(case.clients - drops):
            total += np.frombuffer(sent, dtype=np.float32)
        total /= case.clients - drops
    return measured


MEMBER = "repair as a member"
"""The stage of the few who speak twice; all others are done after their upload."""


def niss_terms(case: Case, mode: str, drops: int) -> Terms:
    """Noise of the size of one client's part; what else is varied here changes no timing."""
    own = (CLIP / case.clients) ** 2
    repairing = mode == "repair"
    members, threshold = case.members(drops) if repairing else (0, 0)
    return Terms(
        run=b"benchmark",
        round=1,
        attempt=0,
        mode=mode,
        coordinates=case.coordinates,
        grid_bits=GRID_BITS,
        modulus_bits=MODULUS_BITS,
        clip=CLIP,
        neighbours=float(case.degree),
        unit_variance=own / case.degree,
        residual_variance=RESIDUAL * own,
        self_variance=0.9 * own if repairing else 0.0,
        revealed=max(1, drops) if repairing else 0,
        dropped=max(1, drops) if repairing else 0,
        committee=members,
        threshold=threshold,
    )


def niss(case: Case, vectors: Vectors, *, drops: int, mode: str) -> Measured:
    """One round of NISS; the last `drops` clients do not upload."""
    measured, assess = Measured(), DrawnAccount(failure=2.0 * FAILURE)
    own, holder = Identity.generate(os.urandom), Identity.generate(os.urandom)
    chain = BeaconChain(2, holder=holder, entropy=os.urandom)
    policy = Policy(
        participants=2,
        collusion=case.colluders / case.clients,
        mu=float("inf"),
        clip=CLIP,
        run=b"benchmark",
        server=own.public,
        holder=holder.public,
        anchor=chain.anchor,
    )

    def assess_timed(*asked: Any) -> float:
        with timed(measured.client, "assess"):
            return assess(*asked)

    def nothing(*_: Any) -> None:
        """In place of what writes to disk."""

    clients = [
        Client(Identity.generate(os.urandom), policy, assess=assess_timed, charge=nothing, persist=nothing)
        for _ in range(case.clients)
    ]
    people = tuple(Participant(client.public, client.enrol(1, os.urandom)[0]) for client in clients)
    terms = niss_terms(case, mode, drops)
    beacon = chain.release(terms.round, terms.attempt, participants_hash(people) + terms_hash(terms))
    server = Server(own)
    with timed(measured.server, "open"):
        opened = server.open_round(terms, people, beacon)
    uploads = []
    for client, vector in zip(clients[: case.clients - drops], vectors, strict=False):
        verify_prekey.cache_clear()  # A client of its own has seen none of these signatures.
        with timed(measured.client, "upload"):
            client.accept(opened, os.urandom)
            uploads.append(client.answer(vector, os.urandom))
        # The assessment is called from within, and is a stage of its own.
        measured.client["upload"][-1] -= measured.client["assess"][-1]
        measured.upload_bytes.append(len(encode(uploads[-1])))
    with timed(measured.server, "take uploads"):
        for upload in uploads:
            server.take_upload(upload)
    if mode == "repair":
        with timed(measured.server, "request reveals"):
            requests = server.request_reveals()
        reveals = []
        for seat, request in requests.items():
            with timed(measured.client, MEMBER):
                reveals.append(clients[seat].reveal(request))
        measured.members = [len(encode(reveal)) for reveal in reveals]
        with timed(measured.server, "take reveals"):
            for reveal in reveals:
                server.take_reveal(reveal)
    with timed(measured.server, "finish"):
        outcome = server.finish()
    measured.messages = 1.0 + len(measured.members) / len(uploads)
    if mode == "repair" and not outcome.exact:
        raise RuntimeError(f"the round did not end exactly: {outcome.problems}")
    if not drops:
        clipped = vectors.sum(axis=0) * (CLIP / NORM)
        _check_mean(outcome.total * len(vectors), clipped, noise=np.sqrt(RESIDUAL * len(vectors)))
    return measured


def _check_mean(found: Vectors, expected: Vectors, *, noise: float) -> None:
    """Refuse a benchmark of something that does not work."""
    off = float(np.sqrt(np.mean((found - expected) ** 2)))
    if off > 2.0 * noise + 1e-3:
        raise RuntimeError(f"the sum is off by {off:.3g} where {noise:.3g} is expected")


class SecAggRound:
    """One round, and the grid that carries its messages: every node runs Flower's mod."""

    def __init__(self, case: Case, drops: int, factor: int) -> None:
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # Who sends messages.
        self.case, self.measured = case, Measured(upload_bytes=[0] * case.clients)
        self.shares = min(case.degree * factor, case.clients - 1) + 1
        self.nodes = range(1, case.clients + 1)
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in self.nodes}
        self.dropped = set(self.nodes[case.clients - drops :])
        self.outside, self.said = 0.0, 0
        self.total: Vectors | None = None

    def run(self, vectors: Vectors) -> Measured:
        """The four stages of the workflow; its time is what it does not spend in `send_and_receive`."""
        self.fits = dict(zip(self.nodes, map(self._fit, vectors), strict=True))
        workflow = SecAggPlusWorkflow(self.shares, THRESHOLD, max_weight=1.0)
        state, context = WorkflowState(), self._server_context()
        for name in ("setup", "share_keys", "collect_masked_vectors", "unmask"):
            self.outside = 0.0
            start = clock()
            if not getattr(workflow, f"{name}_stage")(self, context, state):
                raise RuntimeError(f"SecAgg+ stopped in {name}")
            self.measured.server[name] = [clock() - start - self.outside]
        self.measured.messages = self.said / self.case.clients
        if not self.dropped:
            assert self.total is not None
            _check_mean(self.total, vectors.mean(axis=0), noise=0.0)
        return self.measured

    def send_and_receive(self, messages: list[Any], *, timeout: float | None = None) -> list[Any]:
        """What the workflow asks of a grid."""
        del timeout
        start = clock()
        replies = [self._answer(message) for message in messages]
        self.outside += clock() - start
        return replies

    def configure_fit(self, *_: Any) -> list[tuple[Any, Any]]:
        """What the workflow asks of a strategy: everybody, with nothing to train."""
        nothing = common.FitIns(common.Parameters([], ""), {})
        return [(SimpleNamespace(node_id=node), nothing) for node in self.nodes]

    def aggregate_fit(self, _: int, results: list[tuple[Any, Any]], __: Any) -> tuple[None, dict[str, Any]]:
        """And of its end: the mean is there already, in every result alike."""
        self.total = common.parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}

    def num_available(self) -> int:
        """What the workflow asks of a client manager."""
        return len(self.nodes)

    def _answer(self, message: Any) -> Any:
        """Flower's mod, timed; the message is taken apart first, since one object goes to all nodes."""
        node = message.metadata.dst_node_id
        record = ConfigRecord(dict(message.content.config_records[constants.RECORD_KEY_CONFIGS]))
        stage = record[constants.Key.STAGE]
        self.said += 1
        if node in self.dropped and stage == constants.Stage.COLLECT_MASKED_VECTORS:
            return Message(Error(0, "dropped out"), reply_to=message)
        own = Message(
            RecordDict({constants.RECORD_KEY_CONFIGS: record}),
            node,
            message.metadata.message_type,
            group_id="1",
        )
        with timed(self.measured.client, stage):
            reply = secaggplus_mod(own, self.contexts[node], self._train)
        self.measured.upload_bytes[node - 1] += recorddict_to_proto(reply.content).ByteSize()
        return reply

    def _train(self, message: Any, _: Any) -> Any:
        return Message(self.fits[message.metadata.dst_node_id], reply_to=message)

    def _fit(self, vector: Vectors) -> Any:
        status = common.Status(common.Code.OK, "")
        result = common.FitRes(status, common.ndarrays_to_parameters([vector]), 1, {})
        return compat.fitres_to_recorddict(result, keep_input=True)

    def _server_context(self) -> Any:
        state = RecordDict(
            {
                names.MAIN_CONFIGS_RECORD: ConfigRecord({names.Key.CURRENT_ROUND: 1}),
                names.MAIN_PARAMS_RECORD: ArrayRecord(),
            }
        )
        plain = Context(1, 0, {}, state, {})
        return LegacyContext(plain, strategy=self, client_manager=self)


def secagg(case: Case, vectors: Vectors, *, drops: int, factor: int) -> Measured:
    """One round of Flower's SecAgg+, each client with `factor * v` neighbours."""
    return SecAggRound(case, drops, factor).run(vectors)


CONTESTANTS: dict[str, Callable[..., Measured]] = {
    "fedavg": fedavg,
    "niss-tolerate": partial(niss, mode="tolerate"),
    "niss-repair": partial(niss, mode="repair"),
    "secagg+": partial(secagg, factor=1),
    "secagg+2v": partial(secagg, factor=2),
}


def compare(case: Case, names: list[str], dropped: list[int], repeats: int) -> list[Row]:
    """Every contestant in turn, again and again; medians, less what plain FedAvg takes."""
    vectors = make_vectors(case)
    turns = {
        (name, drops): partial(CONTESTANTS[name], case, vectors, drops=drops)
        for name in names
        if name != "secagg+2v" or case.neighbours is not None
        for drops in ((0,) if name == "fedavg" else dropped)
    }
    found = {key: [_numbers(one) for one in runs] for key, runs in in_turns(turns, repeats).items()}
    base, rows = medians(found.pop(("fedavg", 0))) | {"messages": 0.0}, list[Row]()
    for (name, drops), runs in found.items():
        beyond = {column: value - base[column] for column, value in medians(runs).items()}
        share = f"{beyond['upload B'] / 4 / case.coordinates:.2%}"
        rows.append({"contestant": name, "dropped": drops, **beyond, "extra upload": share})
    for row in rows:
        rival = next(
            (one for one in rows if one["contestant"] == "secagg+" and one["dropped"] == row["dropped"]), None
        )
        for column in ("client s", "server s", "round s") if rival else ():
            row[f"{column}, secagg+ x"] = rival[column] / row[column]
    return rows


def _numbers(one: Measured) -> dict[str, float]:
    """What is compared of a round: of a client the median."""
    members = {MEMBER: one.client.get(MEMBER, [0.0]), "assess": one.client.get("assess", [0.0])}
    return {
        "client s": one.client_seconds(MEMBER, "assess"),
        "+ assess": median(members["assess"]),
        "+ member": median(members[MEMBER]),
        "server s": one.server_seconds(),
        "round s": one.client_seconds(MEMBER) + one.server_seconds(),
        "upload B": median(one.upload_bytes),
        "member B": median(one.members or [0]),
        "messages": one.messages,
    }


def main() -> None:
    """Compare, print, and write."""
    sizes = (30, 100, 1000)
    options = command_line(
        __doc__,
        only=list(CONTESTANTS),
        repeats=3,
        clients={"nargs": "+", "type": int, "choices": sizes, "default": sizes},
        coordinates={"type": int, "default": 200_000},
        graphs={"nargs": "+", "choices": list(GRAPHS), "default": list(GRAPHS)},
        dropped={"nargs": "+", "type": int, "default": [0, 1]},
    )
    report = Report(options, "cryptography", "flwr", "numba")
    names = list(dict.fromkeys(["fedavg", *options.only]))
    if importlib.util.find_spec("flwr") is None:
        print("secagg+ skipped: flwr is not installed (pip install 'niss[flower]')")
        names = [name for name in names if "secagg" not in name]
    # Loaded before anything is timed: a process does it once, when it is worth it.
    compiled = load_loop() is not None and points.load_points() is not None
    secret.demand.worth = points.demand.worth = 0 if compiled else 2**63
    print(f"shares and sums of points are {'compiled' if compiled else 'numpy and libsodium'}, on one thread")
    os.environ["OMP_NUM_THREADS"] = "1"
    cases = [Case(8, 4, 2_000), Case(8, None, 2_000), Case(24, 4, 2_000)]
    if not options.quick:
        graphs = [(m, GRAPHS[name]) for m in options.clients for name in options.graphs]
        cases = [Case(m, v, options.coordinates) for m, v in graphs]
    for case in cases:
        # In a complete graph of 1000 SecAgg+ does not end in reasonable time.
        able = [name for name in names if case.degree < 999 or "secagg" not in name]
        with threadpool_limits(1):
            report.add(case.title, compare(case, able, options.dropped, options.repeats))


if __name__ == "__main__":
    main()
