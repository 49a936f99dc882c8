"""Messages as bytes: compact, versioned, and canonical, so that a signature over an encoding is safe.

    magic "NISS" | version, 1 byte | tag of the message, 1 byte | its fields, as `MESSAGES` lays them out

Each message has one encoding and each accepted encoding is that of the message it decodes to. What is refused is
named by its field and never quoted. No length is believed before the bytes for it are there: `decode` takes about
as much memory as a vector it is given, and some 35 times as much as a message that is all tiny items (Python's
objects are larger than one-byte pieces), of which `Limits` allows only so many.

The layouts below are the format: whatever changes there changes the encodings, and needs a new `VERSION`.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.messages import (
    MODES,
    Beacon,
    Message,
    Participant,
    Prekey,
    Refusal,
    Reveal,
    RevealedEdge,
    RevealedPiece,
    RevealRequest,
    RoundOpen,
    SealedPiece,
    SurvivorClaim,
    Terms,
    Upload,
    Verdict,
)
from niss.protocol.packing import NARROWEST, WIDEST
from niss.protocol.wire_fields import (
    Blob,
    Bound,
    Choice,
    Exact,
    Fault,
    Limits,
    Maybe,
    Reader,
    Real,
    Record,
    Sequence,
    Text,
    Uint,
    Writer,
)

__all__ = ["GROUPS", "MAGIC", "VERSION", "Limits", "decode", "encode", "signed_part", "size_report"]

MAGIC = b"NISS"
VERSION = 1
HEADER_BYTES = len(MAGIC) + 2
SIGNING_DOMAIN = b"niss signed message v1\x00"
GROUPS = ("vector", "prekeys", "pieces", "signature", "rest")
RUN_BYTES = 64
COUNTER = (1 << 32) - 1

_DEFAULT = Limits()
_SIGNED = {"signature": "signature"}

_participants: Bound = attrgetter("max_participants")
_pieces: Bound = attrgetter("max_pieces")
_piece_bytes: Bound = attrgetter("max_piece_bytes")


def _own_edge(edge: RevealedEdge) -> str | None:
    return "sender and receiver must differ" if edge.sender == edge.receiver else None


def _edge_order(reveal: Reveal) -> str | None:
    """Edges go neighbour by neighbour in rising order, of each the share sent before the share received."""
    keys = []
    for edge in reveal.edges:
        if reveal.seat not in (edge.sender, edge.receiver):
            return "edges must have the client's own seat at one end"
        sent = edge.sender == reveal.seat
        keys.append((edge.receiver if sent else edge.sender, not sent))
    return None if keys == sorted(set(keys)) else "edges must be in rising order, none of them twice"


KEY = HASH = SEED = Exact(32)
SIGNATURE = Maybe(64)
SEAT = Uint(lambda limits: limits.max_participants - 1)
HEADCOUNT = Uint(_participants)
SURVIVORS = Sequence(SEAT, _participants, rising=lambda seat: seat)

PREKEY = Record(Prekey, number=Uint(), public=KEY, signature=SIGNATURE)
PARTICIPANT = Record(Participant, groups={"prekey": "prekeys"}, identity=KEY, prekey=PREKEY)
TERMS = Record(
    Terms,
    run=Blob(lambda _: RUN_BYTES, low=1),
    round=Uint(lambda _: COUNTER),
    attempt=Uint(lambda _: COUNTER),
    mode=Choice(MODES),
    coordinates=Uint(lambda limits: limits.max_coordinates, low=1),
    grid_bits=Uint(lambda _: WIDEST),
    modulus_bits=Uint(lambda _: WIDEST, low=NARROWEST),
    clip=Real(),
    neighbours=Real(),
    unit_variance=Real(),
    residual_variance=Real(),
    self_variance=Real(),
    colluding_neighbours=HEADCOUNT,
    revealed=HEADCOUNT,
    dropped=HEADCOUNT,
    threshold_share=Real(),
)
BEACON = Record(Beacon, groups=_SIGNED, index=Uint(lambda _: COUNTER), value=HASH, signature=SIGNATURE)
SEALED_PIECE = Record(SealedPiece, seat=SEAT, ciphertext=Blob(_piece_bytes, low=1))
SEALED_PIECES = Sequence(SEALED_PIECE, _pieces, rising=attrgetter("seat"))
EDGE = Record(RevealedEdge, rule=_own_edge, sender=SEAT, receiver=SEAT, seed=SEED)
REVEALED_PIECE = Record(
    RevealedPiece, seat=SEAT, index=Uint(lambda _: COUNTER), value=Blob(_piece_bytes, low=1)
)
VERDICT = Record(
    Verdict,
    groups=_SIGNED,
    context=HASH,
    seat=SEAT,
    survivors_hash=HASH,
    signature=SIGNATURE,
)

# The tag of a message is its key here; a tag is never used for anything else, even when its message is gone.
MESSAGES: dict[int, Record] = {
    1: Record(
        RoundOpen,
        groups=_SIGNED,
        terms=TERMS,
        participants=Sequence(PARTICIPANT, _participants, unique=attrgetter("identity")),
        beacon=BEACON,
        signature=SIGNATURE,
    ),
    2: Record(
        Upload,
        groups={"vector": "vector", "fresh_prekeys": "prekeys", "pieces": "pieces", "signature": "signature"},
        context=HASH,
        seat=SEAT,
        vector=Blob(lambda limits: limits.max_coordinates * (WIDEST // 8)),
        fresh_prekeys=Sequence(PREKEY, lambda limits: limits.max_prekeys, rising=attrgetter("number")),
        commitment=Maybe(32),
        pieces=SEALED_PIECES,
        signature=SIGNATURE,
    ),
    3: Record(SurvivorClaim, groups=_SIGNED, context=HASH, survivors=SURVIVORS, signature=SIGNATURE),
    4: VERDICT,
    5: Record(
        RevealRequest,
        groups={"pieces": "pieces", "signature": "signature"},
        context=HASH,
        survivors=SURVIVORS,
        verdicts=Sequence(VERDICT, _participants, rising=attrgetter("seat")),
        pieces=SEALED_PIECES,
        signature=SIGNATURE,
    ),
    6: Record(
        Reveal,
        rule=_edge_order,
        groups={"edges": "pieces", "pieces": "pieces", "signature": "signature"},
        context=HASH,
        seat=SEAT,
        edges=Sequence(EDGE, lambda limits: 2 * limits.max_pieces),
        pieces=Sequence(REVEALED_PIECE, _pieces, rising=attrgetter("seat")),
        signature=SIGNATURE,
    ),
    7: Record(
        Refusal,
        groups=_SIGNED,
        context=HASH,
        reason=Text(lambda limits: limits.max_reason_bytes),
        signature=SIGNATURE,
    ),
}
TAGS: dict[type[Any], int] = {record.kind: tag for tag, record in MESSAGES.items()}


def encode(message: Message, *, limits: Limits = _DEFAULT) -> bytes:
    """The one encoding of the message; refuses, as our own fault (`LocalProtocolError`), what `decode` would refuse."""
    return b"".join(write(message, Writer(limits)).parts)


def decode(data: bytes, *, limits: Limits = _DEFAULT) -> Message:
    """The message whose encoding this is; everything else is refused, as a fault of whoever sent it.

    `RemoteProtocolError`, in words that name the field and quote nothing of the message.
    """
    if type(data) is not bytes:
        raise LocalProtocolError("message: must be bytes")
    if len(data) > limits.max_message_bytes:
        raise RemoteProtocolError(f"message: larger than {limits.max_message_bytes} bytes")
    if data[: len(MAGIC)] != MAGIC or len(data) < HEADER_BYTES:
        raise RemoteProtocolError("magic: this is not a niss message")
    version, tag = data[len(MAGIC) : HEADER_BYTES]
    if version != VERSION:
        raise RemoteProtocolError(
            f"version: the message has wire version {version}, this side speaks version {VERSION}",
            hint="run the same release of niss on both sides",
        )
    if tag not in MESSAGES:
        raise RemoteProtocolError(f"type: wire version {VERSION} has no message of type {tag}")
    reader = Reader(data, limits, HEADER_BYTES)
    try:
        message = MESSAGES[tag].read(reader)
    except Fault as fault:
        raise RemoteProtocolError(f"{fault.within(MESSAGES[tag].kind.__name__)}") from None
    if reader.left:
        raise RemoteProtocolError(
            f"{MESSAGES[tag].kind.__name__}: {reader.left} bytes too many at the end"
        )
    return cast(Message, message)


def signed_part(message: Message, *, limits: Limits = _DEFAULT) -> bytes:
    """What is signed: a tag for this purpose alone, then the encoding with the message's own signature empty.

    Signatures inside the message (of prekeys, the beacon, verdicts) stay in: the signer vouches for them too.
    """
    if type(message) not in TAGS:
        raise LocalProtocolError("message: must be one of the messages of the protocol")
    return SIGNING_DOMAIN + encode(replace(message, signature=b""), limits=limits)


def size_report(message: Message, *, limits: Limits = _DEFAULT) -> dict[str, int]:
    """How many bytes of the encoding go where; the groups add up to its length.

    `pieces` counts all that a repair moves, revealed edges too; `signature` counts every signature but those of
    prekeys, which belong to `prekeys`. Lengths count with what they announce, the header with the `rest`.
    """
    writer = write(message, Writer(limits))
    sizes = {group: writer.groups.get(group, 0) for group in GROUPS}
    sizes["rest"] = writer.size - sum(sizes.values())
    return sizes


def write(message: Message, writer: Writer) -> Writer:
    """Writes header and fields; for those who want to watch the writer at work. Returns the writer."""
    tag = TAGS.get(type(message))
    if tag is None:
        raise LocalProtocolError("message: must be one of the messages of the protocol")
    writer.raw(MAGIC + bytes([VERSION, tag]))
    try:
        MESSAGES[tag].write(writer, message)
    except Fault as fault:
        raise LocalProtocolError(f"{fault.within(type(message).__name__)}") from None
    if writer.size > writer.limits.max_message_bytes:
        raise LocalProtocolError(f"message: larger than {writer.limits.max_message_bytes} bytes")
    return writer
