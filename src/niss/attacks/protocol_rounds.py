"""Real protocol rounds in one process, under a server that lies, and what it makes of what clients reveal.

The machines are those of `niss.protocol`; the server's lies are signed by its own key, as it could sign them in
earnest. A client can be restored to an earlier state it had stored, which is what losing one's memory means.
Entropy is simulated and seeded, so that an attack can be repeated.

Against a self-mask the server needs the partials of a threshold of the committee, against a share as many. A member
gives, for one survivor set, either. The graded attack tells some members that the victim lives and the others that it
dropped out; it works on members that answer for two survivor sets in one round, or if fewer than half of them suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from niss.accounting import DrawnAccount, Plan, Promise, effective_variance, make_terms
from niss.attacks.estimates import best_weights, laplacian
from niss.attacks.observation import FloatArray
from niss.errors import RemoteProtocolError
from niss.mechanism.grid import centred
from niss.protocol import committee, messages
from niss.protocol.agreement import Agreed, BeaconChain, agree, participants_hash, terms_hash
from niss.protocol.client import Client, Policy
from niss.protocol.keys import Identity, SecretBytes
from niss.protocol.shares import derive_seed
from niss.protocol.wire import decode, encode, signed_part, unpack
from niss.randomness import SecretStream, SimStream

Survivors = tuple[int, ...]

_PURPOSES = {messages.RoundOpen: "open", messages.RevealRequest: "request"}


class RestorableClient:
    """One client of the protocol that can lose its memory.

    client    the machine as it is now
    stored    every state it has ever stored, the latest last
    charged   every mu it has charged to its ledger
    """

    def __init__(self, identity: Identity, policy: Policy, assess: Any) -> None:
        self._identity, self._policy, self._assess = identity, policy, assess
        self.stored: list[bytes] = []
        self.charged: list[float] = []
        self.client = self.restore(None)

    def restore(self, stored: bytes | None) -> Client:
        """The client as it was when it stored that: everything since is forgotten. None: a new client."""
        self.client = Client(
            self._identity,
            self._policy,
            assess=self._assess,
            charge=lambda _agreed, mu: self.charged.append(mu),
            persist=self.stored.append,
            kept=stored,
        )
        return self.client


class DishonestServer:
    """A server that may sign any lie, and the clients it talks to.

    plan          what the clients' policy asks for
    size          how many clients there are, each with one prekey
    coordinates   length of their updates
    mode          what happens to dropouts: `tolerate` or `repair`
    stream        where all keys and all noise come from
    """

    def __init__(self, plan: Plan, size: int, *, coordinates: int, mode: str, stream: SimStream) -> None:
        self.plan, self.size = plan, size
        self._coordinates, self._mode = coordinates, mode
        self._entropy = stream.generator().bytes
        self._identity = Identity.generate(self._entropy)
        holder = Identity.generate(self._entropy)
        self._chain = BeaconChain(1, holder=holder, entropy=self._entropy)
        policy = Policy(
            participants=size,
            colluders=plan.colluders,
            mu=float(plan.round_mu(np.zeros(1, dtype=np.int64))[0]) * (1.0 + 1e-9),
            clip=plan.clip,
            server=self._identity.public,
            holder=holder.public,
            anchor=self._chain.anchor,
        )
        assess = DrawnAccount(relation=plan.relation, failure=plan.failure, promise=Promise.of(plan))
        self.clients = [
            RestorableClient(Identity.generate(self._entropy), policy, assess) for _ in range(size)
        ]

    def open(self, **changes: Any) -> messages.RoundOpen:
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
            messages.Participant(one.client.public, one.client.enrol(1, self._entropy)[0])
            for one in self.clients
        )
        commitment = participants_hash(participants) + terms_hash(terms)
        beacon = self._chain.release(terms.round, terms.attempt, commitment)
        opened: messages.RoundOpen = self.signed(messages.RoundOpen(terms, participants, beacon))
        return opened

    def upload(self, opened: messages.RoundOpen, seat: int, update: FloatArray) -> messages.Upload:
        """What the client in that seat sends, as it arrives."""
        upload: messages.Upload = _over_the_wire(
            self.clients[seat].client.upload(opened, update, self._entropy)
        )
        return upload

    def signed(self, message: Any) -> Any:
        """A message of the server, true or not, as it arrives."""
        bare = replace(message, signature=b"")
        signature = self._identity.sign(_PURPOSES[type(message)], signed_part(bare))
        return _over_the_wire(replace(bare, signature=signature))

    def collect(
        self,
        updates: Sequence[FloatArray],
        *,
        progress: Callable[[int, int, str], None] | None = None,
        **changes: Any,
    ) -> UploadedRound:
        """Open a round with `changes` to its terms, and gather every client's upload.

        updates    what the clients contribute, seat by seat
        progress   called with uploads done, uploads in all, and nothing more to say
        """
        opened, uploads = self.open(**changes), {}
        for seat, update in enumerate(updates):
            uploads[seat] = self.upload(opened, seat, update)
            if progress is not None:
                progress(seat + 1, len(updates), "")
        return UploadedRound(agree(opened), uploads, tuple(one.stored[-1] for one in self.clients))


def _over_the_wire(message: Any) -> Any:
    """A message as it arrives: encoded and decoded."""
    return decode(encode(message))


def vector_of(upload: messages.Upload, agreed: Agreed) -> FloatArray:
    """An upload as numbers: p_k x_k and its noise, in the units of an update."""
    terms = agreed.terms
    return agreed.grid.to_float(centred(unpack(upload.vector, terms.coordinates, terms.modulus_bits)))


def all_but(size: int, lost: Collection[int]) -> Survivors:
    """All seats but those."""
    return tuple(seat for seat in range(size) if seat not in lost)


@dataclass(frozen=True)
class UploadedRound:
    """A round after all uploads.

    agreed    the round as everyone derives it from what the server opened
    uploads   what the server holds, by seat
    stored    what each client has stored
    """

    agreed: Agreed
    uploads: Mapping[int, messages.Upload]
    stored: tuple[bytes, ...]


@dataclass
class RevealedSecrets:
    """What members of the committee have revealed to the server.

    points   by survivor and neighbour that dropped out (None: for its self-mask), the partials by the member's number
    """

    points: dict[tuple[int, int | None], dict[int, bytes]] = field(default_factory=dict)

    def add(
        self, agreed: Agreed, member: int, survivors: Survivors, said: Iterable[messages.Partials]
    ) -> None:
        """The partials of one member for that survivor set."""
        number, lost = agreed.committee.index(member) + 1, committee.lost_neighbours(agreed, survivors)
        for one in said:
            for other, point in zip((None, *lost[one.seat]), committee.cut(one.points), strict=True):
                self.points.setdefault((one.seat, other), {})[number] = point

    def combined(self, agreed: Agreed) -> dict[tuple[int, int | None], bytes]:
        """What enough members gave partials of."""
        enough = agreed.terms.threshold
        return {
            what: committee.combine(dict(list(given.items())[:enough]))
            for what, given in self.points.items()
            if len(given) >= enough
        }


def claim_survivors(
    server: DishonestServer,
    uploaded: UploadedRound,
    claims: Mapping[int, Iterable[Survivors]],
    *,
    remembers: bool,
) -> RevealedSecrets:
    """Tell members of the committee survivor sets, and keep all that they reveal.

    claims      by seat: the survivor sets it is told, one after the other; seats beyond the committee are not asked
    remembers   whether members keep what they answered. If not, each is restored to its state after the upload before
                it hears the next claim.
    """
    revealed = RevealedSecrets()
    for seat in uploaded.agreed.committee:
        one = server.clients[seat]
        one.restore(uploaded.stored[seat])
        for survivors in claims.get(seat, ()):
            if not remembers:
                one.restore(uploaded.stored[seat])
            _ask_to_reveal(server, seat, uploaded, survivors, revealed)
    return revealed


def _ask_to_reveal(
    server: DishonestServer,
    seat: int,
    uploaded: UploadedRound,
    survivors: Survivors,
    revealed: RevealedSecrets,
) -> None:
    """Add what the member in that seat reveals, if it does."""
    agreed = uploaded.agreed
    pieces = b"".join(
        committee.piece_for(agreed, seat, uploaded.uploads[owner].pieces) for owner in survivors
    )
    request = messages.RevealRequest(agreed.digest, survivors, pieces)
    try:
        answer = _over_the_wire(server.clients[seat].client.reveal(server.signed(request)))
    except RemoteProtocolError:
        return
    revealed.add(agreed, seat, survivors, answer.partials)


def rebuild_masks(uploaded: UploadedRound, revealed: RevealedSecrets) -> dict[int, SecretBytes]:
    """The seeds of the self-masks that the partials suffice for."""
    agreed = uploaded.agreed
    combined = revealed.combined(agreed)
    return {
        seat: committee.mask_seed(agreed, seat, point)
        for (seat, other), point in combined.items()
        if other is None
    }


def known_edges(uploaded: UploadedRound, revealed: RevealedSecrets) -> dict[tuple[int, int], SecretBytes]:
    """The seeds of the shares that the partials suffice for, by sender and receiver."""
    agreed, people = uploaded.agreed, uploaded.agreed.participants
    seeds = {}
    for (seat, other), point in revealed.combined(agreed).items():
        if other is None:
            continue
        key = committee.open_seal(agreed, seat, other, point, uploaded.uploads[seat].pieces)
        for ends in ((seat, other), (other, seat)):
            if agreed.steps_between(*ends):
                sender, receiver = (people[end].identity for end in ends)
                seeds[ends] = derive_seed(key, agreed.context, sender, receiver, "share")
    return seeds


def _residual_left(uploaded: UploadedRound, masks: Collection[int]) -> FloatArray:
    """Per client, the variance of residual noise and of a self-mask that was not rebuilt."""
    terms = uploaded.agreed.terms
    bare = np.array([seat in masks for seat in range(len(uploaded.agreed.participants))])
    return np.asarray(terms.residual_variance + np.where(bare, 0.0, terms.self_variance))


def variance_left(uploaded: UploadedRound, revealed: RevealedSecrets, victim: int) -> float:
    """The accountant's effective variance of the victim's upload, given what was revealed.

    Revealed edges hide nothing any more, and a self-mask counts as residual noise until it is rebuilt.
    """
    agreed = uploaded.agreed
    left = effective_variance(
        agreed.graph,
        unit_variance=agreed.terms.unit_variance,
        residual_variance=_residual_left(uploaded, rebuild_masks(uploaded, revealed)),
        revealed=set(known_edges(uploaded, revealed)),
    )
    return float(left[victim])


def estimate_from_revealed(
    uploaded: UploadedRound, revealed: RevealedSecrets, known: Mapping[int, FloatArray], victim: int
) -> FloatArray:
    """The best linear estimate of the victim's update from all uploads.

    Every share and self-mask whose seed was revealed is drawn again and taken out, and so are the `known` updates of
    others, by seat. What is left has covariance sigma^2 L + diag(residual), with L the Laplacian of the edges that
    stayed hidden.
    """
    agreed = uploaded.agreed
    size = len(agreed.participants)
    masks, edges = rebuild_masks(uploaded, revealed), known_edges(uploaded, revealed)
    rows = np.stack([vector_of(uploaded.uploads[seat], agreed) for seat in range(size)])
    for seat, update in known.items():
        rows[seat] -= update / size
    for (sender, receiver), seed in edges.items():
        share = _noise(seed, rows.shape[1], agreed, agreed.steps_between(sender, receiver))
        rows[sender] -= share
        rows[receiver] += share
    mask_steps = agreed.grid.deviation_steps(agreed.terms.self_variance)
    for seat, mask in masks.items():
        rows[seat] -= _noise(mask, rows.shape[1], agreed, mask_steps)
    hidden = laplacian(agreed.graph, lambda sender, receiver: (sender, receiver) not in edges)
    covariance = np.diag(_residual_left(uploaded, masks)) + agreed.terms.unit_variance * hidden
    weights = best_weights(covariance, victim)
    return np.asarray(size * (weights @ rows) / weights[victim])


def _noise(seed: bytes | SecretBytes, count: int, agreed: Agreed, steps: float) -> FloatArray:
    """The Gaussian noise that a client drew from this seed, in the units of an update."""
    drawn = np.zeros(count, dtype=np.int64)
    SecretStream(bytes(seed)).add_gaussian(drawn, steps)
    return agreed.grid.to_float(drawn)
