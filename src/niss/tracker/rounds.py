"""Runs and rounds: seats first, then the beacon, and never the other way round.

Nobody joins an attempt once it is seated. A link is written down as let out before anyone sees it, and it is let out
for the list that was seated alone: a server that skips a round does not see its graph. Only a tracker that holds chains
for another one leaves the lists to that one.

Where noise is carried from round to round, a commitment also names the list of the next round, which is seated before
this round's link is let out. The next link is let out for that list alone; no round is skipped or tried twice.
The first commitment of a run decides whether it is such a run.

A seating never changes once it is made, nor does a release; so both are prepared once as the JSON that is sent and
cached, as few large objects: a tracker that holds a hundred thousand seats must not pause to look through all of them
for garbage.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property

from pydantic import BaseModel

from niss.graph import ShareGraph
from niss.protocol.agreement import draw_graph, participants_hash
from niss.protocol.curve import Entropy, draw
from niss.protocol.keys import LINKS_PER_ROUND, Identity, link_of
from niss.protocol.messages import Beacon, Participant
from niss.tracker import api
from niss.tracker.auth import LIST_PURPOSE, LONGEST_RUN, Refused, conflict, list_message, require_server
from niss.tracker.store import TrackerStore, unknown_run
from niss.tracker.values import Attempt, Release, Run, SeatRequest, unpack_participants


class SeatList:
    """Who sits in an attempt, signed by the tracker; each seat is kept as the JSON that shows it.

    size, hash   how many they are, and the hash of the list that the server commits to
    signature    the tracker's, under run, link and hash
    numbers      the seat of each identity
    json         the JSON of each seat, in order
    """

    def __init__(self, packed: bytes, sign: Callable[[bytes], bytes]) -> None:
        """`packed` is the list as the store has it; `sign` makes the signature from the hash of the list."""
        participants = unpack_participants(packed)
        self._packed = packed
        self.size = len(participants)
        self.hash = participants_hash(participants)
        self.signature = sign(self.hash)
        self.numbers = {one.identity: seat for seat, one in enumerate(participants)}
        self.json = [_seat_json(seat, one) for seat, one in enumerate(participants)]

    @property
    def participants(self) -> tuple[Participant, ...]:
        return unpack_participants(self._packed)


class RoundView:
    """One attempt as its participants may see it: its seats and, once its link is let out, the graph.

    release and beacon are None until then; a view with them never changes, and is made once.
    """

    def __init__(self, seats: SeatList, release: Release | None, beacon: Beacon | None) -> None:
        self.seats, self.release, self.beacon = seats, release, beacon

    def has_seat(self, identity: bytes) -> bool:
        return identity in self.seats.numbers

    @cached_property
    def list_json(self) -> bytes:
        """The whole list, signed by the tracker, and the beacon if it is out."""
        return b'%s,"participants":[%s]}' % (self._head, b",".join(self.seats.json))

    def neighbours_json(self, identity: bytes) -> bytes:
        """The neighbours of a participant with their signed keys; refused (409) as long as there is no `graph`."""
        seat, seats = self.seats.numbers[identity], self.seats.json
        neighbours = b",".join([seats[other] for other in self.graph.neighbours(seat).tolist()])
        return b'%s,"seat":%d,"neighbours":[%s]}' % (self._head, seat, neighbours)

    @cached_property
    def _head(self) -> bytes:
        """What both answers begin with; the closing brace is for them to set."""
        return _json(
            api.RoundAnswer(
                size=self.seats.size,
                participants_hash=self.seats.hash,
                signature=self.seats.signature,
                commitment=None if self.release is None else self.release.commitment,
                beacon=None if self.beacon is None else api.BeaconAnswer(**asdict(self.beacon)),
            )
        )[:-1]

    @cached_property
    def graph(self) -> ShareGraph:
        """The graph that every client derives in `niss.protocol.agreement`; a test holds the two together.

        Refused (409) before the beacon is out, and where the server did not tell the number of neighbours.
        """
        if self.release is None or self.beacon is None:
            raise conflict(
                "attempt",
                "the beacon of this attempt is not out: nobody has neighbours yet",
                "ask again when the server has opened the round",
            )
        neighbours = self.release.neighbours
        if neighbours is None:
            raise conflict(
                "attempt",
                "the server did not say how many neighbours each client has",
                "derive the graph from the participant list and the terms of the round",
            )
        return draw_graph(self.seats.size, neighbours, self.beacon.value, self.release.commitment)

    def prepare(self) -> None:
        """Draw the graph now, so that nobody's first request has to wait for it."""
        if self.release is not None and self.release.neighbours is not None:
            self.graph.neighbours(0)


