"""What is sent to a tracker and what it answers, as both sides of HTTP and OpenAPI know it.

Keys, hashes and signatures are bytes here and lower-case hex in JSON. What a body says is checked here; the tracker
works with the bodies as they are, and keeps in its store for what commitment a link was let out.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import CoreSchema, core_schema

from niss.protocol.keys import link_of
from niss.protocol.messages import Participant, Prekey
from niss.protocol.wire import UINT64, length_prefixed, uint64
from niss.tracker.auth import LARGEST_BATCH, LARGEST_ROUND, LONGEST_RUN, Refused

HASH_BYTES = 32


@dataclass(frozen=True)
class Hex:
    """In an annotation of bytes: JSON has them as text of this pattern."""

    pattern: str

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> CoreSchema:
        text = core_schema.str_schema(pattern=self.pattern, strict=True)

        def read(value: Any, as_text: Callable[[Any], str]) -> bytes:
            return value if isinstance(value, bytes) else bytes.fromhex(as_text(value))

        shown = core_schema.plain_serializer_function_ser_schema(bytes.hex, return_schema=text)
        return core_schema.no_info_wrap_validator_function(read, text, serialization=shown)


HexKey = Annotated[bytes, Hex(r"^[0-9a-f]{64}$")]
HexSignature = Annotated[bytes, Hex(r"^[0-9a-f]{128}$")]
HexCommitment = Annotated[bytes, Hex(r"^([0-9a-f]{128}|[0-9a-f]{192})$")]
RunName = Annotated[bytes, Hex(r"^([0-9a-f]{2}){1,64}$")]
CoalitionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Attempt(NamedTuple):
    """One try at a round of a run; `round` and `number` count from 0."""

    run: bytes
    round: int
    number: int

    @property
    def link(self) -> int:
        """The link of the run's chain that belongs to it; `RemoteProtocolError` where no round has so many tries."""
        return link_of(self.round, self.number)


class _Strict(BaseModel):
    """A body as it must be sent: no conversion ("3" is not 3), and no entry that is not described."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PrekeyBody(_Strict):
    """A one-time X25519 key, signed by its owner."""

    number: Annotated[int, Field(ge=0, le=UINT64)]
    public: HexKey
    signature: HexSignature

    def prekey(self) -> Prekey:
        return Prekey(self.number, self.public, self.signature)


class Registration(_Strict):
    """The client itself is whoever signs the request."""

    prekeys: Annotated[list[PrekeyBody], Field(max_length=LARGEST_BATCH)]
    coalition: CoalitionName | None = None


class Deposit(_Strict):
    """Fresh prekeys of a client, passed on by the server."""

    prekeys: Annotated[list[PrekeyBody], Field(min_length=1, max_length=LARGEST_BATCH)]


class CoalitionChoice(_Strict):
    """The one coalition to belong to; null for none."""

    coalition: CoalitionName | None


class RunStart(_Strict):
    """How many rounds the chain is for."""

    rounds: Annotated[int, Field(ge=1, le=LONGEST_RUN)]


class SeatsWanted(_Strict):
    """Either `members`, or a `count` of live clients at random, of one coalition if it is named.

    With `absent`, members that are not live are seated too, as long as they have a one-time key.
    """

    members: Annotated[list[HexKey], Field(min_length=2, max_length=LARGEST_ROUND)] | None = None
    count: Annotated[int, Field(ge=2, le=LARGEST_ROUND)] | None = None
    coalition: CoalitionName | None = None
    at_least: Annotated[int, Field(ge=2, le=LARGEST_ROUND)] = 2
    absent: bool = False

    def hash(self) -> bytes:
        """SHA-256 of the request, by which a repetition is told from another request for the same attempt."""
        numbers = uint64(self.count or 0), (self.coalition or "").encode(), uint64(self.at_least)
        request = length_prefixed(*numbers, *(self.members or ()))
        return hashlib.sha256((b"absent" if self.absent else b"") + request).digest()

    def check(self) -> None:
        """Refuse (422) a request that contradicts itself."""
        if (self.members is None) == (self.count is None):
            raise Refused(422, "members", "give either members or a count", "leave one of them out")
        if self.members is None and self.absent:
            raise Refused(422, "absent", "applies to members only, not to a count", "name the members")
        if self.members is None:
            return
        if self.coalition is not None:
            raise Refused(422, "coalition", "applies to a count only, not to members", "name its members")
        if len(set(self.members)) != len(self.members):
            raise Refused(422, "members", "names a client twice", "name each client once")


class CommitmentBody(_Strict):
    """Hash of the participants, then hash of the terms; and how many neighbours each client has.

    Where noise is carried from round to round, the hash of the next round's participants follows, in every round of the
    run; in the last one, that of an empty list.
    """

    commitment: HexCommitment
    neighbours: Annotated[float, Field(gt=0, le=LARGEST_ROUND, allow_inf_nan=False)] | None = None

    @property
    def participants(self) -> bytes:
        """Hash of the round's participants."""
        return self.commitment[:HASH_BYTES]

    @property
    def following(self) -> bytes | None:
        """Hash of the next round's participants; None where nothing is carried to them."""
        return self.commitment[2 * HASH_BYTES :] or None

    def pack(self) -> bytes:
        """The number of neighbours as a float of 8 bytes, 0 for none, then the commitment."""
        return struct.pack(">d", self.neighbours or 0.0) + self.commitment

    @classmethod
    def unpack(cls, record: bytes) -> Self:
        (neighbours,) = struct.unpack_from(">d", record)
        return cls(commitment=record[8:], neighbours=neighbours or None)


