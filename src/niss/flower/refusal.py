"""A client that declines says so under its signature, so that no relay can decline in its name."""

from __future__ import annotations

from dataclasses import replace

from niss.protocol.keys import Identity, verify
from niss.protocol.messages import Refusal
from niss.protocol.wire import Limits, signed_part

_PURPOSE = "refusal"


def refusal(identity: Identity, about: bytes, reason: str) -> Refusal:
    """A signed refusal of the letter with this digest."""
    short = reason.encode()[: Limits().max_reason_bytes].decode(errors="ignore")
    bare = Refusal(about, short)
    return replace(bare, signature=identity.sign(_PURPOSE, signed_part(bare)))


def check_refusal(declined: Refusal, identity: bytes) -> None:
    """Raises `RemoteProtocolError` unless that identity declined."""
    verify(identity, _PURPOSE, signed_part(declined), declined.signature)
