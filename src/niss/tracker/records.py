"""What the tracker remembers, as plain frozen values, and how a participant list is packed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from niss.protocol.keys import PUBLIC_BYTES, SIGNATURE_BYTES
from niss.protocol.messages import Participant, Prekey
from niss.protocol.prekeys import SignedPrekey

NUMBER_BYTES = 8
PREKEY_BYTES = NUMBER_BYTES + PUBLIC_BYTES + SIGNATURE_BYTES
SEAT_BYTES = PUBLIC_BYTES + PREKEY_BYTES


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
class Run:
    """A run and its chain: what was committed to when it began, and the highest link let out so far."""

    rounds: int
    salt: bytes
    anchor: bytes
    signature: bytes
    highest: int = 0


@dataclass(frozen=True)
class Seating:
    """Who sits in an attempt, in order, for good; `asked` is a hash of the request that made it."""

    asked: bytes
    packed: bytes

    def participants(self) -> tuple[Participant, ...]:
        return unpack_participants(self.packed)


@dataclass(frozen=True)
class Release:
    """A link that was let out: for this commitment and no other."""

    commitment: bytes
    neighbours: float | None


@dataclass(frozen=True)
class SeatRequest:
    """Whom the server wants: those named, or `count` of the live clients, all or those of one coalition."""

    asked: bytes
    members: tuple[bytes, ...] | None
    count: int
    coalition: str | None
    at_least: int


@dataclass(frozen=True)
class Counts:
    """For the metrics."""

    registered: int
    live: int
    prekeys: int
    runs: int


@dataclass(frozen=True)
class SortedBatch:
    """A batch of prekeys, held against what is known of their owner."""

    new: tuple[bytes, ...]
    known: int
    stale: int


def sort_batch(batch: Iterable[SignedPrekey], stock: frozenset[bytes], highest: int) -> SortedBatch:
    """Numbers above the highest ever taken are new; the rest are known, or stale. `highest` is -1 at first."""
    new: dict[int, bytes] = {}
    known = stale = 0
    for prekey in batch:
        packed = prekey.encode()
        if prekey.id > highest:
            new[prekey.id] = packed
        elif packed in stock:
            known += 1
        else:
            stale += 1
    return SortedBatch(tuple(new[number] for number in sorted(new)), known, stale)


def pack_participants(seats: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Identity and packed prekey of each seat, 136 bytes a seat."""
    return b"".join(part for seat in seats for part in seat)


def unpack_participants(packed: bytes) -> tuple[Participant, ...]:
    return tuple(
        Participant(
            packed[at : at + PUBLIC_BYTES], unpack_prekey(packed[at + PUBLIC_BYTES : at + SEAT_BYTES])
        )
        for at in range(0, len(packed), SEAT_BYTES)
    )


def unpack_prekey(packed: bytes) -> Prekey:
    one = SignedPrekey.decode(packed)
    return Prekey(one.id, one.public, one.signature)