class ErrorDetail(BaseModel):
    """What was wrong, in which header, path part or entry of the body, and what to do; null where there is none."""

    message: str
    field: str | None
    hint: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is not 2xx."""

    error: ErrorDetail


class Health(BaseModel):
    status: str


class TrackerAnswer(BaseModel):
    """Who this tracker is, and what it expects of requests."""

    tracker: HexKey
    holder: HexKey
    server: HexKey
    version: str
    time: float
    tolerance_seconds: float
    ttl_seconds: float
    attempts: int


class StockAnswer(BaseModel):
    """One-time keys in stock, how many more are wanted, and what became of those sent."""

    held: int
    wanted: int
    accepted: int
    known: int
    stale: int
    ttl_seconds: float


class RunAnswer(BaseModel):
    """What the holder committed to; the signature is under the run's name, its rounds and the anchor."""

    rounds: int
    anchor: HexKey
    holder: HexKey
    signature: HexSignature
    highest_link: int


class BeaconAnswer(BaseModel):
    """A link of the run's chain; the holder's signature is under index, value and the commitment."""

    index: int
    value: HexKey
    signature: HexSignature


class SeatAnswer(BaseModel):
    """A participant, its place in the list, and the one-time key it uses up in this attempt."""

    seat: int
    identity: HexKey
    prekey: PrekeyBody

    def participant(self) -> Participant:
        return Participant(self.identity, self.prekey.prekey())


class RoundAnswer(BaseModel):
    """What every answer about an attempt begins with; commitment and beacon are null until the link is let out."""

    size: int
    participants_hash: HexKey
    signature: HexSignature
    commitment: HexCommitment | None
    beacon: BeaconAnswer | None


class ParticipantsAnswer(RoundAnswer):
    """Everyone in the attempt, in order; the tracker's signature is under run, link and hash of the list."""

    participants: list[SeatAnswer]


class NeighboursAnswer(RoundAnswer):
    """Those with whom the asking client shares noise."""

    seat: int
    neighbours: list[SeatAnswer]


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
class Counts:
    """How much a store holds: clients registered, those of them that are live, prekeys in stock, runs."""

    registered: int
    live: int
    prekeys: int
    runs: int
