"""Rounds under any order of drops, duplicates, delays, tampering, restarts and lies: what must always hold.

The clients and the beacon's holder are honest, the network and what the server says are not. The server's own machine
stays honest too, so that its outcomes can be compared with the truth.
"""

from __future__ import annotations

from collections import defaultdict
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
from niss.protocol.agreement import Agreed, agree
from niss.protocol.messages import RevealRequest, RoundOpen, Upload
from niss.protocol.server import Outcome, ServerStage
from support.protocol_round import Federation, carried, resigned

INTENDED = (ProtocolError, PrivacyError, ConfigError)
MOST = 12
COORDINATES = 4
picks = st.integers(0, 10_000)
seats = st.integers(0, MOST - 1)
some_seats = st.sets(seats, max_size=4)


class Rounds(RuleBasedStateMachine):
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

    def attempt(self, call: Any, *arguments: Any) -> Any:
        """What the call returns; None where it refuses in an intended way. Anything else is a defect."""
        try:
            return call(*arguments)
        except INTENDED:
            return None

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
        quantised = agreed.grid.quantise(clip_l2(update, terms.clip) / self.size)
        self.parts[agreed.digest, seat] = quantised
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

    # The network.

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

    @rule(seat=seats)
    def restart(self, seat: int) -> None:
        self.federation.seats[seat % self.size].restart()

    @rule(seat=seats)
    def close(self, seat: int) -> None:
        self.attempt(self.federation.clients[seat % self.size].close_round)

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
    deadline=None,
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
