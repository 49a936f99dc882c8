"""The server's half of a run: who joined, the round under way, what became of everyone.

It sends nothing itself: requests come out, replies go in (`drive`). A round goes through stages:

    begin     enrol: whoever is new, or has no key left, is asked to join
    take      enrol -> round: the round is opened, and saved before anyone is told; nobody to open it for: done
    take      round -> reveal, mode `repair`: the committee reveals what takes the noise of the lost out
    take      reveal -> late, noise carried over: the committee of the round before is asked once more
    finish    the sum, and what is left in it; everyone who may have answered is charged

The checks are those of `niss.protocol.server`; here a node that breaks the rules becomes a reason in words. Keys are
handed out, and the beacon is held, by a coordinator.

A server that was killed goes on with the same run from what `save` was given last. A transport may know the nodes by
other ids then, so everyone enrols once more under the same proposal, and members are known again by their identity.

**Nothing is charged twice.** A client answers no attempt of a round a second time, and pays before it answers. So a
round that was open when the server died is given up and charged, as those asked may have paid for it, and the run goes
on with the next. A round that nobody was asked about is begun anew.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from niss.accounting import DrawnAccount, Promise, propose_round
from niss.errors import ConfigError, NissError, PrivacyError, ProtocolError, RemoteProtocolError
from niss.protocol.agreement import agree
from niss.protocol.keys import Entropy, Identity
from niss.protocol.messages import Message, Refusal, Reveal, RoundOpen, Upload, decode, encode
from niss.protocol.server import Server
from niss.redaction import printable
from niss.runs import RoundRecord
from niss.session.books import Books, RunState, SessionRound
from niss.session.members import CarriedRounds, Member
from niss.session.metrics import next_clip
from niss.session.ports import (
    USELESS,
    Coordinator,
    CoordinatorAway,
    Deliver,
    Reply,
    Request,
    Stage,
    check_refusal,
    in_words,
)
from niss.session.proposal import (
    ENROLMENT_PREFIX,
    RUN_BYTES,
    Enrolment,
    Proposal,
    Setup,
    read_proposal,
    require_same,
)

# Each upload brings a fresh key; the others are for rounds whose upload is lost.
PREKEYS = 4
LIED = "what it revealed in the repair, or committed to, is proven false"
_KILLED = "the server ended while it was open; it is charged to those who were asked"

LOG = logging.getLogger(__name__)
FloatArray = NDArray[np.float64]


class Session:
    """A run from its first enrolment to its last round.

    stage     of the round
    proposal  of the run, as it was signed
    state     all that is remembered of it
    members   who joined, and who is left out
    books     what was charged, and what happened
    round     the one that was opened last in this process, once it is over with its outcome
    refused   why the round that was begun last could not be opened; None: it was. A `CoordinatorAway` says that it is
              put off, and neither skipped nor paid for by anyone: it can be begun again
    """

    def __init__(
        self,
        setup: Setup,
        *,
        identity: Identity,
        coordinator: Coordinator,
        save: Callable[[RunState], None] = lambda _state: None,
        saved: RunState | None = None,
        entropy: Entropy = os.urandom,
    ) -> None:
        """Start a run and sign its proposal, or go on with one that a server before this one started.

        identity     the server's
        coordinator  hands out keys and holds the beacon
        save         keeps the state, durably and before anyone is told of what is in it, as it is when this is called
        saved        what `save` was given last of the run to go on with; `ConfigError` where it was started with other
                     settings
        """
        # What travels is settled, whatever a node takes for usual.
        plan = replace(setup.plan, mode=setup.plan.settled_mode)
        self._setup, self._server, self._coordinator = setup, Server(identity), coordinator
        self._port = save
        known = None if saved is None else read_proposal(saved.proposal)
        run = entropy(RUN_BYTES) if known is None else known.run
        anchor = coordinator.start_run(run, setup.rounds, None if saved is None else saved.coordinator)
        self.proposal = Proposal(
            run=run,
            server=identity.public,
            holder=coordinator.holder,
            anchor=anchor,
            plan=plan,
            participants=setup.participants,
            prekeys=PREKEYS,
            tracker=coordinator.address,
            metrics=setup.metrics,
            schedule=setup.schedule(),
            deadline=setup.deadline,
        )
        if known is not None:
            require_same(known, self.proposal)
        first = plan.clip if setup.adaptive is None else setup.adaptive.start
        self.state = saved or RunState(self.proposal.signed(identity), first)
        self.members = self.state.members
        assess = DrawnAccount(relation=plan.relation, failure=plan.failure, promise=Promise.of(plan))
        self.books = Books(self.proposal, self.state, assess)
        self.stage = Stage.DONE
        self.round: SessionRound | None = None
        self.refused: NissError | None = None
        # Nodes that could not use the tracker when they were asked to join, and the round that was put off for them.
        self._unreached: set[int] = set()
        self._put_off = -1
        self._opening: Callable[[], None] | None = None
        self._asked: dict[int, Request] = {}
        # They depend on the number of participants and the clip alone, so they are made once for each.
        self._terms = lru_cache(maxsize=16)(setup.terms)
        self._carried: CarriedRounds | None = None
        if self.proposal.schedule is not None:
            self._carried = CarriedRounds(self.proposal, coordinator, self.members, self.state.turns)
            self.state.turns = self._carried.turns
        if saved is not None:
            self.members.resumed = True
            self.state.resumed += 1
            if self.state.pending is not None:
                self.books.lose(self.state.pending, _KILLED)

    def save(self) -> None:
        """Have `state` kept as it is now, for a server that goes on with it."""
        under_way = self.stage not in (Stage.ENROL, Stage.DONE)
        self.state.pending = self.books.pending(self._current) if under_way else None
        self.state.coordinator = self._coordinator.secrets()
        self._port(self.state)

    def begin(
        self,
        number: int,
        nodes: Iterable[int],
        *,
        connected: Collection[int] = (),
        coordinates: int = 0,
        clip: float | None = None,
        following: Sequence[int] | None = None,
    ) -> None:
        """Begin round `number`, counted from 0.

        nodes        who is to take part, seat by seat; where noise is carried over, who may be chosen
        connected    all who are there: they are asked to join at first. Where noise is carried over, no others are
                     asked to take part
        coordinates  of the model
        clip         of the round; None: as `adaptive` has it, or the plan's
        following    where noise is carried over and somebody else than this session says whose turn it is: who takes
                     part in the next round; `nodes` are those of this one
        """
        nodes = tuple(nodes)
        self._opening = partial(
            self._try_to_open,
            number,
            nodes,
            connected,
            coordinates + len(self.proposal.metrics.ranges),
            following,
        )
        self.state.clip = self.state.clip if clip is None else clip
        self.members.ask_again()
        everyone = dict.fromkeys((*nodes, *(following or ())))
        if not self.members.gathered:
            everyone |= dict.fromkeys(connected)
        self.refused = None
        self._unreached.clear()
        self._ask(
            Stage.ENROL,
            {
                node: self.state.proposal
                for node in everyone
                if node not in self.members.left_out and not self._is_ready(node)
            },
        )

    def requests(self) -> dict[int, Request]:
        """By node, what is to be asked in this stage."""
        return dict(self._asked)

    def take(self, replies: dict[int, Reply | str]) -> None:
        """The replies of this stage, or why there are none; they are taken out of the mapping as they are read.

        What is forged, damaged, declined or missing is at most its node's loss, and noted.
        """
        stage = self.stage
        if stage is Stage.ENROL:
            for node in list(replies):
                self._admit(node, replies.pop(node))
            assert self._opening is not None
            self._opening()
        elif stage is Stage.ROUND:
            self._take_uploads(replies)
        elif stage is not Stage.DONE:
            self._hear(replies, self._current.unhelpful)
            if stage is Stage.REVEAL and self._carried is not None:
                late = self._carried.late_requests(self._server)
                self._ask(Stage.LATE, {node: encode(request) for node, request in late.items()})
            else:
                self._ask(Stage.DONE, {})

    def hear(self, node: int, reply: Reply) -> None:
        """An upload as soon as it is there, summed and dropped; `take` then ends the stage, with the other replies."""
        if self.stage is not Stage.ROUND:
            raise ConfigError("no uploads are taken now", field="session")
        self._hear({node: reply}, self._current.lost)

    def willing(self, nodes: Iterable[int]) -> list[int]:
        """Those of these nodes that could take part if they were drawn; new ones count."""
        nodes = list(nodes)
        known = [node for node in nodes if node in self.members.by_node]
        spent = set(known) - set(self.books.with_room(known))
        return [node for node in self.members.may_be_asked(nodes) if node not in spent]

    def over(self, connected: Collection[int]) -> bool:
        """Whether no later round can be opened: too few of those who joined, and may be asked, can pay for another.

        connected  all who are there: whoever of them has not joined may yet. Never where noise is carried over, since
                   what a run costs is there for all of it
        """
        joined, everyone = self.members.by_node, {*self.members.by_node, *connected}
        spent = self._carried is None and len(self.books.with_room(joined)) < len(joined)
        return spent and len(self.willing(everyone)) < self.proposal.participants

    def skip(self, number: int, why: str) -> None:
        """Note that round `number`, counted from 0, does not take place."""
        self.books.skip(number, why)
        self._close()

    def _close(self) -> None:
        """The round is over, or was never opened."""
        self._opening = None
        self._ask(Stage.DONE, {})

    def finish(self) -> tuple[FloatArray | None, RoundRecord]:
        """End the round: the sum, with weights 1 / participants, and what happened; None where nothing was summed.

        Whoever is proven to have lied in the repair is left out from here on.
        """
        current = self._current
        outcome = self._server.finish()
        # Whoever asked for the sum has it: of a large model there is not to be another one.
        size = outcome.total.size - len(self.proposal.metrics.ranges)
        current.outcome = replace(outcome, total=outcome.total[size:].copy())
        if self._setup.adaptive is not None:
            self.state.clip = next_clip(self._setup.adaptive, self.proposal.metrics, current.agreed, outcome)
        if self._carried is not None:
            self._carried.finish(outcome.survivors, current.nodes, current.unhelpful)
        for node in (current.nodes[seat] for seat in outcome.liars):
            current.unhelpful[node] = LIED
            self.members.leave_out(node, LIED)
        self._close()
        return outcome.total if outcome.survivors else None, self.books.enter(current)

    def mean(self, total: FloatArray) -> tuple[FloatArray, dict[str, float]]:
        """The sum of a round, made into the mean of the updates of those who are in it; and by name the hidden metrics.

        Where noise is carried over the mean of the updates stays the sum, with the weight of one participant for each:
        every round has to enter the model with the same factor.
        """
        metrics, current = self.proposal.metrics, self.round
        assert current is not None
        means, mean = self.books.means(current), total[: total.size - len(metrics.ranges)]
        mean *= current.scale
        if means and metrics.weight is not None:
            name, cap = metrics.weight
            mean /= self.books.weigh(means[name] / cap)
        return mean, means

    @contextmanager
    def _reply_of(self, node: int, fail: Callable[[int, str], None]) -> Iterator[None]:
        """Whatever comes of a reply is the failure of its node: logged, noted by `fail`, and never the end of a run."""
        try:
            yield
        except Exception as error:
            LOG.warning(
                "niss: the reply of node %d in stage %s does not count: %s", node, self.stage, in_words(error)
            )
            fail(node, in_words(error))

    def _admit(self, node: int, reply: Reply | str) -> None:
        """Take an enrolment; a node whose keys are not in order, or that declines twice, is left out of the run."""
        if isinstance(reply, str):
            self.members.note_failure(node, reply)
            return
        with self._reply_of(node, self.members.leave_out):
            message = None if reply.body.startswith(ENROLMENT_PREFIX) else decode(reply.body)
            if isinstance(message, Refusal):
                if message.reason == USELESS:
                    self._unreached.add(node)
                    self.members.note_unreached(node, f"declined: {USELESS}")
                else:
                    self.members.note_declined(node, f"declined: {message.reason}")
                return
            enrolment = Enrolment.from_bytes(reply.body)
            enrolment.check(self.proposal)
            if self._setup.coalition is not None:
                self._setup.coalition.require(enrolment.identity)
            self.members.admit(node, enrolment.identity, enrolment.pinned, enrolment.rounds, reply.step)
            self._coordinator.enrolled(enrolment.identity, enrolment.prekeys)

    def _try_to_open(
        self,
        number: int,
        wanted: tuple[int, ...],
        connected: Collection[int],
        coordinates: int,
        following: Sequence[int] | None,
    ) -> None:
        """Open the round, and save it before anyone is told; where that cannot be, the round is skipped.

        Too few nodes, or unlucky graphs: the next round may do better. Where the tracker is away, the round is put off.
        The arguments are those of `begin`.
        """
        ready = [node for node in self.members.seatable(wanted) if self._is_ready(node)]
        nodes = self.books.with_room(ready)
        survived = () if self._carried is None else self._carried.turns.survived
        try:
            if self._carried is None:
                opened = self._open(number, nodes, coordinates)
            else:
                opened = self._carried.open(self._server, nodes, self.save, following)
        except (ProtocolError, PrivacyError) as error:
            self.refused, spent = self._outage(number, error) or error, len(ready) - len(nodes)
            if isinstance(self.refused, CoordinatorAway):
                self._close()
                return
            why = getattr(error, "detail", error.message)
            why += f"; {spent} can pay for no more" if spent else ""
            self.skip(number, f"{why}; {error.hint}" if self._carried is not None and error.hint else why)
            return
        node_of = {member.identity: node for node, member in self.members.by_node.items()}
        by_seat = tuple(node_of[participant.identity] for participant in opened.participants)
        self.round = current = SessionRound(number, agree(opened), by_seat, survived)
        self._ask(Stage.ROUND, dict.fromkeys(by_seat, encode(opened)))
        if self._carried is not None and connected:
            for node in by_seat:
                if node not in connected or node in self.members.left_out:
                    current.lost[node] = self.members.left_out.get(node, "it is not connected")
                    del self._asked[node]
        self.save()

    def _outage(self, number: int, error: NissError) -> CoordinatorAway | None:
        """What is to be waited for, where a round could not be opened: the coordinator, for this server or its nodes.

        Nodes that could not use the tracker, though it is there for the server, are asked once more at once: it may
        have come back in between. What else keeps them from it is not waited for.
        """
        if isinstance(error, CoordinatorAway) or not self._unreached:
            return error if isinstance(error, CoordinatorAway) else None
        if self._put_off == number and not self._coordinator.away():
            return None
        self._put_off = number
        return CoordinatorAway(f"{len(self._unreached)} nodes could not use the tracker: {in_words(error)}")

    def _open(self, number: int, nodes: list[int], coordinates: int) -> RoundOpen:
        """A round that stands alone, on the first graph that keeps the promise; nobody has been asked anything yet."""
        proposal, coordinator = self.proposal, self._coordinator
        if len(nodes) < proposal.participants:
            raise ProtocolError(
                f"{len(nodes)} nodes could take part, at least {proposal.participants} are needed: `participants`, or "
                "the fewest that collusion and dropouts of the plan leave noise to share"
            )
        identities = tuple(self.members.by_node[node].identity for node in nodes)
        proposed = propose_round(
            proposal.plan,
            number,
            seat=lambda attempt: coordinator.seat(number, attempt, identities, proposal.participants),
            terms=lambda people: self._terms(len(people), coordinates, self.state.clip, proposal.run),
            release=lambda attempt, commitment: coordinator.release(number, attempt, commitment),
            assess=self.books.assess,
            allowed=proposal.round_mu,
        )
        return self._server.open_round(proposed.terms, proposed.participants, proposed.beacon)

    def _take_uploads(self, replies: dict[int, Reply | str]) -> None:
        """End the uploads. Those who declined are asked again in a later round, see `niss.session.members`.

        Nobody is asked to repair where more are lost than was agreed on: every member would have to decline.
        """
        current = self._current
        self._hear(replies, current.lost)
        seat_of = {node: seat for seat, node in enumerate(current.nodes)}
        self.members.judge(
            current.refused,
            (node for node in current.nodes if node not in current.lost),
            lambda node: [current.nodes[seat] for seat in current.agreed.neighbours(seat_of[node])],
        )
        if self.proposal.plan.mode != "repair":
            self._ask(Stage.DONE, {})
            return
        asked = self._server.request_reveals()
        survivors = next((len(request.survivors) for request in asked.values()), 0)
        if len(current.nodes) - survivors > current.agreed.terms.dropped:
            asked = {}
        self._ask(Stage.REVEAL, {current.nodes[seat]: encode(request) for seat, request in asked.items()})

    def _hear(self, replies: dict[int, Reply | str], problems: dict[int, str]) -> None:
        """Give the protocol's server what clients said, and note why others' is missing."""
        for node in list(replies):
            reply = replies.pop(node)
            if isinstance(reply, str):
                problems[node] = reply
                continue
            with self._reply_of(node, problems.__setitem__):
                member, message = self.members.by_node[node], decode(reply.body)
                if isinstance(message, Refusal):
                    self._hear_refusal(member, message, problems)
                    continue
                self._hand_over(node, message)
                member.step = max(member.step, reply.step)
                if isinstance(message, Upload):
                    self._current.bytes_uploaded += len(reply.body)
                    # Without fresh keys the upload counts all the same: its node is asked for them anew.
                    with self._reply_of(node, lambda _node, _why: None):
                        self._coordinator.replenish(member.identity, message.fresh_prekeys)

    def _hear_refusal(self, member: Member, refusal: Refusal, problems: dict[int, str]) -> None:
        """Note that a client declined, under its signature; what follows is decided for all of them together."""
        check_refusal(refusal, member.identity)
        reason = problems[member.node] = printable(f"declined: {refusal.reason}")
        if self.stage is Stage.ROUND:
            self._current.refused[member.node] = reason
        else:
            self.members.note_declined(member.node, reason)

    def _hand_over(self, node: int, message: Message) -> None:
        """Give a client's own message to the protocol's server, which checks it."""
        seats = dict(enumerate(self._current.nodes))
        if self.stage is Stage.LATE and self._carried is not None:
            seats = self._carried.helpful
        if isinstance(message, Upload | Reveal) and seats.get(message.seat) != node:
            raise RemoteProtocolError("it sent what another client said, or what nobody in this round did")
        if isinstance(message, Upload):
            self._server.take_upload(message)
        elif isinstance(message, Reveal):
            self._server.take_reveal(message)
        else:
            raise RemoteProtocolError(f"a client does not send a {type(message).__name__}")

    def _ask(self, stage: Stage, bodies: Mapping[int, bytes]) -> None:
        """Go over to a stage, in which these nodes are asked."""
        self.stage, self._asked = stage, {}
        summed = self.books.summed if stage is Stage.ROUND else Counter[int]()
        for node, body in bodies.items():
            member = self.members.by_node.get(node)
            after, sums = (0, 0) if member is None else (member.step, summed[member.number])
            self._asked[node] = Request(stage, body, after, self.proposal.run, sums)

    @property
    def _current(self) -> SessionRound:
        if self.round is None or self._opening is None:
            raise ConfigError("no round has been begun", field="session")
        return self.round

    def _is_ready(self, node: int) -> bool:
        member = self.members.by_node.get(node)
        return member is not None and self._coordinator.ready(member.identity)


def drive(session: Session, deliver: Deliver, until: Stage = Stage.DONE) -> None:
    """Go on with a round up to that stage, or to its end where it ends before; a stage may have nobody to ask."""
    while session.stage not in (until, Stage.DONE):
        requests = session.requests()
        session.take(deliver(requests) if requests else {})
