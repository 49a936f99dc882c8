"""Attacks on the real protocol: nodes that hear of fake dropouts, and of the same round again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from niss.accounting import Plan
from niss.attacks.lying import LyingServer, claim_survivors
from niss.attacks.rounds import relative_error
from niss.errors import RemoteProtocolError
from niss.randomness import SimStream

SIZE, COORDINATES = 10, 4000
PLAN = Plan(neighbours=SIZE - 1.0)
GENERATOR = np.random.default_rng(6)
UPDATES = GENERATOR.normal(size=(SIZE, COORDINATES))
UPDATES *= 0.4 / np.linalg.norm(UPDATES, axis=1, keepdims=True)
KNOWN = {seat: UPDATES[seat] for seat in range(1, SIZE)}
ALIVE, GONE = tuple(range(SIZE)), tuple(range(1, SIZE))
Claims = dict[int, list[tuple[int, ...]]]


@dataclass
class Repair:
    """A round after all uploads, which a committee is to repair."""

    server: LyingServer
    uploads: list[np.ndarray]

    def graded(self) -> Claims:
        """As many members as the mask needs are told that the victim is alive, the others that it dropped out."""
        members = [seat for seat in self.server.agreed.committee if seat]
        believers = members[: self.server.agreed.terms.threshold]
        return {seat: [ALIVE, GONE] if seat in believers else [GONE, ALIVE] for seat in members}

    def claim(self, claims: Claims, *, remembers: bool) -> tuple[bool, int, float]:
        """Whether the victim's mask comes out, how many of its edges, and what is left of the noise it paid for.

        The estimate has to err as that predicts. 4,000 coordinates: 5 % is 4.5 standard deviations (rate 1e-5), and
        seeded.
        """
        revealed = claim_survivors(self.server, claims, remembers=remembers)
        left, guess = revealed.variance_left(0), revealed.estimate(self.uploads, KNOWN, 0)
        predicted = SIZE * np.sqrt(left * COORDINATES) / 0.4
        assert relative_error(guess, UPDATES[0]) == pytest.approx(predicted, rel=0.05)
        paid = (self.server.plan.clip / SIZE / self.server.charged(0)) ** 2
        return 0 in revealed.masks, sum(0 in ends for ends in revealed.edges), left / paid


@pytest.fixture(scope="module")
def repair() -> Repair:
    plan = replace(PLAN, mode="repair", dropout=1e-4)
    server = LyingServer(plan, SIZE, coordinates=COORDINATES, stream=SimStream(1))
    return Repair(server, [server.upload(seat, update) for seat, update in enumerate(UPDATES)])


def test_with_the_rule_the_graded_attack_gets_no_more_than_was_charged(repair: Repair) -> None:
    mask, edges, left = repair.claim(repair.graded(), remembers=True)
    assert mask, "it does get something, or this would show nothing"
    assert edges == 0
    assert left >= 1 - 1e-9


def test_without_it_mask_and_edges_are_both_lost(repair: Repair) -> None:
    mask, edges, left = repair.claim(repair.graded(), remembers=False)
    assert mask
    assert edges == 2 * (SIZE - 1)
    assert left < 0.7


@pytest.mark.parametrize("story", [ALIVE, GONE])
def test_one_story_for_all_reveals_mask_or_edges(repair: Repair, story: tuple[int, ...]) -> None:
    mask, edges, left = repair.claim({seat: [story] for seat in range(1, SIZE)}, remembers=True)
    assert mask == (story == ALIVE)
    assert bool(edges) == (story == GONE)
    assert left >= 1 - 1e-9


def test_a_client_with_its_memory_answers_a_round_once() -> None:
    server = LyingServer(PLAN, SIZE, coordinates=8, stream=SimStream(2))
    before = server.backup(0)
    server.upload(0, np.zeros(8))
    for kept in (None, server.backup(0)):
        if kept is not None:
            server.restore(0, kept)
        with pytest.raises(RemoteProtocolError, match="answered before"):
            server.upload(0, np.ones(8))
    server.restore(0, before)
    server.upload(0, np.ones(8))


def test_the_same_round_again_cancels_the_shares() -> None:
    """What is left is 2 eta^2; 4,000 coordinates, 8 % is 3.5 standard deviations, seeded."""
    server = LyingServer(PLAN, SIZE, coordinates=COORDINATES, stream=SimStream(3))
    before = server.backup(0)
    first = server.upload(0, UPDATES[0])
    server.restore(0, before)
    left = first - server.upload(0, np.zeros(COORDINATES)) - UPDATES[0] / SIZE
    terms = server.agreed.terms
    eta2, shared = terms.residual_variance, terms.unit_variance * (SIZE - 1)
    assert np.mean(left**2) == pytest.approx(2 * eta2, rel=0.08)
    assert 2 * eta2 < 0.5 * shared
    assert np.mean(first**2) > shared


def test_lies_must_be_signed() -> None:
    server = LyingServer(PLAN, SIZE, coordinates=8, stream=SimStream(4))
    opened = server.agreed.opened
    forged = replace(opened, terms=replace(opened.terms, clip=0.4))
    with pytest.raises(RemoteProtocolError):
        server.ask(0, forged, np.zeros(8))
