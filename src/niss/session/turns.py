"""Who sits in which round of a run that carries noise from round to round, and what shows it.

Such a run is planned for rounds of one size m, and for clients that stay out for b rounds after each of theirs (the
separation). With pattern `cyclic` every client belongs to one of b groups, which take turns: all its rounds are a
multiple of b apart. With `any` it may come back at any time from the b-th round on.

A cohort is chosen one round ahead, and then fixed. Those who are there come first, and of them those with the fewest
seats so far. Where too few are left that keep the separation, the places of those who are gone are kept: the round has
its size, and their noise stays in the sum, as it does when somebody does not come. A separation is never broken.

A round is opened with two lists: its own, which the round before announced, and the next one's, which is chosen and
seated now and from then on fixed. So rounds follow one another without a gap, whatever a transport counts: a round in
which nothing could be opened is made up for by the next. One that was opened is over, even if the server was killed
before any upload came; those it carried noise to take it out all the same, and that stays as noise.

**What is saved, and when.** The cohort that was chosen, before it is seated: a tracker seats a round once, and asked in
the same way it answers the same. Everything else with the round that was opened, before anyone is told of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from niss.accounting import CommittedAccount, Plan, Promise, propose_carried_round
from niss.errors import ConfigError, ProtocolError
from niss.protocol import RevealRequest, RoundOpen, Schedule, Server, decode, encode, previous_of
from niss.session.coordinator import Coordinator, Participants, SeatsRefused


@dataclass
class Turns:
    """The seats of a run, by the numbers under which its members joined.

    participants         m, in every round
    separation, pattern  of two rounds of the same member, as in `Plan`
    """

    participants: int
    separation: int
    pattern: str
    _seats: dict[int, int] = field(default_factory=dict, init=False)
    _last: dict[int, int] = field(default_factory=dict, init=False)
    _group: dict[int, int] = field(default_factory=dict, init=False)

    @property
    def needed(self) -> int:
        """How many members fill all rounds."""
        return self.participants * self.separation

    def require(self, members: int) -> None:
        """Refuse (`ProtocolError`) to begin with so few members that nobody could be seated in some round."""
        if members >= self.needed:
            return
        fits = members // self.separation
        fewer = f"plan rounds of at most {fits} participants, or " if fits > 1 else ""
        raise ProtocolError(
            f"rounds of {self.participants} participants, each of whom stays out for {self.separation - 1} rounds "
            f"afterwards, need {self.needed} nodes, and {members} are there",
            hint=f"{fewer}wait for more nodes, or plan a separation of at most {members // self.participants}",
        )

    def choose(self, number: int, present: Collection[int], away: Collection[int] = ()) -> tuple[int, ...]:
        """The members to sit in round `number`, none of whom is seated by this yet; see `commit`.

        present  members that are there
        away     members that are not, but could be seated in their absence

        Raises `ProtocolError` where even with those who are away too few keep the separation.
        """
        self._assign(number, present, away)
        able = [one for one in present if self.may_sit(one, number)]
        gone = [one for one in away if one not in present and self.may_sit(one, number)]
        chosen = [*sorted(able, key=self._turn), *sorted(gone, key=self._turn)][: self.participants]
        if len(chosen) < self.participants:
            raise ProtocolError(
                f"of {len(present) + len(gone)} members {len(chosen)} can sit in round {number + 1} without coming "
                f"back within {self.separation} rounds, and {self.participants} are needed",
                hint="plan rounds of fewer participants, or have more nodes",
            )
        return tuple(sorted(chosen))

    def commit(self, number: int, cohort: Collection[int]) -> None:
        """Fix the cohort of round `number`, which was announced; `ConfigError` for one that breaks the separation."""
        for one in cohort:
            if not self.may_sit(one, number):
                raise ConfigError(
                    f"member {one} would come back to round {number + 1} too early", field="separation"
                )
        for one in cohort:
            self._group.setdefault(one, number % self.separation)
            self._seats[one], self._last[one] = self._seats.get(one, 0) + 1, number

    def may_sit(self, member: int, number: int) -> bool:
        """Whether a seat in round `number` keeps the separation, and the member's group where there are groups."""
        if self.pattern == "cyclic" and self._group.get(member, number) % self.separation != (
            number % self.separation
        ):
            return False
        last = self._last.get(member)
        return last is None or number - last >= self.separation

    def to_json(self) -> dict[str, Any]:
        """Seats, last rounds and groups as JSON, for a server that goes on with the run."""
        return {
            name: [[member, value] for member, value in sorted(values.items())]
            for name, values in (("seats", self._seats), ("last", self._last), ("group", self._group))
        }

    def restore(self, values: dict[str, Any]) -> Self:
        """These turns with what `to_json` gave."""
        self._seats, self._last, self._group = (
            {int(member): int(value) for member, value in values[name]} for name in ("seats", "last", "group")
        )
        return self

    def _turn(self, member: int) -> tuple[int, int, int]:
        """What members are seated by: fewest seats, then longest away, then as they joined."""
        return self._seats.get(member, 0), self._last.get(member, -1), member

    def _assign(self, number: int, present: Collection[int], away: Collection[int]) -> None:
        """Put newcomers into the smallest groups, and members that never sat where this round's group lacks some."""
        if self.pattern != "cyclic":
            return
        here, current = set(present), number % self.separation
        everyone = here | set(away)
        # Of each group: all of it, and those who are there.
        sizes = [[0, 0] for _ in range(self.separation)]

        def count(one: int, change: int) -> None:
            sizes[self._group[one]][0] += change
            sizes[self._group[one]][1] += change * (one in here)

        for one in everyone & self._group.keys():
            count(one, 1)
        # Among groups of one size, the one whose turn comes first.
        turns = sorted(range(self.separation), key=lambda group: (group - number) % self.separation)
        for one in sorted(everyone - self._group.keys()):
            self._group[one] = min(turns, key=lambda group: sizes[group])
            count(one, 1)
        free = sorted(one for one in here if one not in self._last and self._group[one] != current)
        while sizes[current][1] < self.participants and free:
            moved = max(free, key=lambda one: sizes[self._group[one]][1])
            if sizes[self._group[moved]][1] <= self.participants:
                break  # No group has anyone to spare.
            free.remove(moved)
            count(moved, -1)
            self._group[moved] = current
            count(moved, 1)


