"""Runs with carried shares under any order of drops, delays, lies and restarts: what must always hold.

Clients are honest. The server's machine is too, so that its outcomes can be compared with the truth; what else is said
in its name is not, and the holder of the beacon signs it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from niss.protocol.agreement import previous_of
from niss.protocol.messages import RoundCohorts, RoundOpen, Upload
from niss.protocol.server import ServerStage
from protocol.test_stateful import INTENDED, picks
from protocol.test_stateful import QUICK as ROUNDS
from support.protocol_round import GRID, NOISY, CarriedFederation, carried, covered, schedule


class PowerCut(Exception):
    """Everything that was not kept is gone."""


class CarriedRounds(RuleBasedStateMachine):
    """One run; every rule is something that may happen next."""

    @initialize(
        size=st.integers(3, 4),
        separation=st.integers(2, 3),
        rounds=st.integers(3, 6),
        noisy=st.booleans(),
        cyclic=st.booleans(),
        closing=st.booleans(),
        label=picks,
    )
    def start(
        self, size: int, separation: int, rounds: int, noisy: bool, cyclic: bool, closing: bool, label: int
    ) -> None:
        committed = schedule(
            participants=size,
            separation=separation,
            rounds=rounds,
            cyclic=cyclic,
            closing=closing,
            **(NOISY if noisy else {}),
        )
        self.federation = CarriedFederation(committed, f"stateful {label}", attempts=2)
        self.noisy = noisy
        self.versions: list[RoundOpen] = []
        self.mail: list[Upload] = []
        self.parts: dict[tuple[bytes, int], np.ndarray] = {}
        self.truth = np.zeros(committed.coordinates, dtype=np.int64)
        self.total = np.zeros(committed.coordinates, dtype=np.int64)
        self.answered: Counter[tuple[int, int]] = Counter()

    @property
    def next(self) -> int:
        return len(self.federation.opened)

    @property
    def closed(self) -> bool:
        return self.federation.server.state in (ServerStage.IDLE, ServerStage.CLOSED)

    # The server goes on.

    @precondition(lambda self: self.closed and self.next < self.federation.schedule.rounds)
    @rule()
    def open(self) -> None:
        self.versions.append(self.federation.open_next(self.next))

    @precondition(lambda self: not self.closed)
    @rule()
    def finish(self) -> None:
        number, current = self.next - 1, self.federation.server._round
        assert current is not None
        context = current.agreed.digest
        outcome = self.federation.server.finish()
        self.federation.outcomes[number] = outcome
        for seat in outcome.survivors:
            self.truth += self.parts[context, seat]
        self.total += np.rint(outcome.total * 2.0**GRID).astype(np.int64)

    @rule(absent=st.sets(st.integers(0, 3), max_size=2))
    def go_on(self, absent: set[int]) -> None:
        """A whole round as it should be, so that lies meet runs of every age."""
        if self.closed and self.next < self.federation.schedule.rounds:
            self.open()
        if not self.closed:
            self.everyone_answers(absent)
            self.deliver_all(set())
            self.finish()

    # Clients answer.

    def answer(self, one: int, opened: RoundOpen) -> None:
        federation = self.federation
        steps = np.frombuffer(federation.entropy(2 * federation.schedule.coordinates), "<i2").astype(np.int64)
        if opened.terms.round >= federation.schedule.horizon:
            steps = np.zeros_like(steps)
        seat, before = federation.seats[one], len(federation.seats[one].charges)
        try:
            upload = federation.answer(one, opened, steps)
        except INTENDED:
            assert len(seat.charges) == before
            return
        assert [when[0] for when in seat.charges[before:]] == [opened.terms.round]
        self.answered[one, opened.terms.round] += 1
        self.parts[upload.context, upload.seat] = steps
        self.mail.append(upload)

    @precondition(lambda self: self.federation.opened)
    @rule(absent=st.sets(st.integers(0, 3), max_size=2))
    def everyone_answers(self, absent: set[int]) -> None:
        number = self.next - 1
        for seat, one in enumerate(self.federation.cohort(number)):
            if seat not in absent:
                self.answer(one, self.federation.opened[number])

    @precondition(lambda self: self.versions)
    @rule(which=picks, one=picks, late=st.booleans())
    def somebody_answers(self, which: int, one: int, late: bool) -> None:
        """Of any version of any round; mostly one of those that it is for."""
        opened = self.versions[which % len(self.versions) if late else -1]
        people = self.federation.cohort(opened.terms.round)
        self.answer(people[one % len(people)] if one % 5 else one % len(self.federation.seats), opened)

    @precondition(lambda self: self.versions)
    @rule(which=picks, one=picks, kept=st.booleans())
    def power_fails(self, which: int, one: int, kept: bool) -> None:
        """While a client answers: before or after its memory was written."""
        opened = self.versions[which % len(self.versions)]
        people = self.federation.cohort(opened.terms.round)
        number = people[one % len(people)]
        seat = self.federation.seats[number]
        persist = seat._persist

        def failing(memory: bytes) -> None:
            if kept:
                persist(memory)
            raise PowerCut

        seat.client._persist = failing
        try:
            self.federation.answer(number, opened)
        except (PowerCut, *INTENDED):
            pass
        else:
            raise AssertionError("nothing was persisted before the upload left")
        self.federation.restart(number)

    @rule(one=picks)
    def restart(self, one: int) -> None:
        self.federation.restart(one % len(self.federation.seats))

    @rule(one=picks)
    def close(self, one: int) -> None:
        self.federation.seats[one % len(self.federation.seats)].client.close_round()

    # The network.

    @precondition(lambda self: self.mail)
    @rule(lost=st.sets(st.integers(0, 5), max_size=1))
    def deliver_all(self, lost: set[int]) -> None:
        for place, upload in enumerate(self.mail):
            if place not in lost:
                self.deliver(upload)
        self.mail.clear()

    @precondition(lambda self: self.mail)
    @rule(which=picks)
    def deliver_one_and_keep_it(self, which: int) -> None:
        self.deliver(self.mail[which % len(self.mail)])

    def deliver(self, upload: Upload) -> None:
        with suppress(*INTENDED):
            self.federation.server.take_upload(carried(upload))

    # Lies, of which the holder signs what it is asked to.

    @precondition(lambda self: self.versions)
    @rule(
        which=picks,
        kind=st.sampled_from(["attempt", "following", "previous", "last", "again", "next"]),
        other=picks,
    )
    def lie(self, which: int, kind: str, other: int) -> None:
        federation = self.federation
        opened = self.versions[which % len(self.versions)]
        cohorts, terms = opened.cohorts, opened.terms
        assert cohorts is not None
        changes: dict[str, Any] = {}
        if kind == "attempt":
            changes["terms"] = replace(terms, attempt=1 - terms.attempt)
        elif kind == "following" and cohorts.following:
            listed = list(cohorts.following)
            listed[other % len(listed)] = self.seat_of(other)
            changes["cohorts"] = replace(cohorts, following=tuple(listed))
        elif kind == "previous" and cohorts.previous is not None:
            before = self.versions[other % len(self.versions)]
            changes["cohorts"] = replace(cohorts, previous=previous_of(before))
        elif kind == "last":
            changes["cohorts"] = replace(cohorts, following=())
        elif kind == "again":
            people = tuple(
                self.seat_of(one) if place == other % 4 else old
                for place, (one, old) in enumerate(
                    zip(federation.cohort(terms.round), opened.participants, strict=True)
                )
            )
            changes["participants"] = people
        elif kind == "next" and cohorts.following:
            number = terms.round + 1
            after = federation.listed(number + 1) if number + 1 < federation.schedule.rounds else ()
            changes = {
                "terms": federation.schedule.terms(terms.run, number),
                "participants": cohorts.following,
                "cohorts": RoundCohorts(after, previous_of(opened)),
            }
        if not changes:
            return
        try:
            self.versions.append(federation.forged(opened, **changes))
        except INTENDED:
            return

    def seat_of(self, one: int) -> Any:
        """A client with a prekey that it has, whatever it was announced for."""
        federation, one = self.federation, one % len(self.federation.seats)
        if len(federation.prekeys[one]) < 2:
            federation.prekeys[one] += list(federation.seats[one].client.enrol(4, federation.entropy))
        return federation.seat_of(one)

    # What must always hold.

    @invariant()
    def nobody_answered_a_round_twice(self) -> None:
        assert all(count == 1 for count in self.answered.values())

    @invariant()
    def every_share_is_in_two_uploads_at_most(self) -> None:
        self.federation.seen.check_shares()

    @invariant()
    def sums_are_right_or_declared_noisy(self) -> None:
        federation = self.federation
        if self.noisy or len(federation.outcomes) < federation.schedule.rounds:
            return
        exact = all(outcome.exact for outcome in federation.outcomes.values())
        # Noise that is left is 2^19 grid steps wide: it cannot hide behind a zero.
        assert exact == np.array_equal(self.total, self.truth)

    def teardown(self) -> None:
        if getattr(self, "noisy", False) and self.federation.seen.uploads:
            covered(self.federation)


QUICK = settings(ROUNDS, max_examples=40, stateful_step_count=20)
TestCarriedRounds = CarriedRounds.TestCase
TestCarriedRounds.settings = QUICK


@pytest.mark.slow
class TestManyCarriedRounds(CarriedRounds.TestCase):
    """The same with many more examples and longer ones."""

    settings = settings(QUICK, max_examples=400, stateful_step_count=50)


@pytest.mark.parametrize("absent", [(), (1,)])
def test_the_machine_itself_can_reach_the_end_of_a_run(absent: tuple[int, ...]) -> None:
    """The rules above, in the order of a good run: the invariants see exact ends and noisy ones."""
    run = CarriedRounds()
    run.start(3, 2, 3, noisy=False, cyclic=True, closing=False, label=1)
    for number in range(3):
        run.go_on(set(absent) if number == 1 else set())
    assert len(run.federation.outcomes) == 3
    assert np.array_equal(run.total, run.truth) == (not absent)
    run.sums_are_right_or_declared_noisy()
    run.every_share_is_in_two_uploads_at_most()


def test_the_machine_itself_has_lies_answered() -> None:
    """Another version of a round, from a holder that obeys, is answered by who has not answered it yet."""
    run = CarriedRounds()
    run.start(3, 2, 4, noisy=True, cyclic=True, closing=False, label=2)
    run.open()
    run.answer(0, run.versions[0])
    run.lie(0, "following", 4)
    run.answer(1, run.versions[-1])
    run.answer(0, run.versions[-1])
    assert run.answered == {(0, 0): 1, (1, 0): 1}
    run.teardown()
