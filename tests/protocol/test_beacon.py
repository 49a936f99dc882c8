"""The beacon: one link for each attempt, let out once, for one commitment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.agreement import participants_hash, terms_hash
from niss.protocol.keys import LINKS_PER_ROUND, BeaconChain, Identity, link_of, verify_beacon
from support.protocol_round import Federation, carried, resigned


def test_every_attempt_has_a_link_of_its_own() -> None:
    links = [link_of(number, attempt) for number in range(5) for attempt in range(LINKS_PER_ROUND)]
    assert links == list(range(1, len(links) + 1))
    with pytest.raises(RemoteProtocolError):
        link_of(0, LINKS_PER_ROUND)


def test_the_holder_lets_out_each_link_once_and_in_order() -> None:
    chain = Federation(2).chain
    chain.release(1, 1, b"first")
    for number, attempt in ((1, 1), (1, 0), (0, 0)):
        with pytest.raises(RemoteProtocolError, match="before"):
            chain.release(number, attempt, b"second")
    chain.release(1, 2, b"third")


def test_a_chain_ends_after_its_last_round() -> None:
    federation = Federation(2)
    chain = BeaconChain(2, holder=federation.holder, entropy=federation.entropy)
    chain.release(1, LINKS_PER_ROUND - 1, b"last")
    with pytest.raises(LocalProtocolError, match="used up"):
        chain.release(2, 0, b"beyond")
    with pytest.raises(LocalProtocolError, match="rounds"):
        BeaconChain(0, holder=federation.holder, entropy=federation.entropy)


def test_a_link_verifies_for_its_own_commitment_chain_and_holder_alone() -> None:
    federation = Federation(2)
    beacon = federation.chain.release(3, 0, b"commitment")
    good = {
        "expected": link_of(3, 0),
        "anchor": federation.chain.anchor,
        "holder": federation.holder.public,
        "after": 0,
    }
    verify_beacon(beacon, b"commitment", **good)
    stranger = Identity.generate(federation.entropy)
    for change in (
        {"expected": link_of(3, 1)},
        {"anchor": bytes(32)},
        {"holder": stranger.public},
        {"after": link_of(3, 0)},
    ):
        with pytest.raises(RemoteProtocolError):
            verify_beacon(beacon, b"commitment", **{**good, **change})
    with pytest.raises(RemoteProtocolError):
        verify_beacon(beacon, b"another", **good)


def test_a_server_cannot_pick_a_graph_by_asking_for_later_links() -> None:
    """Even with a holder that signs any link, an attempt is answered with its own link only."""
    federation = Federation(5)
    opened = federation.open()
    later = federation.chain.release(7, 0, participants_hash(opened.participants) + terms_hash(opened.terms))
    lie = resigned(federation.server, replace(opened, beacon=later), "open")
    with pytest.raises(RemoteProtocolError, match="this attempt has link"):
        federation.clients[0].upload(lie, federation.updates()[0], federation.entropy)
    assert federation.seats[0].charges == []
    federation.clients[0].upload(opened, federation.updates()[0], federation.entropy)


def test_a_link_seen_in_one_run_serves_in_no_other() -> None:
    """The holder signs it for the terms of one, among them the run."""
    federation = Federation(5)
    first = federation.open()
    client = federation.clients[0]
    other = replace(first.terms, run=b"another run")
    client.policy = replace(client.policy, run=other.run)
    second = carried(resigned(federation.server, replace(first, terms=other), "open"))
    with pytest.raises(RemoteProtocolError, match="the signature for 'beacon' is not by"):
        client.upload(second, federation.updates()[0], federation.entropy)
