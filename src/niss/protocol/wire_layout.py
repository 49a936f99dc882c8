"""How each message lies on the wire: its fields in order, their kinds, their bounds, their order.

This is the format: whatever changes here changes the encodings, and wants a new `VERSION` in `wire`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from niss.protocol.messages import (
    MODES,
    Beacon,
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
from niss.protocol.wire_fields import Choice, Limits, Real, Uint
from niss.protocol.wire_shapes import Blob, Exact, Maybe, Record, Sequence, Text

RUN_BYTES = 64
COUNTER = (1 << 32) - 1

_SIGNED = {"signature": "signature"}


def _last_seat(limits: Limits) -> int:
    return limits.max_participants - 1


def _participants(limits: Limits) -> int:
    return limits.max_participants


def _pieces(limits: Limits) -> int:
    return limits.max_pieces


def _piece_bytes(limits: Limits) -> int:
    return limits.max_piece_bytes


def _own_edge(edge: RevealedEdge) -> str | None:
    return "sender and receiver must differ" if edge.sender == edge.receiver else None


def _edge_order(reveal: Reveal) -> str | None:
    """Edges go neighbour by neighbour in rising order, of each the share given before the share received."""
    keys = []
    for edge in reveal.edges:
        if reveal.seat not in (edge.sender, edge.receiver):
            return "edges must have the client's own seat at one end"
        given = edge.sender == reveal.seat
        keys.append((edge.receiver if given else edge.sender, not given))
    return None if keys == sorted(set(keys)) else "edges must be in rising order, none of them twice"


KEY = HASH = SEED = Exact(32)
SIGNATURE = Maybe(64)
SEAT = Uint(_last_seat)
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
