"""The real protocol inside the simulator: `exchange = "protocol"`.

Every client, the server and the beacon's holder are the machines of `niss.protocol`, joined by function calls through
the wire format. Keys and noise come from the operating system, so such a run cannot be repeated to the last bit; its
noise has the same distribution as the simulated one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Plan
from niss.accounting.assess import make_assessor
from niss.accounting.terms import grid_delta, make_terms
from niss.protocol.agreement import Agreed, agree, participants_hash, terms_hash
from niss.protocol.beacon import BeaconChain
from niss.protocol.client import Client, Policy
from niss.protocol.keys import Identity
from niss.protocol.messages import Message, Participant, Prekey
from niss.protocol.server import Outcome, Server
from niss.protocol.wire import decode, encode

IntArray = NDArray[np.int64]

# Each upload brings one fresh prekey, so a client never has fewer than it was enrolled with.
_PREKEYS = 2


@dataclass(frozen=True)
class Exchanged:
    """What a round of the protocol gave: its outcome, what it cost each client, and what it should have left."""

    outcome: Outcome
    agreed: Agreed
    mu: float
    bytes_uploaded: int

    @property
    def predicted_variance(self) -> float:
        """Residual noise of the survivors, and whatever could not be taken out."""
        return len(self.outcome.survivors) * self.agreed.terms.residual_variance + self.outcome.extra_variance

    @property
    def public(self) -> dict[str, str]:
        """What everybody saw and from which the graph follows: the beacon, and the hashes it was let out for.

        `graph` is the digest of what was drawn, for whoever draws it again.
        """
        opened = self.agreed.opened
        shown = {
            "beacon": opened.beacon.value,
            "participants": participants_hash(opened.participants),
            "terms": terms_hash(opened.terms),
            "graph": self.agreed.graph.digest(),
        }
        return {name: value.hex() for name, value in shown.items()}


class ProtocolExchange:
    """All parties of a run in one process."""

    def __init__(
        self,
        plan: Plan,
        *,
        rounds: int,
        coordinates: int,
        mode: str = "tolerate",
        grid_bits: int | None = None,
        modulus_bits: int = 64,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._plan, self._coordinates, self._entropy = plan, coordinates, entropy
        self._mode, self._grid = mode, (grid_bits, modulus_bits)
        self._holder = Identity.generate(entropy)
        self._chain = BeaconChain(rounds, holder=self._holder, entropy=entropy)
        self._server = Server(Identity.generate(entropy))
        self._run = entropy(16)
        self._assess = make_assessor(relation=plan.relation, failure=plan.corruption.failure)
        self.grid_delta = 0.0
        self._clients: dict[int, Client] = {}
        self._prekeys: dict[int, list[Prekey]] = {}

    def play(
        self,
        number: int,
        members: IntArray,
        updates: Callable[[int], NDArray[np.floating[Any]]],
        *,
        charge: Callable[[float], None],
        absent: Collection[int] = (),
    ) -> Exchanged:
        """One round: `updates(seat)` are bare updates, clipped and hidden by the clients; `absent` never upload."""
        clients = [self._client(int(member), members.size) for member in members]
        participants = tuple(
            Participant(client.public, self._prekeys[int(member)].pop(0))
            for client, member in zip(clients, members, strict=True)
        )
        terms = make_terms(
            self._plan,
            participants=members.size,
            coordinates=self._coordinates,
            run=self._run,
            number=number,
            mode=self._mode,
            grid_bits=self._grid[0],
            modulus_bits=self._grid[1],
        )
        self.grid_delta = max(self.grid_delta, grid_delta(self._plan, terms))
        beacon = self._chain.release(
            terms.round, terms.attempt, participants_hash(participants) + terms_hash(terms)
        )
        opened = self._server.open_round(terms, participants, beacon)
        agreed = agree(opened)
        mu = self._assess(agreed, self._plan.colluders)
        charge(mu)
        sent = 0
        for seat, client in enumerate(clients):
            if seat in absent:
                continue
            upload = client.upload(_carried(opened), updates(seat), self._entropy)
            sent += len(encode(upload))
            self._server.take_upload(_carried(upload))
            self._prekeys[int(members[seat])] += list(upload.fresh_prekeys)
        if self._mode == "repair":
            self._repair(clients, absent)
        outcome = self._server.finish()
        for client in clients:
            client.close_round()
        return Exchanged(outcome, agreed, mu, sent)

    def _repair(self, clients: list[Client], absent: Collection[int]) -> None:
        claim = self._server.claim_survivors()
        for seat in claim.survivors:
            if seat not in absent:
                self._server.take_verdict(_carried(clients[seat].judge(_carried(claim))))
        for seat, request in self._server.request_reveals().items():
            self._server.take_reveal(_carried(clients[seat].reveal(_carried(request))))

    def _client(self, member: int, participants: int) -> Client:
        if member not in self._clients:
            policy = Policy(
                participants=participants,
                colluders=self._plan.colluders,
                # What rounding in the terms may add is not worth a refusal.
                mu=float(self._plan.round_mu(np.zeros(1, dtype=np.int64))[0]) * (1.0 + 1e-9)
                if self._plan.tau2 is None
                else math.inf,
                clip=self._plan.clip,
                server=self._server.public,
                holder=self._holder.public,
                anchor=self._chain.anchor,
            )
            # The simulator charges a round for all its participants at once, before the first upload.
            client = Client(
                Identity.generate(self._entropy),
                policy,
                assess=self._assess,
                charge=lambda _agreed, _mu: None,
                persist=lambda _kept: None,
            )
            self._clients[member] = client
            self._prekeys[member] = list(client.enrol(_PREKEYS, self._entropy))
        return self._clients[member]


def _carried(message: Any) -> Any:
    """A message as it arrives: encoded and decoded."""
    arrived: Message = decode(encode(message))
    return arrived
