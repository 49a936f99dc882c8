"""Long-lived identities: Ed25519 keys that sign for one purpose at a time."""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.encoding import length_prefixed, purpose_bytes
from niss.protocol.secret import Entropy, Secret, SecretBytes, draw

PUBLIC_BYTES = 32
SECRET_BYTES = 32
SIGNATURE_BYTES = 64
_SIGNATURE_TAG = b"niss.signature.v1"
_FINGERPRINT_TAG = b"niss.fingerprint.v1"

_FIELD = 2**255 - 19
# The y of the points of order 1, 2, 4 and 8. Under such a key, signatures can be made for any message
# without a secret, so it identifies nobody.
_SMALL_ORDER = frozenset(
    {
        1,
        _FIELD - 1,
        0,
        0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,
        0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,
    }
)


class Identity(Secret):
    """Who a client is: a long-lived Ed25519 key. It shows its public half only."""

    __slots__ = ("_key", "_secret", "public")

    public: bytes

    def __init__(self, secret: bytes) -> None:
        """From the 32 bytes of `secret_bytes`; `Identity.generate` makes a new one."""
        secret = self._secret = SecretBytes(secret)
        if len(secret) != SECRET_BYTES:
            raise LocalProtocolError(f"an identity's secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls, entropy: Entropy) -> Identity:
        return cls(draw(entropy, SECRET_BYTES))

    def sign(self, purpose: str, message: bytes) -> bytes:
        """64 bytes that `verify` accepts for this purpose and message, and for no other."""
        return self._key.sign(_signed_bytes(purpose, message))

    def secret_bytes(self) -> SecretBytes:
        """The secret itself, for the key file and nothing else."""
        return self._secret

    def __repr__(self) -> str:
        # A traceback may ask before there is a key.
        return f"<Identity {fingerprint(self.public)}>" if hasattr(self, "public") else super().__repr__()


def verify(public: bytes, purpose: str, message: bytes, signature: bytes) -> None:
    """Passes if the owner of `public` signed `message` for `purpose`, else raises `RemoteProtocolError`."""
    check_public(public)
    signed = _signed_bytes(purpose, message)
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except (InvalidSignature, ValueError):
        raise RemoteProtocolError(
            f"the signature for {purpose!r} is not by {fingerprint(public)}",
            hint="the message was changed on its way, or someone else sent it; do not go on with it",
        ) from None


def check_public(public: bytes) -> None:
    """Refuses what cannot identify anyone: wrong lengths, other spellings of a key, points of small order."""
    if not isinstance(public, bytes) or len(public) != PUBLIC_BYTES:
        raise RemoteProtocolError(f"an identity has {PUBLIC_BYTES} bytes")
    y = int.from_bytes(public, "little") & (2**255 - 1)
    if y >= _FIELD or y in _SMALL_ORDER:
        raise RemoteProtocolError(
            "this identity is a degenerate key, under which anyone can sign",
            hint="ask its owner for the key that `niss keys show` prints",
        )


def fingerprint(public: bytes) -> str:
    """128 bits of a hash of a public key, in groups, for people to compare."""
    digest = hashlib.sha256(length_prefixed(_FINGERPRINT_TAG, public)).hexdigest()[:32]
    return "-".join(digest[start : start + 4] for start in range(0, 32, 4))


def _signed_bytes(purpose: str, message: bytes) -> bytes:
    # The hash of the message: Ed25519 itself would hash a long upload three times, with a slower hash.
    return length_prefixed(_SIGNATURE_TAG, purpose_bytes(purpose), hashlib.sha256(message).digest())
