"""A server alone: it makes up every participant but one, holds the beacon, and shows the one whatever it likes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flwr.app import Message, RecordDict

from flower.grid import FIRST, FakeGrid, config, global_model
from niss.accounting import Plan, make_terms
from niss.flower.transport import to_record
from niss.protocol.agreement import (
    LINKS_PER_ROUND,
    Agreed,
    _link,
    _signed,
    agree,
    link_of,
    participants_hash,
    terms_hash,
)
from niss.protocol.keys import Identity, PrekeyStore
from niss.protocol.messages import Beacon, Participant, Refusal, RoundOpen, Terms, Upload
from niss.protocol.wire import decode, encode, signed_part
from niss.session.proposal import Enrolment, Proposal
from niss.session.requests import Request, Stage
from support.protocol_round import seeded_entropy

COORDINATES = 16
VICTIM = 0
"""The seat of the one client that is real."""


class LoneServer:
    """`victim` is a node of a grid of one; the other participants exist only here."""

    def __init__(
        self, plan: Plan, size: int, *, label: str = "alone", links: int = 4_000, **pins: Any
    ) -> None:
        self.entropy = seeded_entropy(label)
        self.identity, self.holder = (Identity.generate(self.entropy) for _ in range(2))
        links_backwards = [self.entropy(32)]
        for _ in range(links):
            links_backwards.append(_link(links_backwards[-1]))
        self.links = links_backwards[::-1]
        self.grid = FakeGrid(1, **{"niss-uncalibrated": False, **pins})
        self.context = self.grid.contexts[FIRST]
        self.proposal = Proposal(
            run=self.entropy(16),
            server=self.identity.public,
            holder=self.holder.public,
            anchor=self.links[0],
            plan=plan,
            mode="tolerate",
            participants=2,
            prekeys=4,
        )
        self.others = []
        for _ in range(size - 1):
            one = Identity.generate(self.entropy)
            (key,) = PrekeyStore().batch(1, one, self.entropy)
            self.others.append(Participant(one.public, key))
        self.victim: list[Participant] = []

    def send(self, stage: Stage, body: bytes) -> Message:
        """A message to the victim, and its reply."""
        record = to_record(Request(stage, body, 0, self.proposal.run))
        content = RecordDict({"niss": record})
        if stage is Stage.ROUND:
            content = RecordDict({"arrays": global_model(), "config": config(), "niss": record})
            content["config"]["server-round"] = 1
        message = Message(content, dst_node_id=FIRST, message_type="train")
        message.metadata.__dict__["_message_id"] = "1"
        reply = self.grid._deliver(copy.deepcopy(message))
        assert reply is not None
        return reply

    def enrol(self) -> str | None:
        """Have the victim join; why it does not, or None."""
        reply = self.send(Stage.ENROL, self.proposal.signed(self.identity))
        if (why := refused(reply)) is not None:
            return why
        enrolment = Enrolment.from_bytes(body_of(reply))
        self.victim = [Participant(enrolment.identity, key) for key in enrolment.prekeys]
        return None

    def terms(self, **changes: Any) -> Terms:
        honest = make_terms(
            self.proposal.plan,
            participants=len(self.others) + 1,
            coordinates=COORDINATES,
            run=self.proposal.run,
            number=0,
            mode=self.proposal.mode,
        )
        return replace(honest, **changes)

    def opened(self, terms: Terms) -> RoundOpen:
        """The round with these terms; its link is signed by a holder that obeys the server."""
        people = (self.victim[0], *self.others)
        index = link_of(terms.round, terms.attempt)
        commitment = participants_hash(people) + terms_hash(terms)
        value = self.links[index] if index < len(self.links) else bytes(32)
        beacon = Beacon(index, value, self.holder.sign("beacon", _signed(index, value, commitment)))
        bare = RoundOpen(terms, people, beacon)
        return replace(bare, signature=self.identity.sign("open", signed_part(bare)))

    def grind(self, terms: Terms, colluders: Sequence[int]) -> Agreed | None:
        """The first round whose graph looks regular, and where all neighbours of the victim collude."""
        attempts = self.proposal.plan.attempts
        wanted = set(colluders)
        for number in range((len(self.links) - 1) // LINKS_PER_ROUND):
            for attempt in range(attempts):
                agreed = agree(self.opened(replace(terms, round=number, attempt=attempt)))
                if set(agreed.neighbours(VICTIM)) <= wanted and len(set(agreed.graph.degrees.tolist())) == 1:
                    return agreed
        return None

    def show(self, opened: RoundOpen) -> str | None:
        """Send a round; why the victim declines, or None where it uploads."""
        reply = self.send(Stage.ROUND, encode(opened))
        why = refused(reply)
        assert why is not None or isinstance(decode(body_of(reply)), Upload)
        return why

    @property
    def charged(self) -> float:
        """The mu that the victim's own books have, all rounds together."""
        return float(self.context.state["niss"]["joint"]) ** 0.5


def body_of(reply: Message) -> bytes:
    return bytes(reply.content["niss-upload"]["body"].numpy().tobytes())


def refused(reply: Message) -> str | None:
    """Why a reply declines; None for one that does not."""
    if reply.has_error():
        return str(reply.error.reason)
    body = body_of(reply)
    if body.startswith(b"niss enrolment"):
        return None
    message = decode(body)
    return message.reason if isinstance(message, Refusal) else None
