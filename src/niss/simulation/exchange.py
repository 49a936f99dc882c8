"""The real protocol inside the simulator: `exchange = "protocol"`.

Every client, the server and the beacon's holder are the machines of `niss.protocol`, joined by function calls through
the wire format. Keys and noise come from the operating system, so such a run cannot be repeated to the last bit; its
noise has the same distribution as the simulated one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Plan, upload_mu
from niss.accounting.assess import Assessor
from niss.accounting.attempts import draw_round
from niss.accounting.corruption import WorstCase
from niss.accounting.terms import grid_delta, make_terms
from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.protocol.agreement import Agreed, agree, participants_hash, terms_hash
from niss.protocol.beacon import LINKS_PER_ROUND, BeaconChain
from niss.protocol.client import Client, Policy
from niss.protocol.keys import Identity
from niss.protocol.messages import Message, Participant, Prekey, RoundOpen, Terms
from niss.protocol.server import Outcome, Server
from niss.protocol.wire import decode, encode

IntArray = NDArray[np.int64]

# Each upload brings one fresh prekey; the other is for a round that the client drops out of.
_PREKEYS = 2
# Rounding in the terms is not worth a refusal; its square stays within the ledger's own 1e-9.
_ROUNDING = 1.0 + 4e-10


@dataclass(frozen=True)
class Exchanged:
    """What a round of the protocol gave: its outcome, what it cost each client, and what it should have left.

    `mu` is the cost in the joint view, `found` the worst case over colluders that it rests on, `marginal_mu` the cost
    of an upload looked at alone. `grid_delta` is what the grid of these terms adds to delta over all participations of
    a client.
    """

    outcome: Outcome
    agreed: Agreed
    found: WorstCase
    mu: float
    marginal_mu: float
    grid_delta: float
    bytes_uploaded: int

    @property
    def attempts(self) -> int:
        """The graphs that were drawn for this round; all but the last were given up before anyone was asked."""
        return self.agreed.terms.attempt + 1

    @property
    def tau2(self) -> float:
        """eta^2 / (v sigma^2): the distortion that the terms of the round stand for."""
        terms = self.agreed.terms
        return terms.residual_variance / (terms.unit_variance * terms.neighbours)

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
        if plan.attempts > LINKS_PER_ROUND:
            raise ConfigError(f"a round has {LINKS_PER_ROUND} attempts at most", field="plan.attempts")
        self._plan, self._coordinates, self._entropy = plan, coordinates, entropy
        self._mode, self._grid = mode, (grid_bits, modulus_bits)
        self._holder = Identity.generate(entropy)
        self._chain = BeaconChain(rounds, holder=self._holder, entropy=entropy)
        self._server = Server(Identity.generate(entropy))
        self._run = entropy(16)
        self._assess = Assessor(relation=plan.relation, failure=plan.corruption.failure)
        # A given tau^2 promises nothing, so nothing is too dear.
        self._allowed = math.inf
        if plan.tau2 is None:
            self._allowed = float(plan.round_mu(np.zeros(1, dtype=np.int64))[0]) * _ROUNDING
        self._terms: dict[int, Terms] = {}
        self._clients: dict[int, Client] = {}
        self._prekeys: dict[int, list[Prekey]] = {}

    def play(
        self,
        number: int,
        members: IntArray,
        updates: Callable[[int], NDArray[np.floating[Any]]],
        *,
        charge: Callable[[float, float, int], None],
        absent: Collection[int] = (),
    ) -> Exchanged:
        """One round: `updates(seat)` are bare updates, clipped and hidden by the clients; `absent` never upload.

        `charge` is told the mu of the joint and of the marginal view, and the attempt, once, before the first upload.
        """
        clients = [self._client(int(member)) for member in members]
        participants = tuple(
            Participant(client.public, self._next_prekey(int(member)))
            for client, member in zip(clients, members, strict=True)
        )
        drawn, mu = self._draw(number, participants)
        terms = drawn.terms
        rounding = grid_delta(self._plan, terms)
        opened = self._server.open_round(terms, participants, drawn.beacon)
        alone = upload_mu(terms, members.size, self._plan.relation)
        charge(mu, alone, terms.attempt)
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
        agreed = agree(opened)
        found = self._assess.worst_case(agreed, self._plan.colluders)
        return Exchanged(outcome, agreed, found, mu, alone, rounding, sent)

    def _draw(self, number: int, participants: tuple[Participant, ...]) -> tuple[RoundOpen, float]:
        """The first attempt whose graph keeps the promise for everyone, and its mu; each has its own link.

        What is given up is given up before any client is told of it, and the keys of the participants stay unused.
        """
        plan = self._plan

        def propose(attempt: int, more: float) -> RoundOpen:
            terms = self._terms_for(len(participants))
            terms = replace(
                terms, round=number, attempt=attempt, residual_variance=more * terms.residual_variance
            )
            commitment = participants_hash(participants) + terms_hash(terms)
            return RoundOpen(terms, participants, self._chain.release(number, attempt, commitment))

        try:
            return draw_round(
                propose,
                self._assess,
                attempts=plan.attempts,
                colluders=plan.colluders,
                allowed=self._allowed,
            )
        except PrivacyError as error:
            raise PrivacyError(f"round {number + 1}: {error.message}", hint=error.hint) from None

    def _terms_for(self, participants: int) -> Terms:
        """The terms for that many participants; round and attempt are filled in later."""
        if participants not in self._terms:
            self._terms[participants] = make_terms(
                self._plan,
                participants=participants,
                coordinates=self._coordinates,
                run=self._run,
                number=0,
                mode=self._mode,
                grid_bits=self._grid[0],
                modulus_bits=self._grid[1],
            )
        return self._terms[participants]

    def _repair(self, clients: list[Client], absent: Collection[int]) -> None:
        """The repair as far as clients agree to it; where more is missing than was planned for, noise stays."""
        claim = self._server.claim_survivors()
        for seat in claim.survivors:
            if seat in absent:
                continue
            try:
                verdict = clients[seat].judge(_carried(claim))
            except RemoteProtocolError:
                continue
            self._server.take_verdict(_carried(verdict))
        for seat, request in self._server.request_reveals().items():
            self._server.take_reveal(_carried(clients[seat].reveal(_carried(request))))

    def _client(self, member: int) -> Client:
        if member not in self._clients:
            policy = Policy(
                # Two honest ones. What a small round costs is bounded by mu.
                participants=self._plan.colluders + 2,
                colluders=self._plan.colluders,
                attempts=self._plan.attempts,
                mu=self._allowed,
                clip=self._plan.clip,
                server=self._server.public,
                holder=self._holder.public,
                anchor=self._chain.anchor,
            )
            # The simulator charges a round for all its participants at once, before the first upload.
            self._clients[member] = Client(
                Identity.generate(self._entropy),
                policy,
                assess=self._assess,
                charge=lambda _agreed, _mu: None,
                persist=lambda _kept: None,
            )
            self._prekeys[member] = []
        return self._clients[member]

    def _next_prekey(self, member: int) -> Prekey:
        """A key of that client that no round has used; it enrols more when it has dropped out too often."""
        if not self._prekeys[member]:
            self._prekeys[member] += self._clients[member].enrol(_PREKEYS, self._entropy)
        return self._prekeys[member].pop(0)


def _carried(message: Any) -> Any:
    """A message as it arrives: encoded and decoded."""
    arrived: Message = decode(encode(message))
    return arrived
