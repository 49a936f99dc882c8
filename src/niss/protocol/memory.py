"""What a client must not forget: which rounds it answered, what it agreed to, and what it gave away.

The driver keeps the bytes on durable storage; the machine hands them over before it lets any message go. A client
whose memory is lost must not take part under the same identity again: it could answer a round twice, and the
difference of two uploads with the same shares is free of them.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from niss.errors import LocalProtocolError
from niss.protocol.secret import SecretBytes
from niss.protocol.table import ClientState

_LOST = "enrol with a new identity; an old one without its memory could answer a round twice"


@dataclass
class CurrentRound:
    """The round a client is in.

    opened      the encoded `RoundOpen` it answered
    seat        where it sits
    prekey      the number of the prekey it is listed with
    verdict     hash of the survivor set it agreed to, once it has
    revealed    by neighbour's seat, what it gave away: "edge" or "piece", never both
    """

    opened: bytes
    seat: int
    prekey: int
    verdict: bytes | None = None
    revealed: dict[int, str] = field(default_factory=dict)


@dataclass
class Memory:
    """`last` maps a run to the last (round, attempt) answered; `beacon` an anchor to the last link seen."""

    last: dict[str, tuple[int, int]] = field(default_factory=dict)
    beacon: dict[str, int] = field(default_factory=dict)
    state: ClientState = ClientState.IDLE
    current: CurrentRound | None = None

    def answered(self, run: bytes, number: int, attempt: int) -> bool:
        """Whether this attempt, or a later one, was answered before."""
        return (number, attempt) <= self.last.get(run.hex(), (-1, -1))

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON holds it; bytes as hex, the opened round as base64."""
        current = None
        if self.current is not None:
            current = {
                "opened": base64.b64encode(self.current.opened).decode(),
                "seat": self.current.seat,
                "prekey": self.current.prekey,
                "verdict": None if self.current.verdict is None else self.current.verdict.hex(),
                "given": {str(seat): what for seat, what in self.current.revealed.items()},
            }
        return {
            "last": {run: list(when) for run, when in self.last.items()},
            "beacon": self.beacon,
            "state": self.state.value,
            "current": current,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Memory:
        """What `to_json` gave; anything else is a `LocalProtocolError`."""
        try:
            current = None
            if (stored := values["current"]) is not None:
                current = CurrentRound(
                    opened=base64.b64decode(stored["opened"], validate=True),
                    seat=int(stored["seat"]),
                    prekey=int(stored["prekey"]),
                    verdict=None if stored["verdict"] is None else bytes.fromhex(stored["verdict"]),
                    revealed={int(seat): str(what) for seat, what in stored["given"].items()},
                )
            return cls(
                last={run: (int(when[0]), int(when[1])) for run, when in values["last"].items()},
                beacon={anchor: int(index) for anchor, index in values["beacon"].items()},
                state=ClientState(values["state"]),
                current=current,
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise LocalProtocolError(
                f"this client's memory is damaged ({type(error).__name__})", hint=_LOST
            ) from None


def dump(memory: Memory, prekeys: bytes) -> SecretBytes:
    """Memory and prekeys as one piece, to be kept or replaced together. Hidden: it holds private keys."""
    whole = {"version": 1, "memory": memory.to_json(), "prekeys": base64.b64encode(prekeys).decode()}
    return SecretBytes(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode())


def restore(kept: bytes) -> tuple[Memory, SecretBytes]:
    """The memory and the prekeys' bytes of an earlier `dump`; anything else is a `LocalProtocolError`."""
    kept = SecretBytes(kept)
    version, values, prekeys = _parts(kept)
    if prekeys is None:
        # Raised here, where no traceback finds the keys among the locals.
        raise LocalProtocolError("this client's memory is damaged", hint=_LOST)
    if version != 1:
        raise LocalProtocolError("this client's memory was written by another version of niss")
    return Memory.from_json(values), prekeys


def _parts(kept: SecretBytes) -> tuple[Any, Any, SecretBytes | None]:
    try:
        whole = json.loads(kept)
        keys = SecretBytes(base64.b64decode(whole["prekeys"], validate=True))
        return whole["version"], whole["memory"], keys
    except (KeyError, TypeError, ValueError, RecursionError):
        return None, None, None
