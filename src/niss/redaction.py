"""What is not to be seen: secrets, what a log would say of an error, and signs that do more than show.

**Secrets** (`Secret`, `SecretBytes`) do not show themselves: not in a repr, a format, a pickle, a copy or a traceback's
locals. What is promised is that they are never shown by accident. It is no protection against code that asks for the
bytes, and Python cannot wipe memory: a dropped secret may stay there until it is written over.

**A log** may say all of an error, less everything that could be key material or a password: byte strings, long runs of
digits, hex or base64, long lists of numbers, and the password in an address. A traceback names files, lines and
functions, never the values of variables. What a peer says passes `printable`.
"""

from __future__ import annotations

import hmac
import os
import re
import traceback
import unicodedata
from typing import Any, NoReturn, Self, SupportsIndex, overload

REDACTED = "[redacted]"
_LONGEST_REASON = 500
# A message longer than this is data, not words.
_MOST_SIGNS = 4000
_FRAME = re.compile(r"\s+File \"")
_BYTES = re.compile(r"""\bb(['"])(?:\\.|(?!\1)[^\\])*(?:\1|$)""")
_HEX = re.compile(r"(?<![0-9a-zA-Z])(?:0x)?[0-9a-fA-F]{24,}")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{40,}={0,2}")
_NUMBERS = re.compile(r"(?:[-+]?[\d.][\de.+-]*[\s,]+){11,}[-+]?[\d.][\de.+-]*")
_PASSWORD = re.compile(r"(?<=://)[^\s/@]+(?=@)")


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


def safe_traceback(error: BaseException) -> str:
    """The traceback with all causes, without the values of variables, and redacted."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(line if _FRAME.match(line) else redact(line) for line in lines) + "\n"


def redact(text: str) -> str:
    """`text` without anything that could be key material or a password."""
    text = text[:_MOST_SIGNS]
    for pattern in (_PASSWORD, _BYTES, _NUMBERS, _HEX):
        text = pattern.sub(REDACTED, text)
    return _BASE64.sub(_unless_a_path, text)


def printable(text: str, *, longest: int | None = _LONGEST_REASON, keep: str = "") -> str:
    """What somebody else said, fit for a log, a terminal or a page: each sign one that is seen, or a space.

    Escape codes, line breaks, marks that turn the direction of writing and lone surrogates become question marks, so
    that no peer can colour, move, erase or forge lines of a log, and no page carries what HTML and SVG may not.

    longest  what is longer is cut there; None: nothing is
    keep     signs that stay as they are, such as line breaks on a page
    """
    shown = "".join(sign if sign in keep or _is_seen(sign) else "?" for sign in text[:longest])
    return shown if longest is None or len(text) <= longest else shown + " ..."


def _is_seen(sign: str) -> bool:
    return sign.isprintable() or unicodedata.category(sign) == "Zs"


def _unless_a_path(found: re.Match[str]) -> str:
    """A long path looks like base64; one whose first folder is there is a path."""
    first = re.match(r"/[^/]+", found[0])
    return found[0] if first is not None and os.path.lexists(first[0]) else REDACTED
