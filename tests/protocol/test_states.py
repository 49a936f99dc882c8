"""The table is the protocol: what is not in it is refused, and tests/docs compares its drawing."""

from __future__ import annotations

import pytest

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.client import CLIENT_TABLE, ClientStage, CurrentRound, Memory, client_step, dump, restore
from niss.protocol.keys import PrekeyStore
from niss.protocol.server import SERVER_TABLE, ServerStage, server_step


def test_every_state_can_be_reached_and_left() -> None:
    for table, states in ((CLIENT_TABLE, ClientStage), (SERVER_TABLE, ServerStage)):
        assert {state for state, _ in table} == set(states)
        assert set(table.values()) | {next(iter(table))[0]} == set(states)


@pytest.mark.parametrize("state", ClientStage)
def test_what_is_not_in_the_clients_table_is_the_servers_fault(state: ClientStage) -> None:
    for message in ("RoundOpen", "RevealRequest", "Upload", "Nonsense"):
        if (state, message) in CLIENT_TABLE:
            assert client_step(state, message) is CLIENT_TABLE[state, message]
        else:
            with pytest.raises(RemoteProtocolError):
                client_step(state, message)


def test_a_driver_out_of_turn_and_a_client_out_of_turn_are_different_faults() -> None:
    with pytest.raises(LocalProtocolError):
        server_step(ServerStage.IDLE, "finish")
    with pytest.raises(RemoteProtocolError):
        server_step(ServerStage.IDLE, "Upload")


def test_the_memory_of_an_earlier_release_is_refused() -> None:
    """It had one more state, and noted what it gave to whom."""
    current = CurrentRound(b"", 1, 2, bytes(32))
    kept = bytes(dump(Memory((3, 0), ClientStage.REVEALED, current), PrekeyStore()))
    for change in ((b"revealed", b"judged"), (b'"prekey":2', b'"prekey":2,"given":{"0":"edge"}')):
        assert change[0] in kept
        with pytest.raises(LocalProtocolError, match="damaged") as refused:
            restore(kept.replace(*change))
        assert refused.value.hint
