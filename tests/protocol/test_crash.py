"""A client that crashes between any two steps and starts again from what it had kept: nothing is done twice.

Every call of `persist` and `charge`, and every message that leaves the client, is a place to crash: before it took
effect, or right after. Whoever restarts is then asked everything again, truthfully and with lies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from niss.errors import ConfigError, LocalProtocolError, PrivacyError, ProtocolError
from niss.mechanism import clip_l2
from niss.protocol import client as client_module
from niss.protocol import committee
from niss.protocol import shares as shares_module
from niss.protocol.agreement import agree
from niss.protocol.client import Memory, dump, restore, rounds_answered
from niss.protocol.keys import Identity, PrekeyStore
from niss.protocol.messages import RevealRequest, RoundOpen
from niss.protocol.server import Outcome, Server
from support.protocol_round import (
    NOISY,
    CarriedFederation,
    Federation,
    Seat,
    carried,
    covered,
    quantised,
    resigned,
    schedule,
)

VICTIM, ABSENT, SIZE, COORDINATES = 2, 4, 6, 3
ROUNDS, CARRYING = 5, 1
# Of each kind, how often it happens to the victim in `play` below when nothing goes wrong.
POINTS = {"persist": 8, "charge": 3, "message": 8}


class Crash(Exception):
    """The power went off."""


@dataclass
class Tripwire:
    """Crashes at the n-th event of one kind, before or after it took effect."""

    kind: str
    at: int
    after: bool
    seen: Counter[str] = field(default_factory=Counter)
    crashed: int = 0

    def pass_by(self, kind: str, effect: Callable[[], None]) -> None:
        self.seen[kind] += 1
        struck = kind == self.kind and self.seen[kind] == self.at
        if struck and not self.after:
            self.crashed += 1
            raise Crash
        effect()
        if struck:
            self.crashed += 1
            raise Crash

    def watch(self, seat: Seat) -> None:
        """Have this client pass by whenever it is to keep or to charge something."""
        keep, charge = seat._persist, seat._charge
        seat._persist = lambda kept: self.pass_by("persist", lambda: keep(kept))  # type: ignore[method-assign]
        seat._charge = lambda agreed, mu: self.pass_by(  # type: ignore[method-assign]
            "charge", lambda: charge(agreed, mu)
        )


class Watched:
    """A federation in which one client crashes once; records all that ever left that client."""

    def __init__(self, wire: Tripwire, monkeypatch: pytest.MonkeyPatch, *, twist: bool = False) -> None:
        self.wire, self.twist = wire, twist
        self.federation = Federation(SIZE, "crash")
        self.seat = self.federation.seats[VICTIM]
        self.left: dict[str, list[Any]] = defaultdict(list)
        self.seeds: list[set[bytes]] = []
        self.noting = False
        self.parts: dict[tuple[bytes, int], np.ndarray] = {}
        wire.watch(self.seat)
        self.seat.restart()
        self._watch_seeds(monkeypatch)

    def _watch_seeds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Notes the seeds that go into each upload the victim works on, finished or not."""
        masked, derive = client_module.masked_upload, shares_module.derive_seed

        def noted(ties: shares_module.EdgeKeys, *rest: Any) -> Any:
            if ties.seat != VICTIM:
                return masked(ties, *rest)
            self.seeds.append(set())
            self.noting = True
            try:
                return masked(ties, *rest)
            finally:
                self.noting = False

        def derived(*arguments: Any) -> Any:
            seed = derive(*arguments)
            if self.noting:
                self.seeds[-1].add(bytes(seed))
            return seed

        monkeypatch.setattr(client_module, "masked_upload", noted)
        monkeypatch.setattr(shares_module, "derive_seed", derived)

    def ask(self, kind: str, call: Callable[[Any], Any], times: int = 2) -> Any:
        """Ask the victim, and after a crash or a lost answer ask the restarted one again."""
        answer = None
        for _ in range(times):
            sent: list[Any] = []
            try:
                message = call(self.seat.client)
                self.wire.pass_by("message", lambda: sent.append(message))  # noqa: B023
                answer = message
                break
            except Crash:
                self.seat.restart()
            except (ProtocolError, PrivacyError, ConfigError):
                break
            finally:
                self.left[kind] += sent
        return answer

    def upload(self, opened: RoundOpen) -> None:
        updates = self.federation.updates(COORDINATES)
        agreed = agree(opened)
        for seat in range(SIZE):
            if seat == ABSENT:
                continue
            update, entropy = updates[seat], self.federation.entropy
            if seat == VICTIM:
                upload = self.ask("upload", lambda client: client.upload(opened, update, entropy))  # noqa: B023
            else:
                upload = self.federation.clients[seat].upload(opened, update, entropy)
            if upload is not None:
                self.federation.server.take_upload(carried(upload))
                part = quantised(agreed.grid, clip_l2(update, opened.terms.clip) / SIZE)
                self.parts[agreed.digest, seat] = part

    def repair(self) -> None:
        server = self.federation.server
        requests = server.request_reveals()
        for seat, request in requests.items():
            if seat != VICTIM:
                server.take_reveal(carried(self.federation.clients[seat].reveal(carried(request))))
        # Where its upload was lost, it is asked though it is called dropped.
        request = requests.get(VICTIM) or self.about(requests[0], requests[0].survivors)
        lie = self.about(request, tuple(one for one in request.survivors if one != 0))
        reveal = self.reveal(request, lie)
        # Asked again with another story, before and after one more restart.
        self.reveal(lie)
        self.seat.restart()
        self.reveal(lie)
        again = self.reveal(request)
        assert reveal is None or again is None or again == reveal
        if reveal is not None:
            server.take_reveal(carried(reveal))

    def reveal(self, request: RevealRequest, instead: RevealRequest | None = None) -> Any:
        """Ask the victim; after a crash, where this run twists the story, for something else. None: it gave nothing."""

        def call(client: Any) -> Any:
            about = instead if instead is not None and self.twist and self.wire.crashed else request
            return about.survivors, client.reveal(carried(about))

        survivors, answer = self.ask("reveal", call) or ((), None)
        return answer if survivors == request.survivors else None

    def about(self, request: RevealRequest, survivors: tuple[int, ...]) -> RevealRequest:
        """The same request to the victim, about this survivor set."""
        current = self.federation.server._round
        assert current is not None
        dealt = (current.uploads[one].pieces for one in survivors)
        pieces = b"".join(committee.piece_for(current.agreed, VICTIM, one) for one in dealt)
        return resigned(
            self.federation.server, replace(request, survivors=survivors, pieces=pieces), "request"
        )

    def play(self) -> list[tuple[Outcome, np.ndarray]]:
        """A repaired round, a tolerated attempt and a repeated one, each asked for again after its end."""
        ends = []
        plan = [{"mode": "repair", "neighbours": 5.0}, {"round": 2}, {"round": 2, "attempt": 1}]
        for terms in plan:
            opened = self.federation.open(self.federation.terms(coordinates=COORDINATES, **terms))
            agreed = agree(opened)
            self.upload(opened)
            if opened.terms.mode == "repair":
                self.repair()
            outcome = self.federation.server.finish()
            steps = sum(self.parts[agreed.digest, seat] for seat in outcome.survivors)
            ends.append((outcome, agreed.grid.to_float(np.asarray(steps))))
            replayed, update = opened, self.federation.updates(COORDINATES)[0]
            self.ask("upload", lambda client: client.upload(replayed, update, self.federation.entropy))  # noqa: B023
            self.ask("closed", lambda client: client.close_round())
        return ends


