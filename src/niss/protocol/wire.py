"""Messages as bytes: compact, versioned, and canonical, so that a signature over an encoding is safe.

    magic "NISS" | version, 1 byte | tag of the message, 1 byte | its fields, as their types say

    tag  message         bytes, with its signature, for seats below 128
    1    RoundOpen       about 250, and 130 for each participant, of three rounds where noise is carried over
    2    Upload          109, the vector, 98 for each fresh prekey; in `repair` 97 more, 64 for each member of the
                         committee, or 32 for one whose piece follows, and 32 for each edge
    3    RevealRequest   107, and for each survivor 97, or 65 where the piece follows; with the verdict of a round next
                         to it 133 more, 1 for each survivor, 65 for each vote
    4    Reveal          106, for each survivor 51, and 32 for its mask and each neighbour that it lost; 64 for a vote
    5    Refusal         104, and its text

Each message has one encoding and each accepted encoding is that of the message it decodes to. What is refused is
named by its field and never quoted. No length is believed before the bytes for it are there: `decode` takes about
as much memory as a vector it is given, and some 35 times as much as a message that is all tiny items (Python's
objects are larger than one-byte pieces), of which `WireLimits` allows only so many.

The vector of an upload holds residues modulo 2^bits without a spare bit: one value after another, lowest bit first, the
last byte filled up with zeros. For 32 and 64 bits, which is what rounds use (`Grid.check_fits`), that is a plain
little-endian array and costs a copy; other widths go through single bits, 64 bytes of memory for each value. Every
vector has exactly one packed form, and only that is unpacked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.messages import (
    NARROWEST,
    WIDEST,
    Message,
    Refusal,
    Reveal,
    RevealRequest,
    RoundOpen,
    Upload,
)
from niss.protocol.wire_fields import Fault, Reader, Writer, record_of
from niss.protocol.wire_fields import WireLimits as WireLimits

_PLAIN = {16: "<u2", 32: "<u4", 64: "<u8"}


def packed_size(count: int, modulus_bits: int) -> int:
    """How many bytes `count` values take: `ceil(count * modulus_bits / 8)`."""
    if type(modulus_bits) is not int or not NARROWEST <= modulus_bits <= WIDEST:
        raise LocalProtocolError(f"modulus_bits: must be a whole number from {NARROWEST} to {WIDEST}")
    if type(count) is not int or count < 0:
        raise LocalProtocolError("count: must be a whole number, 0 or more")
    return (count * modulus_bits + 7) // 8


def pack(values: NDArray[np.uint64] | NDArray[np.int64], modulus_bits: int) -> bytes:
    """The values modulo 2^modulus_bits (negative ones wrap around, as in two's complement), packed.

    `values` has one axis, of uint64 or int64; `modulus_bits` is 16 to 64. Anything else is a `LocalProtocolError`.
    """
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype not in (np.uint64, np.int64):
        raise LocalProtocolError("values: must be a one-dimensional array of uint64 or int64")
    packed_size(values.size, modulus_bits)
    if modulus_bits in _PLAIN:
        return values.view(np.uint64).astype(_PLAIN[modulus_bits]).tobytes()  # keeps the low bits
    octets = values.view(np.uint64).astype("<u8").view(np.uint8).reshape(-1, 8)
    bits = np.unpackbits(octets, axis=1, bitorder="little", count=modulus_bits)
    return np.packbits(bits, bitorder="little").tobytes()


def check_packed(data: bytes, count: int, modulus_bits: int) -> None:
    """Refuse (`RemoteProtocolError`) what `pack` cannot have made of `count` values."""
    size = packed_size(count, modulus_bits)
    if len(data) != size:
        raise RemoteProtocolError(
            f"vector: has {len(data)} bytes, but {count} values of {modulus_bits} bits take {size}"
        )
    spare = 8 * size - count * modulus_bits
    if size and data[-1] >> (8 - spare):
        raise RemoteProtocolError("vector: the bits after the last value must be zero")


def unpack(data: bytes, count: int, modulus_bits: int) -> NDArray[np.uint64]:
    """The `count` values that were packed, in an array of their own.

    What `pack` cannot have made is a `RemoteProtocolError`: another length, or bits set after the last value.
    """
    check_packed(data, count, modulus_bits)
    if modulus_bits in _PLAIN:
        return _plain(data, modulus_bits).astype(np.uint64)
    flat = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little", count=count * modulus_bits)
    octets = np.zeros((count, 8), dtype=np.uint8)
    octets[:, : -(-modulus_bits // 8)] = np.packbits(
        flat.reshape(count, modulus_bits), axis=1, bitorder="little"
    )
    return octets.reshape(-1).view("<u8").astype(np.uint64)


def sum_packed(vectors: Iterable[bytes], count: int, modulus_bits: int) -> NDArray[np.uint64]:
    """The sum of packed vectors of `count` values; only its residue modulo 2^modulus_bits means anything.

    One vector at a time: memory is the sum and, for 16, 32 and 64 bits, nothing more.
    """
    total: NDArray[Any] = np.zeros(count, dtype=_PLAIN.get(modulus_bits, "<u8"))
    for data in vectors:
        if modulus_bits in _PLAIN:
            check_packed(data, count, modulus_bits)
            total += _plain(data, modulus_bits)
        else:
            total += unpack(data, count, modulus_bits)
    return total.astype(np.uint64)


def _plain(data: bytes, modulus_bits: int) -> NDArray[Any]:
    return np.frombuffer(data, dtype=_PLAIN[modulus_bits])


MAGIC = b"NISS"
VERSION = 1
HEADER_BYTES = len(MAGIC) + 2
SIGNING_DOMAIN = b"niss signed message v1\x00"

_DEFAULT = WireLimits()
# A tag is never used for anything else.
MESSAGES: dict[int, type[Any]] = {1: RoundOpen, 2: Upload, 3: RevealRequest, 4: Reveal, 5: Refusal}
TAGS = {kind: tag for tag, kind in MESSAGES.items()}


def encode(message: Message, *, limits: WireLimits = _DEFAULT) -> bytes:
    """The one encoding of the message.

    What `decode` would refuse under the same `limits` is refused here as our own fault: `LocalProtocolError`.
    """
    return b"".join(write(message, Writer(limits)).parts)


def decode(data: bytes, *, limits: WireLimits = _DEFAULT) -> Message:
    """The message whose encoding this is; everything else is refused, as a fault of whoever sent it.

    `RemoteProtocolError`, in words that name the field and quote nothing of the message. Checked are form and bounds
    alone: signatures and meaning are left to the machines.
    """
    if type(data) is not bytes:
        raise LocalProtocolError("message: must be bytes")
    if len(data) > limits.max_message_bytes:
        raise RemoteProtocolError(f"message: larger than {limits.max_message_bytes} bytes")
    if data[: len(MAGIC)] != MAGIC or len(data) < HEADER_BYTES:
        raise RemoteProtocolError("magic: this is not a niss message")
    version, tag = data[len(MAGIC) : HEADER_BYTES]
    if version != VERSION:
        upgrade = "the side that sent it" if version < VERSION else "this side"
        raise RemoteProtocolError(
            f"version: the message has wire version {version}, this side speaks version {VERSION}: "
            f"upgrade niss on {upgrade}"
        )
    if tag not in MESSAGES:
        raise RemoteProtocolError(f"type: wire version {VERSION} has no message of type {tag}")
    reader = Reader(data, limits, HEADER_BYTES)
    name = MESSAGES[tag].__name__
    try:
        message = record_of(MESSAGES[tag]).read(reader)
    except Fault as fault:
        raise RemoteProtocolError(str(fault.within(name))) from None
    if reader.left:
        raise RemoteProtocolError(f"{name}: {reader.left} bytes too many at the end")
    return cast(Message, message)


def signed_part(message: Message, *, limits: WireLimits = _DEFAULT) -> bytes:
    """What is signed: a tag for this purpose alone, then the encoding with the message's own signature empty.

    Signatures inside the message (of prekeys, the beacon) stay in: the signer vouches for them too.
    """
    if type(message) not in TAGS:
        raise LocalProtocolError("message: must be one of the messages of the protocol")
    return b"".join([SIGNING_DOMAIN, *write(replace(message, signature=b""), Writer(limits)).parts])


def write(message: Message, writer: Writer) -> Writer:
    """Writes header and fields; for those who want to watch the writer at work. Returns the writer."""
    tag = TAGS.get(type(message))
    if tag is None:
        raise LocalProtocolError("message: must be one of the messages of the protocol")
    writer.raw(MAGIC + bytes([VERSION, tag]))
    try:
        record_of(type(message)).write(writer, message)
    except Fault as fault:
        raise LocalProtocolError(str(fault.within(type(message).__name__))) from None
    if writer.size > writer.limits.max_message_bytes:
        raise LocalProtocolError(f"message: larger than {writer.limits.max_message_bytes} bytes")
    return writer
