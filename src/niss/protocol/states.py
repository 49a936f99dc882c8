"""The states of a round, the table of steps between them, and what a client must remember of them.

`tolerate`: a client goes IDLE -> UPLOADED and waits for the next round, the server IDLE -> COLLECTING -> CLOSED.
`repair` adds, for the members of the committee alone, revealing what the dropped left behind. Whatever is not in a
table is refused.

A client's `Memory` says which rounds it answered, and for which survivor set it gave its part of a repair. The driver
keeps its bytes on durable storage; the machine hands them over before it lets any message go. A client whose memory is
lost must not take part under the same identity again: it could answer a round twice, and the difference of two uploads
with the same shares is free of them.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.curve import SecretBytes


class ClientStage(Enum):
    """Where a client stands in its current round; part of what it must not forget.

    IDLE        has not answered a round yet
    UPLOADED    has sent its noisy update; whatever comes later can only be a repair, or the next round
    REVEALED    has given its part of the repair for one survivor set, and gives it for no other in this round
    """

    IDLE = "idle"
    UPLOADED = "uploaded"
    REVEALED = "revealed"


class ServerStage(Enum):
    """Where the server stands in its current round.

    IDLE        has not opened a round yet
    COLLECTING  takes uploads
    REPAIRING   has asked the committee for reveals, and takes them
    CLOSED      has summed; the next round may be opened
    """

    IDLE = "idle"
    COLLECTING = "collecting"
    REPAIRING = "repairing"
    CLOSED = "closed"


# (state, what arrives) -> next state. A client answers a new round from any state: the old one is over for it.
CLIENT_TABLE: dict[tuple[ClientStage, str], ClientStage] = {
    (ClientStage.IDLE, "RoundOpen"): ClientStage.UPLOADED,
    (ClientStage.UPLOADED, "RoundOpen"): ClientStage.UPLOADED,
    (ClientStage.REVEALED, "RoundOpen"): ClientStage.UPLOADED,
    (ClientStage.UPLOADED, "RevealRequest"): ClientStage.REVEALED,
    # Said again after a lost reply or a restart, or about shares that were carried on: for the same survivor set alone.
    (ClientStage.REVEALED, "RevealRequest"): ClientStage.REVEALED,
}

# What the driver asks for is in lower case, what arrives from clients in upper.
SERVER_TABLE: dict[tuple[ServerStage, str], ServerStage] = {
    (ServerStage.IDLE, "open round"): ServerStage.COLLECTING,
    (ServerStage.CLOSED, "open round"): ServerStage.COLLECTING,
    (ServerStage.COLLECTING, "Upload"): ServerStage.COLLECTING,
    (ServerStage.COLLECTING, "request reveals"): ServerStage.REPAIRING,
    (ServerStage.REPAIRING, "Reveal"): ServerStage.REPAIRING,
    (ServerStage.REPAIRING, "request carried reveals"): ServerStage.REPAIRING,
    (ServerStage.COLLECTING, "finish"): ServerStage.CLOSED,
    (ServerStage.REPAIRING, "finish"): ServerStage.CLOSED,
}


def client_step(state: ClientStage, message: str) -> ClientStage:
    """The client's state after `message` (a message's class name), or `RemoteProtocolError`: it is out of turn."""
    following = CLIENT_TABLE.get((state, message))
    if following is None:
        raise RemoteProtocolError(
            f"{message} is not allowed while this client is in state {state.value!r}",
            hint="the server is out of step; wait for the next round",
        )
    return following


def server_step(state: ServerStage, event: str) -> ServerStage:
    """The server's state after `event`: a message's class name, or in lower case what the driver asks for.

    Out of turn, a message is a `RemoteProtocolError` and a call of the driver a `LocalProtocolError`.
    """
    following = SERVER_TABLE.get((state, event))
    if following is None:
        kind = RemoteProtocolError if event[0].isupper() else LocalProtocolError
        raise kind(f"{event!r} is not allowed while the server is in state {state.value!r}")
    return following


_LOST = "enrol with a new identity; an old one without its memory could answer a round twice"


@dataclass
class CurrentRound:
    """The round a client is in.

    opened      the encoded `RoundOpen` it answered
    seat        where it sits
    prekey      the number of the prekey it is listed with
    verdict     hash of the survivor set for which it gave its part of the repair, once it has
    """

    opened: bytes
    seat: int
    prekey: int
    verdict: bytes | None = None


@dataclass
class Memory:
    """What a client knows of the rounds it answered.

    last        by run, in hex, the last (round, attempt) answered: no earlier one is answered again
    beacon      by anchor, in hex, the last link seen: no earlier one is accepted again
    carried     by run, in hex, all rounds charged where shares are carried: the cost of the next one depends on them
    state       where it stands in the current round
    current     that round, until it is closed
    """

    last: dict[str, tuple[int, int]] = field(default_factory=dict)
    beacon: dict[str, int] = field(default_factory=dict)
    state: ClientStage = ClientStage.IDLE
    current: CurrentRound | None = None
    carried: dict[str, list[int]] = field(default_factory=dict)

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
            }
        return {
            "last": {run: list(when) for run, when in self.last.items()},
            "beacon": self.beacon,
            "state": self.state.value,
            "current": current,
        } | ({"carried": self.carried} if self.carried else {})

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
                )
            return cls(
                last={run: (int(when[0]), int(when[1])) for run, when in values["last"].items()},
                beacon={anchor: int(index) for anchor, index in values["beacon"].items()},
                state=ClientStage(values["state"]),
                current=current,
                carried={
                    run: [int(number) for number in numbers]
                    for run, numbers in values.get("carried", {}).items()
                },
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


def rounds_answered(kept: bytes | None, run: bytes) -> tuple[int, ...]:
    """The rounds of a run with carried shares that the client of this memory was charged for, and so may have answered.

    It is written after the charge and before the upload leaves: a round that is not here has shown nothing.
    """
    if kept is None:
        return ()
    kept = SecretBytes(kept)
    return tuple(restore(kept)[0].carried.get(run.hex(), ()))


def _parts(kept: SecretBytes) -> tuple[Any, Any, SecretBytes | None]:
    try:
        whole = json.loads(kept)
        keys = SecretBytes(base64.b64decode(whole["prekeys"], validate=True))
        return whole["version"], whole["memory"], keys
    except (KeyError, TypeError, ValueError, RecursionError):
        return None, None, None
