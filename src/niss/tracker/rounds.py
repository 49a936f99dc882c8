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

import copy
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from niss.graph import ShareGraph
from niss.protocol.agreement import draw_graph, participants_hash
from niss.protocol.keys import BeaconChain, Identity, link_of
from niss.protocol.messages import Beacon, Participant
from niss.protocol.wire import length_prefixed, uint64
from niss.redaction import SecretBytes
from niss.tracker import api
from niss.tracker.api import Attempt, CommitmentBody, SeatsWanted
from niss.tracker.auth import (
    ANCHOR_PURPOSE,
    LIST_PURPOSE,
    Refused,
    anchor_message,
    list_message,
    require_server,
)
from niss.tracker.client import TrackerClient, TrackerRefused, TrackerUnavailable
from niss.tracker.store import Run, Seating, TrackerStore, known_run

_CHAINS_IN_MEMORY = 8
_VIEWS_IN_MEMORY = 20
_SALT_BYTES = 32
_NOBODY = participants_hash(())


class RoundView:
    """One attempt as its participants may see it: its seats and, once its link is let out, the graph.

    seating           who sits in it
    release, beacon   what the link was let out for, and the link, signed by its holder; a view with them never changes
    hash, signature   hash of the list, to which the server commits, and the tracker's signature for this attempt
    numbers           the seat of each identity
    """

    def __init__(
        self,
        seating: Seating,
        sign: Callable[[bytes], bytes],
        release: CommitmentBody | None,
        beacon: Beacon | None,
    ) -> None:
        """`sign` makes the signature from the hash of the list."""
        self.seating, self.release, self.beacon = seating, release, beacon
        participants = seating.participants()
        self.hash = participants_hash(participants)
        self.signature = sign(self.hash)
        self.numbers = {participant.identity: seat for seat, participant in enumerate(participants)}
        self._seats = [_seat_json(seat, participant) for seat, participant in enumerate(participants)]

    @cached_property
    def list_json(self) -> bytes:
        """The whole list, signed by the tracker, and the beacon if it is out."""
        return b'%s,"participants":[%s]}' % (self._head, b",".join(self._seats))

    def neighbours_json(self, identity: bytes) -> bytes:
        """The neighbours of a participant with their signed keys; refused (409) as long as there is no `graph`."""
        seat = self.numbers[identity]
        neighbours = b",".join([self._seats[other] for other in self.graph.neighbours(seat).tolist()])
        return b'%s,"seat":%d,"neighbours":[%s]}' % (self._head, seat, neighbours)

    @cached_property
    def _head(self) -> bytes:
        """What both answers begin with; the closing brace is for them to set."""
        head = api.RoundAnswer(
            size=len(self.numbers),
            participants_hash=self.hash,
            signature=self.signature,
            commitment=None if self.release is None else self.release.commitment,
            beacon=None if self.beacon is None else api.BeaconAnswer(**asdict(self.beacon)),
        )
        return head.model_dump_json().encode()[:-1]

    @cached_property
    def graph(self) -> ShareGraph:
        """The graph that every client derives in `niss.protocol.agreement`; a test holds the two together.

        Refused (409) before the beacon is out, and where the server did not tell the number of neighbours.
        """
        if self.release is None or self.beacon is None:
            hint = "ask again when the server has opened the round"
            raise Refused(
                409, "attempt", "the beacon of this attempt is not out: nobody has neighbours", hint
            )
        neighbours = self.release.neighbours
        if neighbours is None:
            hint = "derive the graph from the participant list and the terms of the round"
            raise Refused(409, "attempt", "the server did not say how many neighbours each client has", hint)
        return draw_graph(len(self.numbers), neighbours, self.beacon.value, self.release.commitment)

    def prepare(self) -> None:
        """Draw the graph now, so that nobody's first request has to wait for it."""
        if self.release is not None and self.release.neighbours is not None:
            self.graph.neighbours(0)


def _seat_json(seat: int, participant: Participant) -> bytes:
    prekey = api.PrekeyBody(**asdict(participant.prekey))
    answer = api.SeatAnswer(seat=seat, identity=participant.identity, prekey=prekey)
    return answer.model_dump_json().encode()


