"""Secrets: bytes that do not show themselves, the one encoding of what is hashed or signed, scalars and points.

A secret (`Secret`, `SecretBytes`) does not show itself: not in a repr, a format, a pickle, a copy or a traceback's
locals. What is promised is that it is never shown by accident. It is no protection against code that asks for the
bytes, and Python cannot wipe memory: a dropped secret may stay there until it is written over.

**The curve.** Scalars and points of Curve25519 beyond X25519 are what sharing a key in the exponent needs (libsodium,
by PyNaCl). A prekey is an X25519 key (RFC 7748): its public half is the u-coordinate of a point, which is there up to
its sign. The same point on the Edwards form of the curve has `y = (u - 1) / (u + 1)`; `lift` takes the one with an even
x, and `scalar_of` the scalar with which the base point gives exactly that one, negated where needed (XEdDSA does the
same). Of a product only the u-coordinate is used, for which signs do not matter:

    u(scalar_of(a) * lift(u(b * B))) = X25519(a, u(b * B)).

Points are 32 bytes as RFC 8032 encodes them. libsodium multiplies, in constant time, and refuses whatever is not of the
prime order L; sums and products of scalars modulo L are Python integers, whose timing others must not be able to
measure. Scalars that are secret are `SecretBytes`, 32 of them, lowest first, and integers only inside functions that
cannot fail.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Self, SupportsIndex, overload

import nacl.bindings as sodium
from nacl.exceptions import CryptoError

from niss.errors import LocalProtocolError, RemoteProtocolError

# Gives that many fresh, unpredictable bytes; `os.urandom` outside of tests.
Entropy = Callable[[int], bytes]

LARGEST_UINT64 = 2**64 - 1


class Secret:
    """A base for whatever holds a secret: its repr is its type alone, and pickling or copying is a TypeError.

    A subclass that lets something public show (an identity its fingerprint) overrides `__repr__`; `str` and `format`
    follow it.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: hidden>"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str, /) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, _: SupportsIndex, /) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds a secret and cannot be pickled or copied")

    def _refuse_copy(self, *_: Any) -> NoReturn:
        self.__reduce_ex__(0)

    # Each by its own name: copy, deepcopy and the protocols of pickle look for different ones.
    __reduce__ = __getstate__ = __copy__ = __deepcopy__ = _refuse_copy


