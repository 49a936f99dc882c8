"""From two prekeys to the noise of an upload: shared secrets, the seeds derived from them, noise.

**Seeds.** Two neighbours agree on a secret (X25519, RFC 7748) and derive from it, by HKDF-SHA256 (RFC 5869) over
everything that names a share, the same seed at both ends; nobody else can. Any difference in run, round, attempt,
beacon, participants, graph, direction or purpose gives an unrelated seed; the same context twice gives the same seeds,
which is why a client answers each context at most once.

**Noise.** A client adds to its rounded update the shares of its edges, fresh residual noise and, in mode `repair`, its
self-mask (Bonawitz et al., 2017, mask twice for the same reason: a late upload must not be bared by a repair). All of
it is on the grid and modulo 2^64, so that what both ends of an edge add cancels to the last bit.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.mechanism.rounding import round_randomly
from niss.protocol.agreement import Agreed, RoundContext
from niss.protocol.carried import CarriedContext
from niss.protocol.keys import (
    PUBLIC_BYTES,
    SECRET_BYTES,
    Entropy,
    Secret,
    SecretBytes,
    length_prefixed,
    purpose_bytes,
)
from niss.protocol.messages import Participant
from niss.randomness import SecretStream, add_gaussians

SEED_BYTES = 32
_PAIR_TAG = b"niss.pair.v1"
_SEED_TAG = b"niss.seed.v1"
_CARRIED_TAG = b"niss.carried-seed.v1"

Steps = NDArray[np.int64]


def pair_secret(own_prekey_private: bytes, their_prekey_public: bytes) -> SecretBytes:
    """What two prekeys share: the X25519 agreement, hashed with both public keys, the same at both ends.

    A key that would make the agreement all zero, or that is our own sent back, is a `RemoteProtocolError`.
    """
    own_prekey_private = SecretBytes(own_prekey_private)
    if len(own_prekey_private) != SECRET_BYTES:
        raise LocalProtocolError(f"a prekey's private half has {SECRET_BYTES} bytes")
    own = X25519PrivateKey.from_private_bytes(own_prekey_private)
    own_public = own.public_key().public_bytes_raw()
    if own_public == their_prekey_public:
        raise RemoteProtocolError("the other side sent our own prekey back", hint="do not use it")
    try:
        agreed = SecretBytes(own.exchange(X25519PublicKey.from_public_bytes(their_prekey_public)))
    except (ValueError, TypeError):
        raise RemoteProtocolError(
            "the other side's prekey is degenerate: it would make the shared secret known to all",
            hint="do not use it",
        ) from None
    return hash_agreement(agreed, own_public, their_prekey_public)


def hash_agreement(agreed: SecretBytes, one: bytes, other: bytes) -> SecretBytes:
    """The secret of two prekeys from what X25519 makes of them and their public halves, in either order."""
    first, second = sorted((one, other))
    return SecretBytes(hashlib.sha256(length_prefixed(_PAIR_TAG, agreed, first, second)).digest())


def derive_seed(
    shared: bytes, context: RoundContext, sender: bytes, receiver: bytes, purpose: str
) -> SecretBytes:
    """The 32-byte seed of what `sender` shares with `receiver`; the way back has another one. HKDF-SHA256.

    `shared` is their `pair_secret`; `sender` and `receiver` are identities; `purpose` is "share" for noise.
    """
    shared = SecretBytes(shared)
    return _expand(_SEED_TAG, shared, context, sender, receiver, purpose)


def carried_seed(shared: bytes, context: CarriedContext, sender: bytes, receiver: bytes) -> SecretBytes:
    """The seed of the share that `sender` adds in one round and `receiver` subtracts in the next."""
    shared = SecretBytes(shared)
    return _expand(_CARRIED_TAG, shared, context, sender, receiver, "carried")


def _expand(
    tag: bytes,
    shared: SecretBytes,
    context: RoundContext | CarriedContext,
    sender: bytes,
    receiver: bytes,
    purpose: str,
) -> SecretBytes:
    """32 bytes of HKDF-SHA256 over the pair's secret, bound to context, direction and purpose."""
    for name, identity in (("sender", sender), ("receiver", receiver)):
        if not isinstance(identity, bytes) or len(identity) != PUBLIC_BYTES:
            raise LocalProtocolError(f"{name}: must be the {PUBLIC_BYTES} bytes of an identity")
    if sender == receiver:
        raise LocalProtocolError("sender and receiver are the same", hint="no client is its own neighbour")
    if len(shared) != SEED_BYTES:
        raise LocalProtocolError(f"a shared secret has {SEED_BYTES} bytes, as `pair_secret` returns it")
    info = length_prefixed(tag, *context.fields(), sender, receiver, purpose_bytes(purpose))
    return SecretBytes(HKDF(SHA256(), SEED_BYTES, None, info).derive(shared))


