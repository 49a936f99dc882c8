"""The ledger composes exactly and refuses to overspend, before anything is sent."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from niss.accounting import Charge, Ledger
from niss.errors import PrivacyError
from niss.mechanism import Slots
from support.refusals import refuses


@pytest.mark.parametrize("rounds", [1, 3, 7, 30, 1000])
def test_a_budget_may_be_spent_exactly_despite_rounding(rounds: int) -> None:
    budget = 0.7
    ledger = Ledger.empty(1, budget=np.array([budget]))
    alone = np.array([0])
    charge = Charge.of(budget / math.sqrt(rounds), 0.1)
    for _ in range(rounds):
        ledger.charge(alone, charge)
    assert not ledger.room(alone, charge)[0]
    with pytest.raises(PrivacyError):
        ledger.charge(alone, charge)
    assert ledger.participations[0] == rounds


def test_no_noise_is_refused_by_a_budget_and_recorded_without_one() -> None:
    alone, unprotected = np.array([0]), Charge.of(np.inf, 1.0)
    with pytest.raises(PrivacyError):
        Ledger.empty(1, budget=np.array([5.0])).charge(alone, unprotected)
    open_ledger = Ledger.empty(1)
    open_ledger.charge(alone, unprotected)
    assert open_ledger.joint_squared[0] == np.inf
    assert open_ledger.marginal_squared[0] == 1.0


def test_a_mu_that_is_no_number_never_fits_a_budget() -> None:
    ledger = Ledger.empty(1, budget=np.array([5.0]))
    assert not ledger.room(np.array([0]), Charge.of(np.nan))[0]


def test_room_is_told_per_client() -> None:
    ledger = Ledger.empty(3, budget=np.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(
        ledger.room(np.array([2, 0, 1]), Charge.of(np.array([2.5, 1.5, 1.5]))), [True, False, True]
    )
    assert Ledger.empty(3).room(np.array([0, 2]), Charge.of(1e9)).all()


def test_nobody_takes_part_twice_in_one_round() -> None:
    """Counted once, a second upload would be free."""
    ledger = Ledger.empty(2)
    with refuses("participants"):
        ledger.charge(np.array([1, 1]), Charge.of(0.1, 0.1))
    assert ledger.joint_squared.sum() == 0.0


@pytest.mark.parametrize("budget", [None, np.array([5.0])])
def test_a_slot_is_refused_by_name_and_never_dropped(budget: np.ndarray | None) -> None:
    """It composes by no mu^2: added up as one it would be free."""
    ledger, slot = Ledger.empty(1, budget=budget), Charge(slot=(0.05, 1.3))
    for take in (ledger.room, ledger.charge):
        with pytest.raises(PrivacyError, match="a round that hides records cannot be charged"):
            take(np.array([0]), slot)
    assert ledger.participations[0] == 0


EVERYONE = np.array([0, 1])
SLOTS = Slots.of((0.05, 2.0, 2), (0.1, 1.0, 1))


def test_rounds_that_hide_records_take_slots_that_cover_them() -> None:
    """Client 1 misses the first round, and so has a slot more for the last; the weak round leaves the strong slot."""
    ledger = Ledger.empty(2, SLOTS, unit="record")
    ledger.charge(EVERYONE[:1], Charge(slot=(0.04, 3.0)))
    ledger.charge(EVERYONE, Charge(slot=(0.05, 2.0)))
    ledger.charge(EVERYONE, Charge(slot=(0.1, 1.0)))
    assert ledger.spent(0) == SLOTS
    assert ledger.spent(1) == Slots.of((0.05, 2.0, 1), (0.1, 1.0, 1))
    np.testing.assert_array_equal(ledger.room(EVERYONE, Charge(slot=(0.05, 2.0))), [False, True])
    before = copy.deepcopy(ledger)
    with pytest.raises(
        PrivacyError, match=r"client 0 .* none of its 0 free slots \(of 3\) covers .* q = 0.05, z = 2"
    ):
        ledger.charge(EVERYONE, Charge(slot=(0.05, 2.0)))
    assert ledger.slots == before.slots
    np.testing.assert_array_equal(ledger.participations, [3, 2])


@pytest.mark.parametrize("slot", [(0.11, 9.0), (0.05, 0.99), (0.06, 1.9999), (1.0, 100.0)])
def test_a_round_that_no_slot_covers_is_refused_though_its_epsilon_would_fit(
    slot: tuple[float, float],
) -> None:
    ledger = Ledger.empty(1, Slots.of((0.05, 2.0, 2), (0.06, 2.0, 1), (0.1, 3.0, 1)), unit="record")
    with pytest.raises(PrivacyError, match="covers a round"):
        ledger.charge(EVERYONE[:1], Charge(slot=slot))


def test_a_ledger_of_records_takes_no_round_that_hides_clients_nor_nonsense() -> None:
    """A client-unit round would cost a record 2 mu, and a record round says nothing for a client."""
    ledger = Ledger.empty(1, SLOTS, unit="record")
    with pytest.raises(
        PrivacyError, match=r"hide records .*a round that hides whole clients cannot be charged"
    ):
        ledger.charge(EVERYONE[:1], Charge.of(0.1))
    for slot in ((0.0, 1.0), (1.5, 1.0), (0.5, -1.0), (0.5, math.inf)):
        with pytest.raises(PrivacyError, match="is no slot"):
            ledger.charge(EVERYONE[:1], Charge(slot=slot))
    assert not ledger.slots


def test_the_slot_of_a_round_is_that_of_its_worst_client() -> None:
    charge = Charge.of(np.array([0.2, 0.5]), 0.1, batch=0.05)
    assert charge.slot == (0.05, 2.0)
    assert Charge.of(np.inf, batch=0.05).slot == (0.05, 0.0)
    unpromised = Ledger.empty(2, unit="record")
    unpromised.charge(EVERYONE, charge)
    assert unpromised.spent(1) == Slots.of((0.05, 2.0, 1))
