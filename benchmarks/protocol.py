"""What a round costs beyond plain FedAvg: the protocol of NISS beside Flower's SecAgg+, in one run.

Every contestant runs through its public API: NISS through `Client` and `Server`, SecAgg+ through `secaggplus_mod`
and `SecAggPlusWorkflow`. A few sampled clients do all of a client's work and are timed. The others are stand-ins:
they send what the server and the sampled clients need (valid keys, signatures, pieces, partials), without expanding any
noise, so that a server meets the same work as with real clients. Where everyone is sampled, the result is checked.

Messages are passed as objects: putting them on the wire is not timed on either side. Their bytes are counted as
encoded. Durable storage (`persist`, `charge`) is not timed either; Flower keeps its state in memory too. All times
are CPU time, with linear algebra on one thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from harness import machine, one_line, write_json
from threadpoolctl import threadpool_limits

from niss.accounting import DrawnAccount
from niss.accounting.targets import committee_size, committee_threshold
from niss.protocol import committee
from niss.protocol.agreement import EdgeKeys, agree, participants_hash, terms_hash
from niss.protocol.client import Client, Policy
from niss.protocol.keys import BeaconChain, Identity, PrekeyStore
from niss.protocol.messages import (
    Participant,
    Reveal,
    RevealRequest,
    RoundOpen,
    Terms,
    Upload,
    encode,
    signed_part,
)
from niss.protocol.server import Server
from niss.randomness import SecretStream, secret
from niss.randomness.normal_table import Demand, load_loop

clock = time.process_time
"""CPU seconds of this process, all threads together: others keep these cores busy too."""
CLIP, NORM = 1.0, 2.0
GRID_BITS, MODULUS_BITS = 16, 32  # a grid on which even 2e11 draws are Gaussian enough for a client
THRESHOLD = 0.5
"""Of SecAgg+, as a share of the neighbours."""
DROPOUT, FAILURE = 0.05, 1e-7
"""For which the committees of NISS are planned: dropouts, and what the bound on their colluders may fail with."""
REPEAT_BUDGET = 90.0
"""Seconds in one scenario after which a contestant is not repeated again."""
MOST_NEIGHBOURS = 200
"""With more than that, neither the server's unmasking (SecAgg+) nor its repair (NISS) ends in reasonable time."""
HOW_TO_GET = {"flwr": "pip install 'niss[flower]'"}

