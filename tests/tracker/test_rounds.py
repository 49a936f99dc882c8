"""Seats first, then the beacon: what the tracker promises about rounds, checked with the protocol's own machines.

Where noise is carried from round to round, whom a round carries to is fixed before its link is let out, and stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from niss.protocol.agreement import agree, participants_hash, terms_hash
from niss.protocol.keys import link_of, verify, verify_beacon
from niss.protocol.messages import Beacon, RoundOpen
from niss.tracker.api import Attempt, CommitmentBody, SeatsWanted
from niss.tracker.auth import LIST_PURPOSE, Refused, check_anchor, list_message
from niss.tracker.databases import SqliteStore
from niss.tracker.rounds import RoundView
from niss.tracker.service import Tracker
from tracker.conftest import OpenStore
from tracker.harness import RUN, SERVER, TRACKER, Scene, member, members, terms

ROUNDS = 5
NOBODY = participants_hash(())
FIRST = Attempt(RUN, 0, 0)


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    made = make_scene()
    made.rounds.start_run(SERVER.public, RUN, ROUNDS)
    return made


def committed(view: RoundView, number: int = 0, attempt: int = 0) -> bytes:
    """The commitment to a list and to the terms of its attempt."""
    return view.hash + terms_hash(terms(number, attempt))


def check(scene: Scene, beacon: Beacon, commitment: bytes, number: int = 0, attempt: int = 0) -> None:
    verify_beacon(
        beacon,
        commitment,
        expected=link_of(number, attempt),
        anchor=scene.rounds.run(RUN).anchor,
        holder=scene.tracker.holder.public,
        after=0,
    )


def test_clients_accept_the_beacon_and_the_lists(scene: Scene) -> None:
    many = members(6)
    scene.enrol(many)
    for number, attempt in ((0, 0), (0, 3), (4, 3)):
        view = scene.seat(many, number, attempt)
        message = list_message(RUN, link_of(number, attempt), view.hash)
        verify(scene.tracker.public, LIST_PURPOSE, message, view.signature)
        assert view.hash == participants_hash(view.seating.participants())
        commitment = committed(view, number, attempt)
        check(scene, scene.let_out(commitment, number, attempt), commitment, number, attempt)
    begun = scene.rounds.run(RUN)
    check_anchor(scene.tracker.holder.public, RUN, ROUNDS, begun.anchor, begun.signature)


def test_a_link_is_let_out_for_one_commitment_also_after_a_crash(scene: Scene) -> None:
    many = members(3)
    scene.enrol(many)
    view = scene.seat(many)
    first = scene.let_out(committed(view))
    for _ in range(2):
        assert scene.let_out(committed(view)) == first
        with pytest.raises(Refused, match="for another commitment") as refused:
            scene.let_out(view.hash + bytes(32))
        assert (refused.value.status, refused.value.field) == (409, "commitment")
        scene.crash()
    assert scene.seat(many).seating.participants() == view.seating.participants()
    late = scene.seat(many, 0, 1)
    scene.let_out(committed(scene.seat(many, 1), 1), 1)
    with pytest.raises(Refused, match="link 5 was let out"):
        scene.let_out(committed(late, 0, 1), 0, 1)


def test_a_crash_between_writing_down_and_answering_changes_nothing(scene: Scene) -> None:
    scene.enrol(members(3))
    view = scene.seat(members(3))

    def crash(*_: object) -> Beacon:
        raise KeyboardInterrupt

    scene.tracker.holder.link = crash  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        scene.let_out(committed(view))
    scene.crash()
    with pytest.raises(Refused, match="for another commitment"):
        scene.let_out(view.hash + bytes(32))
    check(scene, scene.let_out(committed(view)), committed(view))


def test_nobody_is_let_in_after_seating(scene: Scene) -> None:
    many = members(4)
    scene.enrol(many)
    view = scene.seat(many[:3])
    with pytest.raises(Refused, match="by another request"):
        scene.seat(many)
    others = scene.seat(many, 0, 1).seating.participants(), view.seating.participants()[::-1]
    for other in others:
        with pytest.raises(Refused, match="other participants than were seated"):
            scene.let_out(participants_hash(other) + terms_hash(terms()))


def test_a_link_is_let_out_for_a_seating_alone(scene: Scene) -> None:
    """A server that skips rounds until it likes a graph would see the graphs without anybody taking part."""
    scene.enrol(members(3))
    for number in range(4):
        with pytest.raises(Refused, match="nobody is seated") as refused:
            scene.let_out(bytes(64), number)
        assert (refused.value.status, refused.value.field) == (409, "attempt")
    assert scene.rounds.run(RUN).highest == 0
    view = scene.seat(members(3), 2)
    with pytest.raises(Refused, match="nobody is seated"):
        scene.let_out(committed(view, 2, 1), 2, 1)
    scene.let_out(committed(view, 2), 2)
    assert scene.rounds.run(RUN).highest == link_of(2, 0)


def test_a_link_is_told_again_when_its_list_has_been_erased(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqliteStore, "KEPT_LINKS", 1)
    many = members(3)
    scene.enrol(many)
    view = scene.seat(many)
    first = scene.let_out(committed(view))
    scene.let_out(committed(scene.seat(many, 3), 3), 3)
    assert scene.store.seating(RUN, link_of(0, 0)) is None
    assert scene.let_out(committed(view)) == first
    with pytest.raises(Refused, match="nobody is seated"):
        scene.let_out(bytes(64))


def test_a_holder_for_another_tracker_leaves_the_lists_to_that_one(scene: Scene) -> None:
    rounds = Tracker(scene.store, TRACKER, server=SERVER.public, lists=False).rounds
    check(scene, rounds.beacon(SERVER.public, FIRST, CommitmentBody(commitment=b"a" * 64)), b"a" * 64)
    with pytest.raises(Refused, match="for another commitment"):
        rounds.beacon(SERVER.public, FIRST, CommitmentBody(commitment=b"b" * 64))


@pytest.mark.parametrize("neighbours", [1.0, 2.5, 4.0, 10.0, 11.0, 30.0])
def test_neighbours_are_those_the_clients_derive(scene: Scene, neighbours: float) -> None:
    agreed = terms(neighbours=neighbours)
    scene.enrol(members(12))
    view = scene.seat(members(12))
    beacon = scene.let_out(view.hash + terms_hash(agreed), neighbours=neighbours)
    derived = agree(RoundOpen(agreed, view.seating.participants(), beacon))
    seen = scene.rounds.view(FIRST)
    for seat in range(12):
        shown = json.loads(seen.neighbours_json(view.seating.participants()[seat].identity))
        assert [one["seat"] for one in shown["neighbours"]] == derived.neighbours(seat)


def test_nobody_has_neighbours_before_the_beacon_or_without_a_degree(scene: Scene) -> None:
    many = members(4)
    scene.enrol(many)
    view = scene.seat(many)
    with pytest.raises(Refused, match="not out"):
        view.neighbours_json(many[0].public)
    scene.let_out(committed(view))
    with pytest.raises(Refused, match="how many neighbours"):
        scene.rounds.view(FIRST).neighbours_json(many[0].public)


STRANGER, TWO = member(0).public, [one.public for one in members(2)]
NOTHING = CommitmentBody(commitment=bytes(64))


@pytest.mark.parametrize(
    ("ask", "status", "field", "said"),
    [
        (lambda r: r.start_run(STRANGER, b"other", 5), 403, "niss-identity", "only the server"),
        (lambda r: r.beacon(STRANGER, FIRST, NOTHING), 403, "niss-identity", "only the server"),
        (lambda r: r.seat(STRANGER, FIRST, SeatsWanted(count=2)), 403, "niss-identity", "only the server"),
        (lambda r: r.beacon(SERVER.public, Attempt(RUN, ROUNDS, 0), NOTHING), 404, "round", "rounds 0 to 4"),
        (lambda r: r.start_run(SERVER.public, RUN, 6), 409, "rounds", "has begun, with 5"),
        (lambda r: r.view(Attempt(b"nothing", 0, 0)), 404, "run", "no run"),
        (lambda r: r.view(FIRST), 404, "attempt", "not seated"),
        (lambda r: r.seat(SERVER.public, FIRST, SeatsWanted()), 422, "members", "either"),
        (lambda r: r.seat(SERVER.public, FIRST, SeatsWanted(members=TWO, count=2)), 422, "members", "either"),
        (lambda r: r.seat(SERVER.public, FIRST, SeatsWanted(members=TWO + TWO)), 422, "members", "twice"),
        (
            lambda r: r.seat(SERVER.public, FIRST, SeatsWanted(members=TWO, coalition="x")),
            422,
            "coalition",
            "count",
        ),
        (lambda r: r.seat(SERVER.public, FIRST, SeatsWanted(count=2, absent=True)), 422, "absent", "members"),
    ],
)
def test_only_the_server_opens_and_only_what_there_is_and_makes_sense(
    scene: Scene, ask: Callable[..., object], status: int, field: str, said: str
) -> None:
    with pytest.raises(Refused, match=said) as refused:
        ask(scene.rounds)
    assert (refused.value.status, refused.value.field) == (status, field)
    assert refused.value.hint


def test_the_store_holds_no_link_and_no_secret(scene: Scene, tmp_path: Path) -> None:
    """Whoever reads the store after round 0 finds nothing from which later links follow."""
    begun = scene.rounds.run(RUN)
    chain = scene.tracker.holder._chain(RUN, begun.rounds, begun.salt)  # type: ignore[attr-defined]
    scene.store.close()
    kept = (tmp_path / "scene-0.db").read_bytes()
    scene.open()
    assert begun.anchor in kept
    assert all(link not in kept for link in chain._links[1:])
    assert bytes(TRACKER.secret_bytes()) not in kept


def test_runs_have_unrelated_chains_and_a_new_store_a_new_chain(
    scene: Scene, make_scene: Callable[..., Scene]
) -> None:
    other = scene.rounds.start_run(SERVER.public, b"another", ROUNDS)
    elsewhere = make_scene().rounds.start_run(SERVER.public, RUN, ROUNDS)
    assert len({scene.rounds.run(RUN).anchor, other.anchor, elsewhere.anchor}) == 3


def test_when_all_ask_at_once_a_round_is_made_ready_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.enrol(members(5))
    scene.let_out(committed(scene.seat(members(5))), neighbours=2.0)
    scene.crash()
    made: list[object] = []
    prepare = RoundView.prepare
    monkeypatch.setattr(RoundView, "prepare", lambda view: (made.append(view), prepare(view)))
    with ThreadPoolExecutor(8) as pool:
        views = set(pool.map(lambda _: scene.rounds.view(FIRST), range(32)))
    assert len(views) == len(made) == 1


def test_the_newest_views_stay_in_memory(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niss.tracker.rounds._VIEWS_IN_MEMORY", 2)
    scene.enrol(members(3))
    views = [scene.seat(members(3), 0, attempt) for attempt in range(3)]
    assert [scene.rounds.view(Attempt(RUN, 0, attempt)) is views[attempt] for attempt in (1, 2)] == [
        True,
        True,
    ]
    again = scene.rounds.view(FIRST)
    assert again is not views[0]
    assert again.list_json == views[0].list_json


# Noise that is carried to the next round


class Carried(Scene):
    """A run in which two cohorts take turns, on a store of either kind."""

    def __init__(self, open_store: OpenStore) -> None:
        super().__init__(open_store)
        self.rounds.start_run(SERVER.public, RUN, ROUNDS)
        self.cohorts = members(6)[:3], members(6)[3:]
        self.enrol(members(6))

    def crash(self) -> None:
        """As another process that finds the store; the one before is closed in the end."""
        self.open()

    def turn(self, number: int, **more: object) -> RoundView:
        return self.seat(self.cohorts[number % 2], number, at_least=3, **more)

    def commitment(self, number: int, following: bytes | None = None) -> bytes:
        if following is None:
            following = self.turn(number + 1).hash if number + 1 < ROUNDS else NOBODY
        return committed(self.turn(number), number) + following

    def beacon(self, number: int, commitment: bytes | None = None, *, attempt: int = 0) -> Beacon:
        return self.let_out(commitment or self.commitment(number), number, attempt)


@pytest.fixture
def carried(open_again: OpenStore) -> Carried:
    return Carried(open_again)


def test_every_round_is_let_out_with_the_list_of_the_next_also_after_a_crash(carried: Carried) -> None:
    for number in range(ROUNDS - 1):
        let_out = carried.beacon(number)
        carried.crash()
        assert carried.beacon(number) == let_out
    with pytest.raises(Refused, match="last round"):
        carried.beacon(ROUNDS - 1, carried.commitment(ROUNDS - 1, bytes(32)))
    carried.beacon(ROUNDS - 1)


def test_nothing_is_let_out_before_the_next_round_is_seated(carried: Carried) -> None:
    alone = committed(carried.turn(0))
    with pytest.raises(Refused, match="nobody is seated in the next round") as refused:
        carried.beacon(0, alone + bytes(32))
    assert refused.value.field == "commitment"
    carried.turn(1)
    for other in (bytes(32), NOBODY):
        with pytest.raises(Refused, match="other participants of the next round"):
            carried.beacon(0, alone + other)
    assert carried.rounds.run(RUN).highest == 0


def test_a_cohort_that_was_announced_cannot_be_seated_otherwise_nor_skipped(carried: Carried) -> None:
    carried.beacon(0)
    carried.crash()
    with pytest.raises(Refused, match="by another request"):
        carried.seat(carried.cohorts[0], 1)
    for number in (2, 3):
        with pytest.raises(Refused, match=f"round {number - 1} was not opened") as refused:
            carried.beacon(number)
        assert refused.value.hint is not None


def test_the_next_round_is_let_out_for_the_list_that_was_announced_alone(carried: Carried) -> None:
    """A holder that keeps no lists knows them by the commitments it let links out for."""
    carried.rounds.lists = False
    mine, next_list, other, agreed = b"m" * 32, b"n" * 32, b"o" * 32, bytes(32)
    carried.beacon(0, mine + agreed + next_list)
    carried.crash()
    carried.rounds.lists = False
    for _ in range(2):
        with pytest.raises(Refused, match="another list than round 0 announced") as refused:
            carried.beacon(1, other + agreed + mine)
        assert refused.value.status == 409
    carried.beacon(1, next_list + agreed + mine)


def test_a_round_is_tried_once(carried: Carried) -> None:
    again = committed(carried.turn(0, attempt=1), 0, 1) + carried.turn(1).hash
    for _ in range(2):
        with pytest.raises(Refused, match="one attempt at a round"):
            carried.beacon(0, again, attempt=1)
        carried.beacon(0)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [(None, 64, "carries noise from round to round"), (64, None, "round 0 announced nobody")],
)
def test_a_run_carries_from_its_first_round_on_or_not_at_all(
    carried: Carried, first: int | None, second: int | None, said: str
) -> None:
    carried.beacon(0, carried.commitment(0)[:first])
    with pytest.raises(Refused, match=said):
        carried.beacon(1, carried.commitment(1)[:second])


def test_those_who_are_away_are_seated_where_the_server_wants_a_missing_seat(carried: Carried) -> None:
    carried.now += 1_000_000.0
    for one in carried.cohorts[0][1:]:
        carried.tracker.heartbeat(one.public)
    with pytest.raises(Refused, match="2 of the clients"):
        carried.turn(0)
    assert len(carried.turn(0, absent=True).numbers) == 3
