"""One unambiguous encoding for everything that is hashed or signed: different fields, different bytes."""

from __future__ import annotations

from niss.errors import LocalProtocolError

LARGEST_UINT64 = 2**64 - 1
LONGEST_NAME = 64


def length_prefixed(*fields: bytes) -> bytes:
    """Each field after its length (4 bytes, big-endian): no two lists of fields encode alike."""
    return b"".join(part for field in fields for part in (len(field).to_bytes(4, "big"), field))


def uint64(number: int) -> bytes:
    return number.to_bytes(8, "big")


def is_uint64(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= LARGEST_UINT64


def purpose_bytes(purpose: str) -> bytes:
    """A purpose as it is bound into keys and signatures: 1 to 64 printable ASCII characters."""
    if (
        not isinstance(purpose, str)
        or not 0 < len(purpose) <= LONGEST_NAME
        or not (purpose.isascii() and purpose.isprintable())
    ):
        raise LocalProtocolError(
            "a purpose must be a short text in ASCII", hint='name what it is for, such as "share"'
        )
    return purpose.encode("ascii")
