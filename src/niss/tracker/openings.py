"""Runs and rounds: seats first, then the beacon, and never the other way round.

Nobody joins an attempt once it is seated. A link is written down as let out before anyone sees it, and where the
tracker seated an attempt its link is let out for that list alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence

from niss.protocol.agreement import participants_hash
from niss.protocol.beacon import LINKS_PER_ROUND, link_of
from niss.protocol.encoding import length_prefixed, uint64
from niss.protocol.keys import Identity
from niss.protocol.messages import Beacon
from niss.protocol.secret import Entropy, draw
from niss.tracker.beacons import BeaconHolder
from niss.tracker.limits import LONGEST_RUN
from niss.tracker.records import Release, Run, SeatRequest
from niss.tracker.refusal import Refusal, require_server
from niss.tracker.rounds import LIST_PURPOSE, RoundCache, RoundView, Seats, list_message
from niss.tracker.store import Store, unknown_run

_SALT_BYTES = 32
_HASH_BYTES = 32


class Openings:
    """The runs of a tracker; only the server changes anything here."""

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
