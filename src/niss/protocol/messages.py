"""What the parties of a round say to each other: frozen, without behaviour.

A round, in order (`tolerate` ends after the uploads, `repair` goes on):

    server -> client   RoundOpen      who takes part, on which terms, with which beacon
    client -> server   Upload         the noisy update; in repair also a secret in pieces, and what it seals
    server -> member   RevealRequest  whose uploads arrived, and the pieces meant for this member of the committee
    member -> server   Reveal         what takes out the masks of the survivors and their shares with the dropped

Every message of a client is signed by its identity, every message of the server by the server's; `signature` is empty
until it is. `context` is the digest of the round's context, `seat` a place in the list of participants.

The types of the fields are the wire format: each says its kind and its bounds. Whatever changes there changes
the encodings, and needs a new `VERSION`. The machines check what a message means.

    tag  message         bytes, with its signature, for seats below 128
    1    RoundOpen       about 250, and 130 for each participant, of three rounds where noise is carried over
    2    Upload          109, the vector, 98 for each fresh prekey; in `repair` 97 more, 64 for each member of the
                         committee, or 32 for one whose piece follows, and 32 for each edge
    3    RevealRequest   107, and for each survivor 97, or 65 where the piece follows; with the verdict of a round next
                         to it 133 more, 1 for each survivor, 65 for each vote
    4    Reveal          106, for each survivor 51, and 32 for its mask and each neighbour that it lost; 64 for a vote
    5    Refusal         104, and its text

Each message is one string of bytes, compact, versioned and canonical, so that a signature over an encoding is safe:

    magic "NISS" | version, 1 byte | tag of the message, 1 byte | its fields, as their types say
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, cast

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.wire import (
    MAX_COORDINATES,
    MAX_MESSAGE_BYTES,
    MAX_PARTICIPANTS,
    MAX_PREKEYS,
    MAX_REASON_BYTES,
    Blob,
    Choice,
    Exact,
    Fault,
    Items,
    Reader,
    Text,
    Uint,
    Writer,
    record_of,
)

if TYPE_CHECKING:
    from niss.mechanism.noise import Noise

# What happens to the shares of clients that drop out: they stay as noise, or are taken out again.
MODES = ("tolerate", "repair")

RUN_BYTES = 64
POINT_BYTES, PROOF_BYTES = 32, 48
MODULI = (32, 64)
"""Bits of a modulus: those of the words in which uploads are packed."""

# How unlikely it is that more records are in a batch than sums have room for: e to the minus that.
_TAIL = 30.0


def _points(count: int) -> int:
    """Bytes of so many points or scalars for each participant, and of three more."""
    return POINT_BYTES * (3 + count * MAX_PARTICIPANTS)


Key = Annotated[bytes, Exact(32)]
Hash = Annotated[bytes, Exact(32)]
Signature = Annotated[bytes, Blob(64, step=64)]
Seat = Annotated[int, Uint(MAX_PARTICIPANTS - 1)]
Headcount = Annotated[int, Uint(MAX_PARTICIPANTS)]
Vector = Annotated[bytes, Blob(MAX_COORDINATES * (MODULI[-1] // 8))]
Count32 = Annotated[int, Uint((1 << 32) - 1)]
# Seats and prekeys lie in rising order and identities differ, so that a set has one encoding and no one counts twice.
Seats = Annotated[tuple[Seat, ...], Items(MAX_PARTICIPANTS, rising=lambda seat: seat)]


@dataclass(frozen=True)
class Prekey:
    """A one-time X25519 key, signed by the identity it belongs to and by itself."""

    number: Annotated[int, Uint()]
    public: Key
    signature: Signature


@dataclass(frozen=True)
class Participant:
    """A seat in the round: an identity and the prekey it will use up."""

    identity: Key
    prekey: Prekey


Participants = Annotated[tuple[Participant, ...], Items(MAX_PARTICIPANTS, unique=attrgetter("identity"))]


@dataclass(frozen=True)
class CarryTerms:
    """How noise is carried from every round of a run to the next; the same in all its rounds.

    plan            hash of the schedule that was committed to before the first round (`niss.protocol.schedule`)
    unit_variance   variance of the share that each client carries to each client of the next round, an entry
    """

    plan: Hash
    unit_variance: float


@dataclass(frozen=True)
class RecordTerms:
    """How single records are hidden instead of whole clients: what a client sends is a sum over some of its records.

    batch    q, the probability with which each record is in that sum, drawn in secret by its client
    divisor  what the sum over all clients is divided by: q times the records of all, as planned
    """

    batch: float
    divisor: float

    @property
    def most(self) -> float:
        """So many records of one client are in a batch, but for probability `e^-30`, if all records are its own.

        `P(X >= l + x) <= exp(-x^2 / (2 l + 2 x / 3))` for a sum X of coins with the mean l (Bernstein).
        """
        return self.divisor + _TAIL / 3.0 + math.sqrt(_TAIL**2 / 9.0 + 2.0 * _TAIL * self.divisor)


@dataclass(frozen=True)
class Terms:
    """What all participants of a round must agree on; bound into every seed.

    run                     name of the run
    round, attempt          counted from 0
    mode                    one of `MODES`
    coordinates             length of an update
    grid_bits               updates and noise are multiples of 2^-grid_bits
    modulus_bits            and are added modulo 2^modulus_bits
    clip                    largest L2 norm of an update, or of what one record adds to it (`records`)
    neighbours              unit shares that each client sends
    unit_variance           variance of a unit share, an entry
    residual_variance       of the noise that stays in the sum, a client
    self_variance           of a self-mask, which a repair takes out
    revealed, dropped       most edges of a client that may be revealed, most clients that may drop out
    committee, threshold    how many members repair the round, and how many of them it takes; 0 in mode `tolerate`
    carrying                how noise is carried from round to round; None: it is not
    records                 how single records are hidden; None: whole clients are

    Variances are those of an upload `p_k x_k` with `p_k = 1 / divisor`, in its own units.
    """

    run: Annotated[bytes, Blob(RUN_BYTES, low=1)]
    round: Count32
    attempt: Count32
    mode: Annotated[str, Choice(MODES)]
    coordinates: Annotated[int, Uint(MAX_COORDINATES, low=1)]
    grid_bits: Annotated[int, Uint(MODULI[-1])]
    modulus_bits: Annotated[int, Uint(MODULI[-1], low=MODULI[0])]
    clip: float
    neighbours: float
    unit_variance: float
    residual_variance: float
    self_variance: float
    revealed: Headcount
    dropped: Headcount
    committee: Headcount
    threshold: Headcount
    carrying: CarryTerms | None = None
    records: RecordTerms | None = None

    def divisor(self, participants: int) -> float:
        """What the sum of all updates is divided by: the participants, where whole clients are hidden."""
        return float(participants) if self.records is None else self.records.divisor

    @property
    def bound(self) -> float:
        """No entry of an update is larger: sums must have room for it. It has no part in what a round costs."""
        return self.clip if self.records is None else self.clip * self.records.most

    @classmethod
    def of_noise(cls, noise: Noise, **others: Any) -> Terms:
        """Terms of rounds with that noise, its variances those of uploads; `others` are all fields beside it."""
        return cls(
            mode="repair" if noise.committee else "tolerate",
            neighbours=noise.neighbours,
            unit_variance=noise.unit,
            residual_variance=noise.residual,
            self_variance=noise.self_mask,
            revealed=noise.revealed,
            dropped=noise.dropped,
            committee=noise.committee,
            threshold=noise.threshold,
            **others,
        )


@dataclass(frozen=True)
class Beacon:
    """One link of a hash chain: `value` hashed `index` times gives the anchor committed to at the start.

    The tracker signs it together with the participants, so it has seen the list before it released the value.
    """

    index: Count32
    value: Hash
    signature: Signature


@dataclass(frozen=True)
class PreviousRound:
    """The round before, as far as its beacon was let out for it: what shows who carried noise to this round.

    terms   the hash of its terms
    """

    participants: Participants
    terms: Hash
    beacon: Beacon


@dataclass(frozen=True)
class RoundCohorts:
    """Who takes part around a round of a run with carried shares.

    following   the participants of the next round, with the prekeys they will use up there; none in the last round
    previous    the round before; None in the first
    """

    following: Participants
    previous: PreviousRound | None


@dataclass(frozen=True)
class RoundOpen:
    """The server opens a round: who takes part, on which terms, with which beacon.

    `cohorts` is there exactly if the terms say how noise is carried from round to round.
    """

    terms: Terms
    participants: Participants
    beacon: Beacon
    signature: Signature = b""
    cohorts: RoundCohorts | None = None


@dataclass(frozen=True)
class Upload:
    """One client's contribution.

    vector          grid steps modulo 2^modulus_bits, packed; that it fits the terms is for the server to check
    fresh_prekeys   to be used in later rounds
    commitment      to the seed of its self-mask; empty in mode `tolerate`
    pieces          of a secret, and the edge keys that it seals (`niss.protocol.committee.deal`); empty likewise
    """

    context: Hash
    seat: Seat
    vector: Vector
    fresh_prekeys: Annotated[tuple[Prekey, ...], Items(MAX_PREKEYS, rising=attrgetter("number"))]
    commitment: Annotated[bytes, Blob(32, step=32)]
    pieces: Annotated[bytes, Blob(_points(5))]
    signature: Signature = b""


@dataclass(frozen=True)
class Vote:
    """A member's signature under the survivor set for which it gave its part of a repair (`vote`)."""

    seat: Seat
    signature: Annotated[bytes, Exact(64)]


