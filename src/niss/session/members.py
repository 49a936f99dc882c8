"""Who takes part in a run: nodes that joined, those that are left out and why, and whose turn it is.

A client declines for reasons of its own (its budget is spent, its state is old), or because of a neighbour that it
cannot share noise with. The server cannot see which, so it tries: where two or more clients declined and they
are more than half of the neighbours of somebody who did not, that one is set aside, and those who declined are asked
again. If at least half of them take part without it, it is left out for good; if they decline again and nobody else is
suspected, they are left out themselves and everyone set aside comes back.

So a client that spoils rounds spoils one, and another for each that looks as suspicious, before it is out. It cannot
have others put out unless it and its helpers are most of the neighbours of their victim.

**Turns.** A run that carries noise from round to round is planned for rounds of one size m, and for clients that stay
out for b rounds after each of theirs (the separation). With pattern `cyclic` every client belongs to one of b groups,
which take turns: all its rounds are a multiple of b apart. With `any` it may come back at any time from the b-th round
on.

A cohort is chosen one round ahead, and then fixed. Those who are there come first, and of them those with the fewest
seats so far. Where too few are left that keep the separation, the places of those who are gone are kept: the round has
its size, and their noise stays in the sum, as it does when somebody does not come. A separation is never broken.

A round is opened with two lists: its own, which the round before announced, and the next one's, which is chosen and
seated now and from then on fixed. So rounds follow one another without a gap, whatever a transport counts: a round in
which nothing could be opened is made up for by the next. One that was opened is over, even if the server was killed
before any upload came; those it carried noise to take it out all the same, and that stays as noise.

**What is saved, and when.** `Members` and `Turns`, as they stand in their fields. The cohort that was chosen, before it
is seated: a tracker seats a round once, and asked in the same way it answers the same. Everything else with the round
that was opened, before anyone is told of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from niss.accounting import CommittedAccount, Promise, propose_carried_round
from niss.errors import ConfigError, ProtocolError, RemoteProtocolError
from niss.mechanism.noise import colluders_among
from niss.protocol.agreement import previous_of
from niss.protocol.keys import fingerprint
from niss.protocol.messages import RevealRequest, RoundOpen, decode, encode
from niss.protocol.server import Server
from niss.redaction import printable
from niss.session.ports import Coordinator, Participants, SeatsRefused
from niss.session.proposal import Proposal

_FEWEST = 2
SPOILED = "its neighbours declined while it took part, and no longer without it"

Neighbours = Callable[[int], Iterable[int]]
"""The neighbours of a node in a round, for every node that had a seat in it."""


@dataclass
class Member:
    """A node that joined.

    node      the transport's id of it
    number    counts members in the order they came
    identity  its public key
    pinned    names of the limits it has set, in its own word
    rounds    how many rounds of the run it can pay for, as it said when it joined
    step      the last of its steps that the server has seen
    """

    node: int
    number: int
    identity: bytes
    pinned: tuple[str, ...]
    rounds: int
    step: int = 0


@dataclass
class Members:
    """The nodes of a run.

    by_node    those who joined
    left_out   by node: why it takes no part in the rest of the run
    declined   those who declined to join or to repair
    to_ask     of those left out, who is asked again when the next round begins
    refusing   those who declined a round and have not taken part since
    aside      who is not seated for now, in the order they were suspected, with those who declined beside each
    """

    by_node: dict[int, Member] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    declined: set[int] = field(default_factory=set)
    to_ask: set[int] = field(default_factory=set)
    refusing: set[int] = field(default_factory=set)
    aside: dict[int, frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Of those who did not answer when they were asked to join: how often, and for how many rounds they are let be.
        self._failed: dict[int, int] = {}
        self._let_be: dict[int, int] = {}
        # Members of a run that was resumed, by identity, that have not enrolled again.
        self._away = {member.identity for member in self.by_node.values()}
        self.resumed = False

    @property
    def gathered(self) -> bool:
        """Whether anyone has joined yet; after the run was resumed, whether anyone has come back."""
        return len(self.by_node) > len(self._away)

    def admit(self, node: int, identity: bytes, pinned: tuple[str, ...], rounds: int, step: int) -> Member:
        """The member with this identity, known as that node from here on.

        Raises `RemoteProtocolError` for an identity that is another's, and after the run was resumed for a client that
        has forgotten what it answered before, or may have: what it spent then is not in its books.
        """
        known = next((member for member in self.by_node.values() if member.identity == identity), None)
        if node in self.by_node and known is not self.by_node[node]:
            raise RemoteProtocolError("it came back with another identity")
        if known is None:
            if self.resumed and "state" not in pinned:
                raise RemoteProtocolError(
                    "it is new to a run that was resumed and has no niss-state: it may not know what it spent"
                )
            known = self.by_node[node] = Member(node, len(self.by_node), identity, pinned, rounds)
        elif identity in self._away:
            if step <= known.step:
                raise RemoteProtocolError(
                    f"its state is at step {step}, but the run has seen step {known.step} of it"
                )
            self._move(known, node)
        elif known.node != node:
            raise RemoteProtocolError(f"identity {fingerprint(identity)} has already joined as another node")
        self._away.discard(identity)
        known.step = max(known.step, step)
        return known

    def _move(self, member: Member, node: int) -> None:
        """Know a member under another of the transport's ids, with all that is held against it."""
        before, member.node = member.node, node

        def named(one: int) -> int:
            return node if one == before else one

        self.by_node = {named(one): known for one, known in self.by_node.items()}
        self.left_out = {named(one): why for one, why in self.left_out.items()}
        self.declined, self.to_ask, self.refusing = (
            set(map(named, nodes)) for nodes in (self.declined, self.to_ask, self.refusing)
        )
        self.aside = {named(one): frozenset(map(named, beside)) for one, beside in self.aside.items()}

    def leave_out(self, node: int, reason: str) -> None:
        """Go on without a node; the first reason stands."""
        self.left_out.setdefault(node, printable(reason))

    def note_failure(self, node: int, reason: str) -> None:
        """A node did not answer when it was asked to join: from the second time on it is let be for some rounds.

        Whoever waits for it waits in vain, so the rounds become twice as many each time; it may have been away, and is
        asked again.
        """
        failed = self._failed[node] = self._failed.get(node, 0) + 1
        if failed > 1:
            self.leave_out(node, f"did not join: {reason}")
            self._let_be[node] = 2 ** (failed - 1)

    def note_unreached(self, node: int, reason: str) -> None:
        """A node declined to join since it could not use the tracker: it is asked again when the next round begins."""
        self.to_ask.add(node)
        self.leave_out(node, reason)

    def note_declined(self, node: int, reason: str) -> None:
        """A node declined to join or to repair: the first time it is left out only until the next round begins."""
        if node not in self.declined:
            self.to_ask.add(node)
        self.declined.add(node)
        self.leave_out(node, reason)

    def ask_again(self) -> None:
        """A round begins: whoever declined once, since this was last called, is asked again."""
        for node in self.to_ask:
            self.left_out.pop(node, None)
        self.to_ask.clear()
        self._let_be = {node: left - 1 for node, left in self._let_be.items() if node in self.left_out}
        self.to_ask |= {node for node, left in self._let_be.items() if left <= 0}

    def may_be_asked(self, nodes: Iterable[int]) -> list[int]:
        """Those of these nodes that may be asked in the next round, whether they have joined or not."""
        out = (self.left_out.keys() - self.to_ask) | self.aside.keys()
        return [node for node in nodes if node not in out]

    def seatable(self, nodes: Iterable[int]) -> list[int]:
        """Those of these nodes that joined and may take part now."""
        out = self.left_out.keys() | self.aside.keys()
        return [node for node in nodes if node in self.by_node and node not in out]

    def judge(self, refused: dict[int, str], took_part: Iterable[int], neighbours: Neighbours) -> None:
        """After the uploads of a round: leave out those who declined, some of them until the next.

        refused     by node: why it declined
        took_part   nodes whose upload is in the sum
        neighbours  of a node in this round
        """
        present, blamed = set(took_part), dict[int, str]()
        if self.aside:
            last, beside = next(reversed(self.aside.items()))
            if 2 * len(beside & present) >= len(beside):
                # It made the difference; whoever was suspected before it did not.
                blamed[last] = SPOILED
                self.aside.clear()
        again = [node for node in refused if node in self.refusing]
        self.refusing = (self.refusing - present) | set(refused)
        if (suspect := _suspect(frozenset(refused), neighbours)) is not None:
            node, beside = suspect
            self.aside[node] = beside
        elif again:
            blamed |= {node: refused[node] for node in again}
            self.aside.clear()
        for node, reason in (refused | blamed).items():
            self.leave_out(node, reason)
        self.to_ask |= refused.keys() - blamed.keys()