class CarriedRounds:
    """The rounds of such a run, one after the other.

    number    the next round to open, from 0
    turns     who sat where
    survived  seats of the round that was opened last whose uploads are in its sum
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
        self._account = CommittedAccount(
            schedule,
            relation=plan.relation,
            colluders=plan.colluders,
            promise=Promise.of(plan),
            failure=plan.failure,
        )
        self.turns = Turns(schedule.participants, schedule.separation, "cyclic" if schedule.cyclic else "any")
        self.number = 0
        # By round: number and identity of those who were chosen; up to this round they are seated.
        self._chosen: dict[int, tuple[tuple[int, bytes], ...]] = {}
        self._announced = -1
        self._last: RoundOpen | None = None
        self.survived: tuple[int, ...] = ()
        # By seat in the round that was summed last: nodes that revealed what its repair needed.
        self._helpful: dict[int, int] = {}
        if saved is not None:
            self._restore(saved)

    def open(
        self,
        server: Server,
        identities: dict[int, bytes],
        present: Collection[int],
        save: Callable[[], None],
        following: Sequence[int] | None = None,
    ) -> RoundOpen:
        """Open the next round.

        server      of the protocol
        identities  by number: the members who could be seated, also in their absence
        present     those of them who are there; in the first round, and where turns are not taken by themselves, they
                    are those who sit in it
        save        keeps `to_json`, durably
        following   the members of the next round, where somebody else chooses them

        Raises `ProtocolError` where the rounds are over, or too few members keep the separation; then nothing has
        changed.
        """
        number = self.number
        if number >= self.schedule.rounds:
            raise ProtocolError(f"all {number} rounds that the run is committed to are over")
        if not self._chosen and following is None:
            self.turns.require(len(identities))
        here = self._list(number, identities, present, save, None if following is None else present)
        after = self._list(number + 1, identities, present, save, following)
        previous = None if self._last is None else previous_of(self._last)
        proposed = propose_carried_round(
            self.schedule,
            number,
            run=self._run,
            participants=here,
            following=after,
            previous=previous,
            release=lambda attempt, commitment: self._coordinator.release(number, attempt, commitment),
            account=self._account,
        )
        opened = server.open_round(
            proposed.terms,
            here,
            proposed.beacon,
            following=after,
            previous=previous,
            survived=self.survived,
        )
        self._last, self.survived, self.number = opened, (), number + 1
        self._chosen.pop(number)
        return opened

    def finished(
        self, survivors: tuple[int, ...], nodes: tuple[int, ...], unhelpful: Collection[int]
    ) -> None:
        """The uploads of these seats of the round that was opened last are in its sum.

        nodes      by seat
        unhelpful  those of them that took no part in the repair
        """
        self.survived = survivors
        self._helpful = {seat: node for seat, node in enumerate(nodes) if node not in unhelpful}

    def late_requests(self, server: Server) -> dict[int, RevealRequest]:
        """By node, what members of the committee of the round before are asked after the repair of this one.

        They can take out what was carried to those who did not come. Who did not help to repair its own round would
        have to decline, and is not asked. Without a round before in this process nobody is.
        """
        requests = server.request_carried_reveals().items()
        return {self._helpful[seat]: request for seat, request in requests if seat in self._helpful}

    def _list(
        self,
        number: int,
        identities: dict[int, bytes],
        present: Collection[int],
        save: Callable[[], None],
        given: Collection[int] | None,
    ) -> Participants:
        """The participants of a round: as they were announced, or chosen and seated now; nobody after the last."""
        if number >= self.schedule.rounds:
            return ()
        if number not in self._chosen:
            there = [member for member in present if member in identities]
            cohort = self.turns.choose(number, there, identities) if given is None else tuple(given)
            self._chosen[number] = tuple((member, identities[member]) for member in cohort)
            save()
        chosen = self._chosen[number]
        try:
            seated = self._coordinator.announce(number, tuple(identity for _, identity in chosen))
        except SeatsRefused:
            # Not seated, for good: others may be. Without an answer it may have been, and is asked for again.
            if number > self._announced:
                del self._chosen[number]
            raise
        if number > self._announced:
            self.turns.commit(number, [member for member, _ in chosen])
            self._announced = number
        return seated

    def to_json(self) -> dict[str, Any]:
        """The run between two rounds, as JSON."""
        return {
            "number": self.number,
            "turns": self.turns.to_json(),
            "announced": self._announced,
            "chosen": {
                str(number): [[member, identity.hex()] for member, identity in chosen]
                for number, chosen in self._chosen.items()
            },
            "survived": list(self.survived),
            "last": None if self._last is None else encode(self._last).hex(),
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        self.number = int(saved["number"])
        self.turns.restore(saved["turns"])
        self.survived, self._announced = tuple(saved["survived"]), int(saved["announced"])
        self._chosen = {
            int(number): tuple((int(member), bytes.fromhex(identity)) for member, identity in chosen)
            for number, chosen in saved["chosen"].items()
            # A tracker may have seated them all the same; without one, their keys were lost with the server.
            if self._coordinator.independent or int(number) <= self._announced
        }
        if saved["last"] is not None:
            opened = decode(bytes.fromhex(saved["last"]))
            assert isinstance(opened, RoundOpen)
            self._last = opened
