"""Bytes that do not show themselves, where they come from, and one unambiguous encoding of what is hashed or signed.

A secret (`Secret`, `SecretBytes`) does not show itself: not in a repr, a format, a pickle, a copy or a traceback's
locals. What is promised is that it is never shown by accident. It is no protection against code that asks for the
bytes, and Python cannot wipe memory: a dropped secret may stay there until it is written over.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, NoReturn, Self, SupportsIndex, overload

from niss.errors import LocalProtocolError

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
