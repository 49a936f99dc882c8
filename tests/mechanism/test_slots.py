"""Rounds with secret batches: their claims against dp-accounting and by hand, and the filter that they are."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from niss.errors import ConfigError, PrivacyError
from niss.mechanism import Slots, gdp_delta, gdp_epsilon, gdp_mu, poisson_multiplier
from niss.mechanism.slots import most_slots

DELTA = 1e-5


def by_hand(z: float, probability: float, rounds: int) -> float:
    accountant = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(z))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, rounds))
    return float(accountant.get_epsilon(DELTA))


@pytest.mark.parametrize(("epsilon", "part"), [(1.0, 0.20), (3.0, 0.27), (8.0, 0.46)])
def test_a_thousand_of_six_thousand_need_a_part_of_the_noise(epsilon: float, part: float) -> None:
    """30 rounds; without the secret a client takes part five times, dealt out in turn."""
    z = poisson_multiplier(epsilon, DELTA, 1 / 6, 30)
    assert epsilon * (1.0 - 1e-3) < by_hand(z, 1 / 6, 30) <= epsilon * (1.0 + 1e-4)
    assert z**2 * gdp_mu(epsilon, DELTA) ** 2 / 5 == pytest.approx(part, abs=0.006)


@pytest.mark.parametrize(
    ("epsilon", "probability", "rounds"), [(0.1, 0.01, 50), (8.0, 0.5, 4), (1.0, 0.999, 3)]
)
def test_the_target_is_kept_and_hardly_undercut(epsilon: float, probability: float, rounds: int) -> None:
    z = poisson_multiplier(epsilon, DELTA, probability, rounds)
    assert epsilon * (1.0 - 1e-4) <= Slots.of((probability, z, rounds)).epsilon(DELTA) <= epsilon
    assert z <= 1.01 * math.sqrt(rounds) / gdp_mu(epsilon, DELTA)


def test_without_a_secret_it_is_plain_composition() -> None:
    assert poisson_multiplier(3.0, DELTA, 1.0, 9) == pytest.approx(3.0 / gdp_mu(3.0, DELTA))
    both, five = Slots.of((1.0, 1.0, 4), (1.0, 2.0, 4)), Slots.of((1.0, 1.0, 5))
    assert both.epsilon(DELTA) == pytest.approx(five.epsilon(DELTA))
    assert both.epsilon_if_known(DELTA) == pytest.approx(five.epsilon(DELTA), rel=1e-6)
    assert both.delta(1.0) == pytest.approx(gdp_delta(1.0, math.sqrt(5.0)))


LAB = (0.05, 600)
"""Batches of 5 %, 600 rounds: the setting of which the page on records speaks."""


@pytest.mark.parametrize(("epsilon", "known"), [(1.0, 5.64), (2.93, 17.29)])
def test_all_batches_known_cost_the_mixture_of_gaussians(epsilon: float, known: float) -> None:
    q, rounds = LAB
    z = poisson_multiplier(epsilon, DELTA, q, rounds)
    found = Slots.of((q, z, rounds)).epsilon_if_known(DELTA)
    assert found == pytest.approx(known, abs=0.01)
    chances = stats.binom.pmf(np.arange(rounds + 1), rounds, q)
    spent = math.fsum(
        chance * gdp_delta(found, math.sqrt(count) / z) for count, chance in enumerate(chances) if count
    )
    assert spent == pytest.approx(DELTA, rel=1e-6)
    assert found < gdp_epsilon(math.sqrt(rounds) / z, DELTA)


def test_known_batches_of_several_kinds_are_never_undercut() -> None:
    """Half of the rounds written as another kind, next to the first, and by brute force over both counts."""
    one = Slots.of((0.2, 2.0, 8))
    other = Slots.of((0.2, 2.0, 4), (0.2, 2.0 * (1.0 + 1e-7), 4))
    assert one.epsilon_if_known(DELTA) * (1.0 - 1e-6) <= other.epsilon_if_known(DELTA)
    mixed = Slots.of((0.2, 2.0, 8), (0.6, 5.0, 3))
    found = mixed.epsilon_if_known(DELTA)
    spent = math.fsum(
        stats.binom.pmf(a, 8, 0.2)
        * stats.binom.pmf(b, 3, 0.6)
        * gdp_delta(found, math.sqrt(a / 4.0 + b / 25.0))
        for a, b in itertools.product(range(9), range(4))
        if a + b
    )
    assert 0.97 * DELTA <= spent <= DELTA


@pytest.mark.parametrize(
    ("records", "person"),
    [
        (2, 2.15),
        pytest.param(5, 6.17, marks=pytest.mark.slow),
        pytest.param(10, 14.5, marks=pytest.mark.slow),
    ],
)
def test_a_person_with_several_records(records: int, person: float) -> None:
    q, rounds = LAB
    slots = Slots.of((q, poisson_multiplier(1.0, DELTA, q, rounds), rounds))
    assert slots.epsilon_of_person(records, DELTA) == pytest.approx(person, rel=5e-3)


def test_a_person_with_one_record_is_a_record_and_r_times_epsilon_would_be_too_little() -> None:
    slots = Slots.of((0.3, 2.0, 5))
    assert slots.epsilon_of_person(1, DELTA) == pytest.approx(slots.epsilon(DELTA), rel=2e-3)
    rare = Slots.of((0.05, 2.0, 3))
    assert rare.epsilon_of_person(3, DELTA) > 3.0 * rare.epsilon(DELTA)
    assert Slots.of((1.0, 2.0, 5)).epsilon_of_person(3, DELTA) == pytest.approx(
        gdp_epsilon(1.5 * math.sqrt(5.0), DELTA), rel=1e-3
    )


@pytest.mark.parametrize(("attempts", "becomes"), [(2, 3.13), (10, 3.32)])
def test_a_batch_that_is_used_again_costs_more_than_a_fresh_one(attempts: int, becomes: float) -> None:
    """Each attempt is a slot. Attempts on one batch would be one round with a part of the noise variance."""
    q, rounds = LAB
    z = poisson_multiplier(2.93, DELTA, q, attempts * rounds)
    fresh, reused = Slots.of((q, z, attempts * rounds)), Slots.of((q, z / math.sqrt(attempts), rounds))
    assert fresh.epsilon(DELTA) <= 2.93
    assert reused.epsilon(DELTA) == pytest.approx(becomes, abs=0.01)


def test_curves_of_both_directions_and_many_kinds_are_never_too_small() -> None:
    many = Slots.of(*((0.1, 2.0 + k / 7.0, 1) for k in range(9)))
    accountant = PLDAccountant()
    for q, z, count in many.rounds:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), count)
    exact = accountant.get_epsilon(DELTA)
    assert exact <= many.epsilon(DELTA) <= 1.01 * exact
    assert many.delta(many.epsilon(DELTA)) <= DELTA * (1.0 + 1e-6)
    assert (
        Slots().epsilon(DELTA)
        == Slots().epsilon_if_known(DELTA)
        == Slots().epsilon_of_person(3, DELTA)
        == 0.0
    )
    bare = Slots.of((0.1, 0.0, 1))
    assert bare.epsilon(DELTA) == bare.epsilon_if_known(DELTA) == bare.epsilon_of_person(2, DELTA) == math.inf
    assert bare.delta(3.0) == 1.0


def test_as_many_slots_as_a_target_has_room_for() -> None:
    found = most_slots((0.05, 4.0), 1.0, DELTA)
    ((_, _, count),) = found.rounds
    assert found.epsilon(DELTA) <= 1.0 < Slots.of((0.05, 4.0, count + 1)).epsilon(DELTA)
    with pytest.raises(PrivacyError, match="one round"):
        most_slots((0.5, 0.1), 1.0, DELTA)


KINDS = st.sampled_from([(0.05, 2.0), (0.05, 4.0), (0.1, 2.0), (0.1, 1.0), (0.2, 4.0)])


def take(budget: Slots, charges: list[tuple[float, float]]) -> tuple[list[bool], Slots]:
    """Which of these rounds found a slot, and all slots they took."""
    taken, found = Slots(), []
    for charge in charges:
        slot = budget.free(taken, charge)
        found.append(slot is not None)
        if slot is not None:
            assert charge[0] <= slot[0]
            assert charge[1] >= slot[1]
            taken = taken.plus(slot)
    return found, taken


@given(st.data(), st.lists(KINDS, max_size=8))
def test_slots_in_any_order_are_slots_in_order(data: st.DataObject, slots: list[tuple[float, float]]) -> None:
    """Written in any order they are one budget; rounds that are the slots themselves all find one, in any order."""
    shuffled = data.draw(st.permutations(slots))
    budget = Slots.of(*((*slot, 1) for slot in slots))
    assert budget == Slots.of(*((*slot, 1) for slot in shuffled))
    found, taken = take(budget, shuffled)
    assert all(found)
    assert taken == budget
    assert budget.free(taken, (0.01, 100.0)) is None


@settings(max_examples=15, deadline=None)
@given(
    st.lists(KINDS, min_size=1, max_size=4),
    st.lists(st.tuples(st.floats(0.01, 0.3), st.floats(0.5, 6.0)), max_size=8),
)
def test_no_sequence_is_charged_beyond_the_claim(
    slots: list[tuple[float, float]], charges: list[tuple[float, float]]
) -> None:
    budget = Slots.of(*((*slot, 1) for slot in slots))
    found, taken = take(budget, charges)
    accepted = Slots.of(*((*charge, 1) for charge, fits in zip(charges, found, strict=True) if fits))
    assert taken.size == accepted.size <= budget.size
    for epsilon in (0.1, 1.0):
        assert accepted.delta(epsilon) <= taken.delta(epsilon) * (1 + 1e-6) + 1e-9
        assert taken.delta(epsilon) <= budget.delta(epsilon) * (1 + 1e-6) + 1e-9


def test_no_adaptive_choice_of_slots_beats_their_product() -> None:
    """The best strategy against two neighbours, by dynamic programming over all outcomes, on coarse slots.

    A slot here is randomised response, whose two outcomes can be gone through: q stands for nothing, z for its bias.
    After each outcome the opponent chooses which of the remaining slots comes next, or stops.
    """
    slots = (0.6, 0.7, 0.55, 0.8)

    def best(left: tuple[float, ...], p: float, q: float, price: float) -> float:
        stopped = max(p - price * q, 0.0)
        return max(
            [stopped]
            + [
                best(left[:i] + left[i + 1 :], p * bias, q * (1 - bias), price)
                + best(left[:i] + left[i + 1 :], p * (1 - bias), q * bias, price)
                for i, bias in enumerate(left)
            ]
        )

    for price in (1.0, 1.5, 3.0):
        product = 0.0
        for signs in itertools.product((0, 1), repeat=len(slots)):
            p = math.prod(bias if sign else 1 - bias for bias, sign in zip(slots, signs, strict=True))
            q = math.prod(1 - bias if sign else bias for bias, sign in zip(slots, signs, strict=True))
            product += max(p - price * q, 0.0)
        assert best(slots, 1.0, 1.0, price) == pytest.approx(product, rel=1e-12)


@pytest.mark.parametrize("slot", [(0.0, 1.0), (1.1, 1.0), (0.5, -1.0), (0.5, math.inf), (math.nan, 1.0)])
def test_what_is_no_slot_is_refused(slot: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="slot"):
        Slots.of((*slot, 1))
