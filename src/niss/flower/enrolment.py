"""A client joins a run: its identity, one-time keys, and what it does not take on trust, signed for this run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from niss.errors import RemoteProtocolError
from niss.flower.proposal import MOST_PREKEYS, Proposal
from niss.protocol.directory import check_prekey
from niss.protocol.encoding import length_prefixed
from niss.protocol.keys import PUBLIC_BYTES, SIGNATURE_BYTES, Identity, verify
from niss.protocol.messages import Prekey
from niss.protocol.prekeys import SignedPrekey

MAGIC = b"niss enrolment/1"
_PURPOSE = "flower enrolment"
_LONGEST = 100_000


@dataclass(frozen=True)
class Enrolment:
    """What the server learns of a client when it joins; `pinned` is the client's own word."""

    identity: bytes
    prekeys: tuple[Prekey, ...]
    pinned: tuple[str, ...]
    signature: bytes

    @classmethod
    def make(
        cls, identity: Identity, proposal: Proposal, prekeys: tuple[Prekey, ...], pinned: tuple[str, ...]
    ) -> Self:
        bare = cls(identity.public, prekeys, pinned, b"")
        return cls(identity.public, prekeys, pinned, identity.sign(_PURPOSE, bare._signed(proposal)))

    def check(self, proposal: Proposal) -> None:
        """Refuse keys that are not this identity's, and an enrolment for another run."""
        verify(self.identity, _PURPOSE, self._signed(proposal), self.signature)
        for prekey in self.prekeys:
            check_prekey(prekey, self.identity)

    def to_bytes(self) -> bytes:
        keys = [SignedPrekey(one.number, one.public, one.signature).encode().hex() for one in self.prekeys]
        values = {
            "identity": self.identity.hex(),
            "prekeys": keys,
            "pinned": list(self.pinned),
            "signature": self.signature.hex(),
        }
        return MAGIC + json.dumps(values, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """An enrolment, not yet checked."""
        if not data.startswith(MAGIC) or len(data) > _LONGEST:
            raise RemoteProtocolError("no enrolment")
        try:
            values = json.loads(data[len(MAGIC) :])
            keys = [SignedPrekey.decode(bytes.fromhex(text)) for text in values["prekeys"]]
            made = cls(
                bytes.fromhex(values["identity"]),
                tuple(Prekey(key.id, key.public, key.signature) for key in keys),
                tuple(str(name) for name in values["pinned"]),
                bytes.fromhex(values["signature"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise RemoteProtocolError("an enrolment that cannot be read") from None
        if len(made.identity) != PUBLIC_BYTES or len(made.signature) != SIGNATURE_BYTES:
            raise RemoteProtocolError("an enrolment with a key or a signature of the wrong length")
        if not 1 <= len(made.prekeys) <= MOST_PREKEYS:
            raise RemoteProtocolError("an enrolment with too few or too many one-time keys")
        return made

    def _signed(self, proposal: Proposal) -> bytes:
        keys = [SignedPrekey(one.number, one.public, one.signature).encode() for one in self.prekeys]
        names = [name.encode() for name in self.pinned]
        return length_prefixed(
            proposal.run, proposal.anchor, self.identity, length_prefixed(*keys), length_prefixed(*names)
        )