class OwnChains:
    """Chains that follow from this tracker's identity; the last few are kept in memory, since deriving one is slow.

    A chain's seed is never stored: a restart finds every chain again, and whoever reads the store learns no link. So
    both methods have the same answer for the same arguments, before and after a restart. `public` is the key that
    signatures verify under.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity, self.public = identity, identity.public
        self._chain = lru_cache(_CHAINS_IN_MEMORY)(self._derive)

    def _derive(self, run: bytes, rounds: int, salt: bytes) -> BeaconChain:
        """The chain of a run: its seed is SHA-256 of a deterministic Ed25519 signature under run, length and salt.

        The signature is never sent or stored, so the seed is known only to whoever holds the identity.
        """
        signature = self._identity.sign("beacon-seed", length_prefixed(run, uint64(rounds), salt))
        seed = SecretBytes(hashlib.sha256(b"niss.beacon-seed.v1" + signature).digest())
        return BeaconChain(rounds, holder=self._identity, entropy=lambda _count: seed)

    def commit(self, run: bytes, rounds: int, salt: bytes) -> tuple[bytes, bytes]:
        """The anchor of a chain for that many rounds, and the holder's signature under run, rounds and anchor.

        `salt` are 32 random bytes, drawn once for each run; the same salt gives the same chain.
        """
        anchor = self._chain(run, rounds, salt).anchor
        return anchor, self._identity.sign(ANCHOR_PURPOSE, anchor_message(run, rounds, anchor))

    def link(self, attempt: Attempt, run: Run, commitment: bytes) -> Beacon:
        """The signed link of an attempt at `run`, for this commitment.

        The caller has written down before, durably, that the link is let out for it and nothing else.
        """
        # A copy: the chain's own memory of what was let out ends with the process; the store's does not.
        fresh = copy.copy(self._chain(attempt.run, run.rounds, run.salt))
        return fresh.release(attempt.round, attempt.number, commitment)


class ExternalChains:
    """Asks the tracker at `url` for anchors and links; it writes down what it lets out, as this one does.

    The two can be run by different people: then whoever draws up the lists, here, cannot know a link beforehand. The
    other one is started with this one's key as its --server-key, and with --holder-only. Its methods are those of
    `OwnChains`, and refuse where the other tracker cannot be reached (503) or will not answer (409).
    """

    def __init__(self, url: str, identity: Identity, *, ca: Path | None = None) -> None:
        """`identity` is this tracker's, which the other one takes for its server; `ca` verifies its certificate.

        Asks for its public key at once, so that a wrong address shows at the start (`TrackerUnavailable`).
        """
        self._client = TrackerClient(url, identity, ca=ca, retries=3)
        self.public = self._client.describe().holder

    def commit(self, run: bytes, rounds: int, salt: bytes) -> tuple[bytes, bytes]:  # noqa: ARG002
        """The other tracker's anchor and signature, verified; the salt is not needed, since that one draws its own."""
        with self._asked():
            self._client.start_run(run, rounds)
            about = self._client.run(run)
        return about.anchor, about.signature

    def link(self, attempt: Attempt, run: Run, commitment: bytes) -> Beacon:  # noqa: ARG002
        with self._asked():
            return self._client.beacon(attempt, commitment)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Trouble with the holder, as this tracker's own answer."""
        try:
            yield
        except (TrackerUnavailable, TrackerRefused) as error:
            away = isinstance(error, TrackerUnavailable)
            words, later = f"the beacon's holder: {error.detail}", 5.0 if away else None
            raise Refused(503 if away else 409, None, words, error.advice, retry_after=later) from None


BeaconHolder = OwnChains | ExternalChains