class RoundCache:
    """The views made last, as many as fit; rounds go by, so the oldest is the first to go.

    `most_seats` bounds the seats of all views together; the newest view stays in any case.
    """

    def __init__(self, most_seats: int = 200_000) -> None:
        self._most_seats, self._seats = most_seats, 0
        self._views: OrderedDict[Attempt, RoundView] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, attempt: Attempt) -> RoundView | None:
        """The view of an attempt if it is in memory; takes no lock, so that it can be called on the event loop."""
        return self._views.get(attempt)

    def keep(self, attempt: Attempt, view: RoundView) -> None:
        """Put a view in the place of an earlier one of the same attempt."""
        with self._lock:
            before = self._views.pop(attempt, None)
            self._views[attempt] = view
            self._seats += view.seats.size - (0 if before is None else before.seats.size)
            while self._seats > self._most_seats and len(self._views) > 1:
                self._seats -= self._views.popitem(last=False)[1].seats.size


def _seat_json(seat: int, participant: Participant) -> bytes:
    prekey = api.PrekeyBody(**asdict(participant.prekey))
    return _json(api.SeatAnswer(seat=seat, identity=participant.identity, prekey=prekey))


def _json(answer: BaseModel) -> bytes:
    return answer.model_dump_json().encode()


_SALT_BYTES = 32
_HASH_BYTES = 32
_NOBODY = participants_hash(())


class BeaconHolder(ABC):
    """Who commits to a chain and lets its links out; `public` is the key its signatures verify under.

    Both methods have the same answer for the same arguments, before and after a restart. They refuse where
    the holder is elsewhere and cannot be reached (503) or will not answer (409).
    """

    public: bytes

    @abstractmethod
    def commit(self, run: bytes, rounds: int, salt: bytes) -> tuple[bytes, bytes]:
        """The anchor of a chain for that many rounds, and the holder's signature under run, rounds and anchor.

        `salt` are 32 random bytes, drawn once for each run; the same salt gives the same chain.
        """

    @abstractmethod
    def link(self, attempt: Attempt, run: Run, commitment: bytes) -> Beacon:
        """The signed link of an attempt at `run`, for this commitment.

        The caller has written down before, durably, that the link is let out for it and nothing else.
        """


