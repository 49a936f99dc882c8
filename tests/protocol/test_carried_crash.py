"""Clients of a run with carried shares that crash at any step, and start again from what they had kept."""

from __future__ import annotations

import numpy as np
import pytest

from niss.errors import LocalProtocolError, ProtocolError
from niss.protocol.states import Memory, dump, restore, rounds_answered
from support.carried_run import NOISY, RUN, CarriedFederation, covered, schedule
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
@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind in ("persist", "charge") for at in (1, 2, 3)])
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
