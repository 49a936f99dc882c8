"""Clients of a run with carried shares that crash at any step, and start again from what they had kept."""

from __future__ import annotations

import numpy as np
import pytest

from niss.errors import LocalProtocolError, ProtocolError
from niss.protocol.keys import Identity
from niss.protocol.server import Server
from niss.protocol.states import Memory, dump, restore, rounds_answered
from niss.protocol.wire import decode, encode
from support.carried_run import GRID, NOISY, RUN, CarriedFederation, covered, schedule
from support.protocol_round import carried

ROUNDS, VICTIM = 5, 1


class Crash(Exception):
    """The power went off."""


def crashing(federation: CarriedFederation, kind: str, at: int, after: bool) -> list[str]:
    """Have the victim crash at the n-th event of a kind, before or after it took effect, once."""
    seat, seen, crashed = federation.seats[VICTIM], [0], []

    def strike(found: str, effect) -> None:
        seen[0] += found == kind
        now = found == kind and seen[0] == at and not crashed
        if now:
            crashed.append(found)
        if now and not after:
            raise Crash
        effect()
        if now:
            raise Crash

    persist, charge = seat._persist, seat._charge
    seat._persist = lambda kept: strike("persist", lambda: persist(kept))
    seat._charge = lambda agreed, mu: strike("charge", lambda: charge(agreed, mu))
    federation.restart(VICTIM)
    return crashed


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("kind", "at"), [*(("persist", at) for at in range(1, 7)), *(("charge", at) for at in range(1, 4))]
)
@pytest.mark.parametrize("sent", [False, True])
def test_a_crash_at_any_step_uses_no_share_twice_and_is_paid_for(
    kind: str, at: int, after: bool, sent: bool
) -> None:
    """After it the client is asked the same again; where its upload was lost on the way (`sent`), always."""
    federation = CarriedFederation(schedule(rounds=ROUNDS, **NOISY))
    crashed = crashing(federation, kind, at, after)
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
                if not (sent and one == VICTIM and not again):
                    federation.server.take_upload(carried(upload))
                if sent and one == VICTIM:
                    federation.restart(one)
                    continue
                break
        federation.outcomes[number] = federation.server.finish()
    assert crashed == [kind]
    covered(federation)
    when = [number for number, _, _ in federation.seats[VICTIM].charges]
    assert when == sorted(set(when))
    victim = federation.seats[VICTIM].identity.public
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
    assert rounds_answered(federation.seats[0].kept[-1], RUN) == (0, 2)
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


def test_memory_written_before_there_were_carried_shares_is_read() -> None:
    old = dump(Memory(last={"aa": (3, 0)}), b"prekeys")
    assert b"carried" not in old
    memory, _ = restore(old)
    assert memory.carried == {}
    assert rounds_answered(old, bytes.fromhex("aa")) == ()
    assert rounds_answered(None, b"run") == ()
    memory.carried["aa"] = [1, 4]
    assert restore(dump(memory, b"prekeys"))[0] == memory
    with pytest.raises(LocalProtocolError, match="damaged"):
        Memory.from_json({**memory.to_json(), "carried": {"aa": ["x"]}})


def test_server_and_all_clients_may_be_restarted_between_any_two_rounds() -> None:
    """The server goes on from the opening it saved and from who survived, clients with the keys of their next round."""
    federation = CarriedFederation(schedule(rounds=5))
    identity = federation.server._identity
    total = np.zeros(federation.schedule.coordinates, dtype=np.int64)
    for number in range(5):
        outcome = federation.play_round(number)
        assert outcome.exact
        total += np.rint(outcome.total * 2.0**GRID).astype(np.int64)
        federation.opened[number] = decode(encode(federation.opened[number]))
        federation.server = Server(Identity(identity.secret_bytes()))
        for one in range(len(federation.seats)):
            federation.restart(one)
    assert np.array_equal(total, sum(federation.sums.values()))


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
    federation = CarriedFederation(schedule(rounds=3, carried_variance=0.0, **NOISY))
    for number in range(3):
        assert federation.play_round(number).under_way == 0.0
    assert covered(federation) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("kind", "at", "paid"), [("charge", 1, [True]), ("persist", 2, [True, True])])
def test_the_grid_of_the_run_is_paid_whatever_crashes(kind: str, at: int, paid: list[bool]) -> None:
    """A round that was begun and never charged does not count as the first; one too many is the worst there is."""
    federation = CarriedFederation(schedule(rounds=ROUNDS, **NOISY))
    crashing(federation, kind, at, after=False)
    for number in range(3):
        opened = federation.open_next(number)
        try:
            federation.answer(federation.cohort(number)[VICTIM], opened)
        except Crash:
            federation.restart(VICTIM)
        federation.outcomes[number] = federation.server.finish()
    owner = federation.seats[VICTIM].identity.public
    assert [number for who, number, _ in federation.seen.uploads if who == owner] == [2]
    charges = federation.booked[VICTIM]
    assert [basis["grid_delta"] > 0.0 for _, basis in charges] == paid