def _suspect(declined: frozenset[int], neighbours: Neighbours) -> tuple[int, frozenset[int]] | None:
    """Who did not decline though most of its neighbours did, the largest part of them first; None: nobody."""
    candidates = dict.fromkeys(
        other for node in sorted(declined) for other in neighbours(node) if other not in declined
    )
    best: tuple[float, int, frozenset[int]] | None = None
    for node in candidates:
        around = frozenset(neighbours(node))
        beside = around & declined
        part = len(beside) / len(around)
        if len(beside) >= _FEWEST and part > 0.5 and (best is None or part > best[0]):
            best = (part, node, beside)
    return None if best is None else best[1:]


@dataclass
class Turns:
    """The seats of a run that carries noise over, by the numbers under which its members joined.

    participants         m, in every round
    separation, pattern  of two rounds of the same member, as in `Plan`
    seats, last          how many a member had, and its last round
    group                of a member, where they take turns in groups
    number               the next round to open, from 0
    chosen               by round that is yet to be opened: those who were chosen for it
    announced            up to this round they are seated
    opened               the round that was opened last, encoded
    survived             seats of it whose uploads are in its sum
    """

    participants: int
    separation: int
    pattern: str
    seats: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    group: dict[int, int] = field(default_factory=dict)
    number: int = 0
    chosen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    announced: int = -1
    opened: bytes | None = None
    survived: tuple[int, ...] = ()

    def require(self, members: int) -> None:
        """Refuse (`ProtocolError`) to begin with so few members that nobody could be seated in some round."""
        needed = self.participants * self.separation
        if members >= needed:
            return
        fits = members // self.separation
        fewer = f"plan rounds of at most {fits} participants, or " if fits > 1 else ""
        raise ProtocolError(
            f"rounds of {self.participants} participants, each of whom stays out for {self.separation - 1} rounds "
            f"afterwards, need {needed} nodes, and {members} are there",
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
        for member in cohort:
            if not self.may_sit(member, number):
                raise ConfigError(
                    f"member {member} would come back to round {number + 1} too early", field="separation"
                )
        for member in cohort:
            self.group.setdefault(member, number % self.separation)
            self.seats[member], self.last[member] = self.seats.get(member, 0) + 1, number

    def may_sit(self, member: int, number: int) -> bool:
        """Whether a seat in round `number` keeps the separation, and the member's group where there are groups."""
        if self.pattern == "cyclic" and (self.group.get(member, number) - number) % self.separation:
            return False
        last = self.last.get(member)
        return last is None or number - last >= self.separation

    def _turn(self, member: int) -> tuple[int, int, int]:
        """What members are seated by: fewest seats, then longest away, then as they joined."""
        return self.seats.get(member, 0), self.last.get(member, -1), member

    def _assign(self, number: int, present: Collection[int], away: Collection[int]) -> None:
        """Put newcomers into the smallest groups, and members that never sat where this round's group lacks some."""
        if self.pattern != "cyclic":
            return
        here, current = set(present), number % self.separation
        everyone = here | set(away)
        # Of each group: all of it, and those who are there.
        sizes = [[0, 0] for _ in range(self.separation)]

        def count(member: int, change: int) -> None:
            sizes[self.group[member]][0] += change
            sizes[self.group[member]][1] += change * (member in here)

        for member in everyone & self.group.keys():
            count(member, 1)
        # Among groups of one size, the one whose turn comes first.
        turns = sorted(range(self.separation), key=lambda group: (group - number) % self.separation)
        for member in sorted(everyone - self.group.keys()):
            self.group[member] = min(turns, key=lambda group: sizes[group])
            count(member, 1)
        free = sorted(one for one in here if one not in self.last and self.group[one] != current)
        while sizes[current][1] < self.participants and free:
            moved = max(free, key=lambda one: sizes[self.group[one]][1])
            if sizes[self.group[moved]][1] <= self.participants:
                break  # No group has anyone to spare.
            free.remove(moved)
            count(moved, -1)
            self.group[moved] = current
            count(moved, 1)


class CarriedRounds:
    """The rounds of a run that carries noise over, one after the other.

    turns    who sat where
    helpful  by seat in the round that was summed last: nodes that revealed what its repair needed
    """

    def __init__(
        self, proposal: Proposal, coordinator: Coordinator, members: Members, turns: Turns | None = None
    ) -> None:
        """`turns` are those of a run that was begun before."""
        schedule, plan = proposal.schedule, proposal.plan
        assert schedule is not None
        self.schedule, self._run = schedule, proposal.run
        self._coordinator, self._members = coordinator, members
        self._account = CommittedAccount(
            schedule,
            relation=plan.relation,
            colluders=colluders_among(plan.collusion, schedule.participants),
            promise=Promise.of(plan),
            failure=plan.failure,
        )
        pattern = "cyclic" if schedule.cyclic else "any"
        self.turns = turns or Turns(schedule.participants, schedule.separation, pattern)
        if not coordinator.address:
            # A tracker may have seated them all the same; without one, their keys were lost with the server.
            for number in [one for one in self.turns.chosen if one > self.turns.announced]:
                del self.turns.chosen[number]
        self.helpful: dict[int, int] = {}

    def open(
        self,
        server: Server,
        nodes: Collection[int],
        save: Callable[[], None],
        following: Sequence[int] | None = None,
    ) -> RoundOpen:
        """Open the next round.

        server     of the protocol
        nodes      who is there; in the first round, and where somebody else chooses, they are those who sit in it
        save       keeps the turns, durably
        following  who takes part in the next round, where somebody else chooses them

        Raises `ProtocolError` where the rounds are over, or too few members keep the separation; then nothing has
        changed.
        """
        turns, members = self.turns, self._members.by_node
        number = turns.number
        if number >= self.schedule.rounds:
            raise ProtocolError(f"all {number} rounds that the run is committed to are over")
        able = [one.number for one in members.values() if self._coordinator.ready(one.identity)]
        if not turns.chosen and following is None:
            turns.require(len(able))
        present = [members[node].number for node in nodes]
        given = None if following is None else [members[node].number for node in following]
        here = self._list(number, present, able, save, None if given is None else present)
        after = self._list(number + 1, present, able, save, given)
        previous = None
        if turns.opened is not None:
            before = decode(turns.opened)
            assert isinstance(before, RoundOpen)
            previous = previous_of(before)
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
            survived=turns.survived,
        )
        turns.opened, turns.survived, turns.number = encode(opened), (), number + 1
        turns.chosen.pop(number)
        return opened

    def finish(self, survivors: tuple[int, ...], nodes: tuple[int, ...], unhelpful: Collection[int]) -> None:
        """The uploads of these seats of the round that was opened last are in its sum.

        nodes      by seat
        unhelpful  those of them that took no part in the repair
        """
        self.turns.survived = survivors
        self.helpful = {seat: node for seat, node in enumerate(nodes) if node not in unhelpful}

    def late_requests(self, server: Server) -> dict[int, RevealRequest]:
        """By node, what members of the committee of the round before are asked after the repair of this one.

        They can take out what was carried to those who did not come. Who did not help to repair its own round would
        have to decline, and is not asked. Without a round before in this process nobody is.
        """
        requests = server.request_carried_reveals().items()
        return {self.helpful[seat]: request for seat, request in requests if seat in self.helpful}

    def _list(
        self,
        number: int,
        present: Collection[int],
        able: Collection[int],
        save: Callable[[], None],
        given: Collection[int] | None,
    ) -> Participants:
        """The participants of a round: as they were announced, or chosen and seated now; nobody after the last."""
        turns = self.turns
        if number >= self.schedule.rounds:
            return ()
        if number not in turns.chosen:
            turns.chosen[number] = turns.choose(number, present, able) if given is None else tuple(given)
            save()
        chosen = turns.chosen[number]
        identities = {member.number: member.identity for member in self._members.by_node.values()}
        try:
            seated = self._coordinator.announce(number, tuple(identities[member] for member in chosen))
        except SeatsRefused:
            # Not seated, for good: others may be. Without an answer it may have been, and is asked for again.
            if number > turns.announced:
                del turns.chosen[number]
            raise
        if number > turns.announced:
            turns.commit(number, chosen)
            turns.announced = number
        return seated
