"""Messages as bytes: compact, versioned, and canonical, so that a signature over an encoding is safe.

    magic "NISS" | version, 1 byte | tag of the message, 1 byte | its fields, as `wire_layout` lays them out

Each message has one encoding and each accepted encoding is that of the message it decodes to. What is refused is
named by its field and never quoted. No length is believed before the bytes for it are there: `decode` takes about
as much memory as a vector it is given, and some 35 times as much as a message that is all tiny items (Python's
objects are larger than one-byte pieces), of which `Limits` allows only so many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.messages import Message
from niss.protocol.wire_fields import Fault, Limits, Reader, Writer
from niss.protocol.wire_layout import MESSAGES, TAGS

__all__ = ["GROUPS", "MAGIC", "VERSION", "Limits", "decode", "encode", "signed_part", "size_report"]

MAGIC = b"NISS"
VERSION = 1
HEADER_BYTES = len(MAGIC) + 2
SIGNING_DOMAIN = b"niss signed message v1\x00"
GROUPS = ("vector", "prekeys", "pieces", "signature", "rest")

_DEFAULT = Limits()


def encode(message: Message, *, limits: Limits = _DEFAULT) -> bytes:
    """The one encoding of the message; refuses, as our own fault, what `decode` would refuse."""
    return b"".join(write(message, Writer(limits)).parts)


def decode(data: bytes, *, limits: Limits = _DEFAULT) -> Message:
    """The message whose encoding this is; everything else is refused, as a fault of whoever sent it."""
    if type(data) is not bytes:
        raise LocalProtocolError("message: must be bytes")
    if len(data) > limits.max_message_bytes:
        raise RemoteProtocolError(f"message: larger than {limits.max_message_bytes} bytes")
    if data[: len(MAGIC)] != MAGIC or len(data) < HEADER_BYTES:
        raise RemoteProtocolError("magic: this is not a message of niss")
    version, tag = data[len(MAGIC) : HEADER_BYTES]
    if version != VERSION:
        raise RemoteProtocolError(
            f"version: the message has wire version {version}, this side speaks version {VERSION}",
            hint="run the same release of niss on both sides",
        )
    if tag not in MESSAGES:
        raise RemoteProtocolError(f"type: wire version {VERSION} has no message of type {tag}")
    reader = Reader(data, limits, HEADER_BYTES)
    try:
        message = MESSAGES[tag].read(reader)
    except Fault as fault:
        raise RemoteProtocolError(f"{fault.within(MESSAGES[tag].kind.__name__)}") from None
    if reader.left:
        raise RemoteProtocolError(f"{MESSAGES[tag].kind.__name__}: {reader.left} bytes too many at the end")
    return cast(Message, message)


def signed_part(message: Message, *, limits: Limits = _DEFAULT) -> bytes:
    """What is signed: a tag for this purpose alone, then the encoding with the message's own signature empty.

    Signatures inside the message (of prekeys, the beacon, verdicts) stay in: the signer vouches for them too.
    """
    if type(message) not in TAGS:
        raise LocalProtocolError("message: must be one of the messages of the protocol")
    return SIGNING_DOMAIN + encode(replace(message, signature=b""), limits=limits)


def size_report(message: Message, *, limits: Limits = _DEFAULT) -> dict[str, int]:
    """How many bytes of the encoding go where; the groups add up to its length.

    `pieces` counts all that a repair moves, revealed edges too; `signature` counts every signature but those of
    prekeys, which belong to `prekeys`. Lengths count with what they announce, the header with the `rest`.
    """
    writer = write(message, Writer(limits))
    sizes = {group: writer.groups.get(group, 0) for group in GROUPS}
    sizes["rest"] = writer.size - sum(sizes.values())
    return sizes


def write(message: Message, writer: Writer) -> Writer:
    """Writes header and fields; for those who want to watch the writer at work."""
    tag = TAGS.get(type(message))
    if tag is None:
        raise LocalProtocolError("message: must be one of the messages of the protocol")
    writer.raw(MAGIC + bytes([VERSION, tag]))
    try:
        MESSAGES[tag].write(writer, message)
    except Fault as fault:
        raise LocalProtocolError(f"{fault.within(type(message).__name__)}") from None
    if writer.size > writer.limits.max_message_bytes:
        raise LocalProtocolError(f"message: larger than {writer.limits.max_message_bytes} bytes")
    return writer
