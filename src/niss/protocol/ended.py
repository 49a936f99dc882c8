"""What a server keeps of a round that carried noise on, for the repair of the next one."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.agreement import Agreed, agree
from niss.protocol.messages import Message, RevealRequest, RoundOpen, Upload, Verdict
from niss.protocol.wire import decode, encode


@dataclass(frozen=True)
class Ended:
    """A round that is over. Nothing in it is secret: pieces are under their pads.

    survivors   the seats whose uploads were summed
    uploads     of the survivors, without their vectors
    verdict     of its committee; None: too few of it answered
    """

    agreed: Agreed
    survivors: tuple[int, ...]
    uploads: Mapping[int, Upload]
    verdict: Verdict | None

    def to_bytes(self) -> bytes:
        """All of it, for a server that may be started again before the next round is over."""
        verdict = RevealRequest(self.agreed.digest, self.survivors, b"", verdict=self.verdict)
        said: list[Message] = [self.agreed.opened, verdict, *(self.uploads[seat] for seat in self.survivors)]
        return json.dumps([base64.b64encode(encode(one)).decode() for one in said]).encode()

    @classmethod
    def from_bytes(cls, kept: bytes) -> Ended:
        """What `to_bytes` gave; anything else is a `LocalProtocolError`."""
        try:
            opened, verdict, *said = (
                decode(base64.b64decode(one, validate=True)) for one in json.loads(kept)
            )
            uploads = {one.seat: one for one in said if isinstance(one, Upload)}
            if not isinstance(opened, RoundOpen) or not isinstance(verdict, RevealRequest):
                raise ValueError
            if len(uploads) != len(said) or verdict.survivors != tuple(uploads):
                raise ValueError
            return cls(agree(opened), verdict.survivors, uploads, verdict.verdict)
        except (ValueError, TypeError, RemoteProtocolError):
            raise LocalProtocolError(
                "what this server kept of the last round is damaged",
                hint="leave it out: what lost clients had carried then stays in the sum, and is counted",
            ) from None
