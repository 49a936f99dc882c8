"""Whole rounds: exact sums, dropouts tolerated and repaired, lies refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.agreement import agree
from support.protocol_round import Federation, carried, resigned


@pytest.mark.parametrize("seed", range(100))
def test_without_drops_and_distortion_the_sum_is_exact_to_the_last_bit(seed: int) -> None:
    federation = Federation(3 + seed % 6, f"exact {seed}")
    outcome, exact = federation.play(federation.terms(neighbours=float(1 + seed % 4)))
    assert outcome.exact
    np.testing.assert_array_equal(outcome.total, exact)


@pytest.mark.parametrize("bits", [32, 64])
def test_a_smaller_modulus_sums_alike(bits: int) -> None:
    federation = Federation(5)
    outcome, exact = federation.play(federation.terms(modulus_bits=bits))
    np.testing.assert_array_equal(outcome.total, exact)


def test_every_upload_is_hidden_though_the_sum_is_bare() -> None:
    federation = Federation(6)
    opened = federation.open(federation.terms(coordinates=2000))
    updates = federation.updates(2000)
    from niss.protocol.agreement import unpack

    for seat, client in enumerate(federation.clients):
        upload = client.upload(opened, updates[seat], federation.entropy)
        steps = unpack(upload.vector, 2000, 64).view(np.int64) / 2.0**20
        # Two times three unit shares of variance 0.5; false-alarm rate far below 1e-6 at +-25 %.
        assert 0.75 * 3.0 < np.var(steps) < 1.25 * 3.0


def test_residual_noise_is_left_as_planned() -> None:
    federation = Federation(8)
    outcome, exact = federation.play(federation.terms(coordinates=20_000, residual_variance=0.01))
    noise = outcome.total - exact
    assert outcome.exact
    # 20,000 normal draws: 6 standard deviations of the sample variance are 6 % of it.
    assert abs(np.var(noise) / 0.08 - 1.0) < 0.06


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_a_single_upload_is_not_passed_on_as_a_sum(mode: str) -> None:
    federation = Federation(4)
    opened = federation.open(federation.terms(mode=mode, dropped=3, revealed=3))
    federation.upload(opened, federation.updates(), absent=(0, 1, 3))
    if mode == "repair":
        federation.repair()
    outcome = federation.server.finish()
    assert outcome.survivors == ()
    assert not outcome.total.any()
    assert any("seat 2 alone uploaded" in problem for problem in outcome.problems)
    assert outcome.liars == ()


def test_tolerating_a_drop_leaves_its_shares_and_says_so() -> None:
    federation = Federation(8)
    outcome, exact = federation.play(federation.terms(coordinates=20_000), absent=(2,))
    assert (outcome.dropped, outcome.exact) == ((2,), False)
    assert outcome.uncancelled == 6
    assert outcome.extra_variance == pytest.approx(6 * 0.5)
    assert abs(np.var(outcome.total - exact) / outcome.extra_variance - 1.0) < 0.07


@pytest.mark.parametrize("absent", [(), (0,), (1, 5), (2, 3, 4)])
def test_a_repaired_round_is_exact(absent: tuple[int, ...]) -> None:
    federation = Federation(9, f"repair {absent}")
    terms = federation.terms(mode="repair", neighbours=6.0, revealed=8, dropped=3)
    outcome, exact = federation.play(terms, absent=absent)
    assert outcome.exact, outcome
    np.testing.assert_array_equal(outcome.total, exact)


@pytest.mark.parametrize("absent", [(), (7,)])
def test_too_few_members_leave_the_round_noisy_and_reported(absent: tuple[int, ...]) -> None:
    federation = Federation(8)
    terms = federation.terms(mode="repair", coordinates=20_000, neighbours=7.0, committee=8, threshold=7)
    opened = federation.open(terms)
    updates = federation.updates(20_000)
    federation.upload(opened, updates, absent)
    federation.repair(silent=(0, 1))
    outcome = federation.server.finish()
    assert not outcome.exact
    assert outcome.masked == outcome.survivors
    assert outcome.uncancelled == 14 * len(absent)
    assert outcome.extra_variance == pytest.approx(len(outcome.masked) * 1.0 + outcome.uncancelled * 0.5)
    assert any("too few true partials" in problem for problem in outcome.problems)
    assert outcome.liars == ()
    exact = sum(agree(opened).grid.quantise(updates[seat] / 8) for seat in outcome.survivors)
    # 20,000 normal draws: 7 standard deviations of the sample variance are 7 % of it.
    assert abs(np.var(outcome.total - np.asarray(exact) / 2.0**20) / outcome.extra_variance - 1.0) < 0.07


def test_nobody_is_asked_where_too_few_members_are_left() -> None:
    federation = Federation(8)
    opened = federation.open(federation.terms(mode="repair", neighbours=7.0, committee=5, threshold=4))
    members = agree(opened).committee
    federation.upload(opened, federation.updates(), absent=members[:2])
    assert federation.server.request_reveals() == {}
    outcome = federation.server.finish()
    assert not outcome.exact
    assert outcome.problems == ("3 of the committee uploaded, 4 are needed",)


def test_only_members_of_the_committee_speak_twice_and_the_others_forget_at_once() -> None:
    federation = Federation(9)
    opened = federation.open(federation.terms(mode="repair", neighbours=6.0, committee=4, threshold=3))
    members = set(agree(opened).committee)
    federation.upload(opened, federation.updates(), absent=(2,))
    for seat, client in enumerate(federation.clients):
        if seat == 2:
            continue
        assert client.awaits_repair == (seat in members)
        if seat not in members:
            client.close_round()
            assert opened.participants[seat].prekey.number not in client._prekeys
    requests = federation.server.request_reveals()
    assert set(requests) == members - {2}
    for seat, request in requests.items():
        federation.server.take_reveal(carried(federation.clients[seat].reveal(carried(request))))
    assert federation.server.finish().exact
    outsider = next(seat for seat in range(9) if seat not in members and seat != 2)
    with pytest.raises(RemoteProtocolError):
        federation.clients[outsider].reveal(next(iter(requests.values())))


def test_no_attempt_is_answered_twice_not_even_after_a_restart() -> None:
    federation = Federation(4)
    opened = federation.open()
    update = federation.updates()[0]
    seat = federation.seats[0]
    seat.client.upload(opened, update, federation.entropy)
    with pytest.raises(RemoteProtocolError, match="answered before"):
        seat.client.upload(opened, update, federation.entropy)
    with pytest.raises(RemoteProtocolError, match="answered before"):
        seat.restart().upload(opened, update, federation.entropy)
    assert len(seat.charges) == 1


def test_a_refused_charge_means_no_upload_and_no_second_try() -> None:
    federation = Federation(4)
    opened = federation.open()
    seat = federation.seats[0]

    def refuse(_agreed: object, _mu: float) -> None:
        raise LocalProtocolError("the budget is spent")

    seat._charge = refuse  # type: ignore[method-assign, assignment]
    client = seat.start(seat.kept[-1])
    with pytest.raises(LocalProtocolError, match="budget is spent"):
        client.upload(opened, federation.updates()[0], federation.entropy)


def test_forged_and_tampered_uploads_are_refused() -> None:
    federation = Federation(4)
    opened = federation.open()
    upload = federation.clients[0].upload(opened, federation.updates()[0], federation.entropy)
    for lie in (
        replace(upload, seat=1),
        replace(upload, vector=bytes(len(upload.vector))),
        replace(upload, signature=bytes(64)),
    ):
        with pytest.raises(RemoteProtocolError):
            federation.server.take_upload(lie)
    federation.server.take_upload(upload)
    federation.server.take_upload(upload)
    federation.server.take_upload(
        federation.clients[2].upload(opened, federation.updates()[2], federation.entropy)
    )
    assert federation.server.finish().survivors == (0, 2)


def test_a_late_upload_of_a_client_declared_dropped_is_discarded() -> None:
    federation = Federation(6)
    terms = federation.terms(mode="repair", neighbours=5.0)
    opened = federation.open(terms)
    updates = federation.updates()
    federation.upload(opened, updates, absent=(3,))
    late = federation.clients[3].upload(opened, updates[3], federation.entropy)
    requests = federation.server.request_reveals()
    with pytest.raises(RemoteProtocolError, match="is not allowed"):
        federation.server.take_upload(late)
    assert 3 not in requests
    told = resigned(federation.server, requests[0], "request")
    with pytest.raises(RemoteProtocolError, match="though it uploaded"):
        federation.clients[3].reveal(told)


def test_a_member_answers_for_one_survivor_set_only() -> None:
    federation = Federation(6)
    opened = federation.open(federation.terms(mode="repair", neighbours=5.0))
    federation.upload(opened, federation.updates())
    request = carried(federation.server.request_reveals()[0])
    reveal = federation.clients[0].reveal(request)
    assert federation.seats[0].restart().reveal(request) == reveal
    fewer = replace(
        request, survivors=request.survivors[:-1], pieces=request.pieces[: -len(request.pieces) // 6]
    )
    with pytest.raises(RemoteProtocolError, match="another survivor set"):
        federation.seats[0].restart().reveal(resigned(federation.server, fewer, "request"))


@pytest.mark.parametrize("change", ["pieces", "survivors", "context"])
def test_a_request_that_is_malformed_binds_nobody(change: str) -> None:
    federation = Federation(6)
    opened = federation.open(federation.terms(mode="repair", neighbours=5.0))
    federation.upload(opened, federation.updates())
    request = federation.server.request_reveals()[0]
    before = len(federation.seats[0].kept)
    lies = {"pieces": request.pieces[:-1], "survivors": request.survivors[:-1], "context": bytes(32)}
    with pytest.raises(RemoteProtocolError):
        federation.clients[0].reveal(
            resigned(federation.server, replace(request, **{change: lies[change]}), "request")
        )
    assert len(federation.seats[0].kept) == before
    assert federation.seats[0].restart().reveal(request).partials


def test_prekeys_are_erased_when_the_round_is_over() -> None:
    federation = Federation(4)
    opened = federation.open()
    client = federation.clients[0]
    client.upload(opened, federation.updates()[0], federation.entropy)
    number = opened.participants[0].prekey.number
    assert number in client._prekeys
    client.close_round()
    assert number not in client._prekeys


def test_a_round_that_was_accepted_is_answered_once_and_not_after_a_restart() -> None:
    federation = Federation(4)
    opened, update = federation.open(), federation.updates()[0]
    seat = federation.seats[0]
    seat.client.accept(opened, federation.entropy)
    with pytest.raises(LocalProtocolError, match="shape"):
        seat.client.answer(update[1:], federation.entropy)
    assert seat.client.answer(update, federation.entropy).seat is not None
    with pytest.raises(LocalProtocolError, match="no round has been accepted"):
        seat.client.answer(update, federation.entropy)
    again = seat.restart()
    with pytest.raises(RemoteProtocolError, match="answered before"):
        again.accept(opened, federation.entropy)
    with pytest.raises(LocalProtocolError, match="no round has been accepted"):
        again.answer(update, federation.entropy)


def test_whoever_enrols_a_client_again_and_again_does_not_fill_its_disk() -> None:
    federation = Federation(4)
    seat = federation.seats[0]
    for _ in range(20):
        newest = seat.client.enrol(64, federation.entropy)
    assert len(seat.client._prekeys) == 256
    assert newest[-1].number in seat.client._prekeys
