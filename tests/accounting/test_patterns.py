"""The worst pattern of participations that a plan allows, against all patterns tried one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.accounting import committed as costs_of
from niss.accounting.committed import heaviest, spent_in, worst_pattern


def inverse_of_chain(residual, links, spread):
    """K from scratch: the inverse of the covariance of round sums, and what deviations add."""
    gamma = np.diag(np.asarray(residual, dtype=float))
    for start, link in enumerate(links):
        edge = np.zeros(len(gamma))
        edge[start], edge[start + 1] = 1.0, -1.0
        gamma += link * np.outer(edge, edge)
    return np.linalg.inv(gamma) + np.diag(spread)


def patterns(rounds, separation):
    """Every set of rounds at least `separation` apart."""
    for count in range(1, rounds + 1):
        for chosen in itertools.combinations(range(rounds), count):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield chosen


@st.composite
def chains(draw):
    rounds = draw(st.integers(1, 11))
    numbers = st.lists(st.floats(0.05, 5.0), min_size=rounds, max_size=rounds)
    links = [0.0 if draw(st.booleans()) and draw(st.booleans()) else w for w in draw(numbers)[: rounds - 1]]
    matrix, shift = inverse_of_chain(draw(numbers), links, draw(numbers)), np.array(draw(numbers))
    return np.maximum(shift[:, None] * matrix * shift, 0.0), draw(st.integers(1, 5))


def plain_decay(costs):
    """q_t / q_s for s < t, entry by entry, for all of the run."""
    rounds = len(costs)
    decay = np.zeros((rounds, rounds))
    for start in range(1, rounds):
        product = 1.0
        for place in range(start + 1, rounds):
            above = costs[place - 2, place - 1]
            product *= costs[place - 2, place] / above if above > 0.0 else 0.0
            decay[start, place] = product
    return decay


@settings(max_examples=150, deadline=None)
@given(chains())
def test_what_is_computed_for_speed_is_what_the_formulas_say(case):
    costs, separation = case
    rounds, most = len(costs), 2 * separation - 1
    found, plain = costs_of._decay(costs, most), plain_decay(costs)
    for start, gap in itertools.product(range(rounds), range(1, most + 1)):
        wanted = plain[start, start + gap] if start + gap < rounds else 0.0
        assert found[start, gap - 1] == wanted


@settings(max_examples=150, deadline=None)
@given(chains())
def test_the_worst_pattern_is_the_worst_of_all(case):
    matrix, separation = case
    every = {p: float(matrix[np.ix_(p, p)].sum()) for p in patterns(len(matrix), separation)}
    found = worst_pattern(matrix, separation, "any")
    assert found.exact
    assert found.cost == pytest.approx(max(every.values()), rel=1e-10)
    assert every[found.rounds] == pytest.approx(found.cost, rel=1e-10)
    cyclic = worst_pattern(matrix, separation, "cyclic")
    offsets = [tuple(range(first, len(matrix), separation)) for first in range(min(separation, len(matrix)))]
    assert cyclic.cost == pytest.approx(max(every[p] for p in offsets), rel=1e-12)


def test_a_cheaper_past_may_cost_more_later():
    """Keeping only the costliest way to every round would miss this one by 1 %."""
    residual = [8.02, 0.17, 0.47, 0.09, 0.56, 0.09, 0.18, 0.05, 0.36, 0.62, 0.14]
    matrix = inverse_of_chain(residual, [1.1, 3.6, 0.1, 1.3, 6.6, 1.4, 5.5, 9.5, 0.1, 0.2], np.zeros(11))
    true = max(matrix[np.ix_(p, p)].sum() for p in patterns(11, 2))
    assert worst_pattern(matrix, 2, "any").cost == pytest.approx(true, rel=1e-10)


@settings(max_examples=40, deadline=None)
@given(chains())
def test_merged_labels_still_bound(case):
    matrix, separation = case
    exact = worst_pattern(matrix, separation, "any").cost
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs_of, "_MOST_LABELS", 1)
        merged = worst_pattern(matrix, separation, "any")
    assert merged.cost >= exact * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(chains())
def test_shorter_separation_and_more_rounds_cost_more(case):
    matrix, separation = case
    here = worst_pattern(matrix, separation, "any").cost
    assert worst_pattern(matrix, separation + 1, "any").cost <= here * (1 + 1e-12)
    taken = list(worst_pattern(matrix, separation, "any").rounds)
    for drop in range(len(taken)):
        fewer = taken[:drop] + taken[drop + 1 :]
        assert spent_in(matrix, fewer) <= spent_in(matrix, taken) * (1 + 1e-12)


def test_an_endless_run_would_undercharge_the_ends():
    """Why K belongs to the committed run: round 1 of it has less carried noise than a round in the middle."""
    endless = inverse_of_chain(np.ones(201), np.full(200, 19.0), np.zeros(201))[100, 100]
    committed = inverse_of_chain(np.ones(100), np.full(99, 19.0), np.zeros(100))[0, 0]
    assert committed > 1.6 * endless


def test_heaviest():
    assert heaviest(np.array([3.0, 4.0, 3.0]), 2) == 6.0
    assert heaviest(np.array([3.0, 7.0, 3.0]), 2) == 7.0
    assert heaviest(np.empty(0), 2) == 0.0
