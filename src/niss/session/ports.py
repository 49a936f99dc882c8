"""What the two halves of a session ask of the outside: a transport, and somebody who hands out keys.

    stage   server -> client                                client -> server
    enrol   signed `Proposal` of the run                    signed `Enrolment`: identity and one-time keys
    round   `RoundOpen`, beside the model                   `Upload`: the noisy update
    reveal  `RevealRequest` (to the committee, `repair`)    `Reveal`
    late    the same about the round before, whose carried  `Reveal`
            noise went to clients that did not come

In place of any of its answers a client may send a signed `Refusal`. Nothing here knows how bytes travel: a transport is
a `Deliver`, which takes a request to each of some nodes and brings back their replies.

Keys are handed out, and the beacon is held, by a `Coordinator`: the server itself (`Relay`), or a tracker apart from it
(`niss.tracker`). With a relay the server knows every link of the beacon chain in advance and could choose participants
until it likes the graph; signed keys it cannot forge. With a tracker it would need the tracker's help, which is what
the paper assumes it does not get. `Directory` is what a node asks of the same tracker. Both block, and both can be
asked the same again after a crash.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from niss.errors import NissError, ProtocolError, RemoteProtocolError
from niss.protocol.agreement import participants_hash
from niss.protocol.keys import BeaconChain, Entropy, Identity, verify
from niss.protocol.messages import Beacon, Participant, Prekey, Refusal, signed_part
from niss.protocol.wire import MAX_REASON_BYTES
from niss.redaction import SecretBytes, printable
from niss.session.proposal import IN_HEX, Proposal
from niss.settings import check_json, to_values

NO_REPLY = "no answer in time"
USELESS = "the tracker cannot be used"
"""All that a server is told by a client for which a tracker was of no use, for now or for good."""
_REFUSAL = "refusal"
# Most one-time keys that are kept of one client, as many as a client itself keeps.
_STOCK = 256

Participants = tuple[Participant, ...]


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

    stage   what it is about
    body    the message of the protocol, encoded
    after   the last step of this client that the server has seen: a client whose own count is lower has lost state
    run     id of the run
    summed  of the rounds of the run that this client was asked for, how many ended in a sum, in the server's word
    """

    stage: Stage
    body: bytes
    after: int = 0
    run: bytes = b""
    summed: int = 0

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


def in_words(error: Exception) -> str:
    """What is wrong with a reply, for the report and the log."""
    if isinstance(error, NissError):
        return printable(error.message)
    return f"the reply cannot be read ({type(error).__name__})"


def sign_refusal(identity: Identity, request: bytes, reason: str) -> Refusal:
    """A client declines the request with this digest, under its signature: no relay can decline in its name."""
    short = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
    unsigned = Refusal(request, short)
    return replace(unsigned, signature=identity.sign(_REFUSAL, signed_part(unsigned)))


def check_refusal(refusal: Refusal, identity: bytes) -> None:
    """Raise `RemoteProtocolError` unless the client with this public key declined."""
    verify(identity, _REFUSAL, signed_part(refusal), refusal.signature)


class SeatsRefused(RemoteProtocolError):
    """The coordinator will not seat these clients, however often it is asked; others it may."""


class CoordinatorAway(RemoteProtocolError):
    """The coordinator cannot be reached, or not answer now: nothing was settled, and it can be asked the same again."""


