"""One-time X25519 keys, signed by an identity, and erased when their round can no longer need them.

Once a prekey is erased at both ends, nothing that is still stored can derive its round's seeds again
(forward secrecy). Numbers are never given twice, not even after all keys were erased.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.encoding import LARGEST_UINT64, is_uint64, length_prefixed, uint64
from niss.protocol.keys import PUBLIC_BYTES, SIGNATURE_BYTES, Identity, fingerprint, verify
from niss.protocol.secret import Entropy, Secret, SecretBytes, draw

PRIVATE_BYTES = 32
LARGEST_BATCH = 2**16
_PURPOSE = "prekey"
_STORE_TAG = b"niss-prekeys/1\n"
_ENTRY_BYTES = 8 + PRIVATE_BYTES


@dataclass(frozen=True, slots=True)
class SignedPrekey:
    """What others see of a prekey: its number, its public key, and its owner's signature over both."""

    id: int
    public: bytes
    signature: bytes

    def __post_init__(self) -> None:
        if not is_uint64(self.id):
            raise RemoteProtocolError("a prekey's number must fit into 64 bits")
        if not isinstance(self.public, bytes) or len(self.public) != PUBLIC_BYTES:
            raise RemoteProtocolError(f"a prekey has {PUBLIC_BYTES} bytes")
        if not isinstance(self.signature, bytes) or len(self.signature) != SIGNATURE_BYTES:
            raise RemoteProtocolError(f"a prekey's signature has {SIGNATURE_BYTES} bytes")

    def verify(self, identity_public: bytes) -> None:
        """Raises `RemoteProtocolError` unless that identity made this prekey."""
        verify(identity_public, _PURPOSE, _signed(identity_public, self.id, self.public), self.signature)

    def encode(self) -> bytes:
        """104 bytes: number (big-endian), public key, signature."""
        return uint64(self.id) + self.public + self.signature

    @classmethod
    def decode(cls, encoded: bytes) -> SignedPrekey:
        if len(encoded) != 8 + PUBLIC_BYTES + SIGNATURE_BYTES:
            raise RemoteProtocolError(f"a signed prekey has 104 bytes, not {len(encoded)}")
        end = 8 + PUBLIC_BYTES
        return cls(int.from_bytes(encoded[:8], "big"), bytes(encoded[8:end]), bytes(encoded[end:]))


class PrekeyStore(Secret):
    """The private halves of a client's prekeys, in memory; `to_bytes` is what a key file keeps."""

    __slots__ = ("_next", "_privates")

    def __init__(self) -> None:
        self._next = 0
        self._privates: dict[int, SecretBytes] = {}

    def batch(self, count: int, identity: Identity, entropy: Entropy) -> tuple[SignedPrekey, ...]:
        """`count` new prekeys, to be published. Save the store before they leave: a lost half is no use."""
        if not is_uint64(count) or not 1 <= count <= LARGEST_BATCH:
            raise LocalProtocolError(f"a batch has 1 to {LARGEST_BATCH} prekeys, not {count!r}")
        if self._next + count > LARGEST_UINT64:
            raise LocalProtocolError("this store has given all its numbers", hint="make a new identity")
        drawn = draw(entropy, PRIVATE_BYTES * count)
        privates: dict[int, SecretBytes] = {}
        made = []
        for position in range(count):
            number = self._next + position
            private = drawn[PRIVATE_BYTES * position : PRIVATE_BYTES * (position + 1)]
            public = x25519_public(private)
            signature = identity.sign(_PURPOSE, _signed(identity.public, number, public))
            privates[number] = private
            made.append(SignedPrekey(number, public, signature))
        self._privates |= privates
        self._next += count
        return tuple(made)

    def private(self, id: int) -> SecretBytes:
        """The private half; one erased or never made is a `LocalProtocolError`."""
        if id not in self._privates:
            raise LocalProtocolError(
                f"prekey {id!r} is erased or was never made here",
                hint="a prekey serves one round; name a fresh one",
            )
        return self._privates[id]

    def erase(self, id: int) -> None:
        """Forget a prekey for good. Save the store afterwards: until then its file still has it."""
        self.private(id)
        del self._privates[id]

    @property
    def fingerprints(self) -> Mapping[int, str]:
        """The fingerprint of each public half that is still here, by number."""
        return MappingProxyType(
            {number: fingerprint(x25519_public(key)) for number, key in self._privates.items()}
        )

    def __len__(self) -> int:
        return len(self._privates)

    def __contains__(self, id: object) -> bool:
        return id in self._privates

    def to_bytes(self) -> SecretBytes:
        """Everything needed to go on, and nothing of an erased key."""
        entries = (part for number, key in self._privates.items() for part in (uint64(number), key))
        return SecretBytes(b"".join((_STORE_TAG, uint64(self._next), *entries)))

    @classmethod
    def from_bytes(cls, stored: bytes) -> PrekeyStore:
        stored = SecretBytes(stored)
        start = len(_STORE_TAG) + 8
        if stored[: len(_STORE_TAG)] != _STORE_TAG or len(stored) < start:
            raise LocalProtocolError("these are no prekeys that this version of niss can read")
        store = cls()
        store._next = int.from_bytes(stored[start - 8 : start], "big")
        entries = stored[start:]
        before = -1
        for place in range(0, len(entries), _ENTRY_BYTES):
            number = int.from_bytes(entries[place : place + 8], "big")
            private = entries[place + 8 : place + _ENTRY_BYTES]
            if len(private) != PRIVATE_BYTES or not before < number < store._next:
                raise LocalProtocolError("the stored prekeys are damaged", hint="restore the key file")
            store._privates[number] = private
            before = number
        return store


def x25519_public(private: SecretBytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _signed(identity_public: bytes, number: int, public: bytes) -> bytes:
    return length_prefixed(identity_public, uint64(number), public)
