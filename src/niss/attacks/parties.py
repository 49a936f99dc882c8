"""All parties of real protocol rounds in one process, under a server that may lie.

The machines are those of `niss.protocol`; the server's lies are signed by its own key, as it could sign them in
earnest. A client can be put back to an earlier state it had stored, which is what losing one's memory means.
Entropy is simulated and seeded, so that an attack can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Plan
from niss.accounting.assess import Assessor
from niss.accounting.terms import make_terms
from niss.mechanism.grid import centred
from niss.protocol.agreement import Agreed, agree, participants_hash, terms_hash
from niss.protocol.beacon import BeaconChain
from niss.protocol.client import Client, Policy
from niss.protocol.keys import Identity
from niss.protocol.messages import Participant, RevealRequest, RoundOpen, SurvivorClaim, Upload
from niss.protocol.packing import unpack
from niss.protocol.wire import decode, encode, signed_part
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]

_PURPOSES = {RoundOpen: "open", SurvivorClaim: "claim", RevealRequest: "request"}


class Party:
    """One client, and every state it has ever stored."""

    def __init__(self, identity: Identity, policy: Policy, assess: Any) -> None:
        self._identity, self._policy, self._assess = identity, policy, assess
        self.stored: list[bytes] = []
        self.charged: list[float] = []
        self.client = self._start(None)

    def put_back(self, stored: bytes) -> Client:
        """The client as it was when it stored that: everything since is forgotten."""
        self.client = self._start(stored)
        return self.client

    def _start(self, stored: bytes | None) -> Client:
        return Client(
            self._identity,
            self._policy,
            assess=self._assess,
            charge=lambda _agreed, mu: self.charged.append(mu),
            persist=self.stored.append,
            kept=stored,
        )


class Parties:
    """`size` clients with one prekey each, a beacon, and the server's key in the adversary's hands."""

    def __init__(self, plan: Plan, size: int, *, coordinates: int, mode: str, stream: SimStream) -> None:
        self.plan, self.size = plan, size
        self._coordinates, self._mode = coordinates, mode
        self.entropy = stream.generator().bytes
        self._server = Identity.generate(self.entropy)
        holder = Identity.generate(self.entropy)
        self._chain = BeaconChain(1, holder=holder, entropy=self.entropy)
        policy = Policy(
            participants=size,
            colluders=plan.colluders,
            mu=float(plan.round_mu(np.zeros(1, dtype=np.int64))[0]) * (1.0 + 1e-9),
            clip=plan.clip,
            server=self._server.public,
            holder=holder.public,
            anchor=self._chain.anchor,
        )
        assess = Assessor(relation=plan.relation, failure=plan.corruption.failure)
        self.parties = [Party(Identity.generate(self.entropy), policy, assess) for _ in range(size)]

    def open(self, **changes: Any) -> RoundOpen:
        """Open round 0 on the plan's terms, some of them changed as the server likes."""
        terms = make_terms(
            self.plan,
            participants=self.size,
            coordinates=self._coordinates,
            run=b"attack",
            number=0,
            mode=self._mode,
        )
        terms = replace(terms, **changes)
        participants = tuple(
            Participant(party.client.public, party.client.enrol(1, self.entropy)[0]) for party in self.parties
        )
        commitment = participants_hash(participants) + terms_hash(terms)
        beacon = self._chain.release(terms.round, terms.attempt, commitment)
        opened: RoundOpen = self.signed(RoundOpen(terms, participants, beacon))
        return opened

    def upload(self, opened: RoundOpen, seat: int, update: FloatArray) -> Upload:
        """What the client in that seat sends, as it arrives."""
        sent: Upload = carried(self.parties[seat].client.upload(opened, update, self.entropy))
        return sent

    def signed(self, message: Any) -> Any:
        """A message of the server, true or not, as it arrives."""
        bare = replace(message, signature=b"")
        purpose = _PURPOSES[type(message)]
        return carried(replace(bare, signature=self._server.sign(purpose, signed_part(bare))))


def carried(message: Any) -> Any:
    """A message as it arrives: encoded and decoded."""
    return decode(encode(message))


def vector_of(upload: Upload, agreed: Agreed) -> FloatArray:
    """An upload as numbers: p_k x_k and its noise, in the units of an update."""
    terms = agreed.terms
    return agreed.grid.to_float(centred(unpack(upload.vector, terms.coordinates, terms.modulus_bits)))


def agreed_on(opened: RoundOpen) -> Agreed:
    """The round as everyone derives it from what was opened."""
    return agree(opened)


def without(size: int, lost: Sequence[int]) -> tuple[int, ...]:
    """All seats but those."""
    return tuple(seat for seat in range(size) if seat not in lost)
