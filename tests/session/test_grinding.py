"""A server does not get to choose the graph: not by skipping links, not by starting runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from niss.accounting import Charge, Plan
from niss.errors import PrivacyError
from niss.session.limits import Limits, Spent
from session.lone_server import LoneServer
from support.protocol_round import seeded_entropy

SIZE, COLLUDERS = 30, 2
# Both neighbours of a client collude with probability 1 / 406, half of what this delta lets a bound fail with.
PLAN = Plan(
    clip=0.5,
    epsilon=8.0,
    delta=0.05,
    participations=1,
    neighbours=1.0,
    kappa=2.0,
    collusion=COLLUDERS / SIZE,
    attempts=1,
)
EVERYONE = Plan(
    clip=0.5, epsilon=8.0, participations=4, neighbours=4.0, kappa=2.0, attempts=2, chain_rounds=10
)
PINS = {"niss-epsilon": 8.0, "niss-delta": 0.05}


def test_a_server_alone_that_skips_links_until_it_likes_the_graph_gains_nothing():
    server = LoneServer(PLAN, SIZE, label="picked", drawn=seeded_entropy("victim"), **PINS)
    colluders = range(SIZE - COLLUDERS, SIZE)
    assert server.enrol() is None
    terms = server.terms()
    liked = server.grind(terms, colluders)
    assert liked is not None
    assert 10 < liked.terms.round < 1000
    declined = server.show(liked.opened)
    # All that is left to the victim is its own noise: every share that it has is known.
    true = terms.clip / SIZE / math.sqrt(terms.residual_variance)
    assert declined is not None or true <= server.charged, f"charged {server.charged:.3g}, true {true:.3g}"


def test_no_round_beyond_the_chain_and_no_attempt_beyond_the_plan_is_answered():
    server = LoneServer(EVERYONE, 5, label="beyond")
    assert server.enrol() is None
    terms = server.terms()
    for number, attempt, why in ((10, 0, "round 10 of a run that has 10"), (9, 2, "attempt 2 of a round")):
        declined = server.show(server.opened(replace(terms, round=number, attempt=attempt)))
        assert declined is not None
        assert why in declined
    assert server.show(server.opened(replace(terms, round=9, attempt=1))) is None


def test_a_key_from_before_the_run_was_joined_is_not_accepted_in_it():
    """Its graph may have been looked at before the run was proposed, and the run proposed because of it."""
    server = LoneServer(EVERYONE, 5, label="earlier")
    assert server.enrol() is None
    earlier = server.victim[0]
    server.proposal = replace(server.proposal, run=bytes(16))
    assert server.enrol() is None
    later, server.victim[0] = server.victim[0], earlier
    declined = server.show(server.opened(server.terms()))
    assert declined is not None
    assert "does not hold" in declined
    server.victim[0] = later
    assert server.show(server.opened(server.terms())) is None


@pytest.mark.parametrize("rounds", [100_001, 2**62])
def test_a_chain_of_any_length_is_not_accepted(rounds):
    declined = LoneServer(replace(EVERYONE, chain_rounds=rounds), 5).enrol()
    assert declined is not None
    assert "at most 100000 is possible" in declined or "not a number that a plan could have" in declined


def test_a_bound_that_may_fail_counts_only_with_a_holder_the_owner_vouches_for():
    plan = replace(PLAN, delta=1e-5, chain_rounds=100)
    server = LoneServer(plan, SIZE)
    alone = server.proposal
    tracked = replace(alone, tracker="https://tracker.example")
    pinned = Limits(holder=alone.holder)
    assert plan.failure == pytest.approx(0.1 * 1e-5 / 100)
    assert pinned.failure(tracked) == plan.failure
    assert pinned.failure(alone) == 0.0
    assert Limits().failure(tracked) == 0.0
    # Where the plan names no rounds, those of the chain that its holder signed are counted when the run is joined.
    unnamed = replace(tracked, plan=replace(plan, chain_rounds=None))
    each, room = pinned.failure(unnamed), pinned.budget(unnamed)
    Spent(0.0, each, room).require_room(room, Charge())
    with pytest.raises(PrivacyError, match="its delta has room for"):
        Spent(0.0, 2 * each, room).require_room(room, Charge())


def test_a_node_that_declines_for_want_of_a_holder_says_so():
    server = LoneServer(PLAN, SIZE, label="said", **PINS)
    assert server.enrol() is None
    declined = server.show(server.opened(server.terms()))
    assert declined is not None
    assert "without a niss-holder of its own" in declined