@dataclass(eq=False)
class Rounds:
    """The runs and rounds of a tracker; only the server changes anything here. What is wrong is a `Refused`.

    store     where runs, seatings and releases are written before they are answered
    identity  the tracker's, which signs participant lists
    holder    who commits to chains and lets links out: this tracker or another one
    server    the public key of the one identity that may open rounds
    clock     wall time in seconds, to tell who is live
    lists     whether attempts are seated here; False: the server is another tracker, which seats them
    """

    store: TrackerStore
    identity: Identity
    holder: BeaconHolder
    server: bytes
    clock: Callable[[], float]
    lists: bool

    def __post_init__(self) -> None:
        self._views: dict[Attempt, RoundView] = {}
        self._making = threading.Lock()

    def start_run(self, caller: bytes, run: bytes, rounds: int) -> Run:
        """Commit to a chain for a run of that many rounds, at most `LONGEST_RUN`; asked again, the same chain.

        Refused: a caller that is not the server (403), a run that has begun with another number of rounds (409).
        """
        require_server(caller, self.server)
        started = self.store.run(run)
        if started is None:
            salt = os.urandom(_SALT_BYTES)
            anchor, signature = self.holder.commit(run, rounds, salt)
            started = self.store.start_run(run, Run(rounds, salt, anchor, signature))
        if started.rounds != rounds:
            begun = f"this run has begun, with {started.rounds} rounds"
            raise Refused(409, "rounds", begun, "choose another name for the new run")
        return started

    def run(self, run: bytes) -> Run:
        """A run that was started; refused (404) where it was not."""
        return known_run(self.store.run(run))

    def _run_of(self, attempt: Attempt) -> Run:
        """The run of an attempt; refused (404) where it was not started, or has no such round."""
        run = self.run(attempt.run)
        if not 0 <= attempt.round < run.rounds:
            there = f"this run has rounds 0 to {run.rounds - 1}"
            raise Refused(404, "round", there, "start a new run for more rounds")
        return run

    def seat(self, caller: bytes, attempt: Attempt, request: SeatsWanted) -> RoundView:
        """Fix who takes part in an attempt, and take one prekey of each; asked again in the same way, the same list.

        Refused: a caller that is not the server (403), a request that contradicts itself (422), an attempt that does
        not exist (404), and what `TrackerStore.seat` refuses.
        """
        require_server(caller, self.server)
        request.check()
        self._run_of(attempt)
        self.store.seat(attempt.run, attempt.link, request, now=self.clock())
        return self.view(attempt)

    def beacon(self, caller: bytes, attempt: Attempt, wanted: CommitmentBody) -> Beacon:
        """Let out the link of an attempt for this commitment; asked again for the same, the same beacon.

        The commitment must be to the list that was seated, and is then the only one for this attempt; any other is
        refused (409). So is what contradicts the list that was announced, where noise is carried over.
        """
        require_server(caller, self.server)
        run = self._run_of(attempt)
        seating = self.store.seating(attempt.run, attempt.link)
        if self.store.released(attempt.run, attempt.link) != wanted:
            if seating is None and self.lists:
                hint = "seat it first; a link is let out for the list that was seated alone"
                raise Refused(409, "attempt", "nobody is seated in this attempt", hint)
            self._check_announced(attempt, run, wanted)
        if seating is not None and wanted.participants != participants_hash(seating.participants()):
            hint = "open the round with the list that seating it returned, in its order"
            raise _other("this commitment is to other participants than were seated", hint)
        if self.store.release(attempt.run, attempt.link, wanted) != wanted:
            hint = "open a later attempt or round"
            raise _other("the link of this attempt was let out for another commitment", hint)
        return self.holder.link(attempt, run, wanted.commitment)

    def _check_announced(self, attempt: Attempt, run: Run, wanted: CommitmentBody) -> None:
        """Refuse (409) what breaks the chain of lists in a run that carries noise from round to round.

        What was let out never changes, so nothing here can be overtaken by another request.
        """
        highest = self.store.released(attempt.run, run.highest) if run.highest else None
        if wanted.following is None:
            if highest is not None and highest.following is not None:
                hint = "add the hash of the next round's participants"
                raise _other("this run carries noise from round to round, to a list that is named", hint)
            return
        if attempt.number:
            hint = "go on with the next round; those who are missing leave their noise in the sum"
            raise Refused(409, "attempt", "a run that carries noise has one attempt at a round", hint)
        if attempt.round:
            self._check_is_next(attempt, wanted)
        if attempt.round + 1 == run.rounds:
            if wanted.following != _NOBODY:
                hint = "end it with the hash of an empty list"
                raise _other("the last round carries noise to nobody", hint)
        elif self.lists:
            self._check_following(attempt, wanted.following)

    def _check_is_next(self, attempt: Attempt, wanted: CommitmentBody) -> None:
        """The round before must have been opened, and have announced the list that this one is committed to."""
        number = attempt.round - 1
        before = self.store.released(attempt.run, link_of(number, 0))
        if before is None or before.following is None:
            lacking = "was not opened" if before is None else "announced nobody"
            hint = "open the rounds in order, each with the list of the next"
            raise Refused(409, "round", f"round {number} {lacking}", hint)
        if before.following != wanted.participants:
            hint = "open the round with the list that was announced, also if some of it are gone"
            raise _other(f"this commitment is to another list than round {number} announced", hint)

    def _check_following(self, attempt: Attempt, following: bytes) -> None:
        """The list that is announced must be seated, in the next round's one attempt."""
        seating = self.store.seating(attempt.run, link_of(attempt.round + 1, 0))
        if seating is None:
            raise _other("nobody is seated in the next round, to which noise is carried", "seat it first")
        if following != participants_hash(seating.participants()):
            hint = "commit to the list that seating the next round returned, in its order"
            raise _other("this commitment is to other participants of the next round than were seated", hint)

    def view(self, attempt: Attempt) -> RoundView:
        """An attempt that was seated here, with its beacon if it is out; refused (404) where it was not seated."""
        # One at a time: when a round opens all its clients ask at once, and the first makes it ready for the others.
        with self._making:
            cached = self._views.get(attempt)
            if cached is not None and cached.beacon is not None:
                return cached
            run, release = self.run(attempt.run), self.store.released(attempt.run, attempt.link)
            if cached is not None and release is None:
                return cached
            seating = self.store.seating(attempt.run, attempt.link)
            if seating is None:
                gone = "this attempt was not seated here, or so long ago that its list is erased"
                raise Refused(404, "attempt", gone, "the server seats it first")
            beacon = None if release is None else self.holder.link(attempt, run, release.commitment)
            view = RoundView(seating, lambda listed: self._sign(attempt, listed), release, beacon)
            view.prepare()
            self._views.pop(attempt, None)
            self._views[attempt] = view
            # Rounds go by, so the oldest is the first to go.
            if len(self._views) > _VIEWS_IN_MEMORY:
                del self._views[next(iter(self._views))]
            return view

    def _sign(self, attempt: Attempt, listed: bytes) -> bytes:
        return self.identity.sign(LIST_PURPOSE, list_message(attempt.run, attempt.link, listed))

    def final_view(self, attempt: Attempt) -> RoundView | None:
        """The view if it is in memory with its beacon: no store is asked, so this does not block."""
        view = self._views.get(attempt)
        return None if view is None or view.beacon is None else view


def _other(message: str, hint: str) -> Refused:
    """The refusal of a commitment that contradicts what was done before."""
    return Refused(409, "commitment", message, hint)
