"""Single lies that once worked, or nearly: each of them is refused, or does no more than add noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from niss.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from niss.protocol import committee
from niss.protocol.agreement import agree
from niss.protocol.keys import _prekey_statement as signed_prekey
from niss.protocol.messages import (
    Partials,
    Participant,
    Prekey,
    Reveal,
    RevealRequest,
    RoundOpen,
    Terms,
    Upload,
)
from niss.protocol.shares import EdgeKeys
from niss.protocol.wire import signed_part
from support.protocol_round import Federation, carried, resigned


def signed_by(federation: Federation, seat: int, message: Any, purpose: str) -> Any:
    """The message signed by the client in that seat: a lie it stands by."""
    bare = replace(message, signature=b"")
    return carried(replace(bare, signature=federation.seats[seat].identity.sign(purpose, signed_part(bare))))


def opened_with(federation: Federation, terms: Terms, prekeys: dict[int, Prekey]) -> RoundOpen:
    """A round in which some seats are listed with the prekeys given."""
    participants = tuple(
        Participant(seat.client.public, prekeys.get(number) or federation.prekeys[number].pop(0))
        for number, seat in enumerate(federation.seats)
    )
    beacon = federation.beacon(participants, terms)
    return carried(federation.server.open_round(terms, participants, beacon))


def test_a_round_that_tolerates_drops_reveals_nothing() -> None:
    """Its charge counts no reveal, whatever caps the server wrote into the terms."""
    federation = Federation(6)
    opened = federation.open(federation.terms(neighbours=5.0, revealed=5, dropped=4))
    federation.upload(opened, federation.updates())
    context = agree(opened).digest
    with pytest.raises(LocalProtocolError, match="not repaired"):
        federation.server.request_reveals()
    for client in federation.clients[:5]:
        with pytest.raises(RemoteProtocolError, match="'tolerate'"):
            client.reveal(resigned(federation.server, RevealRequest(context, (0, 1), b""), "request"))


def test_a_prekey_in_use_is_refused_and_the_client_lives_on() -> None:
    """Listed twice, it once cost a charge without an upload, and the client could never answer again."""
    federation = Federation(4)
    first = federation.open()
    client, update = federation.clients[0], federation.updates()[0]
    client.upload(first, update, federation.entropy)
    federation.server.finish()
    used = first.participants[0].prekey
    again = opened_with(federation, federation.terms(round=2), {0: used})
    with pytest.raises(RemoteProtocolError, match="prekey"):
        client.upload(again, update, federation.entropy)
    assert len(federation.seats[0].charges) == 1
    federation.server.finish()
    client.upload(federation.open(federation.terms(round=3)), update, federation.entropy)
    client.close_round()
    client.close_round()


@pytest.mark.parametrize("public", ["own", "degenerate"])
def test_a_neighbours_useless_prekey_costs_no_charge(public: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colluder signs a prekey with which nothing can be shared: refused before anything is spent."""
    # An honest server would not open such a round.
    monkeypatch.setattr("niss.protocol.server.check_prekey", lambda *_: None)
    federation = Federation(4)
    own = federation.prekeys[0][0].public
    chosen = own if public == "own" else bytes(32)
    liar = federation.seats[2].identity
    prekey = Prekey(9, chosen, liar.sign("prekey with possession", signed_prekey(liar.public, 9, chosen)))
    opened = opened_with(federation, federation.terms(), {2: prekey})
    with pytest.raises(RemoteProtocolError):
        federation.clients[0].upload(opened, federation.updates()[0], federation.entropy)
    assert federation.seats[0].charges == []


def repaired(federation: Federation, absent: int = 5) -> tuple[RoundOpen, dict[int, Reveal], np.ndarray]:
    """A round up to the reveals: what was opened, every survivor's reveal, and the true sum."""
    opened = federation.open(federation.terms(mode="repair", neighbours=float(len(federation.seats) - 1)))
    updates = federation.updates()
    federation.upload(opened, updates, (absent,))
    requests = federation.server.request_reveals()
    reveals = {seat: federation.clients[seat].reveal(request) for seat, request in requests.items()}
    grid, size = agree(opened).grid, len(federation.seats)
    steps = sum(grid.quantise(updates[seat] / size) for seat in range(size) if seat != absent)
    return opened, reveals, grid.to_float(np.asarray(steps))


def test_a_dropped_client_cannot_spoil_the_repair() -> None:
    """It reveals though it is not asked: once that took the place of what the survivors said."""
    federation = Federation(6)
    opened, reveals, exact = repaired(federation)
    context = agree(opened).digest
    false = tuple(Partials(other, bytes(64), bytes(48)) for other in range(5))
    lie = signed_by(federation, 5, Reveal(context, 5, false), "reveal")
    for reveal in reveals.values():
        federation.server.take_reveal(reveal)
    with pytest.raises(RemoteProtocolError, match="not asked"):
        federation.server.take_reveal(lie)
    outcome = federation.server.finish()
    assert outcome.exact
    np.testing.assert_array_equal(outcome.total, exact)


@pytest.mark.parametrize("liars", [(0,), (2,), (4,), (0, 1), (0, 1, 2)])
def test_false_partials_never_give_a_false_exact_sum(liars: tuple[int, ...]) -> None:
    federation = Federation(6)
    _, reveals, exact = repaired(federation)
    for seat, reveal in reveals.items():
        if seat in liars:
            false = tuple(replace(one, points=one.points[32:] + one.points[:32]) for one in reveal.partials)
            reveal = signed_by(federation, seat, replace(reveal, partials=false), "reveal")
        federation.server.take_reveal(reveal)
    outcome = federation.server.finish()
    assert outcome.exact == np.array_equal(outcome.total, exact)
    # Five members of six survived, four are wanted: one liar among them cannot keep a mask in the sum.
    assert outcome.exact == (len(liars) == 1)


