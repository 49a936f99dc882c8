"""Sealing a few secret bytes from one client to another, through a server that must not read them.

**Why the nonce is fixed.** ChaCha20-Poly1305 fails when one key meets one nonce twice. Here each message
has a key of its own: HKDF over the pair's secret and the round, attempt, direction and purpose, salted with
32 fresh bytes that travel with the message. A key that is used once cannot repeat its nonce, and since the
salt is fresh this holds even for a client that crashed, restarted, and seals another seed in the same round.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.derive import RoundContext, expand
from niss.protocol.encoding import length_prefixed, purpose_bytes
from niss.protocol.secret import Entropy, SecretBytes, draw

SALT_BYTES = 32
TAG_BYTES = 16
OVERHEAD_BYTES = SALT_BYTES + TAG_BYTES
LONGEST_PLAINTEXT = 2**16
_TAG = b"niss.seal.v1"
_NONCE = bytes(12)


def seal(
    shared: bytes,
    context: RoundContext,
    sender: bytes,
    receiver: bytes,
    purpose: str,
    plaintext: bytes,
    *,
    entropy: Entropy,
) -> bytes:
    """`plaintext` for `receiver` alone, 48 bytes longer; opens only with the same context, ends and purpose.

    `purpose` is "seal" for a share's seed and "piece" for a piece of a self-mask.
    """
    shared, plaintext = SecretBytes(shared), SecretBytes(plaintext)
    if len(plaintext) > LONGEST_PLAINTEXT:
        raise LocalProtocolError(f"at most {LONGEST_PLAINTEXT} bytes are sealed, not {len(plaintext)}")
    salt = bytes(draw(entropy, SALT_BYTES))
    key = expand(_TAG, shared, context, sender, receiver, purpose, salt)
    bound = _associated(context, sender, receiver, purpose)
    return salt + ChaCha20Poly1305(key).encrypt(_NONCE, plaintext, bound)


def open_sealed(
    shared: bytes, context: RoundContext, sender: bytes, receiver: bytes, purpose: str, sealed: bytes
) -> SecretBytes:
    """What `sender` sealed; anything else, to the last bit, is a `RemoteProtocolError`."""
    shared = SecretBytes(shared)
    if not OVERHEAD_BYTES <= len(sealed) <= OVERHEAD_BYTES + LONGEST_PLAINTEXT:
        raise RemoteProtocolError(f"{len(sealed)} bytes cannot be a sealed message")
    key = expand(_TAG, shared, context, sender, receiver, purpose, sealed[:SALT_BYTES])
    bound = _associated(context, sender, receiver, purpose)
    try:
        return SecretBytes(ChaCha20Poly1305(key).decrypt(_NONCE, sealed[SALT_BYTES:], bound))
    except InvalidTag:
        raise RemoteProtocolError(
            f"a sealed {purpose!r} does not open",
            hint="it was changed on its way, or made for another round, neighbour or purpose",
        ) from None


def _associated(context: RoundContext, sender: bytes, receiver: bytes, purpose: str) -> bytes:
    return length_prefixed(_TAG, context.digest(), sender, receiver, purpose_bytes(purpose))