@dataclass(eq=False)
class Rounds:
    """The runs and rounds of a tracker; only the server changes anything here. What is wrong is a `Refused`.

    store     where runs, seatings and releases are written before they are answered
    identity  the tracker's, which signs participant lists
    holder    who commits to chains and lets links out: this tracker or another one
    server    the public key of the one identity that may open rounds
    clock     wall time in seconds, to tell who is live
    entropy   a source of random bytes, for the salt of each chain
    lists     whether attempts are seated here; False: the server is another tracker, which seats them
    """

    store: TrackerStore
    identity: Identity
    holder: BeaconHolder
    server: bytes
    clock: Callable[[], float]
    entropy: Entropy
    lists: bool = True

    def __post_init__(self) -> None:
        self._cache, self._making = RoundCache(), threading.Lock()

    def start_run(self, caller: bytes, run: bytes, rounds: int) -> Run:
        """Commit to a chain for a run of that many rounds; asked again for as many, the same chain.

        Refused: a caller that is not the server (403), too many rounds (422), a run that has begun with others (409).
        """
        require_server(caller, self.server)
        if not 1 <= rounds <= LONGEST_RUN:
            raise Refused(
                422, f"a run has 1 to {LONGEST_RUN} rounds", field="rounds", hint="split it into several runs"
            )
        started = self.store.run(run)
        if started is None:
            salt = bytes(draw(self.entropy, _SALT_BYTES))
            anchor, signature = self.holder.commit(run, rounds, salt)
            started = self.store.start_run(run, Run(rounds, salt, anchor, signature))
        if started.rounds != rounds:
            raise conflict(
                "rounds",
                f"this run has begun, with {started.rounds} rounds",
                "choose another name for the new run",
            )
        return started

    def run(self, run: bytes) -> Run:
        """A run that was started; refused (404) where it was not."""
        started = self.store.run(run)
        if started is None:
            raise unknown_run()
        return started

    def _run_of(self, attempt: Attempt) -> Run:
        """The run of an attempt; refused (404) where it was not started, or has no such round or attempt."""
        run = self.run(attempt.run)
        if not 0 <= attempt.number < LINKS_PER_ROUND:
            raise Refused(
                404,
                f"a round can be tried {LINKS_PER_ROUND} times",
                field="attempt",
                hint="go on with the next round",
            )
        if not 0 <= attempt.round < run.rounds:
            raise Refused(
                404,
                f"this run has rounds 0 to {run.rounds - 1}",
                field="round",
                hint="start a new run for more rounds",
            )
        return run

    def seat(self, caller: bytes, attempt: Attempt, request: SeatRequest) -> RoundView:
        """Fix who takes part in an attempt, and take one prekey of each; asked again in the same way, the same list.

        Refused: a caller that is not the server (403), a request that contradicts itself (422), an attempt that does
        not exist (404), and what `TrackerStore.seat` refuses.
        """
        require_server(caller, self.server)
        request.check()
        self._run_of(attempt)
        self.store.seat(attempt.run, attempt.link, request, now=self.clock())
        return self.view(attempt)

    def beacon(self, caller: bytes, attempt: Attempt, wanted: Release) -> Beacon:
        """Let out the link of an attempt for this commitment; asked again for the same, the same beacon.

        The commitment must be to the list that was seated, and is then the only one for this attempt; any other is
        refused (409). So is what contradicts the list that was announced, where noise is carried over.
        """
        require_server(caller, self.server)
        run, committed = self._run_of(attempt), wanted.commitment[:_HASH_BYTES]
        seating = self.store.seating(attempt.run, attempt.link)
        if self.store.released(attempt.run, attempt.link) != wanted:
            if seating is None and self.lists:
                raise conflict(
                    "attempt",
                    "nobody is seated in this attempt",
                    "seat it first; a link is let out for the list that was seated alone",
                )
            self._check_announced(attempt, run, wanted)
        if seating is not None and committed != participants_hash(seating.participants()):
            raise conflict(
                "commitment",
                "this commitment is to other participants than were seated",
                "open the round with the list that seating it returned, in its order",
            )
        if self.store.release(attempt.run, attempt.link, wanted) != wanted:
            raise conflict(
                "commitment",
                "the link of this attempt was let out for another commitment",
                "open a later attempt or round",
            )
        return self.holder.link(attempt, run, wanted.commitment)

    def _check_announced(self, attempt: Attempt, run: Run, wanted: Release) -> None:
        """Refuse (409) what breaks the chain of lists in a run that carries noise from round to round.

        What was let out never changes, so nothing here can be overtaken by another request.
        """
        highest = self.store.released(attempt.run, run.highest) if run.highest else None
        if wanted.following is None:
            if highest is not None and highest.following is not None:
                raise conflict(
                    "commitment",
                    "this run carries noise from round to round: a commitment names the next round's list too",
                    "add the hash of the next round's participants",
                )
            return
        if attempt.number:
            raise conflict(
                "attempt",
                "a run that carries noise from round to round has one attempt at a round",
                "go on with the next round; those who are missing leave their noise in the sum",
            )
        if attempt.round:
            self._check_is_next(attempt, wanted)
        if attempt.round + 1 == run.rounds:
            if wanted.following != _NOBODY:
                raise conflict(
                    "commitment",
                    "the last round carries noise to nobody",
                    "end it with the hash of an empty list",
                )
            return
        if self.lists:
            self._check_following(attempt, wanted.following)

    def _check_is_next(self, attempt: Attempt, wanted: Release) -> None:
        """The round before must have been opened, and have announced the list that this one is committed to."""
        number = attempt.round - 1
        before = self.store.released(attempt.run, link_of(number, 0))
        announced = None if before is None else before.following
        if announced is None:
            raise conflict(
                "round",
                f"round {number} was not opened" if before is None else f"round {number} announced nobody",
                "open the rounds in order, each with the list of the next",
            )
        if announced != wanted.commitment[:_HASH_BYTES]:
            raise conflict(
                "commitment",
                f"this commitment is to another list than round {number} announced",
                "open the round with the list that was announced, also if some of it are gone",
            )

    def _check_following(self, attempt: Attempt, following: bytes) -> None:
        """The list that is announced must be seated, in the next round's one attempt."""
        seating = self.store.seating(attempt.run, link_of(attempt.round + 1, 0))
        if seating is None:
            raise conflict(
                "commitment",
                "nobody is seated in the next round, to which this one carries noise",
                "seat the next round first",
            )
        if following != participants_hash(seating.participants()):
            raise conflict(
                "commitment",
                "this commitment is to other participants of the next round than were seated",
                "commit to the list that seating the next round returned, in its order",
            )

    def view(self, attempt: Attempt) -> RoundView:
        """An attempt that was seated here, with its beacon if it is out; refused (404) where it was not seated."""
        # One at a time: when a round opens all its clients ask at once, and the first makes it ready for the others.
        with self._making:
            cached = self._cache.get(attempt)
            if cached is not None and cached.beacon is not None:
                return cached
            run, release = self.run(attempt.run), self.store.released(attempt.run, attempt.link)
            if cached is not None and release is None:
                return cached
            beacon = None if release is None else self.holder.link(attempt, run, release.commitment)
            view = RoundView(self._seats(attempt) if cached is None else cached.seats, release, beacon)
            view.prepare()
            self._cache.keep(attempt, view)
            return view

    def _seats(self, attempt: Attempt) -> SeatList:
        """The list of an attempt from the store, signed."""
        run, link = attempt.run, attempt.link
        seating = self.store.seating(run, link)
        if seating is None:
            raise Refused(
                404,
                "this attempt was not seated here, or so long ago that its list is erased",
                field="attempt",
                hint="the server seats it first",
            )
        return SeatList(
            seating.packed,
            lambda list_hash: self.identity.sign(LIST_PURPOSE, list_message(run, link, list_hash)),
        )

    def final_view(self, attempt: Attempt) -> RoundView | None:
        """The view if it is in memory with its beacon: no store is asked, so this does not block."""
        view = self._cache.get(attempt)
        return None if view is None or view.beacon is None else view
