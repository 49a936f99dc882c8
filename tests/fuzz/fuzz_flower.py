"""Mutated Flower replies against what the ServerApp reads them with: each is taken or is its node's failure.

An input is the reply of a node to one message, whole at first, in which the records, the array with its `.npy` header,
the fields beside it, the metrics or the protocol's bytes are then damaged. A reply may be refused with a reason in
words; an exception of any kind out of `sort_replies`, `Session._admit` or the mean of the metrics is a finding, and so
is a reason that could move the cursor of a terminal. So is a body other than the one numpy reads.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

try:
    from flwr.supercore.task_identity import TaskIdentity
except ModuleNotFoundError:
    pass  # Only the newer ones ask which task makes a message.
else:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

from fuzz.driver import Feed, Target
from niss.accounting import Plan
from niss.flower.transport import alike, mean_metrics, sort_replies, to_content
from niss.protocol.keys import Identity, PrekeyStore
from niss.protocol.messages import encode
from niss.session.ports import Relay, Reply, sign_refusal
from niss.session.proposal import Enrolment, Setup
from niss.session.server import Session

NODE = 77
NASTY_NUMBERS = [0, 1, -1, 2, 255, 256, 2**16, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 2**80, 10**400]
NASTY_FLOATS = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e308, -1e308, 5e-324]
NASTY_TEXTS = [
    "",
    "\x1b[2J\x1b[31mall is well",
    "\u202eabc",
    "a\nb\rc",
    "\ud800",
    "x" * 10_000,
    "\x00",
    "ä€\U0001f600",
]
NASTY_HEADERS = [
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }" % 2**80,
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }" % 2**40,
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1,), }",
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (",
    b"{'descr': '|u1', 'fortran_order': False, 'shape': " + b"(" * 3000 + b")" * 3000 + b", }",
    b"{'descr': '|u1', 'fortran_order': False, 'shape': " + b"[" * 200,
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }",
    b"{'descr': '|O', 'fortran_order': False, 'shape': (2,), }",
    b"{'descr': [('a', '|u1', (%d,))], 'fortran_order': False, 'shape': (1,), }" % 2**62,
    b"{'descr': '|u1', 'fortran_order': True, 'shape': (2, 2), }",
    b"{'descr': '|S%d', 'fortran_order': False, 'shape': (1,), }" % 2**31,
    b"-" * 60_000,
    b"'''",
    b"\\",
    b"",
]  # fmt: skip


def npy(header: bytes, data: bytes, version: int = 1) -> bytes:
    """A `.npy` file with any header."""
    header = header[:65_000] + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(2, "little") + header + data


def make_session() -> tuple[Session, list[bytes]]:
    """A run that nobody has joined, and bodies that a node may send to it."""
    draw = random.Random("identities").randbytes
    setup = Setup(plan=Plan(clip=0.5, epsilon=8.0, participations=3, neighbours=3), rounds=3, participants=2)
    session = Session(setup, identity=Identity.generate(draw), coordinator=Relay())
    client = Identity.generate(draw)
    prekeys = PrekeyStore().batch(4, client, draw)
    joining = Enrolment(client.public, prekeys, ("server",), 1).signed(client, session.proposal).to_bytes()
    return session, [joining, encode(sign_refusal(client, bytes(32), "no \x1b[31m thanks")), b"", bytes(300)]


def damage_body(rng: random.Random, array: Array) -> None:
    """Another header, another length, or a few bits turned."""
    kind = rng.randrange(6)
    data = array.data
    if kind == 0:
        array.data = npy(
            rng.choice(NASTY_HEADERS), rng.randbytes(rng.randrange(40)), rng.choice([1, 1, 2, 3, 9])
        )
    elif kind == 1:
        array.data = data[: rng.randrange(len(data) + 1)]
    elif kind == 2:
        array.data = data + rng.randbytes(rng.randrange(1, 9))
    elif kind == 3:
        turned = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            turned[rng.randrange(min(len(turned), rng.choice([8, 128, len(turned)])))] ^= 1 << rng.randrange(
                8
            )
        array.data = bytes(turned)
    elif kind == 4:
        array.data = rng.choice([b"", b"PK\x03\x04" + data, b"\x80\x04N.", rng.randbytes(rng.randrange(200))])
    else:
        place = data.find(b"(") + 1
        array.data = data[:place] + str(rng.choice(NASTY_NUMBERS)).encode() + data[place:]


def damage_beside(rng: random.Random, array: Array) -> None:
    """What Flower says of the array beside its bytes."""
    array.stype = rng.choice(["", "numpy.ndarray ", "pickle", "torch", *NASTY_TEXTS])
    array.dtype = rng.choice(["uint8", "object", *NASTY_TEXTS])
    array.shape = tuple(rng.choices(NASTY_NUMBERS, k=rng.randrange(4)))


def content_of(rng: random.Random, bodies: list[bytes]) -> RecordDict:
    """The content of a reply."""
    body = rng.choice(bodies)
    if rng.random() < 0.3 and body:
        turned = bytearray(body)
        turned[rng.randrange(len(turned))] ^= 1 << rng.randrange(8)
        body = bytes(turned)
    metrics: dict[str, Any] = {
        rng.choice(["loss", "num-examples", *NASTY_TEXTS]): rng.choice(
            [*NASTY_NUMBERS, *NASTY_FLOATS, [1.0, 2.0], []]
        )
        for _ in range(rng.randrange(3))
    }
    content = to_content(Reply(body, rng.randrange(9), metrics))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        array = (
            content.array_records["niss-upload"].get("body")
            if "niss-upload" in content.array_records
            else None
        )
        kind = rng.randrange(8)
        if array is not None and kind < 3:
            damage_body(rng, array)
        elif array is not None and kind == 3:
            damage_beside(rng, array)
        elif kind == 4 and "niss" in content.config_records:
            value = rng.choice([*NASTY_NUMBERS, *NASTY_FLOATS, *NASTY_TEXTS, True, b"", [1, 2]])
            content["niss"] = ConfigRecord({"step": value})
        elif kind == 5:
            content.pop(rng.choice(["niss", "niss-upload", "metrics"]), None)
        elif kind == 6:
            other = rng.choice([ConfigRecord(), MetricRecord(), ArrayRecord()])
            name = rng.choice(["niss", "niss-upload", "metrics", "more"])
            content.pop(name, None)  # Flower warns where a record is replaced by one of another type.
            content[name] = other
        elif array is not None:
            content["niss-upload"] = ArrayRecord({rng.choice(["body", "Body", ""]): array, "extra": array})
    return content


def feed(session: Session, sent: Message, reply: Message) -> str:
    """What becomes of a reply: taken, refused, or what went wrong."""
    # What was read is taken out of a reply.
    sent_back = None if reply.has_error() else reply.content.get("niss-upload")
    try:
        replies = sort_replies([sent], [reply])
        failures = [one for one in replies.values() if isinstance(one, str)]
        for one in replies.values():
            if isinstance(one, str):
                continue
            # numpy is not to be asked before the header is known; by now it is.
            if np.load(BytesIO(sent_back["body"].data)).tobytes() != one.body:
                return "another body"
            session._admit(NODE, one)
            mean_metrics([one.clear, MetricRecord({"loss": math.inf}), one.clear])
        alike([reply])
    except BaseException as error:
        return f"raised {type(error).__name__}"
    reasons = [*failures, *session.members.left_out.values()]
    joined = bool(session.members.by_node)
    session.members.by_node.clear()
    session.members.left_out.clear()
    if not all(reason.isprintable() and len(reason) < 1000 for reason in reasons):
        return "a reason that cannot be printed"
    return "taken" if joined else "refused"


@contextmanager
def start(_label: str) -> Iterator[Feed]:
    """A run that waits for replies to one message."""
    session, bodies = make_session()
    sent = Message(RecordDict(), dst_node_id=NODE, message_type="train")
    sent.metadata.__dict__["_message_id"] = "1"

    def one_input(rng: random.Random) -> tuple[str, str]:
        if rng.random() < 0.05:
            reply = Message(Error(rng.choice([0, 3, 901]), rng.choice(NASTY_TEXTS)), reply_to=sent)
        else:
            try:
                content = content_of(rng, bodies)
            except (TypeError, ValueError, IndexError):
                return "not a record of Flower's", ""
            reply = Message(content, reply_to=sent)
        outcome = feed(session, sent, reply)
        return outcome, "" if outcome in ("taken", "refused") else outcome

    yield one_input


TARGET = Target("flower", 2_000, start)