def check(watched: Watched, ends: list[tuple[Outcome, np.ndarray]]) -> None:
    """Never twice, never both, never the same seed; and the server came to its ends, truthfully."""
    contexts = [upload.context for upload in watched.left["upload"]]
    assert len(contexts) == len(set(contexts))
    charged = [when[:2] for when in watched.seat.charges]
    assert len(charged) == len(set(charged))
    assert len(contexts) <= len(charged)
    stories: dict[bytes, set[tuple[int, ...]]] = defaultdict(set)
    for survivors, reveal in watched.left["reveal"]:
        stories[reveal.context].add(survivors)
    assert all(len(sets) == 1 for sets in stories.values())
    used = [seed for seeds in watched.seeds for seed in seeds]
    assert used
    assert len(used) == len(set(used))
    assert len(ends) == 3
    for outcome, exact in ends:
        assert outcome.exact == np.array_equal(outcome.total, exact)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("kind", "at"), [(kind, at) for kind, count in POINTS.items() for at in range(1, count + 1)]
)
def test_a_crash_anywhere_gives_nothing_away(
    kind: str, at: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(Tripwire(kind, at, after), monkeypatch)
    ends = watched.play()
    assert watched.wire.crashed == 1
    check(watched, ends)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["persist", "message"])
def test_a_restarted_client_told_another_story_does_not_answer_it_too(
    kind: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash hits the reveal: kept or not, sent or not, and the server comes back with a lie."""
    watched = Watched(Tripwire(kind, 2, after), monkeypatch, twist=True)
    ends = watched.play()
    assert watched.wire.crashed == 1
    check(watched, ends)
    # Only a set that was never kept leaves the client free to answer for another.
    assert ends[0][0].survivors == tuple(seat for seat in range(SIZE) if seat != ABSENT)


def test_without_a_crash_all_points_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of points above is complete: nothing else is kept, charged or sent in this story."""
    watched = Watched(Tripwire("none", 0, after=False), monkeypatch)
    ends = watched.play()
    check(watched, ends)
    assert watched.wire.seen == POINTS
    assert ends[0][0].exact
    assert len(watched.left["upload"]) == 3
    assert len(watched.left["reveal"]) == 2


def test_the_check_finds_a_client_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that restarts a client from an older memory makes it answer twice, with the same seeds."""
    watched = Watched(Tripwire("none", 0, after=False), monkeypatch)
    old = watched.seat.kept[-1]
    opened = watched.federation.open(watched.federation.terms(coordinates=COORDINATES))
    for _ in range(2):
        watched.seat.start(old)
        update = watched.federation.updates(COORDINATES)[0]
        watched.ask("upload", lambda client: client.upload(opened, update, watched.federation.entropy))  # noqa: B023
    with pytest.raises(AssertionError):
        check(watched, [])
    assert watched.seeds[0] == watched.seeds[1]


# Runs with carried shares.


def watched_run(wire: Tripwire) -> CarriedFederation:
    """A run with carried shares in which one client crashes once."""
    federation = CarriedFederation(schedule(rounds=ROUNDS, **NOISY))
    wire.watch(federation.seats[CARRYING])
    federation.restart(CARRYING)
    return federation


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("kind", "at"), [*(("persist", at) for at in range(1, 7)), *(("charge", at) for at in range(1, 4))]
)
@pytest.mark.parametrize("sent", [False, True])
def test_a_crash_at_any_step_uses_no_share_twice_and_is_paid_for(
    kind: str, at: int, after: bool, sent: bool
) -> None:
    """After it the client is asked the same again; where its upload was lost on the way (`sent`), always."""
    wire = Tripwire(kind, at, after)
    federation = watched_run(wire)
    for number in range(ROUNDS):
        opened = federation.open_next(number)
        for one in federation.cohort(number):
            for again in range(2):
                try:
                    upload = federation.answer(one, opened)
                except Crash:
                    federation.restart(one)
                    continue
                except ProtocolError:
                    break
                if not (sent and one == CARRYING and not again):
                    federation.server.take_upload(carried(upload))
                if sent and one == CARRYING:
                    federation.restart(one)
                    continue
                break
        federation.outcomes[number] = federation.server.finish()
    assert wire.crashed == 1
    covered(federation)
    when = [number for number, _, _ in federation.seats[CARRYING].charges]
    assert when == sorted(set(when))
    victim = federation.seats[CARRYING].identity.public
    uploads = [number for owner, number, _ in federation.seen.uploads if owner == victim]
    assert uploads == sorted(set(uploads))
    assert set(uploads) <= set(when)


def test_a_crash_between_accepting_and_answering_loses_the_round() -> None:
    federation = CarriedFederation(schedule(**NOISY))
    opened = federation.open_next(0)
    federation.seats[0].client.accept(opened, federation.entropy)
    client = federation.restart(0)
    with pytest.raises(LocalProtocolError, match="no round has been accepted"):
        client.answer(np.zeros(federation.schedule.coordinates), federation.entropy)
    with pytest.raises(ProtocolError, match="was answered before"):
        federation.answer(0, opened)


def test_what_was_answered_is_remembered_for_the_next_charge() -> None:
    """A client that forgot its first round would pay for the third as if it were its first: less than it costs."""
    federation = CarriedFederation(schedule(**NOISY))
    for number in range(2):
        federation.play_round(number)
    federation.restart(0)
    federation.play_round(2)
    (_, _, first), (_, _, second) = federation.seats[0].charges
    assert rounds_answered(federation.seats[0].kept[-1]) == (0, 2)
    fresh = CarriedFederation(schedule(**NOISY))
    for number in range(2):
        fresh.play_round(number, absent=(0,) if number == 0 else ())
    fresh.play_round(2)
    ((_, _, alone),) = fresh.seats[0].charges
    assert second > alone * 1.01
    assert first > 0.0


def test_the_keys_of_a_round_are_gone_when_it_is_over() -> None:
    """With them its seeds could be derived again: those of its own uploads, and of rounds that it missed."""
    federation = CarriedFederation(schedule(rounds=5))
    numbers = {number: federation.listed(number)[0].prekey.number for number in (0, 2, 4)}
    federation.play_round(0)
    federation.play_round(1)
    federation.play_round(2, absent=(0,))
    client = federation.seats[0].client
    # Until it answers again, it might still be asked about the round that it missed.
    assert numbers[0] in client._prekeys
    assert numbers[2] in client._prekeys
    federation.play_round(3)
    federation.play_round(4)
    assert numbers[0] not in client._prekeys
    assert numbers[2] not in client._prekeys
    client.close_round()
    assert numbers[4] not in client._prekeys
    again = federation.restart(0)
    assert all(number not in again._prekeys for number in numbers.values())


def test_rounds_that_were_charged_are_remembered() -> None:
    memory = Memory(last=(3, 0))
    assert rounds_answered(None) == rounds_answered(dump(memory, PrekeyStore())) == ()
    memory.carried = [1, 4]
    kept = dump(memory, PrekeyStore())
    assert restore(kept)[0] == memory
    assert rounds_answered(kept) == (1, 4)
    with pytest.raises(LocalProtocolError, match="damaged"):
        restore(bytes(kept).replace(b"[1,4]", b'["x"]'))


def test_a_server_that_lost_a_round_goes_on_with_the_cohort_it_announced() -> None:
    """Uploads of round 1 are gone with the process; round 2 takes out what was to come of it, which stays as noise."""
    federation = CarriedFederation(schedule(rounds=4, **NOISY))
    federation.play_round(0)
    opened = federation.open_next(1)
    for one in federation.cohort(1):
        federation.answer(one, opened)
    federation.server = Server(Identity(federation.server._identity.secret_bytes()))
    third = federation.play_round(2)
    assert third.uncancelled == 16
    assert third.extra_variance == pytest.approx(16 * federation.schedule.carried_variance)
    assert federation.play_round(3).exact
    assert covered(federation) <= 1.0


def test_a_run_that_carries_nothing_at_last_is_one_too() -> None:
    """The planner may find that carrying does not pay: the chain is there, its noise is not."""
    federation = CarriedFederation(schedule(rounds=3, carried=0.0, **NOISY))
    for number in range(3):
        assert federation.play_round(number).under_way == 0.0
    assert covered(federation) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("kind", "at", "paid"), [("charge", 1, [True]), ("persist", 2, [True, True])])
def test_the_grid_of_the_run_is_paid_whatever_crashes(kind: str, at: int, paid: list[bool]) -> None:
    """A round that was begun and never charged does not count as the first; one too many is the worst there is."""
    federation = watched_run(Tripwire(kind, at, after=False))
    for number in range(3):
        opened = federation.open_next(number)
        try:
            federation.answer(federation.cohort(number)[CARRYING], opened)
        except Crash:
            federation.restart(CARRYING)
        federation.outcomes[number] = federation.server.finish()
    owner = federation.seats[CARRYING].identity.public
    assert [number for who, number, _ in federation.seen.uploads if who == owner] == [2]
    charges = federation.booked[CARRYING]
    assert [charge.grid_delta > 0.0 for _, charge in charges] == paid
