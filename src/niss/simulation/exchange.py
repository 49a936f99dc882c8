"""The real protocol inside the simulator: `exchange = "protocol"`.

Every client, the server and the beacon's holder are the machines of `niss.protocol`, joined by function calls through
the wire format. Keys and noise come from the operating system, so such a run cannot be repeated to the last bit; its
noise has the same distribution as the simulated one.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Assessor, Plan, Promise, grid_delta, make_terms, propose_round, upload_mu
from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.mechanism.grid import Grid
from niss.mechanism.rounding import beside
from niss.protocol.agreement import LINKS_PER_ROUND, Agreed, BeaconChain, agree, participants_hash, terms_hash
from niss.protocol.carried import Schedule
from niss.protocol.client import Client, Policy
from niss.protocol.keys import Identity
from niss.protocol.messages import (
    Message,
    Participant,
    Prekey,
    Reveal,
    RevealRequest,
    RoundOpen,
    Terms,
)
from niss.protocol.server import Outcome, Server
from niss.protocol.wire import decode, encode
from niss.runs import SumNoise
from niss.views import WorstCase

IntArray = NDArray[np.int64]

# Each upload brings one fresh prekey; the other is for a round that the client drops out of.
_PREKEYS = 2
# Rounding in the terms is not worth a refusal; its square stays within the ledger's own 1e-9.
ROUNDING = 1.0 + 4e-10


@dataclass(frozen=True)
class Exchanged:
    """What a round of the protocol gave, what it cost each client, and what it should have left.

    outcome         the sum, the survivors, and whether all that should cancel did
    agreed          the terms and the graph that all parties derived from the same public values
    worst           the worst case over colluders that `mu` rests on; None where the whole run has one
    mu              most that the round cost a client in the joint view
    marginal_mu     cost of an upload looked at alone
    grid_delta      what the grid of these terms adds to delta over all participations of a client
    bytes_uploaded  by all clients, encoded
    """

    outcome: Outcome
    agreed: Agreed
    worst: WorstCase | None
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
        """Of the noise in the sum: residual noise of the survivors, and whatever could not be taken out."""
        return len(self.outcome.survivors) * self.agreed.terms.residual_variance + self.outcome.extra_variance

    @property
    def scale(self) -> float:
        """Those who are left stand for all."""
        return len(self.agreed.participants) / max(len(self.outcome.survivors), 1)

    @property
    def earlier_covariances(self) -> tuple[float, ...]:
        """Of the noise in the sum with that in sums of earlier rounds, the latest first; (): independent."""
        return ()

    @property
    def noise(self) -> SumNoise:
        """Of the noise in the sum times `scale`, by which the model moves."""
        return SumNoise(self.predicted_variance * self.scale**2, self.earlier_covariances)

    @property
    def public(self) -> dict[str, str]:
        """What everybody saw and from which the graph follows: the beacon, and the hashes it was let out for.

        `graph` is the digest of what was drawn, for whoever draws it again.
        """
        opened = self.agreed.opened
        values = {
            "beacon": opened.beacon.value,
            "participants": participants_hash(opened.participants),
            "terms": terms_hash(opened.terms),
            "graph": self.agreed.graph.digest(),
        }
        return {name: value.hex() for name, value in values.items()}


class Parties(ABC):
    """The beacon's holder, the server and the clients of a run in one process, each with keys of its own.

    plan        what every client is promised
    rounds      for which the beacon's chain has links
    entropy     returns so many random bytes; keys, beacons and noise come from it
    """

    def __init__(self, plan: Plan, rounds: int, entropy: Callable[[int], bytes]) -> None:
        self._plan, self._entropy = plan, entropy
        self._holder = Identity.generate(entropy)
        self._chain = BeaconChain(rounds, holder=self._holder, entropy=entropy)
        self._server = Server(Identity.generate(entropy))
        self._run = entropy(16)
        self._clients: dict[int, Client] = {}
        self._prekeys: dict[int, list[Prekey]] = {}

    def _policy(self, *, participants: int, mu: float, schedule: Schedule | None = None) -> Policy:
        """What a client insists on: at least so many participants, and at most that mu in a round."""
        return Policy(
            participants=participants,
            colluders=self._plan.colluders,
            attempts=self._plan.attempts,
            mu=mu,
            clip=self._plan.clip,
            server=self._server.public,
            holder=self._holder.public,
            anchor=self._chain.anchor,
            schedule=schedule,
        )

    @abstractmethod
    def _new_client(self, member: int) -> Client:
        """The machine of that client, with keys of its own."""

    def _client(self, member: int) -> Client:
        """The machine of that client, made when it first takes part."""
        if member not in self._clients:
            self._clients[member] = self._new_client(member)
            self._prekeys[member] = []
        return self._clients[member]

    def _seated(self, members: IntArray) -> tuple[Participant, ...]:
        """These clients with a key each that no round has used; who has dropped out too often enrols more."""
        seats = []
        for member in members.tolist():
            client = self._client(member)
            if not self._prekeys[member]:
                self._prekeys[member] += client.enrol(_PREKEYS, self._entropy)
            seats.append(Participant(client.public, self._prekeys[member].pop(0)))
        return tuple(seats)

    def _collect(
        self,
        opened: RoundOpen,
        members: IntArray,
        updates: Callable[[int], NDArray[np.floating[Any]]],
        absent: Collection[int],
    ) -> int:
        """Have everyone upload but the seats `absent`; the bytes that were sent."""
        sent = 0
        for seat, member in enumerate(members.tolist()):
            if seat in absent:
                continue
            upload = self._clients[member].upload(through_the_wire(opened), updates(seat), self._entropy)
            sent += len(encode(upload))
            self._server.take_upload(through_the_wire(upload))
            self._prekeys[member] += list(upload.fresh_prekeys)
        return sent

    def _repair(self, clients: list[Client], before: list[Client] | None = None) -> None:
        """The repair as far as the committee agrees to it; where more is missing than was planned for, noise stays.

        before   the clients of the round before, whose committee is asked once more about what it carried to this one
        """
        _ask(clients, self._server.request_reveals(), self._server.take_reveal)
        if before is not None:
            _ask(before, self._server.request_carried_reveals(), self._server.take_carried_reveal)


def _ask(clients: list[Client], requests: dict[int, RevealRequest], take: Callable[[Reveal], None]) -> None:
    """By seat, have clients reveal; whoever refuses is passed over."""
    for seat, request in requests.items():
        try:
            reveal = clients[seat].reveal(through_the_wire(request))
        except RemoteProtocolError:
            continue
        take(through_the_wire(reveal))


class ProtocolExchange(Parties):
    """All parties of a run in one process.

    plan          what every client is promised; its method must have a protocol
    rounds        most rounds that will be played: the beacon's chain has a link for each attempt at each
    coordinates   entries of an upload
    mode          `tolerate` leaves the noise of lost clients in the sum, `repair` has it revealed and taken out
    grid_bits     the grid has steps of 2^-grid_bits; None: chosen for the noise
    modulus_bits  of an uploaded number
    entropy       returns so many random bytes; keys, beacons and noise come from it. Anything but the operating
                  system's is for tests: whoever knows it knows every secret
    """

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
        super().__init__(plan, rounds, entropy)
        self._coordinates, self._mode, self._grid = coordinates, mode, (grid_bits, modulus_bits)
        self._assess = Assessor(relation=plan.relation, failure=plan.failure, promise=Promise.of(plan))
        # A given tau^2 promises nothing, so nothing is too dear.
        self._allowed = math.inf
        if plan.tau2 is None:
            self._allowed = float(plan.round_mu(np.zeros(1, dtype=np.int64))[0]) * ROUNDING
        self._terms: dict[tuple[int, float], Terms] = {}

    def play(
        self,
        number: int,
        members: IntArray,
        updates: Callable[[int], NDArray[np.floating[Any]]],
        *,
        charge: Callable[[float, float, int], None],
        absent: Collection[int] = (),
        clip: float | None = None,
        kept: int = 0,
    ) -> Exchanged:
        """One round, from drawing its graph to the repaired sum.

        number   of the round, from 0
        members  the clients, a seat each
        updates  gives the bare update of a seat; its client clips and hides it
        charge   told the mu of the joint and of the marginal view, and the attempt, once, before the first upload
        absent   seats that never upload
        clip     of this round, at most the plan's; None: the plan's
        kept     how many of the last coordinates rounding to the grid must leave as long as they are

        Raises `PrivacyError` where no attempt keeps the promise; nothing is charged then.
        """
        participants = self._seated(members)
        clients = [self._clients[int(member)] for member in members]
        plan = self._plan if clip is None else replace(self._plan, clip=clip)
        proposed, mu = self._propose(plan, number, participants)
        terms = proposed.terms
        rounding = grid_delta(self._plan, terms, members.size)
        opened = self._server.open_round(terms, participants, proposed.beacon)
        marginal = upload_mu(terms, members.size, self._plan.relation)
        charge(mu, marginal, terms.attempt)

        def update(seat: int) -> NDArray[np.floating[Any]]:
            return beside(Grid(terms.grid_bits), updates(seat), terms.clip, members.size, kept)

        sent = self._collect(opened, members, update, absent)
        if self._mode == "repair":
            self._repair(clients)
        outcome = self._server.finish()
        for client in clients:
            client.close_round()
        agreed = agree(opened)
        worst = self._assess.worst_case(agreed, self._plan.colluders)
        return Exchanged(outcome, agreed, worst, mu, marginal, rounding, sent)

    def _propose(
        self, plan: Plan, number: int, participants: tuple[Participant, ...]
    ) -> tuple[RoundOpen, float]:
        """The first attempt whose graph keeps the promise for everyone, and its mu; each has its own link.

        The keys of the participants stay unused until one does.
        """
        try:
            return propose_round(
                plan,
                number,
                seat=lambda _attempt: participants,
                terms=lambda seated: self._terms_for(plan, len(seated)),
                release=lambda attempt, commitment: self._chain.release(number, attempt, commitment),
                assess=self._assess,
                allowed=self._allowed,
            )
        except PrivacyError as error:
            raise PrivacyError(f"round {number + 1}: {error.message}", hint=error.hint) from None

    def _terms_for(self, plan: Plan, participants: int) -> Terms:
        """The terms for that many participants; round and attempt are filled in later."""
        key = participants, plan.clip
        if key not in self._terms:
            self._terms[key] = make_terms(
                plan,
                participants=participants,
                coordinates=self._coordinates,
                run=self._run,
                number=0,
                mode=self._mode,
                grid_bits=self._grid[0],
                modulus_bits=self._grid[1],
            )
        return self._terms[key]

    def _new_client(self, member: int) -> Client:  # noqa: ARG002
        # Two honest ones. What a small round costs is bounded by mu.
        policy = self._policy(participants=self._plan.colluders + 2, mu=self._allowed)
        # The simulator charges a round for all its participants at once, before the first upload.
        return Client(
            Identity.generate(self._entropy),
            policy,
            assess=self._assess,
            charge=lambda _agreed, _mu: None,
            persist=lambda _kept: None,
        )


def through_the_wire(message: Any) -> Any:
    """A message as it arrives at the other side: encoded and decoded."""
    arrived: Message = decode(encode(message))
    return arrived
