"""What the tracker keeps, as plain frozen values, each of which packs itself into a record.

A participant list is packed as identity and prekey of each seat, 136 bytes a seat; see `pack_participants`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import NamedTuple, Self

from niss.protocol.curve import length_prefixed, uint64
from niss.protocol.keys import PUBLIC_BYTES, SIGNATURE_BYTES, decode_prekey, link_of
from niss.protocol.messages import Participant, Prekey
from niss.tracker.auth import Refused

SEAT_BYTES = PUBLIC_BYTES + 8 + PUBLIC_BYTES + SIGNATURE_BYTES
COMMITMENT_BYTES = 64
HASH_BYTES = 32
_RUN = struct.Struct(">Q32s32s64sQ")
Batch = Sequence[Prekey]


@dataclass(frozen=True)
class Stock:
    """A client's one-time keys after a request: how many are held, and what became of those it sent.

    accepted    new ones, put into stock
    known       sent before and still in stock
    stale       with a number that was used up before: never handed out again
    """

    held: int
    accepted: int = 0
    known: int = 0
    stale: int = 0


@dataclass(frozen=True)
class Client:
    """What is kept of a client.

    highest      the highest prekey number ever taken, -1 at first
    held         the numbers of the prekeys in stock, rising
    coalition    the one it belongs to
    registered   False for one that left, of which only `highest` is remembered
    """

    highest: int = -1
    held: tuple[int, ...] = ()
    coalition: str | None = None
    registered: bool = False

    def pack(self) -> bytes:
        return json.dumps([self.highest, self.held, self.coalition, self.registered]).encode()

    @classmethod
    def unpack(cls, record: bytes | None) -> Self:
        """The client in a record; one that is not known has nothing and is not registered."""
        if record is None:
            return cls()
        highest, held, coalition, registered = json.loads(record)
        return cls(highest, tuple(held), coalition, registered)


@dataclass(frozen=True)
class Run:
    """A run and its chain of links.

    rounds      how many rounds the chain is for
    salt        random, not secret; with the tracker's identity it fixes the chain (see `OwnChains`)
    anchor      the end of the chain, to which every link leads by hashing
    signature   the holder's, under run, rounds and anchor
    highest     the highest link let out so far, 0 at first
    """

    rounds: int
    salt: bytes
    anchor: bytes
    signature: bytes
    highest: int = 0

    def pack(self) -> bytes:
        return _RUN.pack(*astuple(self))

    @classmethod
    def unpack(cls, record: bytes) -> Self:
        return cls(*_RUN.unpack(record))


class Attempt(NamedTuple):
    """One try at a round of a run; `round` and `number` count from 0."""

    run: bytes
    round: int
    number: int

    @property
    def link(self) -> int:
        """The link of the run's chain that belongs to it; `RemoteProtocolError` where no round has so many tries."""
        return link_of(self.round, self.number)


@dataclass(frozen=True)
class Seating:
    """Who sits in an attempt, in order, for good.

    request_hash   `SeatRequest.hash` of the request that made it
    packed         the list, as `pack_participants` packs it
    """

    request_hash: bytes
    packed: bytes

    def participants(self) -> tuple[Participant, ...]:
        return unpack_participants(self.packed)

    def pack(self) -> bytes:
        return self.request_hash + self.packed

    @classmethod
    def unpack(cls, record: bytes) -> Self:
        return cls(record[:HASH_BYTES], record[HASH_BYTES:])


@dataclass(frozen=True)
class Release:
    """What a link was let out for.

    commitment   hash of the participants, then hash of the terms, 64 bytes; where noise is carried to the next round,
                 then the hash of its participants, 96 bytes
    neighbours   the mean degree of the graph, with which the tracker can tell clients their neighbours; None: it cannot
    """

    commitment: bytes
    neighbours: float | None

    @property
    def following(self) -> bytes | None:
        """Hash of the next round's participants; None where nothing is carried to them."""
        return self.commitment[COMMITMENT_BYTES:] or None

    def pack(self) -> bytes:
        """The number of neighbours as a float of 8 bytes, 0 for none, then the commitment."""
        return struct.pack(">d", self.neighbours or 0.0) + self.commitment

    @classmethod
    def unpack(cls, record: bytes) -> Self:
        (neighbours,) = struct.unpack_from(">d", record)
        return cls(record[8:], neighbours or None)


@dataclass(frozen=True)
class SeatRequest:
    """Whom the server wants in an attempt: either `members`, or a `count` of live clients.

    members     their identities, in the order of the seats
    count       how many to draw at random, uniformly; 0 where members are named
    coalition   draw from this coalition only
    at_least    with fewer the attempt is not seated
    absent      seat members that are not live too, as long as they have a prekey: for rounds of a fixed size
    """

    members: tuple[bytes, ...] | None = None
    count: int = 0
    coalition: str | None = None
    at_least: int = 2
    absent: bool = False

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of the request, by which a repetition is told from another request for the same attempt."""
        coalition = (self.coalition or "").encode()
        request = length_prefixed(uint64(self.count), coalition, uint64(self.at_least), *(self.members or ()))
        return hashlib.sha256((b"absent" if self.absent else b"") + request).digest()

    def check(self) -> None:
        """Refuse (422) a request that contradicts itself."""
        named, many = self.members is not None, self.members or ()
        alone = "applies to a count only, not to members", "name its members, or give a count"
        for wrong, field, message, hint in (
            (
                named != (self.count == 0),
                "members",
                "give either members or a count",
                "leave one of them out",
            ),
            (named and self.coalition is not None, "coalition", *alone),
            (
                not named and self.absent,
                "absent",
                "applies to members only, not to a count",
                "name the members",
            ),
            (len(set(many)) != len(many), "members", "names a client twice", "name each client once"),
        ):
            if wrong:
                raise Refused(422, message, field=field, hint=hint)


@dataclass(frozen=True)
class Counts:
    """How much a store holds: clients registered, those of them that are live, prekeys in stock, runs."""

    registered: int
    live: int
    prekeys: int
    runs: int


def pack_participants(seats: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Identity and packed prekey of each seat, 136 bytes a seat."""
    return b"".join(part for seat in seats for part in seat)


def unpack_participants(packed: bytes) -> tuple[Participant, ...]:
    """The list that `pack_participants` packed."""
    return tuple(
        Participant(
            packed[at : at + PUBLIC_BYTES], decode_prekey(packed[at + PUBLIC_BYTES : at + SEAT_BYTES])
        )
        for at in range(0, len(packed), SEAT_BYTES)
    )
