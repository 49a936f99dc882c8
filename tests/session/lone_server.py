"""A server alone: it makes up every participant but one, holds the beacon, and shows the one whatever it likes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from niss.accounting import Plan, make_terms
from niss.protocol.agreement import Agreed, agree, participants_hash, terms_hash
from niss.protocol.keys import (
    LINKS_PER_ROUND,
    Entropy,
    Identity,
    PrekeyStore,
    _link_after,
    _signed_link,
    link_of,
)
from niss.protocol.messages import (
    Beacon,
    Participant,
    RoundOpen,
    Terms,
    Upload,
    decode,
    encode,
    signed_part,
)
from niss.session.limits import Limits
from niss.session.node import Node, Training
from niss.session.ports import Reply, Request, Stage
from niss.session.proposal import Enrolment, Proposal
from niss.session.store import MemoryStore
from niss.tracker.coordinator import NodesTracker
from session.scene import refused
from support.protocol_round import seeded_entropy

COORDINATES = 16
VICTIM = 0
"""The seat of the one client that is real."""


class LoneServer:
    """The victim is a node with these pins, written as in its configuration; the others exist only here."""

    def __init__(
        self,
        plan: Plan,
        size: int,
        *,
        label: str = "alone",
        links: int = 4_000,
        drawn: Entropy = os.urandom,
        **pins: Any,
    ) -> None:
        """`drawn` is the victim's own randomness."""
        self.entropy = seeded_entropy(label)
        self.identity, self.holder = (Identity.generate(self.entropy) for _ in range(2))
        links_backwards = [self.entropy(32)]
        for _ in range(links):
            links_backwards.append(_link_after(links_backwards[-1]))
        self.links = links_backwards[::-1]
        self.store = MemoryStore(drawn)
        tracker = NodesTracker(self.store.identity, None, lambda _error: None)
        self.node = Node(self.store, Limits().of_node(pins), tracker, entropy=drawn)
        self.proposal = Proposal(
            run=self.entropy(16),
            server=self.identity.public,
            holder=self.holder.public,
            anchor=self.links[0],
            plan=plan,
            participants=2,
            prekeys=4,
        )
        self.others = []
        for _ in range(size - 1):
            one = Identity.generate(self.entropy)
            (key,) = PrekeyStore().batch(1, one, self.entropy)
            self.others.append(Participant(one.public, key))
        self.victim: list[Participant] = []

    def send(self, stage: Stage, body: bytes) -> Reply:
        """A message to the victim, and its reply."""
        size = COORDINATES if stage is Stage.ROUND else None
        answer = self.node.answer(Request(stage, body, 0, self.proposal.run, summed=10**9), size)
        return answer.upload(np.full(COORDINATES, 0.01)) if isinstance(answer, Training) else answer

    def enrol(self, signed: bytes | None = None) -> str | None:
        """Have the victim join on this proposal, or on an honest one; why it does not, or None."""
        reply = self.send(Stage.ENROL, self.proposal.signed(self.identity) if signed is None else signed)
        if (why := refused(reply)) is not None:
            return why
        enrolment = Enrolment.from_bytes(reply.body)
        self.victim = [Participant(enrolment.identity, key) for key in enrolment.prekeys]
        return None

    def terms(self, **changes: Any) -> Terms:
        honest = make_terms(
            self.proposal.plan,
            participants=len(self.others) + 1,
            coordinates=COORDINATES,
            run=self.proposal.run,
            number=0,
        )
        return replace(honest, **changes)

    def opened(self, terms: Terms) -> RoundOpen:
        """The round with these terms; its link is signed by a holder that obeys the server."""
        people = (self.victim[0], *self.others)
        index = link_of(terms.round, terms.attempt)
        commitment = participants_hash(people) + terms_hash(terms)
        value = self.links[index] if index < len(self.links) else bytes(32)
        beacon = Beacon(index, value, self.holder.sign("beacon", _signed_link(index, value, commitment)))
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
        assert why is not None or isinstance(decode(reply.body), Upload)
        return why

    @property
    def charged(self) -> float:
        """The mu that the victim's own books have, all rounds together."""
        return float(self.store.charged.joint_squared[0]) ** 0.5
