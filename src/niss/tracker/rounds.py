"""Runs and rounds: seats first, then the beacon, and never the other way round.

Nobody joins an attempt once it is seated. A link is written down as let out before anyone sees it, and where the
tracker seated an attempt its link is let out for that list alone.

A seating never changes once it is made, nor does a release; so both are prepared once as the JSON that is sent and
cached, as few large objects: a tracker that holds a hundred thousand seats must not pause to look through all of them
for garbage.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property

from niss.graph import ShareGraph
from niss.protocol.agreement import draw_graph, participants_hash
from niss.protocol.beacon import LINKS_PER_ROUND, link_of
from niss.protocol.keys import Identity
from niss.protocol.messages import Beacon, Participant
from niss.protocol.secret import Entropy, draw, length_prefixed, uint64
from niss.tracker.auth import LIST_PURPOSE, Refusal, list_message, require_server
from niss.tracker.beacons import BeaconHolder
from niss.tracker.limits import LONGEST_RUN
from niss.tracker.store import Release, Run, SeatRequest, Store, unknown_run, unpack_participants


class Seats:
    """Who sits in an attempt, signed by the tracker; each seat is kept as the JSON that shows it.

    size, hash   how many they are, and the hash of the list that the server commits to
    signature    the tracker's, under run, link and hash
    numbers      the seat of each identity
    shown        the JSON of each seat, in order
    """

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


def shown_beacon(beacon: Beacon) -> dict[str, object]:
    """A beacon as the API shows it: `BeaconAnswer` of `niss.tracker.schema`."""
    return {"index": beacon.index, "value": beacon.value.hex(), "signature": beacon.signature.hex()}


def _shown_participant(seat: int, one: Participant) -> dict[str, object]:
    """A seat as the API shows it: `SeatAnswer` of `niss.tracker.schema`."""
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


_SALT_BYTES = 32
_HASH_BYTES = 32


class Openings:
    """The runs of a tracker; only the server changes anything here.

    store     where runs, seatings and releases are written before they are answered
    identity  the tracker's, which signs participant lists
    holder    who commits to chains and lets links out: this tracker or another one
    server    the public key of the one identity that may open rounds
    clock     wall time in seconds, to tell who is live
    entropy   a source of random bytes, for the salt of each chain
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        holder: BeaconHolder,
        *,
        server: bytes,
        clock: Callable[[], float],
        entropy: Entropy,
    ) -> None:
        self._store, self._identity, self._holder, self._server = store, identity, holder, server
        self._clock, self._entropy = clock, entropy
        self._rounds, self._making = RoundCache(), threading.Lock()

    def start_run(self, caller: bytes, run: bytes, rounds: int) -> Run:
        """Commit to a chain for a run; asked again for as many rounds, the same one."""
        require_server(caller, self._server)
        if not 1 <= rounds <= LONGEST_RUN:
            raise Refusal(
                422, f"a run has 1 to {LONGEST_RUN} rounds", field="rounds", hint="split it into several runs"
            )
        begun = self._store.run(run)
        if begun is None:
            salt = bytes(draw(self._entropy, _SALT_BYTES))
            anchor, signature = self._holder.commit(run, rounds, salt)
            begun = self._store.start_run(run, Run(rounds, salt, anchor, signature))
        if begun.rounds != rounds:
            raise Refusal(
                409,
                f"this run has begun, with {begun.rounds} rounds",
                field="rounds",
                hint="name the new run otherwise",
            )
        return begun

    def run(self, run: bytes) -> Run:
        """A run that was started; `Refusal` 404 where it was not."""
        begun = self._store.run(run)
        if begun is None:
            raise unknown_run()
        return begun

    def link(self, run: bytes, round_number: int, attempt: int) -> int:
        """The link of an attempt of this run."""
        begun = self.run(run)
        if not 0 <= attempt < LINKS_PER_ROUND:
            raise Refusal(
                404,
                f"a round can be tried {LINKS_PER_ROUND} times",
                field="attempt",
                hint="go on with the next round",
            )
        if not 0 <= round_number < begun.rounds:
            raise Refusal(
                404,
                f"this run has rounds 0 to {begun.rounds - 1}",
                field="round",
                hint="start a new run for more rounds",
            )
        return link_of(round_number, attempt)

    def seat(
        self,
        caller: bytes,
        run: bytes,
        round_number: int,
        attempt: int,
        *,
        members: Sequence[bytes] | None,
        count: int | None,
        coalition: str | None,
        at_least: int,
    ) -> RoundView:
        """Fix who takes part in an attempt, and take one prekey of each."""
        require_server(caller, self._server)
        _check_wish(members, count, coalition)
        wanted = members if members is not None else ()
        asked = length_prefixed(
            uint64(0 if count is None else count),
            (coalition or "").encode(),
            uint64(at_least),
            *wanted,
        )
        request = SeatRequest(
            hashlib.sha256(asked).digest(),
            None if members is None else tuple(members),
            len(wanted) if count is None else count,
            coalition,
            at_least,
        )
        self._store.seat(run, self.link(run, round_number, attempt), request, now=self._clock())
        return self.view(run, round_number, attempt)

    def beacon(
        self,
        caller: bytes,
        run: bytes,
        round_number: int,
        attempt: int,
        *,
        commitment: bytes,
        neighbours: float | None,
    ) -> Beacon:
        """Let out the link of an attempt for this commitment; asked again for the same, the same beacon.

        Where the tracker seated the attempt, the commitment must be to that list. Where the server keeps the list
        itself, the tracker holds it to its first commitment.
        """
        require_server(caller, self._server)
        link, begun = self.link(run, round_number, attempt), self.run(run)
        seated = self._store.seating(run, link)
        if seated is not None and commitment[:_HASH_BYTES] != participants_hash(seated.participants()):
            raise Refusal(
                409,
                "this commitment is to other participants than were seated",
                field="commitment",
                hint="open the round with the list that seating it returned, in its order",
            )
        wanted = Release(commitment, neighbours)
        released = self._store.release(run, link, wanted)
        if released != wanted:
            raise Refusal(
                409,
                "the link of this attempt was let out for another commitment",
                field="commitment",
                hint="open a later attempt or round",
            )
        return self._holder.link(run, begun, round_number, attempt, commitment)

    def view(self, run: bytes, round_number: int, attempt: int) -> RoundView:
        """An attempt that was seated here, with its beacon if it is out."""
        link = link_of(round_number, attempt)
        # One at a time: when a round opens all its clients ask at once, and the first makes it ready for the others.
        with self._making:
            kept = self._rounds.get(run, link)
            if kept is not None and kept.beacon is not None:
                return kept
            begun, released = self.run(run), self._store.released(run, link)
            if kept is not None and released is None:
                return kept
            beacon = None
            if released is not None:
                beacon = self._holder.link(run, begun, round_number, attempt, released.commitment)
            view = RoundView(self._seats(run, link) if kept is None else kept.seats, released, beacon)
            view.prepare()
            self._rounds.keep(run, link, view)
            return view

    def _seats(self, run: bytes, link: int) -> Seats:
        """The list of an attempt from the store, signed."""
        seated = self._store.seating(run, link)
        if seated is None:
            raise Refusal(
                404,
                "this attempt was not seated here, or so long ago that its list is erased",
                field="attempt",
                hint="the server seats it first",
            )
        return Seats(
            seated.packed, lambda listed: self._identity.sign(LIST_PURPOSE, list_message(run, link, listed))
        )

    def final_view(self, run: bytes, round_number: int, attempt: int) -> RoundView | None:
        """The view if it is in memory with its beacon: no store is asked, so this does not block."""
        kept = self._rounds.get(run, link_of(round_number, attempt))
        return None if kept is None or kept.beacon is None else kept


def _check_wish(members: Sequence[bytes] | None, count: int | None, coalition: str | None) -> None:
    """Refuse a request for seats that contradicts itself."""
    if (members is None) == (count is None):
        raise Refusal(422, "give either members or a count", field="members", hint="leave one of them out")
    if members is not None and coalition is not None:
        raise Refusal(
            422,
            "applies to a count only, not to members",
            field="coalition",
            hint="name its members, or give a count",
        )
    if members is not None and len(set(members)) != len(members):
        raise Refusal(422, "names a client twice", field="members", hint="name each client once")
