"""The states of a round and what moves each side from one to the next: the whole protocol in one table.

`tolerate`: a client goes IDLE -> UPLOADED and waits for the next round, the server IDLE -> COLLECTING -> CLOSED.
`repair` adds judging who survived and revealing what the dropped left behind. Whatever is not in a table is refused.
"""

from __future__ import annotations

from enum import Enum

from niss.errors import LocalProtocolError, RemoteProtocolError


class ClientState(Enum):
    """Where a client stands in its current round."""

    IDLE = "idle"
    UPLOADED = "uploaded"
    JUDGED = "judged"
    REVEALED = "revealed"


class ServerState(Enum):
    """Where the server stands in its current round."""

    IDLE = "idle"
    COLLECTING = "collecting"
    JUDGING = "judging"
    REPAIRING = "repairing"
    CLOSED = "closed"


# (state, what arrives) -> next state. A client answers a new round from any state: the old one is over for it.
CLIENT_TABLE: dict[tuple[ClientState, str], ClientState] = {
    (ClientState.IDLE, "RoundOpen"): ClientState.UPLOADED,
    (ClientState.UPLOADED, "RoundOpen"): ClientState.UPLOADED,
    (ClientState.JUDGED, "RoundOpen"): ClientState.UPLOADED,
    (ClientState.REVEALED, "RoundOpen"): ClientState.UPLOADED,
    (ClientState.UPLOADED, "SurvivorClaim"): ClientState.JUDGED,
    (ClientState.JUDGED, "RevealRequest"): ClientState.REVEALED,
    # Said again after a lost reply or a restart: the client repeats itself, and refuses anything else.
    (ClientState.JUDGED, "SurvivorClaim"): ClientState.JUDGED,
    (ClientState.REVEALED, "RevealRequest"): ClientState.REVEALED,
}

# What the driver asks for is in lower case, what arrives from clients in upper.
SERVER_TABLE: dict[tuple[ServerState, str], ServerState] = {
    (ServerState.IDLE, "open round"): ServerState.COLLECTING,
    (ServerState.CLOSED, "open round"): ServerState.COLLECTING,
    (ServerState.COLLECTING, "Upload"): ServerState.COLLECTING,
    (ServerState.COLLECTING, "claim survivors"): ServerState.JUDGING,
    (ServerState.JUDGING, "Verdict"): ServerState.JUDGING,
    (ServerState.JUDGING, "request reveals"): ServerState.REPAIRING,
    (ServerState.REPAIRING, "Reveal"): ServerState.REPAIRING,
    (ServerState.COLLECTING, "finish"): ServerState.CLOSED,
    (ServerState.JUDGING, "finish"): ServerState.CLOSED,
    (ServerState.REPAIRING, "finish"): ServerState.CLOSED,
}


def client_step(state: ClientState, message: str) -> ClientState:
    """The client's state after `message` (a message's class name), or `RemoteProtocolError`: it is out of turn."""
    following = CLIENT_TABLE.get((state, message))
    if following is None:
        raise RemoteProtocolError(
            f"{message} is not allowed while this client is in state {state.value!r}",
            hint="the server is out of step; wait for the next round",
        )
    return following


def server_step(state: ServerState, event: str) -> ServerState:
    """The server's state after `event`: a message's class name, or in lower case what the driver asks for.

    Out of turn, a message is a `RemoteProtocolError` and a call of the driver a `LocalProtocolError`.
    """
    following = SERVER_TABLE.get((state, event))
    if following is None:
        kind = RemoteProtocolError if event[0].isupper() else LocalProtocolError
        raise kind(f"{event!r} is not allowed while the server is in state {state.value!r}")
    return following
