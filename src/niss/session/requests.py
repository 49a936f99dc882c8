"""What passes between the two halves of a session, and the loop that has it delivered.

    stage   server -> client                                client -> server
    enrol   signed `Proposal` of the run                    signed `Enrolment`: identity and one-time keys
    round   `RoundOpen`, beside the model                   `Upload`: the noisy update
    reveal  `RevealRequest` (to the committee, `repair`)    `Reveal`
    late    the same about the round before, whose carried  `Reveal`
            noise went to clients that did not come

In place of any of its answers a client may send a signed `Refusal`. Nothing here knows how bytes travel: a transport is
a `Deliver`, which takes a request to each of some nodes and brings back their replies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from niss.errors import NissError
from niss.protocol import Identity, Refusal, WireLimits, signed_part, verify
from niss.redaction import printable

if TYPE_CHECKING:
    from niss.session.server import Session

NO_REPLY = "no answer in time"
_REFUSAL = "refusal"


class Stage(StrEnum):
    """What a session is at, and what a request is about."""

    ENROL = "enrol"
    ROUND = "round"
    REVEAL = "reveal"
    LATE = "late"
    DONE = "done"


@dataclass(frozen=True)
class Request:
    """From the server to a client.

    stage  what it is about
    body   the message of the protocol, encoded
    after  the last step of this client that the server has seen: a client whose own count is lower has lost state
    run    id of the run
    """

    stage: Stage
    body: bytes
    after: int = 0
    run: bytes = b""

    @property
    def digest(self) -> bytes:
        """Identifies this request in a refusal of it."""
        return hashlib.sha256(b"niss.letter.v1" + self.stage.encode() + self.body).digest()


@dataclass(frozen=True)
class Reply:
    """From a client to the server.

    body   the message of the protocol, encoded
    step   how many requests of this run the client has answered
    clear  metrics of the training that the client sends unprotected
    note   for the log of the client alone: what it did, or why it declined; never sent
    """

    body: bytes
    step: int
    clear: Mapping[str, object] = field(default_factory=dict)
    note: str = field(default="", compare=False)


Deliver = Callable[[Mapping[int, Request]], dict[int, Reply | str]]
"""Takes each node its request; by node, its reply, or why there is none."""


def drive(session: Session, deliver: Deliver, until: Stage = Stage.DONE) -> None:
    """Go on with a round up to that stage, or to its end where it ends before; a stage may have nobody to ask."""
    while session.stage not in (until, Stage.DONE):
        requests = session.requests()
        session.take(deliver(requests) if requests else {})


def in_words(error: Exception) -> str:
    """What is wrong with a reply, for the report and the log."""
    if isinstance(error, NissError):
        return printable(error.message)
    return f"the reply cannot be read ({type(error).__name__})"


def sign_refusal(identity: Identity, request: bytes, reason: str) -> Refusal:
    """A client declines the request with this digest, under its signature: no relay can decline in its name."""
    short = reason.encode()[: WireLimits().max_reason_bytes].decode(errors="ignore")
    unsigned = Refusal(request, short)
    return replace(unsigned, signature=identity.sign(_REFUSAL, signed_part(unsigned)))


def check_refusal(refusal: Refusal, identity: bytes) -> None:
    """Raise `RemoteProtocolError` unless the client with this public key declined."""
    verify(identity, _REFUSAL, signed_part(refusal), refusal.signature)