@dataclass(frozen=True)
class Verdict:
    """Who survived a round with carried shares, by the votes of its committee: binding for the rounds next to it.

    beacon      of that round
    following   hash of the participants of the round after it, for which the beacon was let out too
    """

    beacon: Beacon
    following: Hash
    survivors: Seats
    votes: Annotated[tuple[Vote, ...], Items(MAX_PARTICIPANTS, rising=attrgetter("seat"))]


@dataclass(frozen=True)
class RevealRequest:
    """The server tells a member of the committee whose uploads arrived; everyone else counts as dropped.

    pieces    what this member needs of each survivor's pieces, in order of seats
    verdict   of the round before, whose dropped clients carried nothing to this one; None: nothing is asked about them

    Where `context` is that of the shares carried on to the next round (`carried_context`), the member is asked once
    more after that round: `verdict` is that round's, and the shares carried to its dropped clients are to come out.
    """

    context: Hash
    survivors: Seats
    pieces: Annotated[bytes, Blob(_points(3))]
    signature: Signature = b""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Partials:
    """What a member makes of its piece of the client in `seat`, who survived.

    points   32 bytes each: for its self-mask, then for its shares with each dropped neighbour, in order of seats, those
             of its own round first; no mask where a member is asked once more
    proof    that they were made with the piece that the client committed to
    """

    seat: Seat
    points: Annotated[bytes, Blob(_points(2), low=POINT_BYTES, step=POINT_BYTES)]
    proof: Annotated[bytes, Exact(PROOF_BYTES)]


