"""From two prekeys to the seed of one share: agreement, then HKDF-SHA256 over everything that names it.

Both ends derive the same seed and nobody else can. Any difference in run, round, attempt, beacon,
participants, graph, direction or purpose gives an unrelated seed; running the same context twice gives
the same seeds, which is why a client answers each context at most once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.encoding import is_uint64, length_prefixed, purpose_bytes, uint64
from niss.protocol.keys import PUBLIC_BYTES
from niss.protocol.prekeys import PRIVATE_BYTES
from niss.protocol.secret import SecretBytes

SEED_BYTES = 32
HASH_BYTES = 32
LONGEST_FIELD = 255
_CONTEXT_TAG = b"niss.round-context.v1"
_PAIR_TAG = b"niss.pair.v1"
_SEED_TAG = b"niss.seed.v1"


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What one attempt at one round is, to the last detail that keys depend on. Nothing in it is secret."""

    run: bytes
    round: int
    attempt: int
    beacon: bytes
    participants_hash: bytes
    graph_hash: bytes

    def __post_init__(self) -> None:
        for name in ("run", "beacon"):
            value = getattr(self, name)
            if not isinstance(value, bytes) or not 0 < len(value) <= LONGEST_FIELD:
                raise LocalProtocolError(f"{name}: must be 1 to {LONGEST_FIELD} bytes")
        for name in ("round", "attempt"):
            if not is_uint64(getattr(self, name)):
                raise LocalProtocolError(f"{name}: must be a whole number that fits into 64 bits")
        for name in ("participants_hash", "graph_hash"):
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != HASH_BYTES:
                raise LocalProtocolError(f"{name}: must be a hash of {HASH_BYTES} bytes")

    def encode(self) -> bytes:
        """All fields, unambiguously: two contexts encode alike only if they are equal."""
        return length_prefixed(_CONTEXT_TAG, *self.fields())

    def fields(self) -> tuple[bytes, ...]:
        return (
            self.run,
            uint64(self.round),
            uint64(self.attempt),
            self.beacon,
            self.participants_hash,
            self.graph_hash,
        )

    def digest(self) -> bytes:
        """SHA-256 of the encoding."""
        return hashlib.sha256(self.encode()).digest()


def pair_secret(own_prekey_private: bytes, their_prekey_public: bytes) -> SecretBytes:
    """What two prekeys share: the X25519 agreement, hashed with both public keys, the same at both ends.

    A key that would make the agreement all zero, or that is our own sent back, is refused.
    """
    own_prekey_private = SecretBytes(own_prekey_private)
    if len(own_prekey_private) != PRIVATE_BYTES:
        raise LocalProtocolError(f"a prekey's private half has {PRIVATE_BYTES} bytes")
    own = X25519PrivateKey.from_private_bytes(own_prekey_private)
    own_public = own.public_key().public_bytes_raw()
    if own_public == their_prekey_public:
        raise RemoteProtocolError("the other side sent our own prekey back", hint="do not go on with it")
    try:
        agreed = SecretBytes(own.exchange(X25519PublicKey.from_public_bytes(their_prekey_public)))
    except (ValueError, TypeError):
        raise RemoteProtocolError(
            "the other side's prekey is degenerate: it would make the shared secret known to all",
            hint="do not go on with it",
        ) from None
    first, second = sorted((own_public, their_prekey_public))
    return SecretBytes(hashlib.sha256(length_prefixed(_PAIR_TAG, agreed, first, second)).digest())


def derive_seed(
    shared: bytes, context: RoundContext, sender: bytes, receiver: bytes, purpose: str
) -> SecretBytes:
    """The 32-byte seed of what `sender` shares with `receiver`; the way back has another one."""
    shared = SecretBytes(shared)
    return expand(_SEED_TAG, shared, context, sender, receiver, purpose)


def expand(
    tag: bytes,
    shared: bytes,
    context: RoundContext,
    sender: bytes,
    receiver: bytes,
    purpose: str,
    salt: bytes | None = None,
) -> SecretBytes:
    """32 bytes of HKDF-SHA256; `tag` keeps seeds, which repair may reveal, apart from sealing keys."""
    shared = SecretBytes(shared)
    check_ends(sender, receiver)
    if len(shared) != SEED_BYTES:
        raise LocalProtocolError(f"a shared secret has {SEED_BYTES} bytes, as `pair_secret` gives it")
    info = length_prefixed(tag, *context.fields(), sender, receiver, purpose_bytes(purpose))
    return SecretBytes(HKDF(SHA256(), SEED_BYTES, salt, info).derive(shared))


def check_ends(sender: bytes, receiver: bytes) -> None:
    for name, identity in (("sender", sender), ("receiver", receiver)):
        if not isinstance(identity, bytes) or len(identity) != PUBLIC_BYTES:
            raise LocalProtocolError(f"{name}: must be the {PUBLIC_BYTES} bytes of an identity")
    if sender == receiver:
        raise LocalProtocolError("sender and receiver are the same", hint="no client is its own neighbour")