class SecretBytes(Secret, bytes):
    """Bytes that do not show themselves, and are compared in constant time.

    They are bytes wherever bytes are wanted (hashing, encryption, writing to a file). Slices and sums stay
    hidden; `bytes(secret)` and `secret.hex()` reveal, and are to be written only where that is meant.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return hmac.compare_digest(self, other) if isinstance(other, bytes) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not hmac.compare_digest(self, other) if isinstance(other, bytes) else NotImplemented

    __hash__ = bytes.__hash__

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> Self: ...
    def __getitem__(self, key: SupportsIndex | slice, /) -> int | Self:
        if isinstance(key, slice):
            return type(self)(super().__getitem__(key))
        return super().__getitem__(key)

    def __add__(self, other: Any, /) -> Self:
        return type(self)(super().__add__(other))

    def __radd__(self, other: bytes, /) -> Self:
        return type(self)(b"".join((other, self)))


def draw(entropy: Entropy, count: int) -> SecretBytes:
    """`count` bytes from an entropy source, hidden at once.

    A source that returns anything but `count` bytes is broken: `LocalProtocolError`, without showing what it returned.
    """
    content = entropy(count)
    if not isinstance(content, bytes):
        content = None  # Not left for a traceback to show.
        raise LocalProtocolError("the entropy source did not return bytes", hint="pass os.urandom")
    content = SecretBytes(content)
    if len(content) != count:
        raise LocalProtocolError(
            f"the entropy source returned {len(content)} bytes instead of {count}", hint="pass os.urandom"
        )
    return content


def length_prefixed(*fields: bytes) -> bytes:
    """Each field after its length (4 bytes, big-endian): no two lists of fields encode alike.

    Whatever is hashed or signed goes through here, so that no field can borrow bytes from its neighbour.
    """
    return b"".join(part for field in fields for part in (len(field).to_bytes(4, "big"), field))


def uint64(number: int) -> bytes:
    """8 bytes, big-endian."""
    return number.to_bytes(8, "big")


def is_uint64(number: object) -> bool:
    """Whether it is an int (no bool) from 0 to 2^64 - 1."""
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= LARGEST_UINT64


ORDER = 2**252 + 27742317777372353535851937790883648493
FIELD = 2**255 - 19
POINT_BYTES = SCALAR_BYTES = 32
# The neutral element, as it is encoded: no partial, and no sum of some.
ZERO = b"\x01" + bytes(31)

if not sodium.has_crypto_core_ed25519:
    raise LocalProtocolError(
        "the installed PyNaCl was built with a minimal libsodium, which cannot add points",
        hint="install PyNaCl from its wheels",
    )

# What libsodium's binding raises for a point or a product that is none.
_REFUSED = (CryptoError, ValueError, RuntimeError)


def to_scalar(number: int) -> SecretBytes:
    """A number modulo L as libsodium takes it."""
    return SecretBytes((number % ORDER).to_bytes(SCALAR_BYTES, "little"))


def to_number(scalar: bytes) -> int:
    """The number behind a scalar."""
    return int.from_bytes(scalar, "little")


def hash_to_number(*fields: bytes) -> int:
    """A number below L that nobody can tell from a random one: SHA-512 over the fields, modulo L."""
    return int.from_bytes(hashlib.sha512(length_prefixed(*fields)).digest(), "little") % ORDER


def times(scalar: bytes, point: bytes) -> bytes:
    """`scalar * point`; a point that is not of prime order, or a product that is zero, is a `RemoteProtocolError`."""
    try:
        product: bytes = sodium.crypto_scalarmult_ed25519_noclamp(scalar, point)
    except _REFUSED:
        raise RemoteProtocolError("a point is not on the curve, or not of prime order") from None
    return product


def times_base(scalar: bytes) -> bytes:
    """`scalar * B`; zero is a `RemoteProtocolError`."""
    try:
        product: bytes = sodium.crypto_scalarmult_ed25519_base_noclamp(scalar)
    except _REFUSED:
        raise RemoteProtocolError("a scalar is zero") from None
    return product


def total(points: Iterable[bytes]) -> bytes:
    """The sum of one or more points; what is not on the curve is a `RemoteProtocolError`."""
    rest = iter(points)
    found = next(rest)
    try:
        for point in rest:
            found = sodium.crypto_core_ed25519_add(found, point)
    except _REFUSED:
        raise RemoteProtocolError("a point is not on the curve") from None
    return found


def lift(public: bytes) -> bytes:
    """The point with an even x whose u-coordinate is this public half of a prekey.

    One key has one spelling, below the field's prime. Whether it is on the curve and of prime order shows when it is
    multiplied.
    """
    u = int.from_bytes(public, "little")
    if len(public) != POINT_BYTES or u >= FIELD - 1:
        raise RemoteProtocolError("a prekey is spelt in another way than it must be", hint="do not use it")
    return ((u - 1) * pow(u + 1, -1, FIELD) % FIELD).to_bytes(POINT_BYTES, "little")


def cut(points: bytes) -> list[bytes]:
    """Points that stand one after another."""
    return [points[start : start + POINT_BYTES] for start in range(0, len(points), POINT_BYTES)]


def hash_to_point(*fields: bytes) -> bytes:
    """A point of prime order whose logarithm nobody knows (Elligator 2 of a hash of the fields)."""
    uniform = hashlib.sha512(length_prefixed(*fields)).digest()[:POINT_BYTES]
    point: bytes = sodium.crypto_core_ed25519_from_uniform(uniform)
    return point


def clamped(private: bytes) -> SecretBytes:
    """The scalar that X25519 and Ed25519 make of 32 bytes (RFC 7748, decodeScalar25519)."""
    first, last = private[0] & 248, private[31] & 127 | 64
    return SecretBytes(b"".join((bytes([first]), private[1:31], bytes([last]))))


def scalar_of(private: bytes) -> SecretBytes:
    """The scalar of a prekey's private half, with the sign for which `scalar * B` is `lift` of its public half."""
    scalar = to_scalar(to_number(clamped(private)))
    return scalar if times_base(scalar)[-1] < 128 else to_scalar(-to_number(scalar))
