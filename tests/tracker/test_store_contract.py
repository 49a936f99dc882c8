"""What every store must guarantee: one suite, run against SQLite and against a real Redis server."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from niss.errors import ConfigError
from niss.protocol import keys
from niss.protocol.messages import Prekey
from niss.tracker.api import CommitmentBody, SeatsWanted, Stock
from niss.tracker.auth import Refused
from niss.tracker.store import Change, Run, Seating, TrackerStore
from tracker.conftest import OpenStore
from tracker.harness import Member, member, members

RUN = b"run"
NOW = 1_000_000.0
LATER = NOW + 600.0
BEGUN = Run(rounds=100, salt=b"s" * 32, anchor=b"a" * 32, signature=b"g" * 64)


def committed(name: str, neighbours: float | None = None) -> CommitmentBody:
    return CommitmentBody(commitment=hashlib.sha512(name.encode()).digest(), neighbours=neighbours)


def seat(store: TrackerStore, link: int, wanted: Sequence[Member] | None = None, **asked: Any) -> Seating:
    named = None if wanted is None else [one.public for one in wanted]
    return store.seat(RUN, link, SeatsWanted(members=named, **asked), now=NOW)


def seated(
    store: TrackerStore, link: int, wanted: Sequence[Member] | None = None, **asked: Any
) -> set[bytes]:
    return {one.identity for one in seat(store, link, wanted, **asked).participants()}


def register(store: TrackerStore, one: Member, batch: Sequence[Prekey], largest: int = 100) -> Stock:
    return store.register(one.public, batch, expires=LATER, largest=largest)


def enrol(store: TrackerStore, many: Sequence[Member], prekeys: int = 3, expires: float = LATER) -> None:
    for one in many:
        store.register(one.public, one.batch(prekeys), expires=expires, largest=100)


@pytest.fixture
def begun(store: TrackerStore) -> TrackerStore:
    """A store with a run."""
    store.start_run(RUN, BEGUN)
    return store


@pytest.fixture
def four(open_again: OpenStore) -> list[TrackerStore]:
    """A store with a run, as four processes know it."""
    stores = [open_again() for _ in range(4)]
    stores[0].start_run(RUN, BEGUN)
    return stores


def test_the_first_binding_stays(store: TrackerStore) -> None:
    assert store.bind("identity", b"one") == b"one"
    assert store.bind("identity", b"two") == b"one"
    with pytest.raises(ConfigError, match="belongs to the tracker"):
        store.bind_identity(b"two")


def test_a_store_of_another_version_is_refused(store_url: str, open_again: OpenStore) -> None:
    open_again().bind_identity(b"one")
    open_again()
    if store_url.startswith("sqlite"):
        with sqlite3.connect(store_url.removeprefix("sqlite:///")) as plain:
            plain.execute("PRAGMA user_version = 7")
        plain.close()
    else:
        import redis

        with redis.Redis.from_url(store_url) as client:
            client.delete(b"niss:{tracker}:about:version")
    with pytest.raises(ConfigError, match="another version of niss"):
        open_again()


def test_a_nonce_is_used_once_by_each_identity(open_again: OpenStore) -> None:
    first, second = open_again(), open_again()
    assert first.first_use(b"a" * 32, b"n" * 16, now=NOW, expires=NOW + 60)
    assert not second.first_use(b"a" * 32, b"n" * 16, now=NOW, expires=NOW + 60)
    assert second.first_use(b"b" * 32, b"n" * 16, now=NOW, expires=NOW + 60)


def test_prekeys_are_taken_once_known_ones_ignored_and_used_ones_stale(begun: TrackerStore) -> None:
    one, other = members(2)
    first = one.batch(3)
    assert register(begun, one, first) == Stock(3, accepted=3)
    assert register(begun, one, first) == Stock(3, known=3)
    enrol(begun, [other])
    seat(begun, 1, [one, other])
    assert register(begun, one, (*first, *one.batch(1))) == Stock(3, accepted=1, known=2, stale=1)


def test_a_batch_that_does_not_fit_changes_nothing(store: TrackerStore) -> None:
    one = member(0)
    register(store, one, one.batch(3), largest=4)
    with pytest.raises(Refused, match="at most 4"):
        register(store, one, one.batch(2), largest=4)
    assert store.beat(one.public, expires=LATER) == Stock(3)


def signed_by(one: Member, number: int, public: bytes) -> Prekey:
    statement = keys._prekey_statement(one.public, number, public)
    return Prekey(number, public, one.identity.sign("prekey", statement))


def test_a_copy_of_somebody_elses_key_is_refused_as_long_as_that_is_in_stock(begun: TrackerStore) -> None:
    victim, copier, third = members(3)
    (original,) = batch = victim.batch(1)
    register(begun, victim, batch)
    enrol(begun, [copier, third], prekeys=1)
    copy = signed_by(copier, 7, original.public)
    for put in (begun.register, begun.deposit):
        with pytest.raises(Refused, match="another client has a prekey with this public key") as refused:
            put(copier.public, (copy,), expires=LATER, largest=9)
        assert refused.value.status == 409
    assert begun.beat(copier.public, expires=LATER) == Stock(1)
    assert register(begun, victim, batch) == Stock(1, known=1)
    seat(begun, 1, [victim, third])
    assert register(begun, copier, (copy,)) == Stock(2, accepted=1)
    begun.leave(copier.public, now=NOW)
    assert register(begun, third, (signed_by(third, 9, original.public),)) == Stock(1, accepted=1)


def test_numbers_need_not_fit_into_63_bits(begun: TrackerStore) -> None:
    one, other = members(2)
    one.prekeys.next_number = 2**64 - 4
    batch = one.batch(3)
    assert register(begun, one, batch) == Stock(3, accepted=3)
    assert register(begun, one, batch) == Stock(3, known=3)
    enrol(begun, [other])
    assert seat(begun, 1, [one, other]).participants()[0].prekey.number == 2**64 - 4


def test_only_registered_clients_beat_join_leave_or_get_deposits(store: TrackerStore) -> None:
    one = member(0)
    assert store.beat(one.public, expires=LATER) is None
    assert not store.set_coalition(one.public, "clinics")
    assert not store.leave(one.public, now=NOW)
    assert store.deposit(one.public, one.batch(1), expires=LATER, largest=9) is None
    enrol(store, [one], prekeys=2)
    assert store.deposit(one.public, one.batch(1), expires=LATER, largest=9) == Stock(3, accepted=1)
    assert store.beat(one.public, expires=LATER) == Stock(3)
    assert store.set_coalition(one.public, "clinics")
    assert store.leave(one.public, now=NOW)
    assert not store.leave(one.public, now=NOW)
    assert store.beat(one.public, expires=LATER) is None


def test_numbers_of_a_client_that_left_do_not_come_back(store: TrackerStore) -> None:
    one = member(0)
    batch = one.batch(2)
    register(store, one, batch)
    store.leave(one.public, now=NOW)
    with pytest.raises(Refused, match="used before"):
        register(store, one, batch)
    assert store.beat(one.public, expires=LATER) is None
    assert register(store, one, one.batch(1)) == Stock(1, accepted=1)


def test_a_run_begins_once(store: TrackerStore) -> None:
    assert store.run(RUN) is None
    assert store.start_run(RUN, BEGUN) == BEGUN
    assert store.start_run(RUN, Run(7, b"t" * 32, b"b" * 32, b"h" * 64)) == BEGUN
    assert store.run(RUN) == BEGUN


def test_a_seating_takes_the_oldest_prekey_of_each_and_stays(four: list[TrackerStore]) -> None:
    store, again, *_ = four
    many = members(4)
    enrol(store, many)
    first = seat(store, 1, many)
    assert [one.identity for one in first.participants()] == [one.public for one in many]
    assert [one.prekey.number for one in first.participants()] == [0] * 4
    assert seat(again, 1, many) == first == again.seating(RUN, 1)
    assert again.beat(many[0].public, expires=LATER) == Stock(2)
    assert [one.prekey.number for one in seat(again, 2, many[:2]).participants()] == [1, 1]
    with pytest.raises(Refused, match="by another request"):
        seat(again, 1, many[:2])
    assert again.seating(RUN, 3) is None


def test_those_who_are_gone_expired_or_out_of_prekeys_are_not_seated(begun: TrackerStore) -> None:
    fine, also_fine, gone, expired, empty, _unknown = many = members(6)
    enrol(begun, [fine, also_fine, gone])
    enrol(begun, [expired], expires=NOW - 1)
    enrol(begun, [empty], prekeys=0)
    begun.leave(gone.public, now=NOW)
    assert seated(begun, 1, many) == seated(begun, 2, count=6) == {fine.public, also_fine.public}


def test_too_few_are_refused_and_nothing_is_used_up(begun: TrackerStore) -> None:
    many = members(3)
    enrol(begun, many)
    with pytest.raises(Refused, match="3 of the clients"):
        seat(begun, 1, many, at_least=4)
    assert begun.beat(many[0].public, expires=LATER) == Stock(3)
    assert begun.seating(RUN, 1) is None


def test_a_sample_has_that_many_and_differs_from_time_to_time(begun: TrackerStore) -> None:
    many = members(40)
    enrol(begun, many, prekeys=12)
    drawn = [frozenset(seated(begun, link, count=8)) for link in range(1, 9)]
    assert {len(sample) for sample in drawn} == {8}
    assert frozenset().union(*drawn) <= {one.public for one in many}
    # Two equal samples of 8 out of 40 among 8 draws: below 28 / 76,904,685 < 1e-6.
    assert len(set(drawn)) == 8


def test_a_sample_of_a_coalition_stays_inside(begun: TrackerStore) -> None:
    many = members(6)
    enrol(begun, many)
    for one in many[:3]:
        begun.set_coalition(one.public, "clinics")
    begun.set_coalition(many[0].public, "farms")
    assert seated(begun, 1, count=6, coalition="clinics") == {many[1].public, many[2].public}
    with pytest.raises(Refused, match="0 of the clients"):
        seat(begun, 2, count=6, coalition="nobody")
    begun.set_coalition(many[1].public, None)
    with pytest.raises(Refused, match="1 of the clients"):
        seat(begun, 3, count=6, coalition="clinics")


def test_a_link_is_let_out_for_the_first_commitment_only(four: list[TrackerStore]) -> None:
    store, again, *_ = four
    first = committed("one", 3.5)
    assert store.released(RUN, 5) is None
    assert store.release(RUN, 5, first) == first
    assert again.release(RUN, 5, first) == first
    assert again.release(RUN, 5, committed("two")) == first
    assert again.released(RUN, 5) == first
    assert again.run(RUN) == Run(100, BEGUN.salt, BEGUN.anchor, BEGUN.signature, highest=5)


def test_nothing_is_let_out_or_seated_before_the_run_or_after_a_later_link(store: TrackerStore) -> None:
    many = members(2)
    enrol(store, many)
    with pytest.raises(Refused, match="no run"):
        seat(store, 1, many)
    with pytest.raises(Refused, match="no run"):
        store.release(RUN, 1, committed("one"))
    store.start_run(RUN, BEGUN)
    store.release(RUN, 5, committed("one"))
    with pytest.raises(Refused, match="link 5 was let out"):
        store.release(RUN, 4, committed("two"))
    for link in (4, 5):
        with pytest.raises(Refused, match="link 5 was let out"):
            seat(store, link, many)
    assert store.beat(many[0].public, expires=LATER) == Stock(3)


def test_old_lists_are_erased_and_commitments_kept(begun: TrackerStore) -> None:
    many = members(2)
    enrol(begun, many)
    seat(begun, 1, many)
    first = begun.release(RUN, 1, committed("one"))
    begun.release(RUN, TrackerStore.KEPT_LINKS + 1, committed("two"))
    assert begun.seating(RUN, 1) is not None
    begun.release(RUN, TrackerStore.KEPT_LINKS + 2, committed("three"))
    assert begun.seating(RUN, 1) is None
    assert begun.released(RUN, 1) == first


def test_of_many_at_once_one_commitment_wins(four: list[TrackerStore]) -> None:
    def contend(link: int, number: int) -> bytes:
        return four[number % 4].release(RUN, link, committed(str(number))).commitment

    with ThreadPoolExecutor(8) as pool:
        for link in range(1, 11):
            told = set(pool.map(contend, [link] * 8, range(8)))
            held = four[0].released(RUN, link)
            assert held is not None
            assert told == {held.commitment}


def test_of_many_at_once_nobody_gets_a_prekey_twice(four: list[TrackerStore]) -> None:
    many = members(5)
    enrol(four[0], many, prekeys=12)

    def take(link: int) -> list[tuple[bytes, int]]:
        return [(one.identity, one.prekey.number) for one in seat(four[link % 4], link, many).participants()]

    with ThreadPoolExecutor(8) as pool:
        taken = [place for places in pool.map(take, range(1, 13)) for place in places]
    assert len(taken) == len(set(taken)) == 60
    assert four[0].counts(now=NOW).prekeys == 0


def test_of_many_at_once_who_seat_one_attempt_all_see_the_same(four: list[TrackerStore]) -> None:
    enrol(four[0], members(20), prekeys=2)
    with ThreadPoolExecutor(8) as pool:
        told = set(pool.map(lambda number: seat(four[number % 4], 1, count=5).packed, range(16)))
    assert len(told) == 1
    assert four[0].counts(now=NOW).prekeys == 35


def test_counting_and_forgetting(begun: TrackerStore) -> None:
    old, fresh, left = members(3)
    enrol(begun, [old], expires=NOW - 100)
    enrol(begun, [fresh, left])
    begun.leave(left.public, now=NOW)
    counts = begun.counts(now=NOW)
    assert (counts.registered, counts.live, counts.prekeys, counts.runs) == (2, 1, 6, 1)
    assert begun.forget(before=NOW - 50) == 1
    counts = begun.counts(now=NOW)
    assert (counts.registered, counts.live, counts.prekeys, counts.runs) == (1, 1, 3, 1)
    assert begun.beat(old.public, expires=LATER) is None
    begun.ping()


def test_a_client_that_leaves_while_its_keys_are_deposited_stays_away(
    open_again: OpenStore, request: pytest.FixtureRequest
) -> None:
    """In SQLite nothing comes in between; in Redis a change whose lock ran out meanwhile is made anew."""
    if "redis" not in request.node.name:
        pytest.skip("a transaction of SQLite lets nobody in")
    store: Any = open_again()
    other, one, lock = open_again(), member(0), store._key("lock")
    enrol(store, [one], prekeys=0)
    add, tries = store._add, []

    def interrupted(*batch: Any) -> Stock:
        tries.append(batch)
        store._redis.delete(lock)
        other.leave(one.public, now=NOW)
        stock: Stock = add(*batch)
        return stock

    store._add = interrupted
    assert store.deposit(one.public, one.batch(1), expires=LATER, largest=9) is None
    assert len(tries) == 1
    assert store.beat(one.public, expires=LATER) is None
    assert store.counts(now=NOW).prekeys == 0


def refused_once(change: Change, meanwhile: Callable[[], None]) -> bytes | None:
    (found,) = change.read("about", [b"fact"])
    if found is None:
        meanwhile()
        raise Refused(409, None, "there is no such fact", None)
    return found


def test_a_refusal_that_others_have_overtaken_is_not_told(
    open_again: OpenStore, request: pytest.FixtureRequest
) -> None:
    """A lock of Redis that another took over ends neither with a refusal nor with a write of the first."""
    if "redis" not in request.node.name:
        pytest.skip("a transaction of SQLite lets nobody in")
    store: Any = open_again()
    other, lock = open_again(), store._key("lock")

    def meanwhile() -> None:
        store._redis.delete(lock)
        other.bind("fact", b"new")

    assert store._change(lambda change: refused_once(change, meanwhile)) == b"new"
    assert store._redis.get(lock) is None


def test_a_large_change_gets_its_turn_however_often_others_write(open_again: OpenStore) -> None:
    """A seating of thousands reads what is changed all the time: the others have to wait for it."""
    store, other = open_again(), open_again()
    (one,) = members(1)
    enrol(store, [one])
    wrote, over, tries = Event(), Event(), 0

    def keep_writing() -> None:
        count = 0
        while not over.is_set():
            count += 1
            other.set_coalition(one.public, f"group {count}")
            wrote.set()

    def slow(change: Change) -> int:
        nonlocal tries
        tries += 1
        assert tries < 20, "it is overtaken again and again"
        (found,) = change.clients([one.public])
        wrote.clear()
        wrote.wait(0.2)
        change.keep(one.public, found)
        return tries

    with ThreadPoolExecutor(1) as beside:
        writing = beside.submit(keep_writing)
        try:
            assert store._change(slow) >= 1
        finally:
            over.set()
        writing.result()
