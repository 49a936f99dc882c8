"""The graph between rounds: determined by beacon and both lists, and regular on both sides."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niss.errors import ConfigError
from niss.graph import CarriedGraph

LISTS = (hashlib.sha256(b"this round").digest(), hashlib.sha256(b"the next").digest())
PAIRS = [(0, 0), (0, 2), (1, 2), (1, 3), (2, 0), (2, 1), (3, 1), (3, 4), (4, 3), (4, 4)]
UNEQUAL_PAIRS = [(0, 4), (1, 0), (1, 3), (2, 1), (2, 2)]


def draw(sizes, degree, **changes):
    return CarriedGraph.draw(sizes, degree=degree, **{"beacon": b"beacon", "lists": LISTS, **changes})


@given(st.integers(1, 12), st.integers(1, 14))
def test_equal_cohorts_are_biregular(size, degree):
    graph = draw((size, size), degree)
    assert graph.senders.size == size * min(degree, size)
    np.testing.assert_allclose(graph.out_weight, degree)
    np.testing.assert_allclose(graph.in_weight, degree)


@given(st.integers(1, 15), st.integers(1, 15), st.integers(1, 6))
def test_unequal_cohorts_nearly_so(first, second, degree):
    graph = draw((first, second), degree)
    assert graph.weights.sum() == pytest.approx(degree * first)
    unit = degree * first / (min(degree, first, second) * max(first, second))
    for weights in (graph.out_weight, graph.in_weight):
        assert weights.max() - weights.min() <= unit * (1 + 1e-9)
        assert weights.min() > 0.0


def test_everything_that_is_public_enters():
    same = draw((9, 9), 3)
    assert same == draw((9, 9), 3)
    others = [
        draw((9, 9), 3, beacon=b"other"),
        draw((9, 9), 3, lists=LISTS[::-1]),
        draw((9, 9), 3, lists=(LISTS[0], LISTS[0])),
        draw((9, 9), 3, lag=2),
        draw((9, 10), 3),
        draw((9, 9), 4),
    ]
    assert len({same, *others}) == 7


def test_a_drawn_graph_is_the_same_on_every_machine():
    graph = draw((5, 5), 2)
    pairs = list(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))
    assert pairs == PAIRS
    unequal = draw((3, 5), 1)
    assert list(zip(unequal.senders.tolist(), unequal.receivers.tolist(), strict=True)) == UNEQUAL_PAIRS


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((0, 3), {}),
        ((3, 3), {"degree": 0.5}),
        ((3, 3), {"degree": float("nan")}),
        ((3, 3), {"lists": (b"short", LISTS[1])}),
        ((3, 3), {"lag": 0}),
        ((3, 3), {"beacon": "text"}),
    ],
)
def test_bad_settings_are_refused(sizes, changes):
    with pytest.raises(ConfigError):
        draw(sizes, **{"degree": 2, **changes})


def test_edges_must_lie_inside():
    with pytest.raises(ConfigError, match="numbered"):
        CarriedGraph((2, 2), np.array([2]), np.array([0]), np.array([1.0]))
    with pytest.raises(ConfigError, match="weight"):
        CarriedGraph((2, 2), np.array([1]), np.array([0]), np.array([0.0]))
