"""Messages as bytes: compact, versioned, and canonical, so that a signature over an encoding is safe.

    magic "NISS" | version, 1 byte | tag of the message, 1 byte | its fields, as `MESSAGES` lays them out

    tag  message         bytes, with its signature, for seats below 128
    1    RoundOpen       about 250, and 130 for each participant
    2    Upload          109, the vector, 98 for each fresh prekey; in `repair` 97 more, 64 for each member of the
                         committee, or 32 for one whose piece follows, and 32 for each edge
    5    RevealRequest   106, and for each survivor 97, or 65 where the piece follows
    6    Reveal          105, for each survivor 51, and 32 for its mask and for each neighbour that it lost
    7    Refusal         104, and its text
    8    RoundOpen       of a run with carried shares: about 400, and 130 for each participant of three rounds
    9    RevealRequest   with the verdict of a neighbouring round: 133 more, 1 for each survivor, 65 for each vote
    10   Reveal          with a vote: 64 more

Each message has one encoding and each accepted encoding is that of the message it decodes to. What is refused is
named by its field and never quoted. No length is believed before the bytes for it are there: `decode` takes about
as much memory as a vector it is given, and some 35 times as much as a message that is all tiny items (Python's
objects are larger than one-byte pieces), of which `Limits` allows only so many.

The layouts below are the format: whatever changes there changes the encodings, and needs a new `VERSION`.

The vector of an upload holds residues modulo 2^bits without a spare bit: one value after another, lowest bit first, the
last byte filled up with zeros. For 32 and 64 bits, which is what rounds use (`Grid.check_fits`), that is a plain
little-endian array and costs a copy; other widths go through single bits, 64 bytes of memory for each value. Every
vector has exactly one packed form, and only that is unpacked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol import messages
from niss.protocol.messages import MODES, Message
from niss.protocol.wire_fields import (
    Absent,
    Blob,
    Bound,
    Choice,
    Exact,
    Fault,
    Field,
    Maybe,
    Optional,
    Reader,
    Real,
    Record,
    Sequence,
    Text,
    Uint,
    Writer,
)
from niss.protocol.wire_fields import Limits as Limits

NARROWEST, WIDEST = 16, 64
_PLAIN = {16: "<u2", 32: "<u4", 64: "<u8"}


def packed_size(count: int, modulus_bits: int) -> int:
    """How many bytes `count` values take: `ceil(count * modulus_bits / 8)`."""
    if type(modulus_bits) is not int or not NARROWEST <= modulus_bits <= WIDEST:
        raise LocalProtocolError(f"modulus_bits: must be a whole number from {NARROWEST} to {WIDEST}")
    if type(count) is not int or count < 0:
        raise LocalProtocolError("count: must be a whole number, 0 or more")
    return (count * modulus_bits + 7) // 8


def pack(values: NDArray[np.uint64] | NDArray[np.int64], modulus_bits: int) -> bytes:
    """The values modulo 2^modulus_bits (negative ones wrap around, as in two's complement), packed.

    `values` has one axis, of uint64 or int64; `modulus_bits` is 16 to 64. Anything else is a `LocalProtocolError`.
    """
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype not in (np.uint64, np.int64):
        raise LocalProtocolError("values: must be a one-dimensional array of uint64 or int64")
    packed_size(values.size, modulus_bits)
    if modulus_bits in _PLAIN:
        return values.view(np.uint64).astype(_PLAIN[modulus_bits]).tobytes()  # keeps the low bits
    octets = values.view(np.uint64).astype("<u8").view(np.uint8).reshape(-1, 8)
    bits = np.unpackbits(octets, axis=1, bitorder="little", count=modulus_bits)
    return np.packbits(bits, bitorder="little").tobytes()


def check_packed(data: bytes, count: int, modulus_bits: int) -> None:
    """Refuse (`RemoteProtocolError`) what `pack` cannot have made of `count` values."""
    size = packed_size(count, modulus_bits)
    if len(data) != size:
        raise RemoteProtocolError(
            f"vector: has {len(data)} bytes, but {count} values of {modulus_bits} bits take {size}"
        )
    spare = 8 * size - count * modulus_bits
    if size and data[-1] >> (8 - spare):
        raise RemoteProtocolError("vector: the bits after the last value must be zero")


def unpack(data: bytes, count: int, modulus_bits: int) -> NDArray[np.uint64]:
    """The `count` values that were packed, in an array of their own.

    What `pack` cannot have made is a `RemoteProtocolError`: another length, or bits set after the last value.
    """
    check_packed(data, count, modulus_bits)
    if modulus_bits in _PLAIN:
        return _plain(data, modulus_bits).astype(np.uint64)
    flat = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little", count=count * modulus_bits)
    octets = np.zeros((count, 8), dtype=np.uint8)
    octets[:, : -(-modulus_bits // 8)] = np.packbits(
        flat.reshape(count, modulus_bits), axis=1, bitorder="little"
    )
    return octets.reshape(-1).view("<u8").astype(np.uint64)


def sum_packed(vectors: Iterable[bytes], count: int, modulus_bits: int) -> NDArray[np.uint64]:
    """The sum of packed vectors of `count` values; only its residue modulo 2^modulus_bits means anything.

    One vector at a time: memory is the sum and, for 16, 32 and 64 bits, nothing more.
    """
    total: NDArray[Any] = np.zeros(count, dtype=_PLAIN.get(modulus_bits, "<u8"))
    for data in vectors:
        if modulus_bits in _PLAIN:
            check_packed(data, count, modulus_bits)
            total += _plain(data, modulus_bits)
        else:
            total += unpack(data, count, modulus_bits)
    return total.astype(np.uint64)


def _plain(data: bytes, modulus_bits: int) -> NDArray[Any]:
    return np.frombuffer(data, dtype=_PLAIN[modulus_bits])


MAGIC = b"NISS"
VERSION = 1
HEADER_BYTES = len(MAGIC) + 2
SIGNING_DOMAIN = b"niss signed message v1\x00"
RUN_BYTES = 64
POINT_BYTES, PROOF_BYTES = 32, 48

_DEFAULT = Limits()
_participants: Bound = attrgetter("max_participants")
# Of 32 bytes each: a fresh key, the secret's point, for each member a point and a piece, for each edge (to clients of
# three rounds) a seal; for each survivor a key, a point and a piece; for each lost client a point.
_pieces: Bound = lambda limits: POINT_BYTES * (3 + 5 * limits.max_participants)  # noqa: E731
_asked: Bound = lambda limits: POINT_BYTES * 3 * limits.max_participants  # noqa: E731
_points: Bound = lambda limits: POINT_BYTES * 2 * limits.max_participants  # noqa: E731
_reason_bytes: Bound = attrgetter("max_reason_bytes")


def _whole_points(partials: messages.Partials) -> str | None:
    """One or more."""
    size = len(partials.points)
    return None if size and size % POINT_BYTES == 0 else "points must be one or more of 32 bytes"


# Seats and prekeys lie in rising order and identities differ, so that a set has one encoding and no one counts twice.
KEY = HASH = Exact(32)
SIGNATURE = Maybe(64)
SEAT = Uint(lambda limits: limits.max_participants - 1)
HEADCOUNT = Uint(_participants)
COUNT32 = Uint(lambda _: (1 << 32) - 1)
SURVIVORS = Sequence(SEAT, _participants, rising=lambda seat: seat)

PREKEY = Record(messages.Prekey, number=Uint(), public=KEY, signature=SIGNATURE)
PARTICIPANT = Record(messages.Participant, identity=KEY, prekey=PREKEY)
PARTICIPANTS = Sequence(PARTICIPANT, _participants, unique=attrgetter("identity"))
BEACON = Record(messages.Beacon, index=COUNT32, value=HASH, signature=SIGNATURE)
CARRYING = Record(messages.CarryTerms, plan=HASH, unit_variance=Real())
PREVIOUS = Record(messages.Previous, participants=PARTICIPANTS, terms=HASH, beacon=BEACON)
VOTE = Record(messages.Vote, seat=SEAT, signature=Exact(64))
VERDICT = Record(
    messages.Verdict,
    beacon=BEACON,
    following=HASH,
    survivors=SURVIVORS,
    votes=Sequence(VOTE, _participants, rising=attrgetter("seat")),
)
COHORTS = Record(messages.Cohorts, following=PARTICIPANTS, previous=Optional(PREVIOUS))


def _terms(carrying: Field) -> Record:
    """The terms of a round: a layout with room for how noise is carried, or without."""
    return Record(
        messages.Terms,
        run=Blob(lambda _: RUN_BYTES, low=1),
        round=COUNT32,
        attempt=COUNT32,
        mode=Choice(MODES),
        coordinates=Uint(lambda limits: limits.max_coordinates, low=1),
        grid_bits=Uint(lambda _: WIDEST),
        modulus_bits=Uint(lambda _: WIDEST, low=NARROWEST),
        clip=Real(),
        neighbours=Real(),
        unit_variance=Real(),
        residual_variance=Real(),
        self_variance=Real(),
        revealed=HEADCOUNT,
        dropped=HEADCOUNT,
        committee=HEADCOUNT,
        threshold=HEADCOUNT,
        carrying=carrying,
    )


def _opening(carrying: Field, cohorts: Field) -> Record:
    """A round that is opened: both of these are there, or neither."""
    return Record(
        messages.RoundOpen,
        terms=_terms(carrying),
        participants=PARTICIPANTS,
        beacon=BEACON,
        signature=SIGNATURE,
        cohorts=cohorts,
    )


PARTIALS = Record(
    messages.Partials,
    rule=_whole_points,
    seat=SEAT,
    points=Blob(_points, low=POINT_BYTES),
    proof=Exact(PROOF_BYTES),
)


def _request(verdict: Field) -> Record:
    return Record(
        messages.RevealRequest,
        context=HASH,
        survivors=SURVIVORS,
        pieces=Blob(_asked),
        signature=SIGNATURE,
        verdict=verdict,
    )


def _reveal(vote: Field) -> Record:
    return Record(
        messages.Reveal,
        context=HASH,
        seat=SEAT,
        partials=Sequence(PARTIALS, _participants, rising=attrgetter("seat")),
        signature=SIGNATURE,
        vote=vote,
    )


# The tag of a message is its key here; a tag is never used for anything else, even when its message is gone (3, 4).
# An upload's vector is bounded in bytes alone: that it fits the terms is for the server to check.
MESSAGES: dict[int, Record] = {
    1: _opening(Absent(), Absent()),
    2: Record(
        messages.Upload,
        context=HASH,
        seat=SEAT,
        vector=Blob(lambda limits: limits.max_coordinates * (WIDEST // 8)),
        fresh_prekeys=Sequence(PREKEY, lambda limits: limits.max_prekeys, rising=attrgetter("number")),
        commitment=Maybe(32),
        pieces=Blob(_pieces),
        signature=SIGNATURE,
    ),
    5: _request(Absent()),
    6: _reveal(Absent()),
    7: Record(messages.Refusal, context=HASH, reason=Text(_reason_bytes), signature=SIGNATURE),
    8: _opening(CARRYING, COHORTS),
    9: _request(VERDICT),
    10: _reveal(Exact(64)),
}
# Of a run with carried shares: the tag of a message in which this field is there.
CARRIED: dict[type[Any], tuple[int, str]] = {
    messages.RoundOpen: (8, "cohorts"),
    messages.RevealRequest: (9, "verdict"),
    messages.Reveal: (10, "vote"),
}
TAGS: dict[type[Any], int] = {
    record.kind: tag for tag, record in MESSAGES.items() if tag < min(CARRIED.values())[0]
}


def encode(message: Message, *, limits: Limits = _DEFAULT) -> bytes:
    """The one encoding of the message.

    What `decode` would refuse under the same `limits` is refused here as our own fault: `LocalProtocolError`.
    """
    return b"".join(write(message, Writer(limits)).parts)


def decode(data: bytes, *, limits: Limits = _DEFAULT) -> Message:
    """The message whose encoding this is; everything else is refused, as a fault of whoever sent it.

    `RemoteProtocolError`, in words that name the field and quote nothing of the message. Checked are form and bounds
    alone: signatures and meaning are left to the machines.
    """
    if type(data) is not bytes:
        raise LocalProtocolError("message: must be bytes")
    if len(data) > limits.max_message_bytes:
        raise RemoteProtocolError(f"message: larger than {limits.max_message_bytes} bytes")
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
    reader = Reader(data, limits, HEADER_BYTES)
    name = MESSAGES[tag].kind.__name__
    try:
        message = MESSAGES[tag].read(reader)
    except Fault as fault:
        raise RemoteProtocolError(str(fault.within(name))) from None
    if reader.left:
        raise RemoteProtocolError(f"{name}: {reader.left} bytes too many at the end")
    return cast(Message, message)


def signed_part(message: Message, *, limits: Limits = _DEFAULT) -> bytes:
    """What is signed: a tag for this purpose alone, then the encoding with the message's own signature empty.

    Signatures inside the message (of prekeys, the beacon) stay in: the signer vouches for them too.
    """
    if type(message) not in TAGS:
        raise LocalProtocolError("message: must be one of the messages of the protocol")
    return b"".join([SIGNING_DOMAIN, *write(replace(message, signature=b""), Writer(limits)).parts])


def write(message: Message, writer: Writer) -> Writer:
    """Writes header and fields; for those who want to watch the writer at work. Returns the writer."""
    tag = TAGS.get(type(message))
    if tag is None:
        raise LocalProtocolError("message: must be one of the messages of the protocol")
    carried, field = CARRIED.get(type(message), (tag, ""))
    if field and getattr(message, field) is not None:
        tag = carried
    writer.raw(MAGIC + bytes([VERSION, tag]))
    try:
        MESSAGES[tag].write(writer, message)
    except Fault as fault:
        raise LocalProtocolError(str(fault.within(type(message).__name__))) from None
    if writer.size > writer.limits.max_message_bytes:
        raise LocalProtocolError(f"message: larger than {writer.limits.max_message_bytes} bytes")
    return writer
