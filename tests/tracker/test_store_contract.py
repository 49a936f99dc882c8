"""What every store must guarantee: one suite, run against SQLite and against a real Redis server."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from niss.errors import ConfigError
from niss.protocol import keys
from niss.protocol.messages import Prekey
from niss.tracker.auth import Refused
from niss.tracker.store import Change, TrackerStore, bind_identity
from niss.tracker.values import Release, Run, SeatRequest, Stock
from tracker.harness import Member, member, members

RUN = b"run"
NOW = 1_000_000.0
LATER = NOW + 600.0
BEGUN = Run(rounds=100, salt=b"s" * 32, anchor=b"a" * 32, signature=b"g" * 64)


def commitment(name: str) -> bytes:
    return hashlib.sha512(name.encode()).digest()


def asking(
    wanted: Sequence[Member] | None = None, *, count: int = 0, coalition: str | None = None, at_least: int = 2
) -> SeatRequest:
    named = None if wanted is None else tuple(one.public for one in wanted)
    return SeatRequest(named, count, coalition, at_least)


def enrol(store: TrackerStore, many: Sequence[Member], prekeys: int = 3, expires: float = LATER) -> None:
    for one in many:
        store.register(one.public, one.batch(prekeys), expires=expires, largest=100)


def test_the_first_binding_stays(store: TrackerStore) -> None:
    assert store.bind("identity", b"one") == b"one"
    assert store.bind("identity", b"two") == b"one"
    with pytest.raises(ConfigError, match="belongs to the tracker"):
        bind_identity(store, b"two")


def test_a_store_of_another_version_is_refused(
    store_url: str, open_again: Callable[[], TrackerStore]
) -> None:
    bind_identity(open_again(), b"one")
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


def test_a_nonce_is_used_once_by_each_identity(open_again: Callable[[], TrackerStore]) -> None:
    first, second = open_again(), open_again()
    assert first.first_use(b"a" * 32, b"n" * 16, now=NOW, expires=NOW + 60)
    assert not second.first_use(b"a" * 32, b"n" * 16, now=NOW, expires=NOW + 60)
    assert second.first_use(b"b" * 32, b"n" * 16, now=NOW, expires=NOW + 60)


def test_prekeys_are_taken_once_known_ones_ignored_and_used_ones_stale(store: TrackerStore) -> None:
    one, other = members(2)
    first = one.batch(3)
    assert store.register(one.public, first, expires=LATER, largest=100) == Stock(3, accepted=3)
    assert store.register(one.public, first, expires=LATER, largest=100) == Stock(3, known=3)
    enrol(store, [other])
    store.start_run(RUN, BEGUN)
    store.seat(RUN, 1, asking([one, other]), now=NOW)
    again = store.register(one.public, (*first, *one.batch(1)), expires=LATER, largest=100)
    assert again == Stock(3, accepted=1, known=2, stale=1)


def test_a_batch_that_does_not_fit_changes_nothing(store: TrackerStore) -> None:
    one = member(0)
    store.register(one.public, one.batch(3), expires=LATER, largest=4)
    with pytest.raises(Refused, match="at most 4"):
        store.register(one.public, one.batch(2), expires=LATER, largest=4)
    assert store.beat(one.public, expires=LATER) == Stock(3)


def signed_by(one: Member, number: int, public: bytes) -> Prekey:
    statement = keys._prekey_statement(one.public, number, public)
    return Prekey(number, public, one.identity.sign("prekey", statement))


def test_a_copy_of_somebody_elses_key_is_refused_as_long_as_that_is_in_stock(store: TrackerStore) -> None:
    victim, copier, third = members(3)
    (original,) = batch = victim.batch(1)
    store.register(victim.public, batch, expires=LATER, largest=9)
    enrol(store, [copier, third], prekeys=1)
    copy = signed_by(copier, 7, original.public)
    for put in (store.register, store.deposit):
        with pytest.raises(Refused, match="another client has a prekey with this public key") as refused:
            put(copier.public, (copy,), expires=LATER, largest=9)
        assert refused.value.status == 409
    assert store.beat(copier.public, expires=LATER) == Stock(1)
    assert store.register(victim.public, batch, expires=LATER, largest=9) == Stock(1, known=1)
    store.start_run(RUN, BEGUN)
    store.seat(RUN, 1, asking([victim, third]), now=NOW)
    assert store.register(copier.public, (copy,), expires=LATER, largest=9) == Stock(2, accepted=1)
    store.leave(copier.public, now=NOW)
    again = signed_by(third, 9, original.public)
    assert store.register(third.public, (again,), expires=LATER, largest=9) == Stock(1, accepted=1)


def test_numbers_need_not_fit_into_63_bits(store: TrackerStore) -> None:
    one, other = members(2)
    one.prekeys._next = 2**64 - 4
    batch = one.batch(3)
    assert store.register(one.public, batch, expires=LATER, largest=9) == Stock(3, accepted=3)
    assert store.register(one.public, batch, expires=LATER, largest=9) == Stock(3, known=3)
    enrol(store, [other])
    store.start_run(RUN, BEGUN)
    seated = store.seat(RUN, 1, asking([one, other]), now=NOW).participants()
    assert seated[0].prekey.number == 2**64 - 4


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
    store.register(one.public, batch, expires=LATER, largest=9)
    store.leave(one.public, now=NOW)
    with pytest.raises(Refused, match="used before"):
        store.register(one.public, batch, expires=LATER, largest=9)
    assert store.beat(one.public, expires=LATER) is None
    assert store.register(one.public, one.batch(1), expires=LATER, largest=9) == Stock(1, accepted=1)


def test_a_run_begins_once(store: TrackerStore) -> None:
    assert store.run(RUN) is None
    assert store.start_run(RUN, BEGUN) == BEGUN
    assert store.start_run(RUN, Run(7, b"t" * 32, b"b" * 32, b"h" * 64)) == BEGUN
    assert store.run(RUN) == BEGUN


def test_a_seating_takes_the_oldest_prekey_of_each_and_stays(open_again: Callable[[], TrackerStore]) -> None:
    store, many = open_again(), members(4)
    enrol(store, many)
    store.start_run(RUN, BEGUN)
    seated = store.seat(RUN, 1, asking(many), now=NOW)
    assert [one.identity for one in seated.participants()] == [one.public for one in many]
    assert [one.prekey.number for one in seated.participants()] == [0] * 4
    again = open_again()
    assert again.seat(RUN, 1, asking(many), now=NOW) == seated
    assert again.seating(RUN, 1) == seated
    assert again.beat(many[0].public, expires=LATER) == Stock(2)
    following = again.seat(RUN, 2, asking(many[:2]), now=NOW)
    assert [one.prekey.number for one in following.participants()] == [1, 1]
    with pytest.raises(Refused, match="by another request"):
        again.seat(RUN, 1, asking(many[:2]), now=NOW)
    assert again.seating(RUN, 3) is None


def test_those_who_are_gone_expired_or_out_of_prekeys_are_not_seated(store: TrackerStore) -> None:
    fine, also_fine, gone, expired, empty, unknown = many = members(6)
    enrol(store, [fine, also_fine, gone])
    enrol(store, [expired], expires=NOW - 1)
    enrol(store, [empty], prekeys=0)
    store.leave(gone.public, now=NOW)
    store.start_run(RUN, BEGUN)
    seated = store.seat(RUN, 1, asking(many), now=NOW).participants()
    assert {one.identity for one in seated} == {fine.public, also_fine.public}
    sampled = store.seat(RUN, 2, asking(count=6), now=NOW).participants()
    assert {one.identity for one in sampled} == {fine.public, also_fine.public}
    assert unknown.public not in {one.identity for one in sampled}


def test_too_few_are_refused_and_nothing_is_used_up(store: TrackerStore) -> None:
    many = members(3)
    enrol(store, many)
    store.start_run(RUN, BEGUN)
    with pytest.raises(Refused, match="3 of the clients"):
        store.seat(RUN, 1, asking(many, at_least=4), now=NOW)
    assert store.beat(many[0].public, expires=LATER) == Stock(3)
    assert store.seating(RUN, 1) is None


def test_a_sample_has_that_many_and_differs_from_time_to_time(store: TrackerStore) -> None:
    many = members(40)
    enrol(store, many, prekeys=12)
    store.start_run(RUN, BEGUN)
    drawn = [
        frozenset(one.identity for one in store.seat(RUN, link, asking(count=8), now=NOW).participants())
        for link in range(1, 9)
    ]
    assert {len(sample) for sample in drawn} == {8}
    assert frozenset().union(*drawn) <= {one.public for one in many}
    # Two equal samples of 8 out of 40 among 8 draws: below 28 / 76,904,685 < 1e-6.
    assert len(set(drawn)) == 8


def test_a_sample_of_a_coalition_stays_inside(store: TrackerStore) -> None:
    many = members(6)
    enrol(store, many)
    for one in many[:3]:
        store.set_coalition(one.public, "clinics")
    store.set_coalition(many[0].public, "farms")
    store.start_run(RUN, BEGUN)
    seated = store.seat(RUN, 1, asking(count=6, coalition="clinics"), now=NOW).participants()
    assert {one.identity for one in seated} == {many[1].public, many[2].public}
    with pytest.raises(Refused, match="0 of the clients"):
        store.seat(RUN, 2, asking(count=6, coalition="nobody"), now=NOW)
    store.set_coalition(many[1].public, None)
    with pytest.raises(Refused, match="1 of the clients"):
        store.seat(RUN, 3, asking(count=6, coalition="clinics"), now=NOW)


def test_a_link_is_let_out_for_the_first_commitment_only(open_again: Callable[[], TrackerStore]) -> None:
    store = open_again()
    store.start_run(RUN, BEGUN)
    first = Release(commitment("one"), 3.5)
    assert store.released(RUN, 5) is None
    assert store.release(RUN, 5, first) == first
    again = open_again()
    assert again.release(RUN, 5, first) == first
    assert again.release(RUN, 5, Release(commitment("two"), None)) == first
    assert again.released(RUN, 5) == first
    assert again.run(RUN) == Run(100, BEGUN.salt, BEGUN.anchor, BEGUN.signature, highest=5)


def test_nothing_is_let_out_or_seated_before_the_run_or_after_a_later_link(store: TrackerStore) -> None:
    many = members(2)
    enrol(store, many)
    with pytest.raises(Refused, match="no run"):
        store.seat(RUN, 1, asking(many), now=NOW)
    with pytest.raises(Refused, match="no run"):
        store.release(RUN, 1, Release(commitment("one"), None))
    store.start_run(RUN, BEGUN)
    store.release(RUN, 5, Release(commitment("one"), None))
    with pytest.raises(Refused, match="link 5 was let out"):
        store.release(RUN, 4, Release(commitment("two"), None))
    for link in (4, 5):
        with pytest.raises(Refused, match="link 5 was let out"):
            store.seat(RUN, link, asking(many), now=NOW)
    assert store.beat(many[0].public, expires=LATER) == Stock(3)


def test_old_lists_are_erased_and_commitments_kept(store: TrackerStore) -> None:
    many = members(2)
    enrol(store, many)
    store.start_run(RUN, BEGUN)
    store.seat(RUN, 1, asking(many), now=NOW)
    first = store.release(RUN, 1, Release(commitment("one"), None))
    store.release(RUN, TrackerStore.KEPT_LINKS + 1, Release(commitment("two"), None))
    assert store.seating(RUN, 1) is not None
    store.release(RUN, TrackerStore.KEPT_LINKS + 2, Release(commitment("three"), None))
    assert store.seating(RUN, 1) is None
    assert store.released(RUN, 1) == first


def test_of_many_at_once_one_commitment_wins(open_again: Callable[[], TrackerStore]) -> None:
    stores = [open_again() for _ in range(4)]
    stores[0].start_run(RUN, BEGUN)

    with ThreadPoolExecutor(8) as pool:
        for link in range(1, 11):

            def contend(number: int, link: int = link) -> bytes:
                return (
                    stores[number % 4].release(RUN, link, Release(commitment(str(number)), None)).commitment
                )

            told = set(pool.map(contend, range(8)))
            held = stores[0].released(RUN, link)
            assert held is not None
            assert told == {held.commitment}


def test_of_many_at_once_nobody_gets_a_prekey_twice(open_again: Callable[[], TrackerStore]) -> None:
    stores = [open_again() for _ in range(4)]
    many = members(5)
    enrol(stores[0], many, prekeys=12)
    stores[0].start_run(RUN, BEGUN)

    def take(link: int) -> list[tuple[bytes, int]]:
        seated = stores[link % 4].seat(RUN, link, asking(many), now=NOW)
        return [(one.identity, one.prekey.number) for one in seated.participants()]

    with ThreadPoolExecutor(8) as pool:
        taken = [seat for seats in pool.map(take, range(1, 13)) for seat in seats]
    assert len(taken) == len(set(taken)) == 60
    assert stores[0].counts(now=NOW).prekeys == 0


def test_of_many_at_once_who_seat_one_attempt_all_see_the_same(
    open_again: Callable[[], TrackerStore],
) -> None:
    stores = [open_again() for _ in range(4)]
    many = members(20)
    enrol(stores[0], many, prekeys=2)
    stores[0].start_run(RUN, BEGUN)

    def take(number: int) -> bytes:
        return stores[number % 4].seat(RUN, 1, asking(count=5), now=NOW).packed

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(take, range(16)))) == 1
    assert stores[0].counts(now=NOW).prekeys == 35


def test_counting_and_forgetting(store: TrackerStore) -> None:
    old, fresh, left = members(3)
    enrol(store, [old], expires=NOW - 100)
    enrol(store, [fresh, left])
    store.leave(left.public, now=NOW)
    store.start_run(RUN, BEGUN)
    counts = store.counts(now=NOW)
    assert (counts.registered, counts.live, counts.prekeys, counts.runs) == (2, 1, 6, 1)
    assert store.forget(before=NOW - 50) == 1
    counts = store.counts(now=NOW)
    assert (counts.registered, counts.live, counts.prekeys, counts.runs) == (1, 1, 3, 1)
    assert store.beat(old.public, expires=LATER) is None
    store.ping()


def test_a_client_that_leaves_while_its_keys_are_deposited_stays_away(
    open_again: Callable[[], TrackerStore], request: pytest.FixtureRequest
) -> None:
    """In SQLite nothing comes in between; in Redis whether it is registered is looked at with the change itself."""
    if "redis" not in request.node.name:
        pytest.skip("a transaction of SQLite lets nobody in")
    store, other = open_again(), open_again()
    one = member(0)
    enrol(store, [one], prekeys=0)
    sort = store._sort_batch

    def interrupted(*batch: object) -> object:
        other.leave(one.public, now=NOW)
        return sort(*batch)

    store._sort_batch = interrupted  # type: ignore[assignment, method-assign]
    assert store.deposit(one.public, one.batch(1), expires=LATER, largest=9) is None
    assert store.beat(one.public, expires=LATER) is None
    assert store.counts(now=NOW).prekeys == 0


def test_a_large_change_gets_its_turn_however_often_others_write(
    open_again: Callable[[], TrackerStore],
) -> None:
    """What a seating of thousands reads is changed all the time: the others have to wait for it in the end."""
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
