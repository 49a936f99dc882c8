"""Seats first, then the beacon: what the tracker promises about rounds, checked with the protocol's own machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from niss.protocol.agreement import agree, link_of, participants_hash, terms_hash, verify_beacon
from niss.protocol.keys import Identity, verify
from niss.protocol.messages import Beacon, RoundOpen, Terms
from niss.tracker.auth import RequestRefusal, check_anchor
from niss.tracker.rounds import LIST_PURPOSE, RoundCache, RoundView, SeatList, list_message
from niss.tracker.service import Tracker
from niss.tracker.store import Attempt, Release, SeatRequest, pack_participants
from niss.tracker.store_sqlite import SqliteStore
from support.protocol_round import seeded_entropy
from tracker.harness import Member, member, members

RUN = b"a run"
SERVER = member(0, "server")


def terms(round_number: int = 0, attempt: int = 0, neighbours: float = 4.0) -> Terms:
    return Terms(
        run=RUN,
        round=round_number,
        attempt=attempt,
        mode="tolerate",
        coordinates=10,
        grid_bits=16,
        modulus_bits=32,
        clip=1.0,
        neighbours=neighbours,
        unit_variance=0.1,
        residual_variance=0.1,
        self_variance=0.0,
        revealed=0,
        dropped=0,
        committee=0,
        threshold=0,
    )


class Scene:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = Identity.generate(seeded_entropy("tracker"))
        self.open()
        self.anchor = self.tracker.rounds.start_run(SERVER.public, RUN, 5).anchor

    def open(self) -> None:
        """Start, or start again after a crash: from the store and the identity alone."""
        self.store = SqliteStore(self.path)
        self.tracker = Tracker(self.store, self.identity, server=SERVER.public)

    def crash(self) -> None:
        self.store.close()
        self.open()

    def enrol(self, many: list[Member], prekeys: int = 4) -> None:
        for one in many:
            self.tracker.members.register(one.public, one.batch(prekeys), None)

    def seat(self, many: list[Member], round_number: int = 0, attempt: int = 0) -> RoundView:
        named = [one.public for one in many]
        return self.tracker.rounds.seat(
            SERVER.public, Attempt(RUN, round_number, attempt), SeatRequest(tuple(named))
        )

    def beacon(
        self,
        view: RoundView,
        agreed: Terms,
        *,
        commitment: bytes | None = None,
        neighbours: float | None = None,
    ) -> Beacon:
        commitment = view.seats.hash + terms_hash(agreed) if commitment is None else commitment
        return self.tracker.rounds.beacon(
            SERVER.public, Attempt(RUN, agreed.round, agreed.attempt), Release(commitment, neighbours)
        )


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "store.db")
    yield made
    made.store.close()


def check(scene: Scene, beacon: Beacon, commitment: bytes, round_number: int, attempt: int) -> None:
    verify_beacon(
        beacon,
        commitment,
        expected=link_of(round_number, attempt),
        anchor=scene.anchor,
        holder=scene.tracker.holder.public,
        after=0,
    )


def test_clients_accept_the_beacon_and_the_lists(scene: Scene) -> None:
    many = members(6)
    scene.enrol(many)
    for round_number, attempt in ((0, 0), (0, 3), (4, 3)):
        agreed = terms(round_number, attempt)
        view = scene.seat(many, round_number, attempt)
        link = link_of(round_number, attempt)
        verify(
            scene.tracker.public, LIST_PURPOSE, list_message(RUN, link, view.seats.hash), view.seats.signature
        )
        commitment = participants_hash(view.seats.participants) + terms_hash(agreed)
        check(scene, scene.beacon(view, agreed), commitment, round_number, attempt)
    begun = scene.tracker.rounds.run(RUN)
    check_anchor(scene.tracker.holder.public, RUN, 5, begun.anchor, begun.signature)


def test_the_same_commitment_has_the_same_beacon_also_after_a_crash(scene: Scene) -> None:
    many, agreed = members(3), terms()
    scene.enrol(many)
    view = scene.seat(many)
    first = scene.beacon(view, agreed)
    assert scene.beacon(view, agreed) == first
    scene.crash()
    assert scene.beacon(view, agreed) == first
    assert scene.seat(many).seats.participants == view.seats.participants


def test_another_commitment_is_refused_also_after_a_crash(scene: Scene) -> None:
    many, agreed = members(3), terms()
    scene.enrol(many)
    view = scene.seat(many)
    scene.beacon(view, agreed)
    for _ in range(2):
        with pytest.raises(RequestRefusal, match="for another commitment") as refused:
            scene.beacon(view, agreed, commitment=view.seats.hash + bytes(32))
        assert (refused.value.status, refused.value.field) == (409, "commitment")
        scene.crash()
    late = scene.seat(many, 0, 1)
    scene.beacon(scene.seat(many, 1), terms(1))
    with pytest.raises(RequestRefusal, match="link 5 was let out"):
        scene.beacon(late, terms(0, 1))


def test_a_crash_between_writing_down_and_answering_changes_nothing(scene: Scene) -> None:
    many, agreed = members(3), terms()
    scene.enrol(many)
    view = scene.seat(many)

    def crash(*_: object) -> Beacon:
        raise KeyboardInterrupt

    scene.tracker.holder.link = crash  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        scene.beacon(view, agreed)
    scene.crash()
    with pytest.raises(RequestRefusal, match="for another commitment"):
        scene.beacon(view, agreed, commitment=view.seats.hash + bytes(32))
    check(scene, scene.beacon(view, agreed), view.seats.hash + terms_hash(agreed), 0, 0)


def test_nobody_is_let_in_after_seating(scene: Scene) -> None:
    many = members(4)
    scene.enrol(many)
    view = scene.seat(many[:3])
    with pytest.raises(RequestRefusal, match="by another request"):
        scene.seat(many)
    other = participants_hash(scene.seat(many, 0, 1).seats.participants)
    with pytest.raises(RequestRefusal, match="other participants than were seated"):
        scene.beacon(view, terms(), commitment=other + terms_hash(terms()))
    swapped = participants_hash(view.seats.participants[::-1])
    with pytest.raises(RequestRefusal, match="other participants than were seated"):
        scene.beacon(view, terms(), commitment=swapped + terms_hash(terms()))


def test_a_link_is_let_out_for_a_seating_alone(scene: Scene) -> None:
    """A server that skips rounds until it likes a graph would see the graphs without anybody taking part."""
    many, rounds = members(3), scene.tracker.rounds
    scene.enrol(many)
    for number in range(4):
        with pytest.raises(RequestRefusal, match="nobody is seated") as refused:
            rounds.beacon(SERVER.public, Attempt(RUN, number, 0), Release(bytes(64), None))
        assert (refused.value.status, refused.value.field) == (409, "attempt")
    assert rounds.run(RUN).highest == 0
    view = scene.seat(many, 2)
    with pytest.raises(RequestRefusal, match="nobody is seated"):
        scene.beacon(view, terms(2, 1))
    scene.beacon(view, terms(2))
    assert rounds.run(RUN).highest == link_of(2, 0)


def test_a_link_is_told_again_when_its_list_has_been_erased(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqliteStore, "KEPT_LINKS", 1)
    many = members(3)
    scene.enrol(many)
    view = scene.seat(many)
    first = scene.beacon(view, terms())
    scene.beacon(scene.seat(many, 3), terms(3))
    assert scene.store.seating(RUN, link_of(0, 0)) is None
    assert scene.beacon(view, terms()) == first
    with pytest.raises(RequestRefusal, match="nobody is seated"):
        scene.beacon(view, terms(), commitment=bytes(64))


def test_a_holder_for_another_tracker_leaves_the_lists_to_that_one(scene: Scene) -> None:
    rounds = Tracker(scene.store, scene.identity, server=SERVER.public, lists=False).rounds
    first = rounds.beacon(SERVER.public, Attempt(RUN, 0, 0), Release(b"a" * 64, None))
    check(scene, first, b"a" * 64, 0, 0)
    with pytest.raises(RequestRefusal, match="for another commitment"):
        rounds.beacon(SERVER.public, Attempt(RUN, 0, 0), Release(b"b" * 64, None))


@pytest.mark.parametrize("neighbours", [1.0, 2.5, 4.0, 10.0, 11.0, 30.0])
def test_neighbours_are_those_the_clients_derive(scene: Scene, neighbours: float) -> None:
    many, agreed = members(12), terms(neighbours=neighbours)
    scene.enrol(many)
    view = scene.seat(many)
    beacon = scene.beacon(view, agreed, neighbours=neighbours)
    derived = agree(RoundOpen(agreed, view.seats.participants, beacon))
    seen = scene.tracker.rounds.view(Attempt(RUN, 0, 0))
    for seat in range(12):
        shown = json.loads(seen.neighbours_json(view.seats.participants[seat].identity))
        assert [one["seat"] for one in shown["neighbours"]] == derived.neighbours(seat)


def test_nobody_has_neighbours_before_the_beacon_or_without_a_degree(scene: Scene) -> None:
    many = members(4)
    scene.enrol(many)
    view = scene.seat(many)
    with pytest.raises(RequestRefusal, match="not out"):
        view.neighbours_json(many[0].public)
    scene.beacon(view, terms())
    with pytest.raises(RequestRefusal, match="how many neighbours"):
        scene.tracker.rounds.view(Attempt(RUN, 0, 0)).neighbours_json(many[0].public)


def test_only_the_server_opens_and_only_what_there_is(scene: Scene) -> None:
    many, rounds = members(3), scene.tracker.rounds
    scene.enrol(many)
    stranger = many[0].public
    with pytest.raises(RequestRefusal, match="only the server"):
        rounds.start_run(stranger, b"other", 5)
    with pytest.raises(RequestRefusal, match="only the server"):
        rounds.beacon(stranger, Attempt(RUN, 0, 0), Release(bytes(64), None))
    with pytest.raises(RequestRefusal, match="only the server"):
        rounds.seat(stranger, Attempt(RUN, 0, 0), SeatRequest(count=2))
    for round_number, attempt, field in ((5, 0, "round"), (0, 4, "attempt")):
        with pytest.raises(RequestRefusal) as refused:
            rounds.beacon(SERVER.public, Attempt(RUN, round_number, attempt), Release(bytes(64), None))
        assert (refused.value.status, refused.value.field) == (404, field)
    with pytest.raises(RequestRefusal, match="has begun, with 5"):
        rounds.start_run(SERVER.public, RUN, 6)
    with pytest.raises(RequestRefusal, match="no run"):
        rounds.view(Attempt(b"nothing", 0, 0))
    with pytest.raises(RequestRefusal, match="not seated"):
        rounds.view(Attempt(RUN, 0, 0))


def test_what_is_asked_for_must_make_sense(scene: Scene) -> None:
    rounds, named = scene.tracker.rounds, tuple(one.public for one in members(2))
    for wanted, field in (
        (SeatRequest(), "members"),
        (SeatRequest(named, count=2), "members"),
        (SeatRequest(named, coalition="clinics"), "coalition"),
        (SeatRequest((*named, named[0])), "members"),
    ):
        with pytest.raises(RequestRefusal) as refused:
            rounds.seat(SERVER.public, Attempt(RUN, 0, 0), wanted)
        assert (refused.value.status, refused.value.field) == (422, field)


def test_the_store_holds_no_link_and_no_secret(scene: Scene) -> None:
    """Whoever reads the store after round 0 finds nothing from which later links follow."""
    begun = scene.tracker.rounds.run(RUN)
    chain = scene.tracker.holder._chain(RUN, begun.rounds, begun.salt)  # type: ignore[attr-defined]
    scene.store.close()
    kept = scene.path.read_bytes()
    scene.open()
    assert begun.anchor in kept
    assert all(link not in kept for link in chain._links[1:])
    assert bytes(scene.identity.secret_bytes()) not in kept


def test_runs_have_unrelated_chains_and_a_new_store_a_new_chain(scene: Scene, tmp_path: Path) -> None:
    other = scene.tracker.rounds.start_run(SERVER.public, b"another", 5)
    elsewhere = Scene(tmp_path / "second.db")
    elsewhere.store.close()
    assert len({scene.anchor, other.anchor, elsewhere.anchor}) == 3


def test_when_all_ask_at_once_a_round_is_made_ready_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = members(5)
    scene.enrol(many)
    scene.beacon(scene.seat(many), terms(), neighbours=2.0)
    scene.crash()
    made: list[object] = []
    prepare = RoundView.prepare
    monkeypatch.setattr(RoundView, "prepare", lambda view: (made.append(view), prepare(view)))
    with ThreadPoolExecutor(8) as pool:
        views = set(pool.map(lambda _: scene.tracker.rounds.view(Attempt(RUN, 0, 0)), range(32)))
    assert len(views) == len(made) == 1


def test_views_are_kept_by_the_number_of_their_seats() -> None:
    def view(size: int) -> RoundView:
        packed = pack_participants([(one.public, one.batch(1)[0].encode()) for one in members(size)])
        return RoundView(SeatList(packed, lambda found: found), None, None)

    cache = RoundCache(most_seats=5)
    first, second, large = view(2), view(3), view(6)
    cache.keep(Attempt(RUN, 0, 1), first)
    cache.keep(Attempt(RUN, 0, 2), second)
    assert (cache.get(Attempt(RUN, 0, 1)), cache.get(Attempt(RUN, 0, 2))) == (first, second)
    cache.keep(Attempt(RUN, 0, 1), view(2))
    assert cache.get(Attempt(RUN, 0, 2)) is second
    cache.keep(Attempt(RUN, 0, 3), large)
    assert [cache.get(Attempt(RUN, 0, link)) for link in (1, 2, 3)] == [None, None, large]
