"""Turns of a run that carries noise over: the separation is never broken, and everyone is seated evenly."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niss.errors import ConfigError, ProtocolError
from niss.session.turns import Turns

shapes = st.tuples(
    st.integers(2, 6), st.integers(1, 6), st.sampled_from(("cyclic", "any")), st.integers(0, 12)
)


def require_apart(rounds: dict[int, list[int]], separation: int, pattern: str) -> None:
    for taken in rounds.values():
        for before, after in pairwise(taken):
            assert after - before >= separation
            assert pattern == "any" or (after - before) % separation == 0


@given(shape=shapes, length=st.integers(1, 40))
def test_with_everyone_there_all_are_seated_evenly(shape: tuple[int, int, str, int], length: int) -> None:
    participants, separation, pattern, more = shape
    cohorts = Turns(participants, separation, pattern)
    everyone = range(cohorts.needed + more)
    cohorts.require(len(everyone))
    rounds: dict[int, list[int]] = defaultdict(list)
    for number in range(length):
        cohort = cohorts.choose(number, everyone)
        assert len(set(cohort)) == participants
        cohorts.commit(number, cohort)
        for one in cohort:
            rounds[one].append(number)
    require_apart(rounds, separation, pattern)
    seats = Counter({one: len(taken) for one, taken in rounds.items()})
    if pattern == "any":
        assert max(seats[one] for one in everyone) - min(seats[one] for one in everyone) <= 2
        return
    # Groups of one size but for one member, which take turns; within each the seats differ by one at most.
    groups: dict[int, list[int]] = defaultdict(list)
    for one in everyone:
        groups[cohorts._group[one]].append(seats[one])
    assert max(map(len, groups.values())) - min(map(len, groups.values())) <= 1
    assert all(max(group) - min(group) <= 1 for group in groups.values())
    if not more:
        assert all(len(set(group)) == 1 for group in groups.values())


@given(shape=shapes, data=st.data())
def test_whoever_comes_and_goes_the_separation_holds_and_rounds_keep_their_size(
    shape: tuple[int, int, str, int], data: st.DataObject
) -> None:
    participants, separation, pattern, more = shape
    cohorts = Turns(participants, separation, pattern)
    known = list(range(cohorts.needed))
    rounds: dict[int, list[int]] = defaultdict(list)
    for number in range(3 * separation + 2):
        gone = data.draw(st.sets(st.sampled_from(known), max_size=len(known) // 2))
        present = [one for one in known if one not in gone]
        cohort = cohorts.choose(number, present, gone)
        assert len(set(cohort)) == participants
        # Nobody who is gone takes the place of somebody who is there and may sit.
        if set(cohort) & gone:
            assert {one for one in present if cohorts.may_sit(one, number)} <= set(cohort)
        cohorts.commit(number, cohort)
        for one in cohort:
            rounds[one].append(number)
        if more and data.draw(st.booleans()):
            known.append(len(known))
        if data.draw(st.booleans()):
            kept = json.loads(json.dumps(cohorts.to_json()))
            cohorts = Turns(participants, separation, pattern).restore(kept)
    require_apart(rounds, separation, pattern)


def test_one_who_is_gone_is_replaced_by_one_that_never_sat() -> None:
    cohorts = Turns(2, 2, "cyclic")
    everyone = set(range(6))
    for number in range(2):
        cohorts.commit(number, cohorts.choose(number, everyone))
    first = [one for one in everyone if cohorts._last.get(one) == 0]
    spare = [one for one in everyone if one not in cohorts._last]
    cohort = cohorts.choose(2, everyone - set(first), first)
    assert set(cohort) == set(spare)


def test_without_a_spare_the_place_of_one_who_is_gone_is_kept() -> None:
    cohorts = Turns(2, 2, "cyclic")
    for number in range(2):
        cohorts.commit(number, cohorts.choose(number, range(4)))
    gone = cohorts.choose(2, range(4))[0]
    there = set(range(4)) - {gone}
    assert gone in cohorts.choose(2, there, {gone})
    with pytest.raises(ProtocolError, match="1 can sit in round 3") as refused:
        cohorts.choose(2, there)
    assert "fewer participants" in (refused.value.hint or "")


def test_too_few_nodes_are_refused_with_what_to_do() -> None:
    cohorts = Turns(10, 5, "cyclic")
    with pytest.raises(ProtocolError, match="need 50 nodes, and 40 are there") as refused:
        cohorts.require(40)
    assert refused.value.hint == (
        "plan rounds of at most 8 participants, or wait for more nodes, or plan a separation of at most 4"
    )
    cohorts.require(50)


def test_a_cohort_that_breaks_the_separation_cannot_be_committed() -> None:
    cohorts = Turns(2, 3, "any")
    cohorts.commit(0, (0, 1))
    with pytest.raises(ConfigError, match="too early"):
        cohorts.commit(2, (1, 2))
    assert cohorts.choose(3, (0, 1)) == (0, 1)
