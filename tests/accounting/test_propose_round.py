"""A round is proposed on the first graph that keeps the promise, and each attempt commits before its beacon."""

from __future__ import annotations

import math

import numpy as np
import pytest

from niss.accounting import DrawnAccount, Plan, make_terms, propose_round
from niss.errors import PrivacyError
from niss.protocol.agreement import agree, participants_hash, terms_hash
from niss.protocol.keys import BeaconChain, Identity, link_of, verify_beacon
from niss.protocol.messages import Beacon, Participant, RoundOpen, Terms
from support.protocol_round import Federation, seeded_entropy

SIZE = 12


class Server:
    """Proposes round 2 of a run and writes down what it was asked for."""

    def __init__(self, plan: Plan, *, short_of: float = 1.0) -> None:
        self.plan, self.short_of = plan, short_of
        self.holder = Identity.generate(seeded_entropy("holder"))
        self.chain = BeaconChain(4, holder=self.holder, entropy=seeded_entropy("chain"))
        federation = Federation(SIZE, "propose")
        self.participants = federation.open(federation.terms()).participants
        self.commitments: list[bytes] = []

    def terms(self, participants: tuple[Participant, ...]) -> Terms:
        made = make_terms(self.plan, participants=len(participants), coordinates=4, run=bytes(16), number=0)
        return Terms(**{**made.__dict__, "residual_variance": made.residual_variance / self.short_of})

    def release(self, attempt: int, commitment: bytes) -> Beacon:
        self.commitments.append(commitment)
        return self.chain.release(2, attempt, commitment)

    def propose(self, allowed: float) -> tuple[RoundOpen, float]:
        return propose_round(
            self.plan,
            2,
            seat=lambda _attempt: self.participants,
            terms=self.terms,
            release=self.release,
            assess=DrawnAccount(),
            allowed=allowed,
        )


def allowed(plan: Plan) -> float:
    return float(plan.round_mu(np.zeros(1, dtype=np.int64))[0])


@pytest.mark.parametrize("short_of", [1.0, 2.0])
def test_the_beacon_is_released_for_what_is_played(short_of: float) -> None:
    plan = Plan(clip=1.0, neighbours=5, attempts=4)
    server = Server(plan, short_of=short_of)
    opened, mu = server.propose(allowed(plan))
    terms = opened.terms
    assert (terms.round, terms.attempt) == (2, len(server.commitments) - 1)
    assert (terms.attempt > 0) == (short_of > 1.0)
    assert mu <= allowed(plan)
    assert mu == DrawnAccount()(agree(opened), 0)
    commitment = participants_hash(opened.participants) + terms_hash(terms)
    assert server.commitments[-1] == commitment
    verify_beacon(
        opened.beacon,
        commitment,
        expected=link_of(2, terms.attempt),
        anchor=server.chain.anchor,
        holder=server.holder.public,
        after=0,
    )


def test_a_promise_that_no_graph_keeps_is_refused() -> None:
    plan = Plan(clip=1.0, neighbours=3, attempts=3, tau2=0.0)
    server = Server(plan)
    with pytest.raises(PrivacyError, match="none of 3 graphs"):
        server.propose(1.0)
    assert len(set(server.commitments)) == 3
    assert math.isinf(Server(plan).propose(math.inf)[1])
