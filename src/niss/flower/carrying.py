"""The server's side of a run that carries noise from round to round: whose turn it is, and what shows it.

A round is opened with two lists: its own, which the round before announced, and the next one's, which is chosen and
seated now and from then on fixed (`niss.flower.cohorts`). So rounds follow one another without a gap, whatever Flower
counts: a round in which nothing could be opened is made up for by the next. One that was opened is over, even if the
server was killed before any upload came; those it carried noise to take it out all the same, and that stays as noise.

**What is saved, and when.** The cohort that was chosen, before it is seated: a tracker seats a round once, and asked in
the same way it answers the same. Everything else with the round that was opened, before anyone is told of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from niss.accounting import CarriedAccount, Plan, Promise, make_schedule, propose_carried_round
from niss.errors import ConfigError, ProtocolError
from niss.flower.cohorts import Cohorts
from niss.flower.coordinator import Coordinator, packed
from niss.flower.proposal import Proposal
from niss.protocol import (
    Beacon,
    Participant,
    Prekey,
    Previous,
    RevealRequest,
    RoundOpen,
    Schedule,
    Server,
    agree,
    previous_of,
)
from niss.protocol.messages import Cohorts as RoundCohorts
from niss.tracker.client import TrackerRefused
from niss.tracker.store import unpack_participants

Participants = tuple[Participant, ...]


class CarriedRun:
    """The rounds of a run, one after the other.

    number   the next round to open, from 0
    cohorts  who sat where
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        run: bytes,
        coordinator: Coordinator,
        saved: dict[str, Any] | None = None,
    ) -> None:
        """Of a plan and the schedule made for it; `saved` is what `to_json` gave of a run that was begun before."""
        self.schedule, self._run, self._coordinator = schedule, run, coordinator
        self._account = CarriedAccount(
            schedule,
            relation=plan.relation,
            colluders=plan.colluders,
            promise=Promise.of(plan),
            failure=plan.failure,
        )
        self.cohorts = Cohorts(
            schedule.participants, schedule.separation, "cyclic" if schedule.cyclic else "any"
        )
        self.number = 0
        # By round: number and identity of those who were chosen; up to this round they are seated.
        self._chosen: dict[int, tuple[tuple[int, bytes], ...]] = {}
        self._announced = -1
        self._previous: Previous | None = None
        self._survived: tuple[int, ...] = ()
        # By seat in the round that was summed last: nodes that revealed what its repair needed.
        self._helpful: dict[int, int] = {}
        if saved is not None:
            self._restore(saved)

    @classmethod
    def of(
        cls, plan: Plan, proposal: Proposal, coordinator: Coordinator, saved: dict[str, Any] | None
    ) -> CarriedRun | None:
        """The rounds of the run that is proposed; None where nothing is carried. `saved` is `Session.to_json`."""
        if proposal.schedule is None:
            return None
        known = None if saved is None else saved["carried"]
        return cls(plan, proposal.schedule, proposal.run, coordinator, known)

    def open(
        self,
        server: Server,
        identities: dict[int, bytes],
        present: Collection[int],
        save: Callable[[], None],
    ) -> RoundOpen:
        """Open the next round.

        server      of the protocol
        identities  by number: the members who could be seated, also in their absence
        present     those of them who are there
        save        keeps `to_json`, durably

        Raises `ProtocolError` where the rounds are over, or too few members keep the separation; then nothing has
        changed.
        """
        number = self.number
        if number >= self.schedule.rounds:
            raise ProtocolError(f"all {number} rounds that the run is committed to are over")
        if not self._chosen:
            self.cohorts.require(len(identities))
        here = self._list(number, identities, present, save)
        following = self._list(number + 1, identities, present, save)
        proposed = propose_carried_round(
            self.schedule,
            number,
            run=self._run,
            participants=here,
            following=following,
            previous=self._previous,
            release=lambda attempt, commitment: self._coordinator.beacon(number, attempt, commitment),
            account=self._account,
        )
        opened = server.open_round(
            proposed.terms,
            here,
            proposed.beacon,
            following=following,
            previous=self._previous,
            survived=self._survived,
        )
        self._previous, self._survived, self.number = previous_of(opened), (), number + 1
        self._chosen.pop(number)
        return opened

    def finished(
        self, survivors: tuple[int, ...], nodes: tuple[int, ...], unhelpful: Collection[int]
    ) -> None:
        """The uploads of these seats of the round that was opened last are in its sum.

        nodes      by seat
        unhelpful  those of them that took no part in the repair
        """
        self._survived = survivors
        self._helpful = {seat: node for seat, node in enumerate(nodes) if node not in unhelpful}

    def late_requests(self, server: Server) -> dict[int, RevealRequest]:
        """By node, what members of the committee of the round before are asked after the repair of this one.

        They can take out what was carried to those who did not come. Who did not help to repair its own round would
        have to decline, and is not asked. Without a round before in this process nobody is.
        """
        requests = server.request_carried_reveals().items()
        return {self._helpful[seat]: request for seat, request in requests if seat in self._helpful}

    def _list(
        self, number: int, identities: dict[int, bytes], present: Collection[int], save: Callable[[], None]
    ) -> Participants:
        """The participants of a round: as they were announced, or chosen and seated now; nobody after the last."""
        if number >= self.schedule.rounds:
            return ()
        if number not in self._chosen:
            there = [one for one in present if one in identities]
            cohort = self.cohorts.choose(number, there, identities)
            self._chosen[number] = tuple((one, identities[one]) for one in cohort)
            save()
        chosen = self._chosen[number]
        try:
            seated = self._coordinator.announce(number, tuple(identity for _, identity in chosen))
        except TrackerRefused:
            # Not seated, for good: others may be. Without an answer it may have been, and is asked for again.
            if number > self._announced:
                del self._chosen[number]
            raise
        if number > self._announced:
            self.cohorts.commit(number, [one for one, _ in chosen])
            self._announced = number
        return seated

    def to_json(self) -> dict[str, Any]:
        """The run between two rounds, as JSON."""
        previous = self._previous
        return {
            "number": self.number,
            "cohorts": self.cohorts.to_json(),
            "announced": self._announced,
            "chosen": {
                str(number): [[one, identity.hex()] for one, identity in chosen]
                for number, chosen in self._chosen.items()
            },
            "survived": list(self._survived),
            "previous": None
            if previous is None
            else {
                "participants": packed(previous.participants).hex(),
                "terms": previous.terms.hex(),
                "index": previous.beacon.index,
                "value": previous.beacon.value.hex(),
                "signature": previous.beacon.signature.hex(),
            },
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        self.number = int(saved["number"])
        self.cohorts.restore(saved["cohorts"])
        self._survived, self._announced = tuple(saved["survived"]), int(saved["announced"])
        self._chosen = {
            int(number): tuple((int(one), bytes.fromhex(identity)) for one, identity in chosen)
            for number, chosen in saved["chosen"].items()
            # A tracker may have seated them all the same; without one, their keys were lost with the server.
            if self._coordinator.independent or int(number) <= self._announced
        }
        if (previous := saved["previous"]) is not None:
            beacon = Beacon(
                previous["index"], bytes.fromhex(previous["value"]), bytes.fromhex(previous["signature"])
            )
            self._previous = Previous(
                unpack_participants(bytes.fromhex(previous["participants"])),
                bytes.fromhex(previous["terms"]),
                beacon,
            )


def make_run_schedule(plan: Plan, participants: int, coordinates: int, mode: str) -> Schedule | None:
    """The schedule of a run, on a grid of 32 bits where the sums fit it, which halves the uploads; else of 64.

    None where nothing is carried.
    """
    if not plan.kind.carries:
        return None
    schedule = make_schedule(
        plan, participants=participants, coordinates=coordinates, mode=mode, modulus_bits=32
    )
    # Who they are does not matter for the size of the sum.
    people = tuple(
        Participant(number.to_bytes(32, "big"), Prekey(0, bytes(32), b"")) for number in range(participants)
    )
    opened = RoundOpen(
        schedule.terms(b"run", 0), people, Beacon(1, bytes(32), b""), cohorts=RoundCohorts(people, None)
    )
    return schedule if fits(opened) else replace(schedule, modulus_bits=64)


def fits(opened: RoundOpen) -> bool:
    """Whether the sum of a round cannot wrap on its grid."""
    try:
        agree(opened).check_fits()
    except ConfigError:
        return False
    return True
