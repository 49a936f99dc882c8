"""Faults of the paper that no other test shows, one test each, by their numbers in docs/concepts/paper.md."""

from __future__ import annotations

import math

import numpy as np
import pytest

from experiments.reproduce.paper import NBAFL, Setup
from niss.accounting import Plan
from niss.graph import ShareGraph
from niss.mechanism import add_shares, clip_elements, clip_l2, gdp_epsilon, gdp_mu
from niss.randomness import SimStream


def test_1_shares_of_the_full_variance_are_v_times_too_much():
    """False alarms: 6 deviations of each of two variances over 20,000 coordinates, below 1e-8."""
    v, own, coordinates = 10, 0.04, 20_000
    graph = ShareGraph.regular(30, degree=v, beacon=b"fault 1")

    def carried(unit_variance: float) -> float:
        uploads = np.zeros((30, coordinates))
        add_shares(
            uploads,
            graph,
            unit_variance=unit_variance,
            tau2=0.0,
            distortion="scalar",
            stream=SimStream(1).child("noise"),
        )
        return float(np.var(uploads[0]))

    # What the paper's text counts with: its own noise, and as much again from the shares it receives.
    assert carried(own / v) == pytest.approx(2 * own, rel=0.06)
    # What line "n_i <- N(0, sigma_k^2 I)" of its Algorithm 2 adds.
    assert carried(own) == pytest.approx(2 * v * own, rel=0.06)


def test_6_thirty_rounds_at_epsilon_10_promise_nothing():
    """100 rounds in which three of ten clients take part."""
    mu = gdp_mu(10.0, 1e-4)
    assert gdp_epsilon(mu, 1e-4) == pytest.approx(10.0, rel=1e-6)
    assert gdp_epsilon(math.sqrt(30) * mu, 1e-4) > 100.0


def test_7_clipped_entries_leave_a_large_norm():
    """The paper's MLP has 199,210 weights; entries of at most 3 add up to a norm of over a thousand."""
    update = np.full(199_210, 5.0)
    assert np.linalg.norm(clip_elements(update, 3.0)) == pytest.approx(3.0 * math.sqrt(update.size))
    assert np.linalg.norm(clip_l2(update, 3.0)) == pytest.approx(3.0)


def test_7_local_epochs_move_a_weight_further_than_the_papers_sensitivity():
    """One record of 600 turned round, its clipped gradient 3 in every step: E epochs of batches of B."""
    setup = Setup()
    one, other = (_trained(gradient, setup, epochs=5) for gradient in (setup.clip, -setup.clip))
    assert abs(one - other) == pytest.approx(5 * setup.learning_rate * 2 * setup.clip / setup.batch_size)
    assert abs(one - other) == pytest.approx(3.0 * NBAFL.sensitivity(setup))
    # One step over all records stays within it.
    whole = Setup(batch_size=setup.records)
    one, other = (_trained(gradient, whole, epochs=1) for gradient in (setup.clip, -setup.clip))
    assert abs(one - other) <= NBAFL.sensitivity(setup)


def _trained(gradient_of_one: float, setup: Setup, *, epochs: int) -> float:
    """One weight after plain SGD; all records but the first have gradient zero."""
    gradients = np.zeros(setup.records)
    gradients[0] = gradient_of_one
    weight = 0.0
    for _ in range(epochs):
        for batch in clip_elements(gradients, setup.clip).reshape(-1, setup.batch_size):
            weight -= setup.learning_rate * float(batch.mean())
    return weight


def test_10_private_sizes_move_more_than_their_weight():
    """200 clients of 100 records; one of them turns out to have 500."""
    sizes = np.full(200, 100.0)
    before = sizes / sizes.sum()
    sizes[0] = 500.0
    after = sizes / sizes.sum()
    plan = Plan(unit="client", clip=1.0)
    claimed = plan.sensitivity(before, np.ones(200))[0]
    assert after[0] * plan.clip > 4.5 * claimed
    # And nobody's weight stays as it was.
    assert np.all(after != before)
