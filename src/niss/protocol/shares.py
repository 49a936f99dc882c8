"""Keys, seeds and noise of the edges of a round.

**Keys.** Two neighbours agree on a secret (X25519, RFC 7748) that never leaves either of them. For each context, a
round or what is carried between two, they derive an *edge key* from it (HKDF-SHA256, RFC 5869): all that a repair
brings out. Edge keys of different contexts have nothing in common, so that what comes out for one list is of no use in
another with the same prekeys.

**Seeds.** From an edge key both ends derive the same seeds, over everything that names a share; nobody else can. Any
difference in run, round, attempt, beacon, participants, graph, direction or purpose gives an unrelated seed; the same
context twice gives the same seeds, which is why a client answers each context at most once.

**Noise.** A client adds to its rounded update the shares of its edges, fresh residual noise and, in mode `repair`, its
self-mask (Bonawitz et al., 2017, mask twice for the same reason: a late upload must not be bared by a repair). All of
it is on the grid and modulo 2^64, so that what both ends of an edge add cancels to the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.mechanism.blocks import Blocks
from niss.mechanism.rounding import round_randomly, round_records
from niss.protocol.agreement import Agreed, Context, Edge, Words
from niss.protocol.keys import PUBLIC_BYTES, SECRET_BYTES, Entropy
from niss.protocol.messages import Terms
from niss.protocol.wire import length_prefixed
from niss.randomness import SecretStream, add_gaussians
from niss.redaction import Secret, SecretBytes

SEED_BYTES, EDGE_KEY_BYTES = 32, 16
_PAIR_TAG = b"niss.pair.v1"
_KEY_TAG = b"niss.edge-key.v1"

Steps = NDArray[np.signedinteger[Any]]
# Entries of a vector to which noise is added at once: enough for all cores, and few beside a large model.
AT_ONCE = 2**21


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
    first, second = sorted((own_public, their_prekey_public))
    return SecretBytes(hashlib.sha256(length_prefixed(_PAIR_TAG, agreed, first, second)).digest())


def edge_key(secret: bytes, context: Context, one: bytes, other: bytes) -> SecretBytes:
    """What two clients share in one context: HKDF of their `pair_secret`, the same for both, in either order."""
    secret = SecretBytes(secret)
    first, second = sorted((one, other))
    info = length_prefixed(_KEY_TAG, context.digest(), first, second)
    return SecretBytes(HKDF(SHA256(), EDGE_KEY_BYTES, None, info).derive(secret))


def derive_seed(key: bytes, context: Context, sender: bytes, receiver: bytes) -> SecretBytes:
    """The 32-byte seed of what `sender` adds and `receiver` subtracts; the way back has another one. HKDF-SHA256.

    `key` is their `edge_key` in that context; `sender` and `receiver` are identities.
    """
    key = SecretBytes(key)
    for name, identity in (("sender", sender), ("receiver", receiver)):
        if not isinstance(identity, bytes) or len(identity) != PUBLIC_BYTES:
            raise LocalProtocolError(f"{name}: must be the {PUBLIC_BYTES} bytes of an identity")
    if sender == receiver:
        raise LocalProtocolError("sender and receiver are the same", hint="no client is its own neighbour")
    if len(key) != EDGE_KEY_BYTES:
        raise LocalProtocolError(f"the key of an edge has {EDGE_KEY_BYTES} bytes, as `edge_key` returns it")
    info = length_prefixed(context.seed_tag, *context.fields, sender, receiver, context.purpose)
    return SecretBytes(HKDF(SHA256(), SEED_BYTES, None, info).derive(key))


class EdgeKeys(Secret):
    """What the client in one seat of a round shares with each client that it has an edge with, agreed on once.

    agreed, seat    the round, and where this client sits in it
    private         the private half of the prekey it is listed with
    """

    __slots__ = ("_keys", "agreed", "private", "seat")

    def __init__(self, agreed: Agreed, seat: int, private: SecretBytes) -> None:
        self.agreed, self.seat, self.private = agreed, seat, private
        self._keys: dict[int, SecretBytes] = {}

    def key(self, place: int) -> SecretBytes:
        """The `edge_key` with the client at that place in `Agreed.everyone`; refuses a prekey with which there is none.

        What the two prekeys share is not kept.
        """
        if place not in self._keys:
            agreed, other = self.agreed, self.agreed.everyone[place]
            own = agreed.participants[self.seat].identity
            self._keys[place] = edge_key(
                pair_secret(self.private, other.prekey.public),
                agreed.edge_context(place),
                own,
                other.identity,
            )
        return self._keys[place]

    def agree_with_all(self) -> list[SecretBytes]:
        """The keys of all edges, in the order of `Agreed.edge_places`.

        Asked before anything is charged: it refuses a neighbour's prekey with which no secret can be shared.
        """
        return [self.key(place) for place in self.agreed.edge_places(self.seat)]

    def seed(self, edge: Edge) -> SecretBytes:
        """The seed of a share in this client's upload."""
        return derive_seed(self.key(edge.place), edge.context, *edge.ends)


