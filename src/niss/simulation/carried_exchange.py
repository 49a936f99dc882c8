"""The real protocol inside the simulator, for runs whose noise is carried from round to round."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import (
    CarriedAccount,
    Plan,
    Promise,
    make_schedule,
    propose_carried_round,
    run_grid_delta,
)
from niss.errors import PrivacyError, RunFolderError
from niss.protocol.agreement import agree, participants_hash
from niss.protocol.carrying import previous_of
from niss.protocol.client import Client
from niss.protocol.keys import Identity
from niss.protocol.messages import Participant, RoundOpen
from niss.simulation.exchange import ROUNDING, Exchanged, IntArray, Parties

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class CarriedExchanged(Exchanged):
    """A round that carries noise on, and takes out what was carried to it.

    survived    the seats of the round before whose uploads were summed
    """

    survived: tuple[int, ...] = ()

    @property
    def predicted_variance(self) -> float:
        """With what is carried on, and all that is taken out."""
        left, taken = self._left, 0.0
        if (before := self.agreed.before) is not None:
            taken = before.taken(self.outcome.survivors)
        # Of these, the first were put back and the others taken out, in this sum.
        senders, receivers = self.outcome.repaired
        changed = taken - senders + receivers
        return super().predicted_variance - left + changed + self.outcome.under_way

    @property
    def scale(self) -> float:
        """Equal in all rounds: noise is taken out as it was added."""
        return 1.0

    @property
    def earlier_covariances(self) -> tuple[float, ...]:
        """With the round before: half of what both sums together have less than each alone.

        Together they have what stays, and what is carried on, less what the round before had carried on.
        """
        if (before := self.agreed.before) is None:
            return ()
        stays = super().predicted_variance + self.outcome.under_way
        return ((stays - before.added(self.survived) - self.predicted_variance) / 2.0,)

    @property
    def _left(self) -> float:
        before = self.agreed.before
        if before is None:
            return 0.0
        return before.left(self.survived, self.outcome.survivors)[1] - sum(self.outcome.repaired)

    @property
    def public(self) -> dict[str, str]:
        """Also the schedule, and the next cohort that the beacon was let out for."""
        opened = self.agreed.opened
        assert opened.cohorts is not None
        assert opened.terms.carrying is not None
        following = participants_hash(opened.cohorts.following)
        return super().public | {"following": following.hex(), "plan": opened.terms.carrying.plan.hex()}


class CarriedExchange(Parties):
    """All parties of a run with carried shares in one process; the arguments are those of `ProtocolExchange`.

    participants  of every round

    The keys of a cohort are announced one round ahead and live in this process, so that a run goes on in the process
    that began it, or not at all.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        participants: int,
        coordinates: int,
        mode: str = "tolerate",
        grid_bits: int | None = None,
        modulus_bits: int = 64,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.schedule = make_schedule(
            plan,
            participants=participants,
            coordinates=coordinates,
            mode=mode,
            grid_bits=grid_bits,
            modulus_bits=modulus_bits,
        )
        super().__init__(plan, self.schedule.rounds, entropy)
        self._promise = Promise.of(plan)
        # A given tau^2 promises nothing, so nothing is too dear.
        self._budget = math.inf
        if plan.tau2 is None and (promise := plan.committed(participants)).private:
            self._budget = promise.mu
        self._accounts: dict[int, CarriedAccount] = {}
        self._last: RoundOpen | None = None
        self._survived: tuple[int, ...] = ()
        self._announced: tuple[Participant, ...] = ()
        self._before: list[Client] = []

    def require_next(self, number: int) -> None:
        """Refuse (`RunFolderError`) a round that this process did not announce."""
        expected = 0 if self._last is None else self._last.terms.round + 1
        if number != expected:
            raise RunFolderError(
                f"round {number + 1} of a run whose noise is carried over cannot be played after round {expected}: the "
                "keys that its clients were announced with are gone with the process that made them",
                hint="start the run again, or resume runs with exchange = 'simulated'",
            )

    def play(
        self,
        number: int,
        members: IntArray,
        updates: Callable[[int], NDArray[np.floating[Any]]],
        *,
        following: IntArray,
        charge: Callable[[FloatArray, float, int], None],
        absent: Collection[int] = (),
    ) -> CarriedExchanged:
        """One round; as in `ProtocolExchange.play`.

        members    those that the round before announced
        following  the clients of the next round, none in the last
        charge     told the mu of each seat in the joint view
        """
        self.require_next(number)
        participants = self._announced or self._seated(members)
        clients = [self._client(int(member)) for member in members]
        if [one.identity for one in participants] != [client.public for client in clients]:
            raise PrivacyError(f"round {number + 1}: others take part than were announced")
        announced = self._seated(following)
        opened = self._open(number, participants, announced)
        # A round without updates costs nothing and is not charged.
        mus = np.sqrt([self._accounts[int(member)].cost(number) for member in members])
        marginal = self._account().marginal_mu(number)
        if number < self.schedule.horizon:
            charge(mus, marginal, opened.terms.attempt)
        sent = self._collect(opened, members, updates, absent)
        if self.schedule.committee:
            self._repair(clients, self._before)
        outcome, survived = self._server.finish(), self._survived
        # Of a round that is repaired the committee is asked once more, after the next one.
        waiting = clients if self.schedule.committee and announced else []
        over, self._before = [*self._before, *(() if waiting else clients)], waiting
        for client in over:
            client.close_round()
        self._last, self._survived, self._announced = opened, outcome.survivors, announced
        rounding = run_grid_delta(self.schedule, self._promise)
        return CarriedExchanged(
            outcome, agree(opened), None, float(mus.max()), marginal, rounding, sent, survived
        )

    def _open(
        self, number: int, participants: tuple[Participant, ...], following: tuple[Participant, ...]
    ) -> RoundOpen:
        previous = None if self._last is None else previous_of(self._last)
        try:
            proposed = propose_carried_round(
                self.schedule,
                number,
                run=self._run,
                participants=participants,
                following=following,
                previous=previous,
                release=lambda attempt, commitment: self._chain.release(number, attempt, commitment),
                account=self._account(),
            )
        except PrivacyError as error:
            raise PrivacyError(f"round {number + 1}: {error.message}", hint=error.hint) from None
        return self._server.open_round(
            proposed.terms,
            participants,
            proposed.beacon,
            following=following,
            previous=previous,
            survived=self._survived,
        )

    def _account(self) -> CarriedAccount:
        return CarriedAccount(
            self.schedule,
            relation=self._plan.relation,
            colluders=self._plan.colluders,
            promise=self._promise,
            budget=self._budget,
            failure=self._plan.failure,
        )

    def _new_client(self, member: int) -> Client:
        account = self._accounts[member] = self._account()
        size = self.schedule.participants
        policy = self._policy(participants=size, mu=self._budget * ROUNDING, schedule=self.schedule)
        return Client(
            Identity.generate(self._entropy),
            policy,
            assess=account.assess,
            charge=account.charging(_ChargedAtOnce(), str(member)),
            persist=lambda _kept: None,
        )


class _ChargedAtOnce:
    """The simulator charges a round for all its participants at once, before the first upload."""

    def charge(
        self, round: int, attempt: int, mus: Mapping[str, tuple[float, float]], basis: Mapping[str, Any]
    ) -> None:
        del round, attempt, mus, basis
