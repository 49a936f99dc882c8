"""Rounds, and runs that carry noise over, under any order of drops, duplicates, delays, tampering, restarts and lies.

The clients and the beacon's holder are honest, the network and what the server says are not. The server's own machine
stays honest too, so that its outcomes can be compared with the truth.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from niss.errors import ConfigError, PrivacyError, ProtocolError
from niss.mechanism import clip_l2
from niss.protocol import committee
from niss.protocol.agreement import Agreed, agree, previous_of
from niss.protocol.messages import RevealRequest, RoundCohorts, RoundOpen, Upload
from niss.protocol.server import Outcome, ServerStage
from support.protocol_round import (
    GRID,
    NOISY,
    CarriedFederation,
    Federation,
    carried,
    covered,
    quantised,
    resigned,
    schedule,
)

INTENDED = (ProtocolError, PrivacyError, ConfigError)
MOST = 12
COORDINATES = 4
picks = st.integers(0, 10_000)
seats = st.integers(0, MOST - 1)
some_seats = st.sets(seats, max_size=4)


class Network(RuleBasedStateMachine):
    """What may happen to rounds of either kind: messages lost, late or said twice; clients that crash or end it."""

    federation: Federation
    mail: list[Any]
    arrived: dict[bytes, set[int]]

    def attempt(self, call: Any, *arguments: Any) -> Any:
        """What the call returns; None where it refuses in an intended way. Anything else is a defect."""
        try:
            return call(*arguments)
        except INTENDED:
            return None

    @precondition(lambda self: self.mail)
    @rule(lost=st.sets(st.integers(0, 40), max_size=2), backwards=st.booleans())
    def deliver_all(self, lost: set[int], backwards: bool) -> None:
        for number, message in enumerate(self.mail[::-1] if backwards else self.mail):
            if number not in lost:
                self.deliver(message)
        self.mail.clear()

    @precondition(lambda self: self.mail)
    @rule(which=picks, twice=st.booleans())
    def deliver_one(self, which: int, twice: bool) -> None:
        message = self.mail[which % len(self.mail)]
        self.deliver(message)
        if not twice:
            self.mail.remove(message)

    def deliver(self, message: Any) -> None:
        server = self.federation.server
        take = server.take_upload if isinstance(message, Upload) else server.take_reveal
        before = server._round and set(server._round.uploads)
        self.attempt(take, carried(message))
        if isinstance(message, Upload) and set(server._round.uploads) != before:
            self.arrived[message.context].add(message.seat)

    @rule(seat=picks)
    def restart(self, seat: int) -> None:
        self.federation.restart(seat % len(self.federation.seats))

    @rule(seat=picks)
    def close(self, seat: int) -> None:
        self.attempt(self.federation.clients[seat % len(self.federation.seats)].close_round)


class Rounds(Network):
    """One federation over a few rounds; every rule is something that may happen next."""

    @initialize(size=st.integers(3, MOST), label=picks, members=st.integers(2, MOST))
    def start(self, size: int, label: int, members: int) -> None:
        self.federation = Federation(size, f"stateful {label}")
        self.size, self.members = size, min(size, members)
        self.opened: list[RoundOpen] = []
        self.agreed: dict[bytes, Agreed] = {}
        self.mail: list[Any] = []
        self.requests: list[tuple[int, RevealRequest]] = []
        self.uploads: dict[tuple[bytes, int], Upload] = {}
        self.parts: dict[tuple[bytes, int], np.ndarray] = {}
        self.arrived: dict[bytes, set[int]] = defaultdict(set)
        # What really left each client.
        self.uploaded: dict[tuple[int, int, int], int] = defaultdict(int)
        self.answered: dict[tuple[bytes, int], set[tuple[int, ...]]] = defaultdict(set)
        self.charged_late: list[int] = []
        self.outcomes: list[tuple[Outcome, np.ndarray, set[int]]] = []

    def pick(self, items: list[Any], number: int) -> Any:
        """Mostly recent ones; now and then one of an earlier round."""
        if number % 2:
            return items[-1]
        return items[-1 - number % (min(len(items), 3) if number % 4 else len(items))]

    # The server opens rounds, in order or not.

    @precondition(
        lambda self: (
            len(self.opened) < 5 and self.federation.server.state in (ServerStage.IDLE, ServerStage.CLOSED)
        )
    )
    @rule(mode=st.sampled_from(["tolerate", "repair", "repair"]), again=st.booleans(), degree=picks)
    def open(self, mode: str, again: bool, degree: int) -> None:
        last = self.opened[-1].terms if self.opened else None
        when = {"round": 1} if last is None else {"round": last.round + 1}
        if last is not None and again and last.attempt < 2:
            when = {"round": last.round, "attempt": last.attempt + 1}
        terms = self.federation.terms(
            mode=mode,
            coordinates=COORDINATES,
            neighbours=float(2 + degree % self.size),
            **{"committee": self.members, "threshold": self.members // 2 + 1} if mode == "repair" else {},
            **when,
        )
        opened = self.attempt(self.federation.open, terms)
        if opened is not None:
            self.opened.append(opened)
            agreed = agree(opened)
            self.agreed[agreed.digest] = agreed

    @rule(absent=some_seats, backwards=st.booleans())
    def go_on(self, absent: set[int], backwards: bool) -> None:
        """One whole stage as it should be, so that the lies meet rounds of every age."""
        state = self.federation.server.state
        if state in (ServerStage.IDLE, ServerStage.CLOSED):
            if len(self.opened) < 5:
                self.open("repair", again=False, degree=self.size)
        elif state is ServerStage.COLLECTING:
            self.everyone_uploads(set(sorted(absent)[:2]))
            self.deliver_all(set(), backwards)
            self.request()
        elif state is ServerStage.REPAIRING and self.requests:
            self.everyone_reveals(set(sorted(absent)[:1]))
            self.deliver_all(set(), backwards)
            self.finish()

    # Clients answer.

    def answer(self, seat: int, opened: RoundOpen) -> None:
        update = self.federation.updates(COORDINATES)[0]
        own = self.federation.seats[seat]
        before = len(own.charges)
        upload = self.attempt(own.client.upload, opened, update, self.federation.entropy)
        if upload is None:
            return
        terms, agreed = opened.terms, agree(opened)
        if own.charges[before:] != [(terms.round, terms.attempt, 0.5)]:
            self.charged_late.append(seat)
        self.uploaded[seat, terms.round, terms.attempt] += 1
        steps = quantised(agreed.grid, clip_l2(update, terms.clip) / self.size)
        self.parts[agreed.digest, seat] = steps
        self.uploads[agreed.digest, seat] = upload
        self.mail.append(upload)
        self.federation.prekeys[seat].extend(upload.fresh_prekeys)

    @precondition(lambda self: self.opened)
    @rule(absent=some_seats)
    def everyone_uploads(self, absent: set[int]) -> None:
        for seat in range(self.size):
            if seat not in absent:
                self.answer(seat, self.opened[-1])

    @precondition(lambda self: self.opened)
    @rule(seat=seats, which=picks)
    def one_uploads(self, seat: int, which: int) -> None:
        self.answer(seat % self.size, self.pick(self.opened, which))

    @precondition(lambda self: self.mail)
    @rule(which=picks, seat=seats)
    def tamper(self, which: int, seat: int) -> None:
        message = self.mail[which % len(self.mail)]
        server = self.federation.server
        lies: list[Any] = [replace(message, context=bytes(32)), replace(message, signature=bytes(64))]
        lies.append(replace(message, seat=(message.seat + 1 + seat) % (self.size + 1)))
        if isinstance(message, Upload):
            lies.append(replace(message, vector=bytes(len(message.vector))))
        take = server.take_upload if isinstance(message, Upload) else server.take_reveal
        for lie in lies:
            if lie != message:
                with pytest.raises(INTENDED):
                    take(lie)

    # The server's stages, and its lies.

    @precondition(lambda self: self.opened)
    @rule()
    def request(self) -> None:
        requests = self.attempt(self.federation.server.request_reveals)
        self.requests.extend((requests or {}).items())

    @precondition(lambda self: self.opened)
    @rule(which=picks, lost=some_seats, seat=seats, missing=st.booleans(), wrong=st.booleans())
    def lie_in_a_request(self, which: int, lost: set[int], seat: int, missing: bool, wrong: bool) -> None:
        """Another survivor set, with the true pieces, those of another member, or too few."""
        agreed = agree(self.pick(self.opened, which))
        if not agreed.committee:
            return
        seat = agreed.committee[seat % len(agreed.committee)]
        alive = tuple(
            one for one in range(self.size) if one not in lost and (agreed.digest, one) in self.uploads
        )
        owner = agreed.committee[0] if wrong else seat
        dealt = [self.uploads[agreed.digest, one].pieces for one in alive[missing:]]
        pieces = b"".join(committee.piece_for(agreed, owner, one) for one in dealt)
        request = RevealRequest(agreed.digest, alive, pieces)
        self.requests.append((seat, resigned(self.federation.server, request, "request")))

    @precondition(lambda self: self.opened)
    @rule(lost=st.sets(seats, min_size=1, max_size=2), seat=seats, restarted=st.booleans())
    def lie_to_one(self, lost: set[int], seat: int, restarted: bool) -> None:
        """Another story of the latest round for a member that may have answered one."""
        before = len(self.requests)
        self.lie_in_a_request(1, lost, seat, missing=False, wrong=False)
        for told, request in self.requests[before:]:
            if restarted:
                self.restart(told)
            self.reveal(told, request)
        del self.requests[before:]

    def reveal(self, seat: int, request: RevealRequest) -> None:
        reveal = self.attempt(self.federation.clients[seat].reveal, carried(request))
        if reveal is None:
            return
        self.answered[request.context, seat].add(request.survivors)
        self.mail.append(reveal)

    @precondition(lambda self: self.requests)
    @rule(silent=some_seats)
    def everyone_reveals(self, silent: set[int]) -> None:
        for seat, request in self.requests[-self.size :]:
            if seat not in silent:
                self.reveal(seat, request)

    @precondition(lambda self: self.requests)
    @rule(which=picks, other=seats, own=st.booleans())
    def one_reveals(self, which: int, other: int, own: bool) -> None:
        seat, request = self.pick(self.requests, which)
        self.reveal(seat if own else other % self.size, request)

    # Crashes and ends.

    @precondition(lambda self: self.opened)
    @rule()
    def finish(self) -> None:
        current = self.federation.server._round
        outcome = self.attempt(self.federation.server.finish)
        if outcome is None:
            return
        context = current.agreed.digest
        steps = sum(
            (self.parts[context, seat] for seat in outcome.survivors), np.zeros(COORDINATES, dtype=np.int64)
        )
        self.outcomes.append((outcome, current.agreed.grid.to_float(steps), self.arrived[context]))

    # What must always hold.

    @invariant()
    def nobody_answered_twice(self) -> None:
        assert all(count == 1 for count in self.uploaded.values())
        assert self.charged_late == []
        for seat in self.federation.seats:
            when = [(number, attempt) for number, attempt, _ in seat.charges]
            assert when == sorted(set(when))

    @invariant()
    def nobody_answered_for_two(self) -> None:
        assert all(len(sets) == 1 for sets in self.answered.values())

    @invariant()
    def outcomes_tell_the_truth(self) -> None:
        for outcome, exact, arrived in self.outcomes:
            assert set(outcome.survivors) == (arrived if len(arrived) > 1 else set())
            # Noise that is left is 2^19 grid steps wide: it cannot hide behind a zero.
            assert outcome.exact == np.array_equal(outcome.total, exact)
            assert outcome.exact == (outcome.extra_variance == 0.0)
        self.outcomes.clear()


QUICK = settings(
    max_examples=50,
    stateful_step_count=25,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestRounds = Rounds.TestCase
TestRounds.settings = QUICK


@pytest.mark.slow
class TestManyRounds(Rounds.TestCase):
    """The same with many more examples and longer ones."""

    settings = settings(QUICK, max_examples=400, stateful_step_count=60)


@pytest.mark.parametrize("absent", [(), (1,)])
def test_the_machine_itself_can_reach_an_exact_repair(absent: tuple[int, ...]) -> None:
    """The rules above, in the order of a good round, end in an exact outcome: the invariants see some."""
    rounds = Rounds()
    rounds.start(6, 1, 6)
    rounds.open("repair", again=False, degree=3)
    rounds.everyone_uploads(set(absent))
    rounds.deliver_all(set(), backwards=True)
    rounds.request()
    rounds.everyone_reveals(set())
    rounds.deliver_all(set(), backwards=False)
    rounds.finish()
    assert [outcome.exact for outcome, _, _ in rounds.outcomes] == [True]
    assert rounds.answered
    rounds.outcomes_tell_the_truth()
    rounds.nobody_answered_for_two()
    rounds.teardown()


# Runs that carry noise over. What is said in the server's name is not honest, and the holder of the beacon signs it.


class PowerCut(Exception):
    """Everything that was not kept is gone."""


class CarriedRounds(Network):
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
        self.mail, self.arrived = [], defaultdict(set)
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
            self.deliver_all(set(), backwards=False)
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


TestCarriedRounds = CarriedRounds.TestCase
TestCarriedRounds.settings = settings(QUICK, max_examples=40, stateful_step_count=20)


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
