"""Runs that carry noise from round to round: whom a round carries to is fixed before its link is let out, and stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from niss.protocol.agreement import participants_hash, terms_hash
from niss.protocol.keyfile import create_keyfile
from niss.protocol.keys import Identity
from niss.protocol.messages import Beacon
from niss.tracker.auth import RequestRefusal
from niss.tracker.client import TrackerClient, TrackerRefused
from niss.tracker.rounds import RoundView
from niss.tracker.service import Tracker
from niss.tracker.store import Attempt, Release, SeatRequest
from support.protocol_round import seeded_entropy
from tracker.conftest import OpenStore
from tracker.harness import Member, member, members, tracker_process
from tracker.test_rounds import RUN, SERVER, terms

ROUNDS = 4
NOBODY = participants_hash(())


class Carried:
    """A tracker and a run of four rounds, with two cohorts that take turns."""

    def __init__(self, open_again: OpenStore) -> None:
        self._open, self.now = open_again, 1_000.0
        self._identity = Identity.generate(seeded_entropy("tracker"))
        self.crash()
        self.tracker.rounds.start_run(SERVER.public, RUN, ROUNDS)
        everyone = members(6)
        for one in everyone:
            self.tracker.members.register(one.public, one.batch(4), None)
        self.cohorts = everyone[:3], everyone[3:]

    def crash(self) -> None:
        """Start, or start again after a crash: from the store and the identity alone."""
        self.tracker = Tracker(
            self._open(), self._identity, server=SERVER.public, clock=lambda: self.now, monotonic=lambda: 0.0
        )

    def seat(
        self, number: int, many: list[Member] | None = None, *, attempt: int = 0, absent: bool = False
    ) -> RoundView:
        named = tuple(one.public for one in many or self.cohorts[number % 2])
        request = SeatRequest(named, at_least=len(named), absent=absent)
        return self.tracker.rounds.seat(SERVER.public, Attempt(RUN, number, attempt), request)

    def commitment(self, number: int, following: bytes | None = None) -> bytes:
        if following is None:
            following = self.seat(number + 1).seats.hash if number + 1 < ROUNDS else NOBODY
        return self.seat(number).seats.hash + terms_hash(terms(number)) + following

    def beacon(self, number: int, commitment: bytes | None = None, *, attempt: int = 0) -> Beacon:
        wanted = Release(self.commitment(number) if commitment is None else commitment, None)
        return self.tracker.rounds.beacon(SERVER.public, Attempt(RUN, number, attempt), wanted)


@pytest.fixture
def carried(open_again: OpenStore) -> Carried:
    return Carried(open_again)


def test_every_round_is_let_out_with_the_list_of_the_next_also_after_a_crash(carried: Carried) -> None:
    for number in range(ROUNDS):
        let_out = carried.beacon(number)
        carried.crash()
        assert carried.beacon(number) == let_out


def test_nothing_is_let_out_before_the_next_round_is_seated(carried: Carried) -> None:
    alone = carried.seat(0).seats.hash + terms_hash(terms(0))
    with pytest.raises(RequestRefusal, match="nobody is seated in the next round") as refused:
        carried.beacon(0, alone + bytes(32))
    assert refused.value.field == "commitment"
    carried.seat(1)
    with pytest.raises(RequestRefusal, match="other participants of the next round"):
        carried.beacon(0, alone + bytes(32))
    with pytest.raises(RequestRefusal, match="other participants of the next round"):
        carried.beacon(0, alone + NOBODY)
    assert carried.tracker.rounds.run(RUN).highest == 0


def test_a_cohort_that_was_announced_cannot_be_seated_otherwise(carried: Carried) -> None:
    carried.beacon(0)
    carried.crash()
    with pytest.raises(RequestRefusal, match="by another request"):
        carried.seat(1, carried.cohorts[0])


def test_the_next_round_is_let_out_for_the_list_that_was_announced_alone(carried: Carried) -> None:
    """A holder that keeps no lists knows them by the commitments it let links out for."""
    carried.tracker.rounds.lists = False
    mine, next_list, other = b"m" * 32, b"n" * 32, b"o" * 32
    agreed = bytes(32)
    carried.beacon(0, mine + agreed + next_list)
    carried.crash()
    carried.tracker.rounds.lists = False
    for _ in range(2):
        with pytest.raises(RequestRefusal, match="another list than round 0 announced") as refused:
            carried.beacon(1, other + agreed + mine)
        assert refused.value.status == 409
    carried.beacon(1, next_list + agreed + mine)


def test_no_round_is_skipped(carried: Carried) -> None:
    carried.beacon(0)
    carried.seat(3)
    with pytest.raises(RequestRefusal, match="round 1 was not opened") as refused:
        carried.beacon(2)
    assert refused.value.hint is not None
    with pytest.raises(RequestRefusal, match="round 2 was not opened"):
        carried.beacon(3)


def test_a_round_is_tried_once(carried: Carried) -> None:
    again = carried.seat(0, attempt=1).seats.hash + terms_hash(terms(0, 1)) + carried.seat(1).seats.hash
    for _ in range(2):
        with pytest.raises(RequestRefusal, match="one attempt at a round"):
            carried.beacon(0, again, attempt=1)
        carried.beacon(0)


def test_the_last_round_carries_to_nobody(carried: Carried) -> None:
    for number in range(ROUNDS - 1):
        carried.beacon(number)
    with pytest.raises(RequestRefusal, match="last round"):
        carried.beacon(ROUNDS - 1, carried.commitment(ROUNDS - 1, bytes(32)))
    carried.beacon(ROUNDS - 1)


def test_a_run_carries_from_its_first_round_on_or_not_at_all(carried: Carried) -> None:
    carried.beacon(0)
    with pytest.raises(RequestRefusal, match="carries noise from round to round"):
        carried.beacon(1, carried.commitment(1)[:64])


def test_a_run_that_did_not_carry_does_not_begin_to(carried: Carried) -> None:
    carried.beacon(0, carried.commitment(0)[:64])
    with pytest.raises(RequestRefusal, match="round 0 announced nobody"):
        carried.beacon(1)


def test_those_who_are_away_are_seated_where_the_server_wants_a_missing_seat(carried: Carried) -> None:
    carried.now += 1_000_000.0
    for one in carried.cohorts[0][1:]:
        carried.tracker.members.heartbeat(one.public)
    with pytest.raises(RequestRefusal, match="2 of the clients"):
        carried.seat(0)
    assert carried.seat(0, absent=True).seats.size == 3


def test_over_http_and_with_a_holder_apart(tmp_path: Path) -> None:
    keeper, everyone = member(0, "lists"), members(4)
    (tmp_path / "holder").mkdir()
    create_keyfile(tmp_path / "tracker.key", keeper.identity)
    with (
        tracker_process(tmp_path / "holder", keeper.public, "--holder-only") as holder,
        tracker_process(tmp_path, SERVER.public, "--external-beacon", holder.url) as lists,
        TrackerClient(lists.url, SERVER.identity, retries=0) as server,
        TrackerClient(holder.url, keeper.identity, retries=0) as behind,
    ):
        server.start_run(RUN, 2)
        for one in everyone:
            with TrackerClient(lists.url, one.identity) as line:
                line.register(one.batch(2))
        cohorts = [[one.public for one in half] for half in (everyone[:2], everyone[2:])]
        hashes = [
            participants_hash(server.seat(RUN, number, 0, cohort, at_least=2, absent=True))
            for number, cohort in enumerate(cohorts)
        ]
        server.beacon(RUN, 0, 0, hashes[0] + bytes(32) + hashes[1], neighbours=1.0)
        with pytest.raises(TrackerRefused, match="another list than round 0 announced"):
            behind.beacon(RUN, 1, 0, hashes[0] + bytes(32) + NOBODY)
        server.beacon(RUN, 1, 0, hashes[1] + bytes(32) + NOBODY)
        with TrackerClient(lists.url, everyone[0].identity) as line:
            assert len(line.participants(RUN, 0, 0)) == 2
