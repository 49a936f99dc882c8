"""Who takes part: turns, whose separation is never broken, and who is to blame when clients decline a round."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niss.errors import ConfigError, ProtocolError
from niss.session.members import SPOILED, Members, Turns
from niss.settings import check_json, to_values

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
    everyone = range(participants * separation + more)
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
        groups[cohorts.group[one]].append(seats[one])
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
    known = list(range(participants * separation))
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
            cohorts = check_json(Turns, json.dumps(to_values(cohorts)))
    require_apart(rounds, separation, pattern)


def test_one_who_is_gone_is_replaced_by_one_that_never_sat() -> None:
    cohorts = Turns(2, 2, "cyclic")
    everyone = set(range(6))
    for number in range(2):
        cohorts.commit(number, cohorts.choose(number, everyone))
    first = [one for one in everyone if cohorts.last.get(one) == 0]
    spare = [one for one in everyone if one not in cohorts.last]
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


class TestDeclines:
    """Who is to blame when clients decline a round; on complete graphs where nothing else is said."""

    def rounds(self, nodes: int, declining: Callable[[set[int]], set[int]], count: int = 6) -> Members:
        """Rounds of all who may be asked; `declining` says who of them declines."""
        members = Members()
        for _ in range(count):
            members.ask_again()
            seated = set(members.may_be_asked(range(nodes)))
            self.judge(members, declining(seated), {node: seated - {node} for node in seated})
        members.ask_again()
        return members

    def judge(
        self, members: Members, declined: Collection[int], around: Mapping[int, Collection[int]]
    ) -> None:
        members.judge(
            dict.fromkeys(declined, "no"), around.keys() - declined, lambda node: sorted(around[node])
        )

    def test_two_that_spoil_rounds_together_are_both_found(self) -> None:
        members = self.rounds(8, lambda seated: seated - {0, 1} if seated & {0, 1} else set())
        assert members.left_out == {0: SPOILED, 1: SPOILED}
        assert not members.aside

    def test_most_of_a_round_that_have_reasons_of_their_own_put_nobody_else_out(self) -> None:
        spent = {3, 4, 5, 6, 7}
        members = self.rounds(8, lambda seated: spent & seated)
        assert members.left_out == dict.fromkeys(spent, "no")
        assert not members.aside

    def test_a_minority_cannot_frame_a_neighbour(self) -> None:
        turns = iter(({1, 2, 3}, set()))
        members = self.rounds(8, lambda _seated: next(turns), count=2)
        assert not members.left_out
        assert not members.aside

    def test_on_a_sparse_graph_the_common_neighbour_is_found(self) -> None:
        ring = {node: {(node + step) % 12 for step in (-2, -1, 1, 2)} for node in range(12)}
        members = Members()
        self.judge(members, ring[5], ring)
        assert members.aside.keys() == {5}
        members.ask_again()
        assert not members.left_out
        self.judge(members, set(), {node: ring[node] for node in ring if node != 5})
        assert members.left_out == {5: SPOILED}

    def test_what_is_known_of_them_survives_and_follows_a_node(self) -> None:
        members = Members()
        for node in range(1, 5):
            members.admit(node, bytes([node]) * 32, ("state",), 9, 1)
        self.judge(members, {2, 3}, {1: {2, 3, 4}, 2: {1, 3}, 3: {1, 2}, 4: {1}})
        again = check_json(Members, json.dumps(to_values(members)))
        assert again.aside == members.aside == {1: frozenset({2, 3})}
        again.resumed = True
        again.ask_again()
        for node in (1, 2):
            again.admit(10 + node, bytes([node]) * 32, ("state",), 9, 2)
        assert again.aside == {11: frozenset({12, 3})}
        self.judge(again, set(), {12: (), 3: (), 4: ()})
        assert again.left_out == {11: SPOILED}


class TestWhoIsAskedAgain:
    """Nobody is left out for good because it was away."""

    def asked_in(self, rounds: int, note: str) -> list[int]:
        """The rounds in which a node is asked to join that never does."""
        members, asked = Members(), []
        for number in range(rounds):
            willing = members.may_be_asked([7])
            members.ask_again()
            assert bool(willing) == (7 not in members.left_out)
            if willing:
                asked.append(number)
                getattr(members, note)(7, "no answer in time")
        return asked

    def test_who_does_not_answer_is_let_be_for_twice_as_long_each_time(self) -> None:
        assert self.asked_in(40, "note_failure") == [0, 1, 4, 9, 18, 35]

    def test_who_cannot_use_the_tracker_is_asked_in_the_next_round(self) -> None:
        assert self.asked_in(5, "note_unreached") == [0, 1, 2, 3, 4]

    def test_who_declines_for_reasons_of_its_own_is_asked_once_more(self) -> None:
        assert self.asked_in(5, "note_declined") == [0, 1]
