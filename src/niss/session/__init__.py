"""A run of the protocol in two halves that send nothing themselves, for whatever transport carries their messages.

    ports     what passes between them, and who hands out keys: the server itself, or a tracker
    server    `Session`, the server's half: begin, requests, take, finish; and the loop `drive`
    members   who joined, who is left out, and whose turn it is
    books     what was charged and what happened; the statement
    node      `Node`, the client's half: charged before anything is trained
    store     what a client keeps of its runs
    limits    what the owner of a node insists on, and what all runs may cost it
    proposal  how a run begins, on both sides
    metrics   metrics inside the upload, on both sides

A new transport is an adapter: it gives nodes their requests and brings back replies (`Deliver`), keeps what `save` and
`Store` are told to keep, and nothing else. `niss.flower` is one; the simulator and the tests drive both halves in one
process.

**All parties in one process** (`together`): of the simulator, of tests, and those that a lying server is tried on.
Every node is a `Node` with keys, memory and a ledger of its own, which knows of the others what it is told. A session
drives them as it drives nodes far away; a server that is no session sends them what it likes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from niss.mechanism.blocks import Blocks
from niss.protocol.keys import Entropy, Identity
from niss.protocol.messages import Prekey
from niss.records import Records
from niss.session.limits import Limits
from niss.session.node import Node, Rows, Training
from niss.session.ports import Deliver, Relay, Reply, Request, Stage
from niss.session.proposal import Proposal, Setup, proposable
from niss.session.server import Session
from niss.session.store import MemoryStore

FloatArray = NDArray[np.float64]
Paced = Callable[[Rows], Rows]
Update = Callable[[int, Training], FloatArray | Blocks | tuple[Records, FloatArray, Paced] | None]
"""(node, the round that it was charged for) -> its bare update; where records are hidden, what `upload_records` takes;
None: it uploads a blank."""
HERE = "this process"
DROPPED = "it dropped out"


class Parties:
    """Many nodes; each is made when it is first asked.

    limits   what all of them insist on
    entropy  their keys and noise come from it. Anything but the operating system's is for tests and attacks: whoever
             knows it knows every secret
    dataset  the name of what each has records of, where a run hides records
    """

    def __init__(self, limits: Limits, entropy: Entropy = os.urandom, dataset: str = "") -> None:
        self.limits, self._entropy, self._dataset = limits, entropy, dataset
        self.stores: dict[int, MemoryStore] = {}

    def store(self, number: int) -> MemoryStore:
        """What a node keeps."""
        if number not in self.stores:
            self.stores[number] = MemoryStore(self._entropy)
        return self.stores[number]

    def node(self, number: int) -> Node:
        """A node, as it is after a start: all that it knows is in its store."""
        return Node(
            self.store(number), self.limits, InProcess(), entropy=self._entropy, dataset=self._dataset
        )

    def with_updates(self, update: Update, coordinates: int, absent: Collection[int] = ()) -> Deliver:
        """Takes requests to the nodes, which upload these updates; those `absent` answer no round."""

        def deliver(requests: Mapping[int, Request]) -> dict[int, Reply | str]:
            replies: dict[int, Reply | str] = {}
            for number, request in requests.items():
                if request.stage is Stage.ROUND and number in absent:
                    replies[number] = DROPPED
                    continue
                size = coordinates if request.stage is Stage.ROUND else None
                answer = self.node(number).answer(request, size)
                if isinstance(answer, Training):
                    made = update(number, answer)
                    if isinstance(made, tuple):
                        answer = answer.upload_records(*made)
                    else:
                        answer = answer.blank() if made is None else answer.upload(made)
                replies[number] = answer
            return replies

        return deliver


class InProcess:
    """The tracker of a run whose parties are all here: there is nothing to ask it."""

    def rounds(self, proposal: Proposal) -> int:
        """Of the plan: nobody here looks at graphs that are not used."""
        return proposal.plan.possible_rounds if proposal.schedule is None else proposal.schedule.rounds

    def register(self, proposal: Proposal, prekeys: tuple[Prekey, ...]) -> None:
        del proposal, prekeys  # The enrolment has them.

    def stay_live(self, proposal: Proposal) -> None:
        del proposal


def together(
    setup: Setup, entropy: Entropy = os.urandom, identity: Identity | None = None
) -> tuple[Session, Parties]:
    """A session and the nodes for it: the beacon is held by a party of its own, which every node trusts.

    identity  the server's; None: a new one

    Each node spends on the plan what it promises, and nothing more. What a plan says of rounds that its method does not
    take from it stays out of the proposal.
    """
    setup = replace(setup, plan=proposable(setup.plan))
    relay = Relay(address=HERE, entropy=entropy)
    server = identity or Identity.generate(entropy)
    session = Session(setup, identity=server, coordinator=relay, entropy=entropy)
    limits = Limits(holder=relay.holder, tracker=HERE, uncalibrated=True)
    if setup.plan.calibrated and not isinstance(setup.plan.epsilon, tuple):
        limits = replace(limits, epsilon=setup.plan.epsilon, delta=setup.plan.delta)
    return session, Parties(limits, entropy, "records" if setup.plan.unit == "record" else "")
