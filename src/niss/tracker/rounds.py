"""A round as it is asked about: its participant list ready to be sent, and who is whose neighbour.

A seating never changes once it is made, nor does a release; so both are made ready once and kept in memory, as few
large objects: a tracker that holds a hundred thousand seats must not pause to look through all of them for garbage.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property

from niss.graph import ShareGraph
from niss.protocol.agreement import draw_graph, participants_hash
from niss.protocol.encoding import length_prefixed, uint64
from niss.protocol.messages import Beacon, Participant
from niss.tracker.records import Release, unpack_participants
from niss.tracker.refusal import Refusal

LIST_PURPOSE = "participants"


class Seats:
    """Who sits in an attempt, signed by the tracker; each seat is kept as the JSON that shows it."""

    def __init__(self, packed: bytes, sign: Callable[[bytes], bytes]) -> None:
        """`sign` is given the hash of the list."""
        participants = unpack_participants(packed)
        self._packed = packed
        self.size = len(participants)
        self.hash = participants_hash(participants)
        self.signature = sign(self.hash)
        self.numbers = {one.identity: seat for seat, one in enumerate(participants)}
        self.shown = [_json(_shown_participant(seat, one)) for seat, one in enumerate(participants)]

    @property
    def participants(self) -> tuple[Participant, ...]:
        return unpack_participants(self._packed)


class RoundView:
    """One attempt: its seats and, once its link is let out, the graph."""

    def __init__(self, seats: Seats, release: Release | None, beacon: Beacon | None) -> None:
        self.seats, self.release, self.beacon = seats, release, beacon

    def has_seat(self, identity: bytes) -> bool:
        return identity in self.seats.numbers

    @cached_property
    def list_json(self) -> bytes:
        """The whole list, signed by the tracker, and the beacon if it is out."""
        return b'%s,"participants":[%s]}' % (self._head, b",".join(self.seats.shown))

    def neighbours_json(self, identity: bytes) -> bytes:
        """The neighbours of one participant with their signed keys."""
        seat, shown = self.seats.numbers[identity], self.seats.shown
        found = b",".join([shown[other] for other in self.graph.neighbours(seat).tolist()])
        return b'%s,"seat":%d,"neighbours":[%s]}' % (self._head, seat, found)

    @cached_property
    def _head(self) -> bytes:
        """What both answers begin with; the closing brace is for them to set."""
        shown = {
            "size": self.seats.size,
            "participants_hash": self.seats.hash.hex(),
            "signature": self.seats.signature.hex(),
            "commitment": None if self.release is None else self.release.commitment.hex(),
            "beacon": None if self.beacon is None else shown_beacon(self.beacon),
        }
        return _json(shown)[:-1]

    @cached_property
    def graph(self) -> ShareGraph:
        """The graph that every client derives in `niss.protocol.agreement`; a test holds the two together."""
        if self.release is None or self.beacon is None:
            raise Refusal(
                409,
                "the beacon of this attempt is not out: nobody has neighbours yet",
                field="attempt",
                hint="ask again when the server has opened the round",
            )
        neighbours = self.release.neighbours
        if neighbours is None:
            raise Refusal(
                409,
                "the server did not say how many neighbours each client has",
                field="attempt",
                hint="derive the graph from the participant list and the terms of the round",
            )
        return draw_graph(self.seats.size, neighbours, self.beacon.value, self.release.commitment)

    def prepare(self) -> None:
        """Draw the graph now, so that nobody's first request has to wait for it."""
        if self.release is not None and self.release.neighbours is not None:
            self.graph.neighbours(0)


class RoundCache:
    """The views made last, as many as fit; rounds go by, so the oldest is the first to go."""

    def __init__(self, most_seats: int = 200_000) -> None:
        self._most_seats, self._seats = most_seats, 0
        self._views: OrderedDict[tuple[bytes, int], RoundView] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, run: bytes, link: int) -> RoundView | None:
        return self._views.get((run, link))

    def keep(self, run: bytes, link: int, view: RoundView) -> None:
        """Put a view in the place of an earlier one of the same attempt."""
        with self._lock:
            before = self._views.pop((run, link), None)
            self._views[run, link] = view
            self._seats += view.seats.size - (0 if before is None else before.seats.size)
            while self._seats > self._most_seats and len(self._views) > 1:
                self._seats -= self._views.popitem(last=False)[1].seats.size


def list_message(run: bytes, link: int, listed: bytes) -> bytes:
    """What the tracker signs under a participant list."""
    return length_prefixed(run, uint64(link), listed)


def shown_beacon(beacon: Beacon) -> dict[str, object]:
    return {"index": beacon.index, "value": beacon.value.hex(), "signature": beacon.signature.hex()}


def _shown_participant(seat: int, one: Participant) -> dict[str, object]:
    prekey = one.prekey
    return {
        "seat": seat,
        "identity": one.identity.hex(),
        "prekey": {
            "number": prekey.number,
            "public": prekey.public.hex(),
            "signature": prekey.signature.hex(),
        },
    }


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