class Coordinator(Protocol):
    """Hands out one-time keys and lets links of the beacon chain out.

    address  where clients register; empty where the server relays their keys, and so knows every link in advance
    """

    address: str

    @property
    def holder(self) -> bytes:
        """The public key that the links are signed with."""

    def start_run(self, run: bytes, rounds: int, saved: dict[str, Any] | None = None) -> bytes:
        """The anchor of a new chain for this run, long enough for so many rounds.

        saved  `secrets` of a server before this one, whose chain is gone on with; clients hand over new one-time keys
        """

    def away(self) -> bool:
        """Whether it cannot be reached, or cannot answer, just now."""

    def secrets(self) -> dict[str, Any]:
        """What `start_run` needs to go on with the chain, as JSON; secret."""

    def enrolled(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        """A client joined with these one-time keys."""

    def replenish(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        """One-time keys came with a client's upload."""

    def ready(self, identity: bytes) -> bool:
        """Whether the client has a key left for another round, as far as is known."""

    def seat(self, number: int, attempt: int, identities: tuple[bytes, ...], at_least: int) -> Participants:
        """Those of these clients that can be seated, each with a key it will use up; too few are an error."""

    def announce(self, number: int, identities: tuple[bytes, ...]) -> Participants:
        """Seat a round ahead of its time, with all of these clients, whether they are there or not; once.

        For runs that carry noise from each round to the next, which have one attempt at each. Raises `SeatsRefused`
        where it never will.
        """

    def release(self, number: int, attempt: int, commitment: bytes) -> Beacon:
        """The link of this attempt at a round, once, for terms and those participants that were seated."""


class Directory(Protocol):
    """The tracker of a run, as one of its nodes speaks to it; whatever goes wrong is a `RemoteProtocolError`."""

    def rounds(self, proposal: Proposal) -> int:
        """How many rounds the chain of the run has; it must be the chain of the proposal."""

    def register(self, proposal: Proposal, prekeys: tuple[Prekey, ...]) -> None:
        """Leave these keys there, and none that were left before."""

    def stay_live(self, proposal: Proposal) -> None:
        """Say that this client is still there; nothing is raised."""


@dataclass(frozen=True, repr=False)
class _RelaySecrets:
    """What a relay goes on from: its holder's key, the seed of the chain, and who was announced for which round, since
    they keep their keys for it."""

    __pydantic_config__: ClassVar[Any] = IN_HEX

    holder: bytes
    seed: bytes
    seated: dict[int, Participants]


class Relay:
    """The server itself keeps the keys and holds the chain.

    address  not empty in one process, where the holder is a party of its own that every node can ask (`Parties`)
    """

    def __init__(self, *, address: str = "", entropy: Entropy = os.urandom) -> None:
        self.address, self._entropy = address, entropy
        self._holder, self._seed = Identity.generate(entropy), SecretBytes(b"")
        self._chain: BeaconChain | None = None
        self._prekeys: dict[bytes, list[Prekey]] = {}
        self._publics: set[bytes] = set()
        self._seated: dict[int, Participants] = {}
        self._ahead = False  # Whether rounds are announced.

    @property
    def holder(self) -> bytes:
        return self._holder.public

    def start_run(self, run: bytes, rounds: int, saved: dict[str, Any] | None = None) -> bytes:
        del run
        self._prekeys, self._publics, self._seated, self._ahead = {}, set(), {}, False
        if saved is None:
            self._seed = SecretBytes(self._entropy(32))
        else:
            secrets = check_json(_RelaySecrets, json.dumps(saved))
            self._holder, self._seed = Identity(secrets.holder), SecretBytes(secrets.seed)
            self._seated, self._ahead = secrets.seated, bool(secrets.seated)
        self._chain = BeaconChain(rounds, holder=self._holder, entropy=lambda _size: bytes(self._seed))
        return self._chain.anchor

    def away(self) -> bool:
        return False

    def secrets(self) -> dict[str, Any]:
        seated = self._seated if self._ahead else {}
        return to_values(_RelaySecrets(bytes(self._holder.secret_bytes()), bytes(self._seed), seated))

    def enrolled(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        """Of many keys the newest are kept.

        A key that somebody handed over before is left out: whoever sat beside a copy of its own would have to decline.
        """
        stock = self._prekeys.setdefault(identity, [])
        for prekey in prekeys:
            if prekey.public not in self._publics:
                self._publics.add(prekey.public)
                stock.append(prekey)
        for dropped in stock[:-_STOCK]:
            self._publics.discard(dropped.public)
        del stock[:-_STOCK]

    def replenish(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        self.enrolled(identity, prekeys)

    def ready(self, identity: bytes) -> bool:
        return bool(self._prekeys.get(identity))

    def seat(self, number: int, attempt: int, identities: tuple[bytes, ...], at_least: int) -> Participants:
        del at_least  # Here all of them can.
        if attempt == 0 or number not in self._seated:
            self._forget_seats(before=number + 1)
            self._seated[number] = self._take_keys(identities)
        # Nobody was told of the attempt before, so the keys are still unused.
        return self._seated[number]

    def announce(self, number: int, identities: tuple[bytes, ...]) -> Participants:
        self._ahead = True
        if number not in self._seated:
            self._forget_seats(before=number - 1)  # The round before is still to be opened, with this list.
            self._seated[number] = self._take_keys(identities)
        return self._seated[number]

    def _take_keys(self, identities: tuple[bytes, ...]) -> Participants:
        return tuple(Participant(identity, self._prekeys[identity].pop(0)) for identity in identities)

    def _forget_seats(self, *, before: int) -> None:
        for number in [number for number in self._seated if number < before]:
            self._publics.difference_update(one.prekey.public for one in self._seated.pop(number))

    def release(self, number: int, attempt: int, commitment: bytes) -> Beacon:
        if self._chain is None:
            raise ProtocolError("no run has been started")
        if not commitment.startswith(participants_hash(self._seated.get(number, ()))):
            raise ProtocolError("a link is let out for the participants that were seated in the round alone")
        if self._ahead and not commitment.endswith(participants_hash(self._seated.get(number + 1, ()))):
            raise ProtocolError(
                "a link is let out for the participants that were seated in the next round alone"
            )
        return self._chain.release(number, attempt, commitment)