Vectors = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One scenario: `neighbours` is the paper's v, None for everyone with everyone."""

    clients: int
    neighbours: int | None
    coordinates: int
    sampled: int

    @property
    def degree(self) -> int:
        return self.clients - 1 if self.neighbours is None else min(self.neighbours, self.clients - 1)

    @property
    def colluders(self) -> int:
        return min(3, max(1, self.degree // 3))

    @property
    def members(self) -> tuple[int, int]:
        """Size and threshold of the committee."""
        size = committee_size(self.clients, self.colluders, FAILURE, DROPOUT) or self.clients
        return size, committee_threshold(self.clients, size, self.colluders, FAILURE)

    @property
    def residual(self) -> float:
        """Residual noise as a share of a client's own; next to none where the sum is checked."""
        return 1e-6 if self.sampled == self.clients else 0.1

    @property
    def title(self) -> str:
        return f"m = {self.clients}, " + ("complete" if self.neighbours is None else f"v = {self.neighbours}")


@dataclass
class Measured:
    """Seconds by stage: of every sampled client, and of the server; bytes that a client uploads.

    members    bytes that a member of the committee sends beside its upload
    messages   of a client, on average
    """

    client: dict[str, list[float]] = field(default_factory=dict)
    server: dict[str, list[float]] = field(default_factory=dict)
    upload_bytes: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    messages: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def client_seconds(self, *, without: tuple[str, ...] = ()) -> float:
        return _sum_of_medians(self.client, without)

    def server_seconds(self) -> float | None:
        return None if self.notes else _sum_of_medians(self.server, ())

    def add(self, other: Measured) -> None:
        """Take in another repeat."""
        for mine, theirs in ((self.client, other.client), (self.server, other.server)):
            for stage, seconds in theirs.items():
                mine.setdefault(stage, []).extend(seconds)
        self.upload_bytes += other.upload_bytes
        self.members += other.members
        self.messages += other.messages
        self.notes += [note for note in other.notes if note not in self.notes]


def _sum_of_medians(stages: dict[str, list[float]], without: tuple[str, ...]) -> float:
    return sum(statistics.median(seconds) for stage, seconds in stages.items() if stage not in without)


@contextmanager
def timed(stages: dict[str, list[float]], stage: str) -> Iterator[None]:
    """Add the seconds of the block to a stage."""
    start = clock()
    yield
    stages.setdefault(stage, []).append(clock() - start)


def make_vectors(case: Case) -> Vectors:
    """The same updates for every contestant: float32, of norm 2, one for each sampled client."""
    drawn = np.random.default_rng(1).standard_normal((case.sampled, case.coordinates)).astype(np.float32)
    return np.asarray(drawn * np.float32(NORM) / np.linalg.norm(drawn, axis=1, keepdims=True))


# Plain FedAvg


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


# NISS

MEMBER = "repair as a member"
"""The stage of the few who speak twice; all others are done after their upload."""


@dataclass
class NissStandIn:
    """A client that signs, deals and repairs, but expands no noise."""

    identity: Identity
    store: PrekeyStore

    def signed(self, purpose: str, message: Any) -> Any:
        return replace(message, signature=self.identity.sign(purpose, signed_part(message)))


def niss_terms(case: Case, mode: str, drops: int) -> Terms:
    """Noise of the size of one client's part; what else is varied here changes no timing."""
    own = (CLIP / case.clients) ** 2
    repairing = mode == "repair"
    members, threshold = case.members if repairing else (0, 0)
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
        residual_variance=case.residual * own,
        self_variance=0.9 * own if repairing else 0.0,
        revealed=max(1, drops) if repairing else 0,
        dropped=max(1, drops) if repairing else 0,
        committee=members,
        threshold=threshold,
    )


class NissRound:
    """One round: real clients in the first seats, stand-ins in the others."""

    def __init__(self, case: Case, mode: str, drops: int) -> None:
        self.case, self.mode, self.measured = case, mode, Measured()
        self.server_identity, holder = Identity.generate(os.urandom), Identity.generate(os.urandom)
        chain = BeaconChain(2, holder=holder, entropy=os.urandom)
        self.policy = Policy(
            participants=2,
            colluders=case.colluders,
            mu=float("inf"),
            clip=CLIP,
            server=self.server_identity.public,
            holder=holder.public,
            anchor=chain.anchor,
        )
        self.clients = [self._client() for _ in range(case.sampled)]
        self.stand_ins = [
            NissStandIn(Identity.generate(os.urandom), PrekeyStore())
            for _ in range(case.clients - case.sampled)
        ]
        people = tuple(Participant(one.public, one.enrol(1, os.urandom)[0]) for one in self.clients) + tuple(
            Participant(one.identity.public, one.store.batch(1, one.identity, os.urandom)[0])
            for one in self.stand_ins
        )
        terms = niss_terms(case, mode, drops)
        beacon = chain.release(terms.round, terms.attempt, participants_hash(people) + terms_hash(terms))
        self.server = Server(self.server_identity)
        with timed(self.measured.server, "open"):
            self.opened: RoundOpen = self.server.open_round(terms, people, beacon)
        self.agreed = agree(self.opened)
        near = set(self.agreed.neighbours(0))
        # First those that a sampled client lost.
        others = sorted(range(case.sampled, case.clients), key=lambda seat: seat not in near)
        self.dropped = set(others[:drops])
        self.uploads: dict[int, Upload] = {}

    def run(self, vectors: Vectors) -> Measured:
        """All stages that this mode has, as far as they end in reasonable time."""
        self._upload(vectors)
        with timed(self.measured.server, "take uploads"):
            for upload in self.uploads.values():
                self.server.take_upload(upload)
        if self.mode == "repair":
            self._repair()
        with timed(self.measured.server, "finish"):
            outcome = self.server.finish()
        spoken = len(self.uploads) + len(self.measured.members)
        self.measured.messages.append(spoken / len(self.uploads))
        if not outcome.exact and not (self.mode == "tolerate" and self.dropped):
            raise RuntimeError(f"the round did not end exactly: {outcome.problems}")
        if self.case.sampled == self.case.clients:
            clipped = vectors.sum(axis=0) * (CLIP / NORM)
            _check_mean(
                outcome.total * len(vectors), clipped, noise=np.sqrt(self.case.residual * len(vectors))
            )
        return self.measured

    def _client(self) -> Client:
        assess = DrawnAccount(failure=2.0 * FAILURE)

        def assess_timed(*asked: Any) -> float:
            with timed(self.measured.client, "assess"):
                return assess(*asked)

        return Client(
            Identity.generate(os.urandom),
            self.policy,
            assess=assess_timed,
            charge=lambda *_: None,
            persist=lambda *_: None,
        )

    def _upload(self, vectors: Vectors) -> None:
        filler = os.urandom(self.case.coordinates * MODULUS_BITS // 8)
        for seat, (client, vector) in enumerate(zip(self.clients, vectors, strict=True)):
            with timed(self.measured.client, "upload"):
                self.uploads[seat] = client.upload(self.opened, vector, os.urandom)
            # The assessment is called from within, and is a stage of its own.
            self.measured.client["upload"][-1] -= self.measured.client["assess"][-1]
            self.measured.upload_bytes.append(len(encode(self.uploads[seat])))
        for seat in range(self.case.sampled, self.case.clients):
            if seat not in self.dropped:
                self.uploads[seat] = self._stand_in_upload(seat, filler)

    def _stand_in_upload(self, seat: int, vector: bytes) -> Upload:
        one = self.stand_ins[seat - self.case.sampled]
        commitment, pieces = b"", b""
        if self.mode == "repair":
            mask, pieces = committee.deal(EdgeKeys(self.agreed, seat, self._private(seat)), os.urandom)
            commitment = committee.commit_mask(self.agreed, seat, mask)
        fresh = one.store.batch(1, one.identity, os.urandom)
        return one.signed("upload", Upload(self.agreed.digest, seat, vector, fresh, commitment, pieces))

    def _private(self, seat: int) -> Any:
        return self.stand_ins[seat - self.case.sampled].store.private(
            self.agreed.participants[seat].prekey.number
        )

    def _repair(self) -> None:
        stages, server = self.measured.server, self.server
        with timed(stages, "request reveals"):
            requests = server.request_reveals()
        reveals = [self._reveal(seat, request) for seat, request in requests.items()]
        with timed(stages, "take reveals"):
            for reveal in reveals:
                server.take_reveal(reveal)

    def _reveal(self, seat: int, request: RevealRequest) -> Reveal:
        """Timed for everyone: a stand-in does a member's whole work here."""
        with timed(self.measured.client, MEMBER):
            if seat < self.case.sampled:
                reveal = self.clients[seat].reveal(request)
            else:
                reveal = self._stand_in_reveal(seat, request)
        self.measured.members.append(len(encode(reveal)))
        return reveal

    def _stand_in_reveal(self, seat: int, request: RevealRequest) -> Reveal:
        one = self.stand_ins[seat - self.case.sampled]
        lost = committee.lost_edges(self.agreed, request.survivors)
        given = committee.take_apart(self.agreed, seat, request.survivors, request.pieces)
        partials = committee.answer(self.agreed, seat, self._private(seat), lost, given)
        return one.signed("reveal", Reveal(self.agreed.digest, seat, partials))


def _check_mean(found: Vectors, expected: Vectors, *, noise: float) -> None:
    """Refuse a benchmark of something that does not work."""
    off = float(np.sqrt(np.mean((found - expected) ** 2)))
    if off > 2.0 * noise + 1e-3:
        raise RuntimeError(f"the sum is off by {off:.3g} where {noise:.3g} is expected")


def niss(case: Case, vectors: Vectors, *, drops: int, mode: str) -> Measured:
    """One round of NISS."""
    return NissRound(case, mode, drops).run(vectors)


# SecAgg+ of Flower


def load_flower() -> SimpleNamespace:
    """What is needed of Flower, imported here alone: all else runs without it."""
    import flwr.app
    import flwr.client.mod
    import flwr.common as common
    import flwr.compat.common.recorddict_compat as compat
    from flwr.common.secure_aggregation import secaggplus_constants, secaggplus_utils
    from flwr.common.secure_aggregation.crypto import shamir, symmetric_encryption
    from flwr.common.serde import recorddict_to_proto
    from flwr.server.compat.legacy_context import LegacyContext
    from flwr.server.workflow import SecAggPlusWorkflow, constant
    from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
    from flwr.supercore.primitives import asymmetric
    from flwr.supercore.task_identity import TaskIdentity

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # who sends messages
    return SimpleNamespace(
        app=flwr.app,
        mod=flwr.client.mod.secaggplus_mod,
        common=common,
        compat=compat,
        configs=secaggplus_constants.RECORD_KEY_CONFIGS,
        key=secaggplus_constants.Key,
        stage=secaggplus_constants.Stage,
        utils=secaggplus_utils,
        shamir=shamir,
        cipher=symmetric_encryption,
        to_proto=recorddict_to_proto,
        LegacyContext=LegacyContext,
        Workflow=SecAggPlusWorkflow,
        State=WorkflowState,
        names=constant,
        keys=asymmetric,
    )


class SecAggStandIn:
    """A node that keeps the protocol's books, but expands no mask and splits no secret of its own."""

    def __init__(self, flower: SimpleNamespace, number: int) -> None:
        self.flower, self.number = flower, number
        (self.sk1, pk1), (self.sk2, pk2) = flower.keys.generate_key_pairs(), flower.keys.generate_key_pairs()
        self.public = [flower.keys.public_key_to_bytes(pk) for pk in (pk1, pk2)]
        self.shared: dict[int, bytes] = {}

    def secret_with(self, other: int, public: bytes) -> bytes:
        """The key that this node and another encrypt shares with."""
        if other not in self.shared:
            theirs = self.flower.keys.bytes_to_public_key(public)
            self.shared[other] = self.flower.cipher.generate_shared_key(self.sk2, theirs)
        return self.shared[other]


class SecAggRound:
    """One round, and the grid that carries its messages: sampled nodes run Flower's mod, the others stand in."""

    def __init__(self, case: Case, drops: int, factor: int) -> None:
        self.flower = flower = load_flower()
        self.case, self.measured = case, Measured()
        self.shares = min(case.degree * factor, case.clients - 1) + 1
        self.threshold = max(round(THRESHOLD * self.shares), 2)
        self.nodes = range(1, case.clients + 1)
        self.contexts = {node: self._context(node) for node in self.nodes[: case.sampled]}
        self.stand_ins = {node: SecAggStandIn(flower, node) for node in self.nodes[case.sampled :]}
        self.dropped = set(self.nodes[case.clients - drops :])
        self.seed_shares = flower.shamir.create_shares(os.urandom(32), self.threshold, self.shares)
        self.key_shares = {node: self._split_key(node) for node in self.dropped}
        self.linked: dict[int, list[int]] = {}
        self.sent: dict[tuple[int, int], bytes] = {}
        self.publics: dict[int, list[bytes]] = {}
        self.outside, self.said = 0.0, 0
        self.total: Vectors | None = None

    def run(self, vectors: Vectors) -> Measured:
        """The four stages of the workflow; its time is what it does not spend in `send_and_receive`."""
        self.fits = {node: self._fit(vector) for node, vector in zip(self.nodes, vectors, strict=False)}
        self.stand_in_fit = self._fit(np.zeros(1, dtype=np.float32))
        self.stand_in_vector = self._masked_filler()
        workflow = self.flower.Workflow(self.shares, THRESHOLD, max_weight=1.0)
        state, context = self.flower.State(), self._server_context()
        self.measured.upload_bytes = [0] * self.case.sampled
        stages = [workflow.setup_stage, workflow.share_keys_stage, workflow.collect_masked_vectors_stage]
        if self.shares <= MOST_NEIGHBOURS:
            stages.append(workflow.unmask_stage)
        else:
            self.measured.notes.append(
                "no unmasking: rebuilding so many secrets of so many shares was not run"
            )
        for stage in stages:
            self._run_stage(stage, context, state)
        self.measured.messages.append(self.said / self.case.clients)
        if self.total is not None and self.case.sampled == self.case.clients:
            _check_mean(self.total, vectors.mean(axis=0), noise=0.0)
        return self.measured

    def _run_stage(self, stage: Callable[..., bool], context: Any, state: Any) -> None:
        self.outside = 0.0
        start = clock()
        if not stage(self, context, state):
            raise RuntimeError(f"SecAgg+ stopped in {stage.__name__}")
        spent = clock() - start - self.outside
        self.measured.server[stage.__name__.removesuffix("_stage").replace("_", " ")] = [spent]

    def send_and_receive(self, messages: list[Any], *, timeout: float | None = None) -> list[Any]:
        """What the workflow asks of a grid."""
        del timeout
        start = clock()
        replies = [self._answer(message) for message in messages]
        self.outside += clock() - start
        return replies

    def configure_fit(self, *_: Any) -> list[tuple[Any, Any]]:
        """What the workflow asks of a strategy: everybody, with nothing to train."""
        nothing = self.flower.common.FitIns(self.flower.common.Parameters([], ""), {})
        return [(SimpleNamespace(node_id=node), nothing) for node in self.nodes]

    def aggregate_fit(self, _: int, results: list[tuple[Any, Any]], __: Any) -> tuple[None, dict[str, Any]]:
        """And of its end: the mean is there already, in every result alike."""
        self.total = self.flower.common.parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}

    def num_available(self) -> int:
        """What the workflow asks of a client manager."""
        return len(self.nodes)

    def _answer(self, message: Any) -> Any:
        app, node = self.flower.app, message.metadata.dst_node_id
        record = message.content.config_records[self.flower.configs]
        stage = record[self.flower.key.STAGE]
        self.said += 1
        if node in self.dropped and stage == self.flower.stage.COLLECT_MASKED_VECTORS:
            return app.Message(app.Error(0, "dropped out"), reply_to=message)
        if node in self.contexts:
            return self._answer_for_real(message, stage)
        values = {
            self.flower.stage.SETUP: self._stand_in_setup,
            self.flower.stage.SHARE_KEYS: self._stand_in_share,
            self.flower.stage.COLLECT_MASKED_VECTORS: self._stand_in_vector,
            self.flower.stage.UNMASK: self._stand_in_unmask,
        }[stage](node, record)
        content = app.RecordDict({self.flower.configs: app.ConfigRecord(values)})
        if stage == self.flower.stage.COLLECT_MASKED_VECTORS:
            content.update({name: kept for name, kept in self.stand_in_fit.items() if name not in content})
        return app.Message(content, reply_to=message)

    def _answer_for_real(self, message: Any, stage: str) -> Any:
        """Flower's mod, timed; the message is taken apart first, since one object goes to all nodes."""
        app, node = self.flower.app, message.metadata.dst_node_id
        record = app.ConfigRecord(dict(message.content.config_records[self.flower.configs]))
        if stage == self.flower.stage.SHARE_KEYS:
            self.linked[node] = [int(name) for name in record if name != self.flower.key.STAGE]
        own = app.Message(
            app.RecordDict({self.flower.configs: record}), node, message.metadata.message_type, group_id="1"
        )
        with timed(self.measured.client, stage.replace("_", " ")):
            reply = self.flower.mod(own, self.contexts[node], self._train)
        self.measured.upload_bytes[node - 1] += self.flower.to_proto(reply.content).ByteSize()
        said = reply.content.config_records[self.flower.configs]
        if stage == self.flower.stage.SETUP:
            self.publics[node] = [said[self.flower.key.PUBLIC_KEY_1], said[self.flower.key.PUBLIC_KEY_2]]
        if stage == self.flower.stage.SHARE_KEYS:
            sealed = zip(
                said[self.flower.key.DESTINATION_LIST], said[self.flower.key.CIPHERTEXT_LIST], strict=True
            )
            self.sent.update({(node, other): text for other, text in sealed})
        return reply

    def _train(self, message: Any, _: Any) -> Any:
        return self.flower.app.Message(self.fits[message.metadata.dst_node_id], reply_to=message)

    def _stand_in_setup(self, node: int, _: Any) -> dict[str, Any]:
        self.publics[node] = self.stand_ins[node].public
        pk1, pk2 = self.stand_ins[node].public
        return {self.flower.key.PUBLIC_KEY_1: pk1, self.flower.key.PUBLIC_KEY_2: pk2}

    def _stand_in_share(self, node: int, record: Any) -> dict[str, Any]:
        """Ciphertexts that decrypt for sampled nodes; as many bytes for the others."""
        self.linked[node] = [int(name) for name in record if name != self.flower.key.STAGE]
        others = [other for other in self.linked[node] if other != node]
        one, texts = self.stand_ins[node], []
        for other in others:
            if other in self.contexts:
                place = self.linked[node].index(other)
                plain = self.flower.utils.share_keys_plaintext_concat(
                    node, other, self.seed_shares[place], self._key_share(node, place)
                )
                texts.append(
                    self.flower.cipher.encrypt(one.secret_with(other, self.publics[other][1]), plain)
                )
            else:
                texts.append(bytes(628))
        return {self.flower.key.DESTINATION_LIST: others, self.flower.key.CIPHERTEXT_LIST: texts}

    def _stand_in_vector(self, _: int, __: Any) -> dict[str, Any]:
        return {self.flower.key.MASKED_PARAMETERS: self.stand_in_vector}

    def _stand_in_unmask(self, node: int, record: Any) -> dict[str, Any]:
        active, dead = record[self.flower.key.ACTIVE_NODE_ID_LIST], record[self.flower.key.DEAD_NODE_ID_LIST]
        shares = [self._seed_share(node, owner) for owner in active]
        shares += [self._key_share(owner, self.linked[owner].index(node)) for owner in dead]
        return {self.flower.key.NODE_ID_LIST: [*active, *dead], self.flower.key.SHARE_LIST: shares}

    def _seed_share(self, node: int, owner: int) -> bytes:
        if owner not in self.contexts:
            return self.seed_shares[self.linked[owner].index(node)]
        key = self.stand_ins[node].secret_with(owner, self.publics[owner][1])
        plain = self.flower.cipher.decrypt(key, self.sent[owner, node])
        return self.flower.utils.share_keys_plaintext_separate(plain)[2]

    def _key_share(self, owner: int, place: int) -> bytes:
        """Of the nodes that will drop out a share that rebuilds the key; of the others as many bytes."""
        return self.key_shares[owner][place] if owner in self.key_shares else bytes(324)

    def _split_key(self, node: int) -> list[bytes]:
        secret = self.flower.keys.private_key_to_bytes(self.stand_ins[node].sk1)
        return self.flower.shamir.create_shares(secret, self.threshold, self.shares)

    def _fit(self, vector: Vectors) -> Any:
        common = self.flower.common
        status = common.Status(common.Code.OK, "")
        result = common.FitRes(status, common.ndarrays_to_parameters([vector]), 1, {})
        return self.flower.compat.fitres_to_recorddict(result, keep_input=True)

    def _masked_filler(self) -> list[bytes]:
        drawn = np.random.default_rng(2).integers(0, 2**32, self.case.coordinates, dtype=np.int64)
        return [self.flower.common.ndarray_to_bytes(array) for array in (drawn[:1], drawn)]

    def _context(self, node: int) -> Any:
        return self.flower.app.Context(1, node, {}, self.flower.app.RecordDict(), {})

    def _server_context(self) -> Any:
        app, names = self.flower.app, self.flower.names
        state = app.RecordDict(
            {
                names.MAIN_CONFIGS_RECORD: app.ConfigRecord({names.Key.CURRENT_ROUND: 1}),
                names.MAIN_PARAMS_RECORD: app.ArrayRecord(),
            }
        )
        plain = app.Context(1, 0, {}, state, {})
        return self.flower.LegacyContext(plain, strategy=self, client_manager=self)


def secagg(case: Case, vectors: Vectors, *, drops: int, factor: int) -> Measured:
    """One round of Flower's SecAgg+, each client with `factor * v` neighbours."""
    return SecAggRound(case, drops, factor).run(vectors)


# The comparison

CONTESTANTS: dict[str, Callable[..., Measured]] = {
    "fedavg": fedavg,
    "niss-tolerate": partial(niss, mode="tolerate"),
    "niss-repair": partial(niss, mode="repair"),
    "secagg+": partial(secagg, factor=1),
    "secagg+2v": partial(secagg, factor=2),
}
NEEDS = {"secagg+": "flwr", "secagg+2v": "flwr"}
DROPS = {"niss-repair": (0, 1), "secagg+": (0, 1), "secagg+2v": (0, 1)}

Results = dict[tuple[str, int], Measured]


def available(names: list[str]) -> list[str]:
    """Those that can run here; says how to get the others."""
    found = []
    for name in names:
        needed = NEEDS.get(name)
        if needed is not None and importlib.util.find_spec(needed) is None:
            print(f"skipped: {name}, {needed} is not installed ({HOW_TO_GET[needed]})")
        else:
            found.append(name)
    return found


def compare(case: Case, names: list[str], repeats: int) -> Results:
    """Every contestant in turn, again and again; those that take long less often."""
    vectors, results, spent = make_vectors(case), Results(), dict.fromkeys(names, 0.0)
    for _ in range(repeats):
        for name in names:
            if spent[name] > REPEAT_BUDGET or (name == "secagg+2v" and case.neighbours is None):
                continue
            start = time.perf_counter()
            for drops in DROPS.get(name, (0,)):
                if drops and case.sampled == case.clients:
                    continue  # only stand-ins drop out
                measured = CONTESTANTS[name](case, vectors, drops=drops)
                results.setdefault((name, drops), Measured()).add(measured)
                if measured.notes:
                    break
            spent[name] += time.perf_counter() - start
    return results


def summarise(case: Case, results: Results) -> list[dict[str, Any]]:
    """Medians, less what plain FedAvg takes."""
    base = results[("fedavg", 0)]
    rows = []
    for name in dict.fromkeys(name for name, _ in results if name != "fedavg"):
        calm, stormy = results[(name, 0)], results.get((name, 1))
        plain_bytes = 4 * case.coordinates
        extra = statistics.median(calm.upload_bytes) - plain_bytes
        all_of_client = calm.client_seconds(without=(MEMBER,)) - base.client_seconds()
        server = _less(calm.server_seconds(), base.server_seconds())
        rows.append(
            {
                **asdict(case),
                "contestant": name,
                "client_s": calm.client_seconds(without=("assess", MEMBER)) - base.client_seconds(),
                "member_s": statistics.median(calm.client[MEMBER]) if MEMBER in calm.client else None,
                "member_bytes": statistics.median(calm.members) if calm.members else None,
                "messages": statistics.median(calm.messages) if calm.messages else None,
                "committee": case.members if name == "niss-repair" else None,
                "assess_s": statistics.median(calm.client.get("assess", [0.0])),
                "server_s": server,
                "round_s": None if server is None else all_of_client + server,
                "server_one_drop_s": _less(stormy and stormy.server_seconds(), base.server_seconds()),
                "extra_bytes": extra,
                "extra_bytes_share": extra / plain_bytes,
                "repeats": len(next(iter(calm.server.values()))),
                "notes": calm.notes,
                "stages": {
                    f"{side}, {drops} drops": {
                        stage: statistics.median(each) for stage, each in stages.items()
                    }
                    for drops, one in ((0, calm), (1, stormy))
                    if one is not None
                    for side, stages in (("client", one.client), ("server", one.server))
                },
            }
        )
    return rows


def _less(seconds: float | None, base: float | None) -> float | None:
    return None if seconds is None or base is None else seconds - base


COLUMNS = {
    "client_s": "client",
    "assess_s": "+ assess",
    "member_s": "+ member",
    "server_s": "server",
    "server_one_drop_s": "1 drop",
    "round_s": "round",
}


def show(case: Case, rows: list[dict[str, Any]]) -> None:
    """A table of one scenario; ratios say how many times as long SecAgg+ takes."""
    print(f"\n{case.title}, {case.coordinates:,} coordinates, {case.sampled} clients sampled")
    heads = "".join(f"{head:>11}{'ratio':>7}" for head in COLUMNS.values())
    print(f"  {'':14}{heads}{'extra upload':>15}{'messages':>18}")
    rival = next((row for row in rows if row["contestant"] == "secagg+"), None)
    for row in rows:
        cells = "".join(f"{_duration(row[name]):>11}{_ratio(row, rival, name):>7}" for name in COLUMNS)
        upload = f"{row['extra_bytes']:,.0f} B"
        print(
            f"  {row['contestant']:14}{cells}{upload:>15}{row['extra_bytes_share']:>9.2%}{row['messages'] or 0:>9.2f}"
        )
    for row in rows:
        for note in row["notes"]:
            print(f"  {row['contestant']}: {note}")


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if not seconds:
        return "0"
    return f"{seconds * 1e3:.1f} ms" if seconds < 10.0 else f"{seconds:.1f} s"


def _ratio(row: dict[str, Any], rival: dict[str, Any] | None, name: str) -> str:
    if rival is None or not rival[name] or not row[name] or row is rival:
        return "-"
    ratio = rival[name] / row[name]
    return f"{ratio:.0f}x" if ratio >= 10.0 else f"{ratio:.2g}x"


def make_cases(options: argparse.Namespace) -> list[Case]:
    """The scenarios; in the first two of a quick run everyone is sampled, and the sums are checked."""
    if options.quick:
        return [Case(8, 4, 2_000, 8), Case(8, None, 2_000, 8), Case(24, 4, 2_000, 3)]
    sampled = {30: 3, 100: 3, 1000: 2}
    return [
        Case(clients, neighbours, options.coordinates, 1 if clients == 1000 and neighbours is None else count)
        for clients, count in sampled.items()
        if clients in options.clients
        for neighbours in (10, None)
    ]


def expansion(edges: int = 8, coordinates: int = 2**18, repeats: int = 5) -> float:
    """Nanoseconds to expand what two clients share, a coordinate: a Gaussian each way."""
    vector, seconds = np.zeros(coordinates, dtype=np.uint64), math.inf
    for _ in range(repeats):
        start = clock()
        secret.add_gaussians(vector, [(SecretStream.fresh(), 1000.0, 1) for _ in range(2 * edges)])
        seconds = min(seconds, clock() - start)
    return seconds / edges / coordinates * 1e9


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all medians and stages there")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--clients", nargs="+", type=int, choices=(30, 100, 1000), default=[30, 100, 1000])
    parser.add_argument("--coordinates", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--numpy", action="store_true", help="expand shares as without numba")
    parser.add_argument("--quick", action="store_true", help="small rounds, as a smoke test")
    return parser.parse_args()


def main() -> None:
    """Compare, print, and write."""
    options = parse()
    names = available(list(dict.fromkeys(["fedavg", *options.only])))
    where = machine("cryptography", "flwr", "numba")
    print(one_line(where))
    # Loaded before anything is timed: a process does it once, when it is worth it.
    compiled = not options.numpy and load_loop() is not None
    secret.demand = Demand(0 if compiled else 2**63)
    print(f"shares are expanded {'by a compiled loop' if compiled else 'in numpy'}, on one thread")
    os.environ["OMP_NUM_THREADS"] = "1"
    expanding = expansion()
    print(f"an edge and coordinate take {expanding:.1f} ns")
    rows = []
    for case in make_cases(options):
        with threadpool_limits(1):
            found = summarise(case, compare(case, names, options.repeats))
        show(case, found)
        rows += found
        write_json(options.json, {"machine": where, "expansion_ns": expanding, "rows": rows})


if __name__ == "__main__":
    main()