class PairSecrets(Secret):
    """What the client in one seat of a round shares with each other client, agreed on once.

    agreed, seat    the round, and where this client sits in it
    private         the private half of the prekey it is listed with
    """

    __slots__ = ("_secrets", "agreed", "private", "seat")

    def __init__(self, agreed: Agreed, seat: int, private: SecretBytes) -> None:
        self.agreed, self.seat, self.private = agreed, seat, private
        self._secrets: dict[bytes, SecretBytes] = {}

    def secret(self, other: int) -> SecretBytes:
        """The `pair_secret` with the client in that seat; refuses a prekey with which none can be shared."""
        return self._with(self.agreed.participants[other])

    def _with(self, other: Participant) -> SecretBytes:
        public = other.prekey.public
        if public not in self._secrets:
            self._secrets[public] = pair_secret(self.private, public)
        return self._secrets[public]

    def check_neighbours(self) -> None:
        """Refuse a neighbour's prekey with which no secret can be shared, before anything is charged."""
        for other in self.agreed.neighbours(self.seat):
            self.secret(other)
        self.carried()

    def carried(self) -> list[tuple[SecretBytes, float, int]]:
        """Seed, variance and sign of every share that is carried from this client, or to it."""
        before, after, shares = self.agreed.before, self.agreed.after, []
        if after is not None:
            own = after.senders[self.seat].identity
            for seat, variance in after.edges_from(self.seat):
                other = after.receivers[seat]
                seed = carried_seed(self._with(other), after.context, own, other.identity)
                shares.append((seed, variance, 1))
        if before is not None:
            own = before.receivers[self.seat].identity
            for seat, variance in before.edges_to(self.seat):
                other = before.senders[seat]
                seed = carried_seed(self._with(other), before.context, other.identity, own)
                shares.append((seed, variance, -1))
        return shares

    def edge_seed(self, sender: int, receiver: int) -> SecretBytes:
        """The seed of the share from `sender` to `receiver`, this client being one of the two."""
        shared = self.secret(receiver if self.seat == sender else sender)
        return derive_seed(shared, self.agreed.context, *self.ends(sender, receiver), "share")

    def ends(self, sender: int, receiver: int) -> tuple[bytes, bytes]:
        """The identities in two seats."""
        people = self.agreed.participants
        return people[sender].identity, people[receiver].identity


def round_update(agreed: Agreed, weighted: NDArray[np.float64], entropy: Entropy) -> Steps:
    """`p_k x_k` in grid steps, rounded at random, of norm at most `clip / participants`.

    The coins are fresh and for this upload alone: no noise is drawn from their stream.
    """
    bound = Fraction(agreed.terms.clip) / len(agreed.participants)
    return round_randomly(agreed.grid, weighted, bound, SecretStream.fresh(entropy))


def masked_upload(
    secrets: PairSecrets, steps: Steps, mask: SecretBytes | None, entropy: Entropy
) -> NDArray[np.uint64]:
    """`p_k x_k + shares sent - shares received + residual (+ self-mask)`, in grid steps modulo 2^64.

    Shares that are carried to the next round count as sent, those carried to this one as received: all of them, whoever
    is said to have dropped out.

    `steps` is the rounded update, `mask` the seed of the self-mask where there is one.
    """
    agreed, terms = secrets.agreed, secrets.agreed.terms
    vector = steps.astype(np.int64).view(np.uint64)
    noises = [
        (SecretStream(secrets.edge_seed(sender, receiver)), deviation, 1 if sender == secrets.seat else -1)
        for sender, receiver, deviation in agreed.edges_of(secrets.seat)
    ]
    noises += [
        (SecretStream(seed), agreed.grid.deviation_steps(variance), sign)
        for seed, variance, sign in secrets.carried()
    ]
    if terms.residual_variance:
        # Never from a seed anyone else could replay.
        noises.append((SecretStream.fresh(entropy), agreed.grid.deviation_steps(terms.residual_variance), 1))
    if mask is not None:
        noises.append((SecretStream(mask), agreed.grid.deviation_steps(terms.self_variance), 1))
    add_gaussians(vector, noises)
    return vector
