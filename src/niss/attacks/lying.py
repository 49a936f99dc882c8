"""A server that lies to real nodes, and what it makes of what they reveal.

The nodes are those of `niss.session.Parties`; the server's lies are signed by its own key, as it could sign them in
earnest. A node can be given back what it had stored before, which is what losing one's memory means. Entropy is
simulated and seeded, so that an attack can be repeated.

Against a self-mask the server needs the partials of a threshold of the committee, against a share as many. A member
gives, for one survivor set, either. The graded attack tells some members that the victim lives and the others that it
dropped out; it works on members that answer for two survivor sets in one round, or if fewer than half of them suffice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from niss.accounting import Plan
from niss.attacks.estimates import FloatArray, best_weights, laplacian
from niss.attacks.experiment import VICTIM
from niss.errors import RemoteProtocolError
from niss.mechanism.grid import centred
from niss.protocol import committee
from niss.protocol.agreement import Agreed, unpack
from niss.protocol.keys import Identity
from niss.protocol.messages import Refusal, RoundOpen, Upload, decode, encode
from niss.protocol.points import cut
from niss.protocol.server import Server
from niss.protocol.shares import derive_seed
from niss.randomness import SecretStream, SimStream
from niss.records import Records
from niss.redaction import SecretBytes
from niss.session import together
from niss.session.node import Training
from niss.session.ports import Request, Stage
from niss.session.proposal import Setup
from niss.session.server import drive
from niss.session.store import ClientState, MemoryStore
from niss.views import effective_variance

Survivors = tuple[int, ...]
# What a node is to upload: its update, or its records and the weights at which their gradients are taken.
Held = FloatArray | tuple[Records, FloatArray]


class LyingServer:
    """A server that opened one round, may sign any lie about it, and the nodes it talks to: node k has seat k.

    plan          what is proposed to the nodes
    size          how many there are
    coordinates   length of their updates
    stream        where all keys and all noise come from

    agreed        the round as everyone derives it from what the server opened
    uploads       what arrived last from each seat
    """

    def __init__(self, plan: Plan, size: int, *, coordinates: int, stream: SimStream) -> None:
        entropy = stream.generator().bytes
        self.plan, self.size, self._coordinates = plan, size, coordinates
        self._identity = Identity.generate(entropy)
        # 64 bits: a single upload, whose shares do not cancel, must not wrap around either.
        setup = Setup(plan=plan, rounds=1, participants=size, modulus_bits=64)
        session, self._parties = together(setup, entropy, self._identity)
        session.begin(0, range(size), coordinates=coordinates)
        drive(session, self._parties.with_updates(_no_update, coordinates), until=Stage.ROUND)
        if session.round is None:
            raise RemoteProtocolError(f"the round was not opened: {session.refused}")
        self.run, self.agreed = session.proposal.run, session.round.agreed
        self.uploads: dict[int, Upload] = {}

    def ask(self, seat: int, message: Any, held: Held | None = None) -> Any:
        """What a node answers, as it arrives; raises `RemoteProtocolError` with its reason where it declines."""
        opening = isinstance(message, RoundOpen)
        request = Request(Stage.ROUND if opening else Stage.REVEAL, encode(message), run=self.run)
        answer = self._parties.node(seat).answer(request, self._coordinates if opening else None)
        if isinstance(answer, Training):
            assert held is not None
            answer = answer.upload_records(*held) if isinstance(held, tuple) else answer.upload(held)
        said = decode(answer.body)
        if isinstance(said, Refusal):
            raise RemoteProtocolError(said.reason)
        return said

    def upload(self, seat: int, held: Held) -> FloatArray:
        """Open the round to a node, again perhaps: its upload as numbers, p_k x_k and noise in units of an update."""
        said = self.uploads[seat] = self.ask(seat, self.agreed.opened, held)
        terms = self.agreed.terms
        return self.agreed.grid.to_float(centred(unpack(said.vector, terms.coordinates, terms.modulus_bits)))

    def backup(self, seat: int) -> MemoryStore:
        """A copy of everything that a node has stored."""
        store = self._parties.store(seat)
        kept = copy(store)
        kept.state = ClientState.from_bytes(store.state.to_bytes())
        kept.charged = deepcopy(store.charged)
        return kept

    def restore(self, seat: int, kept: MemoryStore) -> None:
        """The node as it was when that was stored: everything since is forgotten."""
        self._parties.stores[seat] = kept
        self._parties.stores[seat] = self.backup(seat)

    def charged(self, seat: int) -> float:
        """mu that a node has charged to its ledger."""
        return sqrt(self._parties.store(seat).charged.joint_squared[0])

    def reveal_requests(self, survivors: Survivors) -> dict[int, Any]:
        """By member of the committee, what it is asked where these are said to have survived."""
        server, opened = Server(self._identity), self.agreed.opened
        server.open_round(opened.terms, opened.participants, opened.beacon)
        for seat in survivors:
            server.take_upload(self.uploads[seat])
        return dict(server.request_reveals())


def _no_update(_node: int, _training: Training) -> FloatArray:
    raise AssertionError("nobody is asked for an update before the round is opened")


@dataclass(frozen=True)
class RevealedSecrets:
    """What the partials of members of the committee suffice for.

    agreed  the round
    masks   by seat, the seed of its self-mask
    edges   by sender and receiver, the seed of the share and its variance
    """

    agreed: Agreed
    masks: dict[int, SecretBytes]
    edges: dict[tuple[int, int], tuple[SecretBytes, float]]

    @property
    def residual(self) -> FloatArray:
        """Per client, the variance of residual noise and of a self-mask that was not rebuilt."""
        terms, bare = self.agreed.terms, np.isin(np.arange(self.agreed.graph.size), list(self.masks))
        return np.asarray(terms.residual_variance + np.where(bare, 0.0, terms.self_variance))

    def variance_left(self, victim: int) -> float:
        """The accountant's effective variance of the victim's upload, given what was revealed.

        Revealed edges hide nothing any more, and a self-mask counts as residual noise until it is rebuilt.
        """
        unit = self.agreed.terms.unit_variance
        left = effective_variance(
            self.agreed.graph,
            unit_variance=unit,
            residual_variance=self.residual,
            revealed=set(self.edges),
        )
        return float(left[victim])

    def estimate(
        self, uploads: Sequence[FloatArray], known: Mapping[int, FloatArray], victim: int
    ) -> FloatArray:
        """The best linear estimate of the victim's update from all uploads.

        Every share and self-mask whose seed was revealed is drawn again and taken out, and so are the `known` updates
        of others, by seat. What is left has covariance sigma^2 L + diag(residual), with L the Laplacian of the edges
        that stayed hidden.
        """
        rows, graph = np.stack(uploads), self.agreed.graph
        divisor = self.agreed.terms.divisor(len(uploads))
        for seat, update in known.items():
            rows[seat] -= update / divisor
        for (sender, receiver), (seed, variance) in self.edges.items():
            share = self._noise(seed, variance)
            rows[sender] -= share
            rows[receiver] += share
        for seat, seed in self.masks.items():
            rows[seat] -= self._noise(seed, self.agreed.terms.self_variance)
        ends = zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True)
        hidden = laplacian(graph, np.array([pair not in self.edges for pair in ends]))
        covariance = np.diag(self.residual) + self.agreed.terms.unit_variance * hidden
        weights = best_weights(covariance, victim)
        return np.asarray(divisor * (weights @ rows) / weights[victim])

    def _noise(self, seed: SecretBytes, variance: float) -> FloatArray:
        """The Gaussian noise that a client drew from this seed, in the units of an update."""
        drawn, grid = np.zeros(self.agreed.terms.coordinates, dtype=np.int64), self.agreed.grid
        SecretStream(bytes(seed)).add_gaussian(drawn, grid.deviation_steps(variance))
        return grid.to_float(drawn)


def guess_sum(
    plan: Plan,
    silos: Sequence[Records],
    weights: FloatArray,
    stream: SimStream,
    known: Sequence[FloatArray] = (),
) -> tuple[FloatArray, float]:
    """A run of one round that hides records: the best guess of what the first silo added up, and the mu it was charged.

    silos    what each holds; its node draws the batch
    weights  where all take their gradients
    known    what all add up to, the others of which count; none: nothing
    """
    server = LyingServer(plan, len(silos), coordinates=weights.size, stream=stream)
    uploads = [server.upload(seat, (records, weights)) for seat, records in enumerate(silos)]
    others = {seat: added for seat, added in enumerate(known) if seat != VICTIM}
    return RevealedSecrets(server.agreed, {}, {}).estimate(uploads, others, VICTIM), server.charged(VICTIM)


def claim_survivors(
    server: LyingServer, claims: Mapping[int, Sequence[Survivors]], *, remembers: bool
) -> RevealedSecrets:
    """Tell members of the committee survivor sets, and take what they reveal; then all are as they were before.

    claims      by seat: the survivor sets it is told, one after the other; seats beyond the committee are not asked
    remembers   whether members keep what they answered. If not, each is restored to its state after the upload before
                it hears the next claim.
    """
    agreed, told = server.agreed, {one for claimed in claims.values() for one in claimed}
    requests = {survivors: server.reveal_requests(survivors) for survivors in told}
    # By survivor and neighbour that dropped out (None: for its self-mask), the partials by the member's number.
    partials: dict[tuple[int, int | None], dict[int, bytes]] = {}
    for number, seat in enumerate(agreed.committee, start=1):
        before = server.backup(seat)
        for survivors in claims.get(seat, ()):
            if not remembers:
                server.restore(seat, before)
            try:
                said = server.ask(seat, requests[survivors][seat])
            except RemoteProtocolError:
                continue
            lost = committee.lost_edges(agreed, survivors)
            for one in said.partials:
                for other, point in zip((None, *lost[one.seat]), cut(one.points), strict=True):
                    partials.setdefault((one.seat, other), {})[number] = point
        server.restore(seat, before)
    found, enough = RevealedSecrets(agreed, {}, {}), agreed.terms.threshold
    for (seat, other), given in partials.items():
        if len(given) < enough:
            continue
        (point,) = committee.combine(dict(list(given.items())[:enough]))
        if other is None:
            found.masks[seat] = committee.mask_seed(agreed, seat, point)
            continue
        key = committee.open_seals(agreed, seat, {other: point}, server.uploads[seat].pieces)[other]
        for edge in agreed.edges(seat, [other]):
            ends = (seat, other) if edge.sign > 0 else (other, seat)
            found.edges[ends] = derive_seed(key, edge.context, *edge.ends), edge.variance
    return found
