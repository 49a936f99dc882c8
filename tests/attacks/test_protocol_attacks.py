"""Attacks on the real protocol machines: fake dropouts, and the same round again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from niss.accounting import Plan
from niss.attacks.protocol_rounds import (
    DishonestServer,
    RevealedSecrets,
    UploadedRound,
    all_but,
    claim_survivors,
    estimate_from_revealed,
    known_edges,
    rebuild_masks,
    variance_left,
    vector_of,
)
from niss.attacks.rounds import relative_error
from niss.errors import RemoteProtocolError
from niss.protocol.agreement import agree
from niss.randomness import SimStream

SIZE, COORDINATES = 10, 4000
PLAN = Plan(neighbours=SIZE - 1.0)
GENERATOR = np.random.default_rng(6)
UPDATES = GENERATOR.normal(size=(SIZE, COORDINATES))
UPDATES *= 0.4 / np.linalg.norm(UPDATES, axis=1, keepdims=True)
KNOWN = {seat: UPDATES[seat] for seat in range(1, SIZE)}
ALIVE, GONE = all_but(SIZE, ()), all_but(SIZE, (0,))


@pytest.fixture(scope="module")
def repair() -> tuple[DishonestServer, UploadedRound]:
    plan = replace(PLAN, revealed=1, dropped=1)
    server = DishonestServer(plan, SIZE, coordinates=COORDINATES, mode="repair", stream=SimStream(1))
    return server, server.collect(list(UPDATES))


def charged(server: DishonestServer) -> float:
    return float((server.plan.clip / SIZE / max(server.clients[0].charged)) ** 2)


def graded(uploaded: UploadedRound) -> dict[int, list[tuple[int, ...]]]:
    """As many members as the mask needs are told that the victim is alive, the others that it dropped out."""
    members = [seat for seat in uploaded.agreed.committee if seat]
    believers = members[: uploaded.agreed.terms.threshold]
    return {seat: [ALIVE, GONE] if seat in believers else [GONE, ALIVE] for seat in members}


def assert_error_as_predicted(uploaded: UploadedRound, revealed: RevealedSecrets) -> None:
    """4,000 coordinates: 5 % is 4.5 standard deviations (rate 1e-5), and seeded."""
    guess = estimate_from_revealed(uploaded, revealed, KNOWN, 0)
    predicted = SIZE * np.sqrt(variance_left(uploaded, revealed, 0) * COORDINATES) / 0.4
    assert relative_error(guess, UPDATES[0]) == pytest.approx(predicted, rel=0.05)


def test_with_the_rule_the_graded_attack_gets_no_more_than_was_charged(
    repair: tuple[DishonestServer, UploadedRound],
) -> None:
    server, uploaded = repair
    revealed = claim_survivors(server, uploaded, graded(uploaded), remembers=True)
    assert 0 in rebuild_masks(uploaded, revealed), "it does get something, or this would show nothing"
    assert not known_edges(uploaded, revealed)
    assert variance_left(uploaded, revealed, 0) >= charged(server) * (1 - 1e-9)
    assert_error_as_predicted(uploaded, revealed)


def test_without_it_mask_and_edges_are_both_lost(repair: tuple[DishonestServer, UploadedRound]) -> None:
    server, uploaded = repair
    revealed = claim_survivors(server, uploaded, graded(uploaded), remembers=False)
    assert 0 in rebuild_masks(uploaded, revealed)
    assert sum(0 in ends for ends in known_edges(uploaded, revealed)) == 2 * (SIZE - 1)
    assert variance_left(uploaded, revealed, 0) < 0.7 * charged(server)
    assert_error_as_predicted(uploaded, revealed)


@pytest.mark.parametrize("story", [ALIVE, GONE])
def test_one_story_for_all_reveals_mask_or_edges(
    repair: tuple[DishonestServer, UploadedRound], story: tuple[int, ...]
) -> None:
    server, uploaded = repair
    revealed = claim_survivors(server, uploaded, {seat: [story] for seat in range(1, SIZE)}, remembers=True)
    assert (0 in rebuild_masks(uploaded, revealed)) == (story == ALIVE)
    assert bool(known_edges(uploaded, revealed)) == (story == GONE)
    assert variance_left(uploaded, revealed, 0) >= charged(server) * (1 - 1e-9)
    assert_error_as_predicted(uploaded, revealed)


def test_a_client_with_its_memory_answers_a_uploadedonce() -> None:
    server = DishonestServer(PLAN, SIZE, coordinates=8, mode="tolerate", stream=SimStream(2))
    opened = server.open()
    before = server.clients[0].stored[-1]
    server.upload(opened, 0, np.zeros(8))
    with pytest.raises(RemoteProtocolError, match="answered before"):
        server.upload(opened, 0, np.ones(8))
    server.clients[0].restore(server.clients[0].stored[-1])
    with pytest.raises(RemoteProtocolError, match="answered before"):
        server.upload(opened, 0, np.ones(8))
    server.clients[0].restore(before)
    server.upload(opened, 0, np.ones(8))


def test_the_same_uploadedagain_cancels_the_shares() -> None:
    """What is left is 2 eta^2; 4,000 coordinates, 8 % is 3.5 standard deviations, seeded."""
    server = DishonestServer(PLAN, SIZE, coordinates=COORDINATES, mode="tolerate", stream=SimStream(3))
    opened = server.open()
    agreed = agree(opened)
    before = server.clients[0].stored[-1]
    first = vector_of(server.upload(opened, 0, UPDATES[0]), agreed)
    server.clients[0].restore(before)
    second = vector_of(server.upload(opened, 0, np.zeros(COORDINATES)), agreed)
    left = first - second - UPDATES[0] / SIZE
    eta2, shared = agreed.terms.residual_variance, agreed.terms.unit_variance * (SIZE - 1)
    assert np.mean(left**2) == pytest.approx(2 * eta2, rel=0.08)
    assert 2 * eta2 < 0.5 * shared
    assert np.mean(first**2) > shared


def test_lies_must_be_signed() -> None:
    server = DishonestServer(PLAN, SIZE, coordinates=8, mode="tolerate", stream=SimStream(4))
    opened = server.open()
    forged = replace(opened, terms=replace(opened.terms, clip=0.4))
    with pytest.raises(RemoteProtocolError):
        server.upload(forged, 0, np.zeros(8))