def test_one_unopenable_dealing_does_not_silence_the_committee() -> None:
    """A colluder seals rubbish to everyone: its own mask stays, all others are taken out."""
    federation = Federation(6)
    opened = federation.open(federation.terms(mode="repair", neighbours=5.0))
    updates = federation.updates()
    for seat, client in enumerate(federation.clients):
        upload = client.upload(opened, updates[seat], federation.entropy)
        if seat == 1:
            keys = EdgeKeys(agree(opened), 2, federation.seats[2].privates[0])
            _, other = committee.deal(keys, federation.entropy)
            upload = signed_by(federation, 1, replace(upload, pieces=other), "upload")
        federation.server.take_upload(upload)
    federation.repair()
    outcome = federation.server.finish()
    assert outcome.masked == (1,)
    assert outcome.extra_variance == pytest.approx(1.0)
    assert outcome.liars == ()


def test_an_upload_without_its_commitment_or_pieces_is_refused() -> None:
    federation = Federation(5)
    opened = federation.open(federation.terms(mode="repair", neighbours=4.0))
    upload = federation.clients[0].upload(opened, federation.updates()[0], federation.entropy)
    lies: list[Upload] = [
        replace(upload, commitment=b""),
        replace(upload, pieces=upload.pieces[:-1]),
        replace(upload, pieces=b""),
        replace(upload, pieces=upload.pieces + bytes(32)),
    ]
    for lie in lies:
        with pytest.raises(RemoteProtocolError, match="seat 0"):
            federation.server.take_upload(signed_by(federation, 0, lie, "upload"))


def test_of_two_different_reveals_or_uploads_the_first_counts_and_is_noted_once() -> None:
    federation = Federation(6)
    _, reveals, exact = repaired(federation)
    for reveal in reveals.values():
        federation.server.take_reveal(reveal)
    empty = signed_by(federation, 0, replace(reveals[0], partials=()), "reveal")
    for _ in range(3):
        federation.server.take_reveal(empty)
    outcome = federation.server.finish()
    assert outcome.problems == ("seat 0 revealed twice; the first reveal counts",)
    np.testing.assert_array_equal(outcome.total, exact)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"grid_bits": 63}, RemoteProtocolError),
        ({"unit_variance": 1e40}, RemoteProtocolError),
        ({"self_variance": 1e308, "mode": "repair"}, RemoteProtocolError),
        ({"grid_bits": 30, "modulus_bits": 32}, ConfigError),
        ({"neighbours": 0.5}, ConfigError),
    ],
)
def test_terms_that_cannot_be_carried_out_are_refused_by_both_sides_and_cost_nothing(
    change: dict[str, Any], error: type[Exception]
) -> None:
    federation = Federation(5)
    good = federation.open(federation.terms())
    terms = federation.terms(round=2, **change)
    federation.server.finish()
    beacon = federation.beacon(good.participants, terms)
    with pytest.raises(error):
        federation.server.open_round(terms, good.participants, beacon)
    lie = resigned(federation.server, replace(good, terms=terms, beacon=beacon), "open")
    if error is RemoteProtocolError:
        with pytest.raises(error):
            federation.clients[0].upload(lie, federation.updates()[0], federation.entropy)
        assert federation.seats[0].charges == []


def test_a_self_mask_is_never_in_the_hands_of_one_member() -> None:
    pair = Federation(2)
    with pytest.raises(RemoteProtocolError, match="no majority"):
        pair.open(pair.terms(mode="repair", neighbours=1.0, committee=1, threshold=1))
    outcome, exact = pair.play(pair.terms(mode="repair", neighbours=1.0))
    assert outcome.exact
    np.testing.assert_array_equal(outcome.total, exact)


def test_a_client_reveals_no_more_of_its_own_edges_than_agreed() -> None:
    """Three clients may drop out in all, but only one of them next to any client."""
    federation = Federation(8)
    opened = federation.open(federation.terms(mode="repair", neighbours=7.0, revealed=1, dropped=3))
    federation.upload(opened, federation.updates())
    agreed = agree(opened)
    uploads = federation.server._round.uploads

    def asked(survivors: tuple[int, ...]) -> RevealRequest:
        pieces = b"".join(committee.piece_for(agreed, 0, uploads[seat].pieces) for seat in survivors)
        return resigned(federation.server, RevealRequest(agreed.digest, survivors, pieces), "request")

    with pytest.raises(RemoteProtocolError, match="2 edges to reveal, at most 1"):
        federation.clients[0].reveal(asked((0, 1, 2, 3, 4, 5)))
    assert federation.clients[0].reveal(asked((0, 1, 2, 3, 4, 5, 6))).seat == 0


def test_the_partials_of_colluders_alone_open_nothing() -> None:
    """Fewer members than the threshold, truthful though they are: everything stays in."""
    federation = Federation(6)
    opened = federation.open(federation.terms(mode="repair", neighbours=5.0, committee=6, threshold=5))
    federation.upload(opened, federation.updates(), absent=(5,))
    requests = federation.server.request_reveals()
    for seat in (1, 2, 3, 4):
        federation.server.take_reveal(federation.clients[seat].reveal(requests[seat]))
    outcome = federation.server.finish()
    assert outcome.masked == (0, 1, 2, 3, 4)
    assert outcome.uncancelled == 10
