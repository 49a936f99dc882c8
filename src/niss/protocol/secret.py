"""Secrets that do not show themselves: not in a repr, a format, a pickle, a copy or a traceback's locals.

What is promised is that a secret is never shown by accident. It is no protection against code that asks
for the bytes, and Python cannot wipe memory: a dropped secret may stay there until it is written over.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, NoReturn, Self, SupportsIndex, overload

from niss.errors import LocalProtocolError

Entropy = Callable[[int], bytes]
"""Gives that many fresh, unpredictable bytes; `os.urandom` outside of tests."""


class Secret:
    """A base for whatever holds a secret: says only its type, and refuses to be pickled or copied."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: hidden>"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str, /) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds a secret and cannot be pickled or copied")

    def __reduce__(self) -> NoReturn:
        self.__reduce_ex__(0)

    def __getstate__(self) -> NoReturn:
        self.__reduce_ex__(0)

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(0)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(0)


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
    """`count` bytes of entropy; a source that gives anything else is refused."""
    given = entropy(count)
    if not isinstance(given, bytes):
        given = None  # Not left for a traceback to show.
        raise LocalProtocolError("the entropy source gave no bytes", hint="pass os.urandom")
    given = SecretBytes(given)
    if len(given) != count:
        raise LocalProtocolError(
            f"the entropy source gave {len(given)} bytes instead of {count}", hint="pass os.urandom"
        )
    return given
