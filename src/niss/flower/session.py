"""One run of the protocol, seen from the ServerApp: who joined, the round under way, what became of everyone.

It sends nothing itself: letters come out, answers go in. The machines are those of `niss.protocol`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from niss.accounting import Plan
from niss.accounting.attempts import draw_round
from niss.accounting.terms import make_terms
from niss.errors import ConfigError, NissError, ProtocolError, RemoteProtocolError
from niss.flower.coordinator import Coordinator
from niss.flower.enrolment import MAGIC, Enrolment
from niss.flower.letters import Answer, Letter, Stage
from niss.flower.post import Mail
from niss.flower.proposal import RUN_BYTES, Proposal
from niss.flower.refusal import check_refusal
from niss.protocol.agreement import Agreed, agree, participants_hash, terms_hash
from niss.protocol.coalition_file import Coalition
from niss.protocol.keys import Identity, fingerprint
from niss.protocol.messages import (
    Beacon,
    Message,
    Participant,
    Refusal,
    Reveal,
    RoundOpen,
    SurvivorClaim,
    Terms,
    Upload,
    Verdict,
)
from niss.protocol.server import Outcome, Server
from niss.protocol.wire import decode, encode

# Each upload brings a fresh key; the others are for rounds whose upload is lost.
PREKEYS = 4


@dataclass
class Member:
    """A node that joined; `number` counts members in the order they came."""

    node: int
    number: int
    identity: bytes
    pinned: tuple[str, ...]
    step: int = 0


@dataclass
class Round:
    """The round under way: its seats, and by node why its upload is missing, or its part in the repair."""

    number: int
    agreed: Agreed
    nodes: tuple[int, ...]
    lost: dict[int, str] = field(default_factory=dict)
    unhelpful: dict[int, str] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    bytes_uploaded: int = 0


class Session:
    """A run from its first enrolment to its last round."""

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
    ) -> None:
        self._assess = assess
        self._identity, self._server, self._coordinator = identity, Server(identity), coordinator
        self._coalition = coalition
        run = os.urandom(RUN_BYTES)
        self.proposal = Proposal(
            run=run,
            server=identity.public,
            holder=coordinator.holder,
            anchor=coordinator.start_run(run, rounds),
            plan=plan,
            mode=mode,
            participants=participants,
            prekeys=PREKEYS,
            tracker=coordinator.address,
        )
        self._proposed = self.proposal.signed(identity)
        self.members: dict[int, Member] = {}
        self.left_out: dict[int, str] = {}
        self.round: Round | None = None
        self._terms: dict[tuple[int, int], Terms] = {}

    def wanting(self, nodes: Iterable[int]) -> dict[int, Letter]:
        """Letters to those nodes that have yet to join, or have no key left."""
        return {
            node: self._letter(node, Stage.ENROL, self._proposed)
            for node in nodes
            if node not in self.left_out and not self._is_ready(node)
        }

    def admit(self, node: int, answer: Answer) -> None:
        """Take an enrolment; a node that declines, or whose keys are not in order, is left out of the run."""
        try:
            if not answer.body.startswith(MAGIC):
                said = decode(answer.body)
                reason = said.reason if isinstance(said, Refusal) else "it did not answer with its keys"
                raise RemoteProtocolError(f"declined: {reason}")
            enrolment = Enrolment.from_bytes(answer.body)
            enrolment.check(self.proposal)
            if self._coalition is not None:
                self._coalition.require(enrolment.identity)
            known = self.members.get(node)
            if known is not None and known.identity != enrolment.identity:
                raise RemoteProtocolError("it came back with another identity")
            if known is None and any(one.identity == enrolment.identity for one in self.members.values()):
                raise RemoteProtocolError(f"identity {fingerprint(enrolment.identity)} joined before")
        except NissError as error:
            self.leave_out(node, error.message)
            return
        if known is None:
            known = Member(node, len(self.members), enrolment.identity, enrolment.pinned)
            self.members[node] = known
        known.step = max(known.step, answer.step)
        self._coordinator.enrolled(enrolment.identity, enrolment.prekeys)

    def leave_out(self, node: int, reason: str) -> None:
        self.left_out.setdefault(node, reason)

    def seatable(self, nodes: Iterable[int]) -> list[int]:
        """Those of these nodes that can take part now."""
        return [node for node in nodes if node not in self.left_out and self._is_ready(node)]

    def open(self, number: int, nodes: list[int], coordinates: int) -> dict[int, Letter]:
        """Open a round; one letter for each of these nodes."""
        if len(nodes) < self.proposal.participants:
            raise ProtocolError(
                f"{len(nodes)} nodes could take part, {self.proposal.participants} are wanted"
            )
        node_of = {self.members[node].identity: node for node in nodes}
        drawn = self._draw(number, tuple(node_of), coordinates)
        opened = self._server.open_round(drawn.terms, drawn.participants, drawn.beacon)
        seats = tuple(node_of[one.identity] for one in opened.participants)
        self.round = Round(number, agree(opened), seats)
        body = encode(opened)
        return {node: self._letter(node, Stage.ROUND, body) for node in self.round.nodes}

    def _draw(self, number: int, identities: tuple[bytes, ...], coordinates: int) -> RoundOpen:
        """A graph on which the plan's promise holds for everyone, else every client would decline.

        What is given up on the way is given up before anyone is asked.
        """
        plan = self.proposal.plan

        def propose(attempt: int, more: float) -> RoundOpen:
            people = self._coordinator.seat(number, attempt, identities, self.proposal.participants)
            terms = self._terms_for(people, coordinates)
            terms = replace(
                terms, round=number, attempt=attempt, residual_variance=more * terms.residual_variance
            )
            commitment = participants_hash(people) + terms_hash(terms)
            return RoundOpen(terms, people, self._coordinator.beacon(number, attempt, commitment))

        drawn, _ = draw_round(
            propose,
            self._assess,
            attempts=plan.attempts,
            colluders=plan.colluders,
            allowed=self.proposal.round_mu,
        )
        return drawn

    def take_uploads(self, mail: Mail) -> None:
        """The answers to the round. What is forged, damaged, declined or missing counts as lost, and says why."""
        self._take(mail, self._current.lost)

    def take_repairs(self, mail: Mail) -> None:
        """The answers in a stage of the repair."""
        self._take(mail, self._current.unhelpful)

    def _take(self, mail: Mail, problems: dict[int, str]) -> None:
        problems.update(mail.failures)
        for node, answer in mail.answers.items():
            try:
                said = decode(answer.body)
                if isinstance(said, Refusal):
                    self._take_refusal(node, said, problems)
                    continue
                self._hand_over(said)
            except RemoteProtocolError as error:
                problems[node] = error.message
                continue
            self.members[node].step = max(self.members[node].step, answer.step)
            if isinstance(said, Upload):
                self._current.bytes_uploaded += len(answer.body)
                self._coordinator.replenish(self.members[node].identity, said.fresh_prekeys)

    def claim(self) -> dict[int, Letter]:
        """End the uploads; one letter for each survivor, who is to agree to the survivor set."""
        claim: SurvivorClaim = self._server.claim_survivors()
        body, nodes = encode(claim), self._current.nodes
        return {nodes[seat]: self._letter(nodes[seat], Stage.CLAIM, body) for seat in claim.survivors}

    def requests(self) -> dict[int, Letter]:
        """One letter for each survivor that agreed, who is to reveal what the repair needs."""
        nodes = self._current.nodes
        return {
            nodes[seat]: self._letter(nodes[seat], Stage.REQUEST, encode(request))
            for seat, request in self._server.request_reveals().items()
        }

    def finish(self) -> tuple[Round, Outcome]:
        """The end of the round under way."""
        current, self.round = self._current, None
        return current, self._server.finish()

    @property
    def _current(self) -> Round:
        if self.round is None:
            raise ConfigError("aggregate_train before configure_train", field="strategy")
        return self.round

    def _is_ready(self, node: int) -> bool:
        return node in self.members and self._coordinator.ready(self.members[node].identity)

    def _letter(self, node: int, stage: Stage, body: bytes) -> Letter:
        after = self.members[node].step if node in self.members else 0
        return Letter(stage, body, after, self.proposal.run)

    def _take_refusal(self, node: int, declined: Refusal, problems: dict[int, str]) -> None:
        """A client that declines once would decline again: the run goes on without it."""
        check_refusal(declined, self.members[node].identity)
        problems[node] = f"declined: {declined.reason}"
        if problems is self._current.lost:
            self._current.refused.add(node)
        self.leave_out(node, f"declined: {declined.reason}")

    def _hand_over(self, said: Message) -> None:
        if isinstance(said, Upload):
            self._server.take_upload(said)
        elif isinstance(said, Verdict):
            self._server.take_verdict(said)
        elif isinstance(said, Reveal):
            self._server.take_reveal(said)
        else:
            raise RemoteProtocolError(f"a {type(said).__name__} is nothing a client says")

    def _terms_for(self, people: tuple[Participant, ...], coordinates: int) -> Terms:
        """Terms on a grid of 32 bits where the sum fits it, which halves the upload; else of 64."""
        key = len(people), coordinates
        if key not in self._terms:
            plan, mode = self.proposal.plan, self.proposal.mode
            narrow, wide = (
                make_terms(
                    plan,
                    participants=len(people),
                    coordinates=coordinates,
                    run=self.proposal.run,
                    number=0,
                    mode=mode,
                    modulus_bits=bits,
                )
                for bits in (32, 64)
            )
            self._terms[key] = narrow if _fits(narrow, people) else wide
        return self._terms[key]


def _fits(terms: Terms, people: tuple[Participant, ...]) -> bool:
    try:
        # The graph does not matter for the size of the sum, so any beacon will do.
        agree(RoundOpen(terms, people, Beacon(1, bytes(32), b""))).check_fits()
    except ConfigError:
        return False
    return True
