"""Whole rounds, and runs that carry noise over: exact sums, dropouts tolerated and repaired, lies refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.agreement import agree, commitment_of, participants_hash, terms_hash, unpack
from niss.protocol.keys import Identity
from niss.protocol.schedule import Schedule
from niss.protocol.server import Server
from support.protocol_round import (
    GRID,
    CarriedFederation,
    Federation,
    carried,
    quantised,
    repairing,
    resigned,
    schedule,
)

ROUNDS: list[tuple[int, dict[str, Any], tuple[int, ...]]] = [
    *((3 + seed % 6, {"neighbours": float(1 + seed % 4)}, ()) for seed in range(100)),
    *((5, {"modulus_bits": bits}, ()) for bits in (32, 64)),
    *(
        (9, {"mode": "repair", "neighbours": 6.0, "revealed": 8, "dropped": 3}, absent)
        for absent in ((), (0,), (1, 5), (2, 3, 4))
    ),
]


@pytest.mark.parametrize("number", range(len(ROUNDS)))
def test_without_drops_or_repaired_the_sum_is_exact_to_the_last_bit(number: int) -> None:
    size, terms, absent = ROUNDS[number]
    federation = Federation(size, f"exact {number}")
    outcome, exact = federation.play(federation.terms(**terms), absent=absent)
    assert outcome.exact, outcome
    np.testing.assert_array_equal(outcome.total, exact)


def test_every_upload_is_hidden_though_the_sum_is_bare() -> None:
    federation = Federation(6)
    opened = federation.open(federation.terms(coordinates=2000))
    updates = federation.updates(2000)
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
    exact = sum(quantised(agree(opened).grid, updates[seat] / 8) for seat in outcome.survivors)
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
    opened, update = federation.open(), federation.updates()[0]
    seat = federation.seats[0]
    seat.client.accept(opened, federation.entropy)
    with pytest.raises(LocalProtocolError, match="shape"):
        seat.client.answer(update[1:], federation.entropy)
    seat.client.answer(update, federation.entropy)
    for client in (seat.client, seat.restart()):
        with pytest.raises(LocalProtocolError, match="no round has been accepted"):
            client.answer(update, federation.entropy)
        with pytest.raises(RemoteProtocolError, match="answered before"):
            client.upload(opened, update, federation.entropy)
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


def test_whoever_enrols_a_client_again_and_again_does_not_fill_its_disk() -> None:
    federation = Federation(4)
    seat = federation.seats[0]
    for _ in range(20):
        newest = seat.client.enrol(64, federation.entropy)
    assert len(seat.client._prekeys) == 256
    assert newest[-1].number in seat.client._prekeys


# Runs that carry noise over.


def in_steps(total: np.ndarray) -> np.ndarray:
    return np.rint(total * 2.0**GRID).astype(np.int64)


def played(absent: dict[int, tuple[int, ...]], committed: Any = None, **how: Any) -> CarriedFederation:
    federation = CarriedFederation(committed or repairing())
    for number in range(federation.schedule.rounds):
        federation.play_round(number, absent.get(number, ()), **how)
    return federation


def left(federation: CarriedFederation) -> np.ndarray:
    """The noise that is still in the sum of all rounds."""
    sums = federation.sums
    if federation.schedule.closing:
        sums[federation.schedule.rounds - 1] = np.zeros_like(sums[0])
    return sum(in_steps(one.total) for one in federation.outcomes.values()) - sum(sums.values())


@pytest.mark.parametrize(
    ("committed", "absent"),
    [
        (schedule(), {}),
        (schedule(participants=7, separation=3, rounds=7), {}),
        (schedule(closing=True, rounds=4), {}),
        (schedule(modulus_bits=32, unit=0.01, carried=0.04), {}),
        (repairing(), {}),
        (repairing(), {1: (2,)}),
        (repairing(), {0: (0,)}),
        (repairing(), {4: (3,)}),
        (repairing(), {1: (0,), 2: (4,)}),
        (repairing(), {number: (number,) for number in range(5)}),
        (
            repairing(participants=7, dropped=2, committee=6, threshold=4),
            {1: (0, 3), 2: (5,), 3: (1, 2)},
        ),
        (repairing(closing=True, rounds=4), {1: (2,), 3: (2,)}),
    ],
)
def test_the_sum_of_all_rounds_is_exact_whoever_drops_out(committed: Schedule, absent: dict) -> None:
    """Without fresh noise, what was shared and carried is gone after the last round, bit by bit; not before."""
    federation = played(absent, committed)
    last = committed.rounds - 1
    np.testing.assert_array_equal(left(federation), 0)
    for number, outcome in federation.outcomes.items():
        assert outcome.exact
        assert outcome.dropped == absent.get(number, ())
        assert outcome.extra_variance == 0.0
        assert not outcome.problems
        assert (outcome.under_way > 0.0) == (number < last)
        noisy = np.abs(in_steps(outcome.total) - federation.sums[number]).max() > 1000
        assert noisy or number == last


def test_a_round_without_a_verdict_leaves_its_noise_and_says_so() -> None:
    """Too few members answer in round 1: nothing that is carried to it or from it can be repaired."""
    federation = CarriedFederation(repairing())
    federation.play_round(0)
    federation.play_round(1, (2,), silent=(0, 1, 3))
    first, second = federation.outcomes[1], federation.play_round(2)
    # Spatial edges with seat 2, sent and received; five shares carried to it.
    assert first.uncancelled == 8 + 5
    assert first.masked == (0, 1, 3, 4)
    assert second.uncancelled == 5
    assert second.extra_variance == pytest.approx(5 * 0.25)
    assert second.repaired == (0.0, 0.0)
    for number in (3, 4):
        assert federation.play_round(number).exact


def test_server_and_all_clients_may_be_restarted_between_any_two_rounds() -> None:
    """The server goes on from the opening it saved and from who survived, clients with the keys of their next round."""
    federation = CarriedFederation(schedule())
    for number in range(5):
        assert federation.play_round(number).exact
        federation.opened[number] = carried(federation.opened[number])
        federation.server = Server(Identity(federation.server._identity.secret_bytes()))
        for one in range(len(federation.seats)):
            federation.restart(one)
    np.testing.assert_array_equal(left(federation), 0)


def test_a_server_that_forgot_the_round_before_leaves_carried_noise_and_says_so() -> None:
    federation = CarriedFederation(repairing())
    federation.play_round(0)
    federation.play_round(1, (2,))
    federation.server.ended = None
    assert federation.play_round(2, (1,)).uncancelled == 4 + 4
    assert federation.play_round(3).exact


seats = st.sets(st.integers(0, 4), max_size=2)


@settings(max_examples=25, derandomize=True)
@given(
    absent=st.lists(seats, min_size=4, max_size=4),
    pretended=st.lists(seats, min_size=4, max_size=4),
    silent=st.lists(st.sets(st.integers(0, 4), max_size=3), min_size=4, max_size=4),
    started_again=st.sets(st.integers(1, 3), max_size=1),
    restarts=st.booleans(),
)
def test_whatever_is_lost_the_sum_is_right_or_declared_noisy(
    absent: list, pretended: list, silent: list, started_again: set, restarts: bool
) -> None:
    """Clients that vanish, or are said to; members that do not answer; restarts on both sides."""
    federation = CarriedFederation(repairing(rounds=4))
    for number in range(4):
        if number in started_again:
            federation.server.ended = None
        missing = absent[number] | pretended[number]
        # Three uploads at least: of fewer there is not always a sum.
        absent_here = sorted(missing)[:2]
        said = [seat for seat in absent_here if seat in pretended[number]]
        federation.play_round(
            number,
            [seat for seat in absent_here if seat not in said],
            pretended=said,
            silent=silent[number],
            restarts=restarts,
        )
    federation.seen.check_shares()
    exact = all(outcome.exact for outcome in federation.outcomes.values())
    assert exact == (not left(federation).any())
    if (
        not any(silent)
        and not started_again
        and all(len(a | b) < 2 for a, b in zip(absent, pretended, strict=True))
    ):
        assert exact


def test_both_ends_derive_the_same_seeds_and_nobody_else_has_them() -> None:
    federation = CarriedFederation(schedule(rounds=3))
    for number in range(3):
        federation.play_round(number)
    uses = Counter(share[0] for _, _, shares in federation.seen.uploads for share in shares)
    # Within 3 rounds 12 shares each, and 16 between each two: all of them used twice.
    assert len(uses) == 3 * 12 + 2 * 16
    assert set(uses.values()) == {2}
    federation.seen.check_shares()


def test_the_commitment_names_the_next_cohort_only_where_noise_is_carried() -> None:
    federation = CarriedFederation(schedule())
    opened = federation.open_next(0)
    assert opened.cohorts is not None
    here, after = opened.participants, opened.cohorts.following
    carrying = commitment_of(opened.terms, here, after)
    assert carrying == participants_hash(here) + terms_hash(opened.terms) + participants_hash(after)
    plain = replace(opened.terms, carrying=None)
    assert commitment_of(plain, here, after) == participants_hash(here) + terms_hash(plain)
    assert terms_hash(plain) != terms_hash(opened.terms)


def test_a_round_says_what_stays_in_the_model_and_what_is_under_way() -> None:
    """Of shares carried to a round those count of which one end is missing: a lost sender's and a lost receiver's."""
    federation = CarriedFederation(schedule(rounds=4))
    each = federation.schedule.carried_variance
    first = federation.play_round(0, absent=(1,))
    # 3 of 4 within the round: 2 shares with the lost one each; 3 carry on to 4.
    assert (first.uncancelled, first.extra_variance) == (6, pytest.approx(6 * 0.5))
    assert first.under_way == pytest.approx(12 * each)
    second = federation.play_round(1, absent=(0, 2))
    # Within: 2 x 2 pairs of a survivor and a lost one, both ways. Carried: 3 senders to 2 lost, and 1 lost to 2.
    assert second.uncancelled == 8 + 6 + 2
    assert second.extra_variance == pytest.approx(8 * 0.5 + 8 * each)
    assert not second.exact
    # A round that carries nothing away still ends: nobody came.
    third = federation.play_round(2, absent=range(4))
    assert third.survivors == ()
    assert third.under_way == 0.0
    assert third.extra_variance == pytest.approx(8 * each)
    fourth = federation.play_round(3)
    assert fourth.extra_variance == pytest.approx(16 * each)
