"""One run of the protocol, seen from the ServerApp: who joined, the round under way, what became of everyone.

It sends nothing itself: requests come out, replies go in, or `repair` is told how to send. A run is

    enrolment_requests -> admit        again for whoever comes later or has run out of keys
    open -> take_uploads               each round
    repair                             mode `repair`: the committee reveals what takes the noise of the lost out
    finish                             the sum, and what is left in it

The checks are those of `niss.protocol.server`; here a node that breaks the rules becomes a reason in words. Keys are
handed out, and the beacon is held, by a coordinator. `open_next` takes the place of `open` where noise is carried over.

A server that was killed goes on with the same run (`niss.flower.saving`). Flower may know the nodes by other ids then,
so everyone enrols once more under the same proposal, and members are known again by their identity.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from niss.accounting import Plan, make_terms, propose_round
from niss.errors import ConfigError, ProtocolError, RemoteProtocolError
from niss.flower.adaptive import next_clip
from niss.flower.carrying import CarriedRun, fits, make_run_schedule
from niss.flower.coordinator import Coordinator
from niss.flower.declines import Declines
from niss.flower.metrics import NO_METRICS, NoisyMetrics
from niss.flower.proposal import (
    ENROLMENT_PREFIX,
    RUN_BYTES,
    Enrolment,
    Proposal,
    read_proposal,
    require_same,
)
from niss.flower.transport import Replies, Reply, Request, Stage, check_refusal, in_words
from niss.mechanism.adaptive import AdaptiveClip
from niss.protocol import (
    Agreed,
    Beacon,
    Coalition,
    Identity,
    Message,
    Outcome,
    Participant,
    Refusal,
    Reveal,
    RevealRequest,
    RoundOpen,
    Server,
    Terms,
    Upload,
    agree,
    decode,
    encode,
    fingerprint,
)
from niss.redaction import printable

# Each upload brings a fresh key; the others are for rounds whose upload is lost.
PREKEYS = 4
LIED = "what it revealed in the repair, or committed to, is proven false"


@dataclass
class Member:
    """A node that joined.

    node      Flower's id of it
    number    counts members in the order they came
    identity  its public key
    pinned    names of the limits it has set, in its own word
    step      the last of its steps that the server has seen
    """

    node: int
    number: int
    identity: bytes
    pinned: tuple[str, ...]
    step: int = 0


@dataclass
class Round:
    """The round under way.

    number          counts rounds from 0
    agreed          participants, terms, beacon and the graph that follows from them
    nodes           Flower's ids of the participants, by seat
    lost            by node: why its upload is missing
    unhelpful       by node: why its part in the repair is missing, or does not count
    refused         by node that declined under its signature, and so uploaded nothing: why
    bytes_uploaded  size of all uploads that were accepted
    """

    number: int
    agreed: Agreed
    nodes: tuple[int, ...]
    lost: dict[int, str] = field(default_factory=dict)
    unhelpful: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    bytes_uploaded: int = 0


class Session:
    """A run from its first enrolment to its last round.

    members   by node: those who joined
    left_out  by node: why it takes no part in the rest of the run
    round     the one under way
    clip      of the next round
    """

    def __init__(
        self,
        plan: Plan,
        *,
        mode: str,
        identity: Identity,
        coordinator: Coordinator,
        rounds: int,
        participants: int,
        coalition: Coalition | None,
        assess: Callable[[Agreed, int], float],
        metrics: NoisyMetrics = NO_METRICS,
        adaptive: AdaptiveClip | None = None,
        coordinates: int = 0,
        saved: dict[str, Any] | None = None,
    ) -> None:
        """Start a run and sign its proposal, or go on with one that a server before this one started.

        plan          what the clients are promised
        mode          how dropouts are handled
        identity      the server's
        coordinator   hands out keys and holds the beacon
        rounds        how many rounds the beacon chain is made for
        participants  fewest participants of a round
        coalition     the identities that may join; None: anyone
        assess        (round, colluders) -> the worst mu of any client in it
        metrics       what travels inside the uploads beside the updates
        adaptive      how the clip moves; None: it is always the plan's
        coordinates   of an upload; needed beforehand only where noise is carried from round to round
        saved         what `to_json` gave of the run to go on with; `ConfigError` where it was started with other
                      settings
        """
        self._assess = assess
        self._identity, self._server, self._coordinator = identity, Server(identity), coordinator
        self._coalition, self._adaptive = coalition, adaptive
        self.clip = plan.clip if adaptive is None else adaptive.start
        if saved is None:
            run = os.urandom(RUN_BYTES)
            anchor = coordinator.start_run(run, rounds)
        else:
            before = read_proposal(bytes.fromhex(saved["proposal"]))
            run = before.run
            anchor = coordinator.resume_run(run, rounds, saved["coordinator"])
        self.proposal = Proposal(
            run=run,
            server=identity.public,
            holder=coordinator.holder,
            anchor=anchor,
            plan=plan,
            mode=mode,
            participants=participants,
            prekeys=PREKEYS,
            tracker=coordinator.address,
            metrics=metrics,
            schedule=make_run_schedule(plan, participants, coordinates, mode),
        )
        self._proposed, self._allowed = self.proposal.signed(identity), self.proposal.round_mu
        self.members: dict[int, Member] = {}
        self.left_out: dict[int, str] = {}
        self._declines = Declines()
        self._declined_before: set[int] = set()
        self._to_ask_again: set[int] = set()
        self.round: Round | None = None
        self._terms: dict[tuple[int, int, float], Terms] = {}
        # Members of a run that was resumed, by identity, that have not enrolled again.
        self._away: set[bytes] = set()
        self._resumed = saved is not None
        self._carried = CarriedRun.of(plan, self.proposal, coordinator, saved)
        if saved is not None:
            require_same(before, self.proposal)
            self._restore(saved)

    def to_json(self) -> dict[str, Any]:
        """The run between two rounds, as JSON: for a server that goes on with it. Secret, as it has the chain's seed.

        One-time keys in stock are left out: clients hand over new ones when they enrol again.
        """
        return {
            "proposal": self._proposed.hex(),
            "coordinator": self._coordinator.secrets(),
            "members": [
                asdict(one) | {"identity": one.identity.hex()}
                for one in sorted(self.members.values(), key=lambda one: one.number)
            ],
            "left_out": {str(node): why for node, why in self.left_out.items()},
            "declined": sorted(self._declined_before),
            "ask_again": sorted(self._to_ask_again),
            "declines": self._declines.to_json(),
            "clip": self.clip,
        } | ({} if self._carried is None else {"carried": self._carried.to_json()})

    def _restore(self, saved: dict[str, Any]) -> None:
        for one in saved["members"]:
            identity, pinned = bytes.fromhex(one["identity"]), tuple(one["pinned"])
            self.members[one["node"]] = Member(**one | {"identity": identity, "pinned": pinned})
        self._away = {one.identity for one in self.members.values()}
        self.left_out = {int(node): why for node, why in saved["left_out"].items()}
        self._declined_before, self._to_ask_again = set(saved["declined"]), set(saved["ask_again"])
        self._declines = Declines.from_json(saved["declines"])
        self.clip = saved.get("clip", self.clip)

    @property
    def gathered(self) -> bool:
        """Whether anyone has joined yet; after the run was resumed, whether anyone has come back."""
        return len(self.members) > len(self._away)

    def enrolment_requests(self, nodes: Iterable[int]) -> dict[int, Request]:
        """Requests to enrol, for those of these nodes that have yet to join or have no key left.

        Whoever declined once, since this was last called, is asked again from here on.
        """
        for node in self._to_ask_again:
            self.left_out.pop(node, None)
        self._to_ask_again.clear()
        return {
            node: self._request(node, Stage.ENROL, self._proposed)
            for node in nodes
            if node not in self.left_out and not self._is_ready(node)
        }

    def admit(self, node: int, reply: Reply) -> None:
        """Take an enrolment; a node whose keys are not in order, or that declines twice, is left out of the run."""
        try:
            message = None if reply.body.startswith(ENROLMENT_PREFIX) else decode(reply.body)
            if isinstance(message, Refusal):
                self._declined(node, f"declined: {message.reason}")
                return
            enrolment = Enrolment.from_bytes(reply.body)
            enrolment.check(self.proposal)
            if self._coalition is not None:
                self._coalition.require(enrolment.identity)
            member = self._recognised(node, enrolment, reply.step)
        except Exception as error:
            # Whatever a node sends may end its own part in the run, never the run.
            self.leave_out(node, in_words(error))
            return
        if member is None:
            member = Member(node, len(self.members), enrolment.identity, enrolment.pinned)
            self.members[node] = member
        self._away.discard(member.identity)
        member.step = max(member.step, reply.step)
        self._coordinator.enrolled(enrolment.identity, enrolment.prekeys)

    def _recognised(self, node: int, enrolment: Enrolment, step: int) -> Member | None:
        """The member with this identity, under the node's id from here on; None: it is new.

        Raises `RemoteProtocolError` for an identity that is another's, and after the run was resumed for a client that
        has forgotten what it answered before, or may have: what it spent then is not in its books.
        """
        known = next((one for one in self.members.values() if one.identity == enrolment.identity), None)
        if node in self.members and known is not self.members[node]:
            raise RemoteProtocolError("it came back with another identity")
        if known is None:
            if self._resumed and "state" not in enrolment.pinned:
                raise RemoteProtocolError(
                    "it is new to a run that was resumed and has no niss-state: it may not know what it spent"
                )
            return None
        if known.identity not in self._away:
            if known.node != node:
                raise RemoteProtocolError(
                    f"identity {fingerprint(enrolment.identity)} has already joined as another node"
                )
            return known
        if step <= known.step:
            raise RemoteProtocolError(
                f"its state is at step {step}, but the run has seen step {known.step} of it"
            )
        self._move(known, node)
        return known

    def _move(self, member: Member, node: int) -> None:
        """Know a member under another of Flower's ids, with all that is held against it."""
        before = member.node
        if before == node:
            return
        self.members[node] = self.members.pop(before)
        member.node = node
        if before in self.left_out:
            self.left_out[node] = self.left_out.pop(before)
        for nodes in (self._declined_before, self._to_ask_again):
            if before in nodes:
                nodes.remove(before)
                nodes.add(node)
        self._declines.rename(before, node)

    def leave_out(self, node: int, reason: str) -> None:
        """Go on without a node; the first reason stands."""
        self.left_out.setdefault(node, printable(reason))

    def _declined(self, node: int, reason: str) -> None:
        """A node declined to join or to repair: the first time it is left out only until the next round begins."""
        if node not in self._declined_before:
            self._to_ask_again.add(node)
        self._declined_before.add(node)
        self.leave_out(node, reason)

    def not_left_out(self, nodes: Iterable[int]) -> list[int]:
        """Those of these nodes that may be asked in the next round, whether they have joined or not."""
        out = (self.left_out.keys() - self._to_ask_again) | self._declines.set_aside
        return [node for node in nodes if node not in out]

    def seatable(self, nodes: Iterable[int]) -> list[int]:
        """Those of these nodes that can take part now."""
        aside = self._declines.set_aside
        return [
            node for node in nodes if node not in self.left_out and node not in aside and self._is_ready(node)
        ]

    def open(self, number: int, nodes: list[int], coordinates: int) -> dict[int, Request]:
        """Open a round on models of so many coordinates; one request for each participant.

        Raises `ProtocolError` where there are too few nodes, or the tracker is away, and `PrivacyError` where no graph
        that was drawn keeps the plan's promise. Nobody has been asked anything then.
        """
        if len(nodes) < self.proposal.participants:
            raise ProtocolError(
                f"{len(nodes)} nodes could take part, at least {self.proposal.participants} are needed"
            )
        node_of = {self.members[node].identity: node for node in nodes}
        coordinator, fewest = self._coordinator, self.proposal.participants
        proposed, _ = propose_round(
            self.proposal.plan,
            number,
            seat=lambda attempt: coordinator.seat(number, attempt, tuple(node_of), fewest),
            terms=lambda people: self._terms_for(people, coordinates + len(self.proposal.metrics)),
            release=lambda attempt, commitment: coordinator.beacon(number, attempt, commitment),
            assess=self._assess,
            allowed=self._allowed,
        )
        opened = self._server.open_round(proposed.terms, proposed.participants, proposed.beacon)
        return self._begin_round(number, opened, node_of)

    def open_next(
        self, number: int, nodes: list[int], connected: Collection[int], save: Callable[[], None]
    ) -> dict[int, Request]:
        """Open the next round of a run that carries noise over, for those whose turn it is; requests for those there.

        `nodes` may be chosen for the round after it, those `connected` can be asked; `save` keeps `to_json`, durably.
        """
        assert self._carried is not None
        ready = (one for one in self.members.values() if self._coordinator.ready(one.identity))
        opened = self._carried.open(
            self._server,
            {one.number: one.identity for one in ready},
            [self.members[node].number for node in nodes],
            save,
        )
        node_of = {one.identity: node for node, one in self.members.items()}
        requests = self._begin_round(number, opened, node_of)
        for node in [node for node in requests if node not in connected or node in self.left_out]:
            self._current.lost[node] = self.left_out.get(node, "it is not connected")
            del requests[node]
        return requests

    def _begin_round(self, number: int, opened: RoundOpen, node_of: dict[bytes, int]) -> dict[int, Request]:
        nodes_by_seat = tuple(node_of[one.identity] for one in opened.participants)
        self.round = Round(number, agree(opened), nodes_by_seat)
        body = encode(opened)
        return {node: self._request(node, Stage.ROUND, body) for node in nodes_by_seat}

    def take_uploads(self, replies: Replies) -> None:
        """The replies of a round. What is forged, damaged, declined or missing counts as lost, with the reason.

        Those who declined are asked again in a later round, without the one that most of them sat beside.
        """
        current = self._current
        self._take(replies, current.lost)
        seat_of = {node: seat for seat, node in enumerate(current.nodes)}
        blamed = self._declines.judge(
            current.refused,
            (node for node in current.nodes if node not in current.lost),
            lambda node: [current.nodes[seat] for seat in current.agreed.neighbours(seat_of[node])],
        )
        for node, reason in (current.refused | blamed).items():
            self.leave_out(node, reason)
        self._to_ask_again |= current.refused.keys() - blamed.keys()

    def _take(self, replies: Replies, problems: dict[int, str]) -> None:
        problems.update(replies.failures)
        for node, reply in replies.received.items():
            member = self.members[node]
            replies.received[node] = replace(reply, body=b"")  # The message has what is in it.
            try:
                message = decode(reply.body)
                if isinstance(message, Refusal):
                    self._take_refusal(member, message, problems)
                    continue
                self._hand_over(message)
            except Exception as error:
                problems[node] = in_words(error)
                continue
            member.step = max(member.step, reply.step)
            if isinstance(message, Upload):
                self._current.bytes_uploaded += len(reply.body)
                self._coordinator.replenish(member.identity, message.fresh_prekeys)

    def _take_refusal(self, member: Member, refusal: Refusal, problems: dict[int, str]) -> None:
        """Note that a client declined, under its signature; what follows is decided for all of them together."""
        check_refusal(refusal, member.identity)
        reason = problems[member.node] = printable(f"declined: {refusal.reason}")
        if problems is self._current.lost:
            self._current.refused[member.node] = reason
        else:
            self._declined(member.node, reason)

    def _hand_over(self, message: Message) -> None:
        """Give a client's message to the protocol's server, which checks it."""
        if isinstance(message, Upload):
            self._server.take_upload(message)
        elif isinstance(message, Reveal):
            own = message.context == self._current.agreed.digest
            (self._server.take_reveal if own else self._server.take_carried_reveal)(message)
        else:
            raise RemoteProtocolError(f"a client does not send a {type(message).__name__}")

    def repair(self, send: Callable[[dict[int, Request]], Replies]) -> None:
        """End the uploads, and have the committee reveal what the repair needs; then that of the round before.

        Nobody is asked where more are lost than was agreed on: every member would have to decline.
        """
        current, asked = self._current, self._server.request_reveals()
        survivors = next((len(one.survivors) for one in asked.values()), 0)
        if len(current.nodes) - survivors <= current.agreed.terms.dropped:
            self._ask(send, {current.nodes[seat]: one for seat, one in asked.items()})
        if self._carried is not None:
            self._ask(send, self._carried.late_requests(self._server))

    def _ask(self, send: Callable[[dict[int, Request]], Replies], asked: Mapping[int, RevealRequest]) -> None:
        requests = {node: self._request(node, Stage.REQUEST, encode(one)) for node, one in asked.items()}
        self._take(send(requests), self._current.unhelpful)

    def finish(self) -> tuple[Round, Outcome]:
        """End the round under way; returns it with the sum and what is left in it.

        Whoever is proven to have lied in the repair is left out from here on.
        """
        current, self.round = self._current, None
        outcome = self._server.finish()
        if self._adaptive is not None:
            self.clip = next_clip(self._adaptive, self.proposal.metrics, current.agreed, outcome)
        if self._carried is not None:
            self._carried.finished(outcome.survivors, current.nodes, current.unhelpful)
        for node in (current.nodes[seat] for seat in outcome.liars):
            current.unhelpful[node] = LIED
            self.leave_out(node, LIED)
        return current, outcome

    @property
    def _current(self) -> Round:
        if self.round is None:
            raise ConfigError("aggregate_train was called before configure_train", field="strategy")
        return self.round

    def _is_ready(self, node: int) -> bool:
        return node in self.members and self._coordinator.ready(self.members[node].identity)

    def _request(self, node: int, stage: Stage, body: bytes) -> Request:
        after = self.members[node].step if node in self.members else 0
        return Request(stage, body, after, self.proposal.run)

    def _terms_for(self, people: tuple[Participant, ...], coordinates: int) -> Terms:
        """Terms on a grid of 32 bits where the sum fits it, which halves the upload; else of 64.

        They depend on the number of participants and the clip alone, so they are made once for each; `propose_round`
        fills in round and attempt.
        """
        key = len(people), coordinates, self.clip
        if key not in self._terms:
            terms = make_terms(
                replace(self.proposal.plan, clip=self.clip),
                participants=len(people),
                coordinates=coordinates,
                run=self.proposal.run,
                number=0,
                mode=self.proposal.mode,
                modulus_bits=32,
            )
            # The graph does not matter for the size of the sum, so any beacon will do.
            drawn = RoundOpen(terms, people, Beacon(1, bytes(32), b""))
            self._terms[key] = terms if fits(drawn) else replace(terms, modulus_bits=64)
        return self._terms[key]