def round_batch(
    agreed: Agreed, rows: Iterable[tuple[NDArray[np.floating[Any]], int]], entropy: Entropy
) -> Steps:
    """`p_k x_k` of a batch of records in grid steps, each rounded to a norm of at most `clip / divisor`; none: zeros.

    The coins are fresh and for this batch alone.
    """
    terms, divisor = agreed.terms, agreed.terms.divisor(len(agreed.participants))
    return round_records(
        agreed.grid,
        rows,
        terms.coordinates,
        clip=terms.clip,
        divisor=divisor,
        span=terms.bound,
        coins=SecretStream.fresh(entropy),
    )


def round_update(agreed: Agreed, weighted: Blocks, entropy: Entropy) -> Steps:
    """`p_k x_k` of a client in grid steps, rounded at random, of norm at most `clip / divisor`.

    The coins are fresh and for this upload alone: no noise is drawn from their stream.
    """
    bound = Fraction(agreed.terms.clip) / Fraction(agreed.terms.divisor(len(agreed.participants)))
    return round_randomly(agreed.grid, weighted, bound, SecretStream.fresh(entropy), step_type(agreed.terms))


def step_type(terms: Terms) -> type[np.int32 | np.int64]:
    """Wide enough for a client's steps, whose sum over all clients fits the modulus (`Agreed.check_fits`)."""
    return np.int32 if terms.modulus_bits == 32 else np.int64


def masked_upload(keys: EdgeKeys, steps: Steps, mask: SecretBytes | None, entropy: Entropy) -> Words:
    """`p_k x_k + shares sent - shares received + residual (+ self-mask)`, in grid steps modulo 2^modulus_bits.

    Shares that are carried to the next round count as sent, those carried to this one as received: all of them, whoever
    is said to have dropped out.

    `steps` is the rounded update, `mask` the seed of the self-mask where there is one. The upload takes the place of
    the steps, some at a time, where they are as wide: there is no other vector of that length.
    """
    agreed, terms = keys.agreed, keys.agreed.terms
    noises = [
        (SecretStream(keys.seed(edge)), agreed.grid.deviation_steps(edge.variance), edge.sign)
        for edge in agreed.edges(keys.seat)
    ]
    if terms.residual_variance:
        # Never from a seed anyone else could replay.
        noises.append((SecretStream.fresh(entropy), agreed.grid.deviation_steps(terms.residual_variance), 1))
    if mask is not None:
        noises.append((SecretStream(mask), agreed.grid.deviation_steps(terms.self_variance), 1))
    words: Words = steps.astype(step_type(terms), copy=False).view(f"u{terms.modulus_bits // 8}")
    add_noises(words, noises)
    return words


def add_noises(words: Words, noises: list[tuple[SecretStream, float, int]]) -> None:
    """`add_gaussians` modulo what the words hold, in place, with little memory beside them."""
    for start in range(0, words.size, AT_ONCE):
        some = words[start : start + AT_ONCE].astype(np.uint64)
        add_gaussians(some, noises)
        words[start : start + AT_ONCE] = some  # Keeps the low bits.