@dataclass(frozen=True)
class Reveal:
    """The answer of the committee's member in `seat`: for each client its mask, or its shares, never both.

    `vote` is that of a `Vote`, in rounds that carry noise over; None in others, and where a member is asked once more.
    """

    context: Hash
    seat: Seat
    partials: Annotated[tuple[Partials, ...], Items(MAX_PARTICIPANTS, rising=attrgetter("seat"))]
    signature: Signature = b""
    vote: Annotated[bytes, Exact(64)] | None = None


@dataclass(frozen=True)
class Refusal:
    """A client will not go on, and says why in words that hold no secret."""

    context: Hash
    reason: Annotated[str, Text(MAX_REASON_BYTES)]
    signature: Signature = b""


Message = RoundOpen | Upload | RevealRequest | Reveal | Refusal

# A tag is never used for anything else.
MESSAGES: dict[int, type[Any]] = {1: RoundOpen, 2: Upload, 3: RevealRequest, 4: Reveal, 5: Refusal}
TAGS = {kind: tag for tag, kind in MESSAGES.items()}

MAGIC = b"NISS"
VERSION = 1
HEADER_BYTES = len(MAGIC) + 2
SIGNING_DOMAIN = b"niss signed message v1\x00"


def encode(message: Message) -> bytes:
    """The one encoding of the message.

    What `decode` would refuse is refused here as our own fault: `LocalProtocolError`.
    """
    return b"".join(_written(message))


def decode(data: bytes) -> Message:
    """The message whose encoding this is; everything else is refused, as a fault of whoever sent it.

    `RemoteProtocolError`, in words that name the field and quote nothing of the message. Checked are form and bounds
    alone: signatures and meaning are left to the machines.
    """
    if type(data) is not bytes:
        raise LocalProtocolError("message: must be bytes")
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"message: larger than {MAX_MESSAGE_BYTES} bytes")
    if data[: len(MAGIC)] != MAGIC or len(data) < HEADER_BYTES:
        raise RemoteProtocolError("magic: this is not a niss message")
    version, tag = data[len(MAGIC) : HEADER_BYTES]
    if version != VERSION:
        upgrade = "the side that sent it" if version < VERSION else "this side"
        raise RemoteProtocolError(
            f"version: the message has wire version {version}, this side speaks version {VERSION}: "
            f"upgrade niss on {upgrade}"
        )
    if tag not in MESSAGES:
        raise RemoteProtocolError(f"type: wire version {VERSION} has no message of type {tag}")
    reader = Reader(data, HEADER_BYTES)
    name = MESSAGES[tag].__name__
    try:
        message = record_of(MESSAGES[tag]).read(reader)
    except Fault as fault:
        raise RemoteProtocolError(f"{name}{reader}: {fault}") from None
    if reader.left:
        raise RemoteProtocolError(f"{name}: {reader.left} bytes too many at the end")
    return cast("Message", message)


def signed_part(message: Message) -> bytes:
    """What is signed: a tag for this purpose alone, then the encoding with the message's own signature empty.

    Signatures inside the message (of prekeys, the beacon) stay in: the signer vouches for them too.
    """
    return b"".join(signed_parts(message))


def signed_parts(message: Message) -> list[bytes]:
    """The same piece by piece, a long vector as it lies in the message."""
    bare = replace(message, signature=b"") if type(message) in TAGS else message
    return [SIGNING_DOMAIN, *_written(bare)]


def _written(message: Message) -> list[bytes]:
    """Header and fields, one after another."""
    if type(message) not in TAGS:
        raise LocalProtocolError("message: must be one of the messages of the protocol")
    writer = Writer()
    writer.raw(MAGIC + bytes([VERSION, TAGS[type(message)]]))
    try:
        record_of(type(message)).write(writer, message)
    except Fault as fault:
        raise LocalProtocolError(f"{type(message).__name__}{writer}: {fault}") from None
    if sum(map(len, writer.parts)) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"message: larger than {MAX_MESSAGE_BYTES} bytes")
    return writer.parts
