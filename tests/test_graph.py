"""Share graphs: balanced, simple, reproducible from the beacon, well connected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.randomness import SimStream
from niss.views import effective_variance
from support.refusals import refuses

BEACON = b"beacon of the tests"

sizes_and_degrees = st.integers(2, 14).flatmap(
    lambda size: st.tuples(st.just(size), st.integers(1, size - 1))
)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 11])
def test_every_degree_gives_a_simple_regular_graph(size: int) -> None:
    for degree in range(1, size):
        graph = ShareGraph.regular(size, degree=degree, beacon=BEACON)
        assert graph.senders.size == size * degree
        assert np.all(graph.senders != graph.receivers)
        np.testing.assert_array_equal(graph.weights, 1.0)
        np.testing.assert_array_equal(np.bincount(graph.senders, minlength=size), degree)
        np.testing.assert_array_equal(np.bincount(graph.receivers, minlength=size), degree)
        assert graph.balanced


@settings(deadline=None, max_examples=100)
@given(shape=sizes_and_degrees, beacon=st.binary(max_size=40))
def test_regular_for_any_beacon(shape: tuple[int, int], beacon: bytes) -> None:
    size, degree = shape
    graph = ShareGraph.regular(size, degree=degree, beacon=beacon)
    edges = set(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))
    assert len(edges) == size * degree
    np.testing.assert_array_equal(graph.in_weight, degree)
    np.testing.assert_array_equal(graph.out_weight, degree)
    assert graph == ShareGraph.regular(size, degree=degree, beacon=beacon)


@pytest.mark.parametrize("size", [2, 3, 7, 30])
def test_the_full_degree_is_the_complete_graph(size: int) -> None:
    assert ShareGraph.regular(size, degree=size - 1, beacon=BEACON) == ShareGraph.complete(size)


def test_the_derivation_from_the_beacon_never_changes() -> None:
    """Golden digests: parties with different versions must draw the same graph."""
    regular = ShareGraph.regular(20, degree=4, beacon=BEACON)
    random = ShareGraph.random(20, degree=4, beacon=BEACON)
    assert regular.digest().hex() == "75acf31adcfed7fb0c6b7b794bcae1261b5236e13d92121e7152a2a7d881088d"
    assert random.digest().hex() == "561043ae7bd72ba68a1082a9498048d2bbaa9b7dfab0cdcc7325cff8df688867"


@pytest.mark.parametrize("make", [ShareGraph.regular, ShareGraph.random])
def test_beacons_decide_the_graph(make: Callable[..., ShareGraph]) -> None:
    drawn = {make(20, degree=4, beacon=bytes([number])).digest() for number in range(20)}
    assert len(drawn) == 20


def test_a_fractional_degree_is_spread_over_the_next_whole_number() -> None:
    graph = ShareGraph.regular(9, degree=2.5, beacon=BEACON)
    np.testing.assert_array_equal(np.bincount(graph.senders), 3)
    np.testing.assert_allclose(graph.in_weight, 2.5, rtol=1e-15)
    np.testing.assert_allclose(graph.out_weight, 2.5, rtol=1e-15)


def test_a_degree_above_the_others_merges() -> None:
    graph = ShareGraph.regular(5, degree=10, beacon=BEACON)
    assert graph == ShareGraph.complete(5, weight=2.5)


@settings(deadline=None, max_examples=40)
@given(shares=st.lists(st.floats(1.0, 3.0), min_size=6, max_size=20))
def test_unequal_shares_are_received_as_they_are_sent(shares: list[float]) -> None:
    graph = ShareGraph.regular(len(shares), degree=len(shares) - 1, beacon=BEACON, shares=shares)
    np.testing.assert_allclose(graph.in_weight, shares, rtol=1e-9)
    np.testing.assert_allclose(graph.out_weight, shares, rtol=1e-9)
    assert graph.balanced


def test_unequal_shares_on_a_sparse_graph() -> None:
    shares = np.linspace(2.0, 4.0, 40)
    graph = ShareGraph.regular(40, degree=6, beacon=BEACON, shares=shares)
    assert (
        240 <= graph.senders.size <= 40 * 12
    )  # six for the least shares, twice as many for twice the shares
    np.testing.assert_allclose(graph.in_weight, shares, rtol=1e-9)
    np.testing.assert_allclose(graph.out_weight, shares, rtol=1e-9)


@pytest.mark.parametrize("shares", [[1.0, 2.0], [1.0, 1.0, 5.0]])
def test_shares_no_graph_can_balance_are_refused(shares: list[float]) -> None:
    with refuses("shares", "more unit shares than all others together") as caught:
        ShareGraph.regular(len(shares), degree=len(shares) - 1, beacon=BEACON, shares=shares)
    assert caught.value.hint is not None


def test_a_random_list_sends_equally_and_receives_unequally() -> None:
    graph = ShareGraph.random(40, degree=3, beacon=BEACON)
    np.testing.assert_allclose(graph.out_weight, 3.0)
    np.testing.assert_array_equal(np.bincount(graph.senders), 3)
    assert np.all(graph.senders != graph.receivers)
    assert graph.in_weight.sum() == pytest.approx(120.0)
    assert np.unique(graph.in_weight).size > 2
    assert not graph.balanced
    shares = np.linspace(1.0, 5.0, 40)
    np.testing.assert_allclose(
        ShareGraph.random(40, degree=3, beacon=BEACON, shares=shares).out_weight, shares, rtol=1e-14
    )


@pytest.mark.parametrize("degree", [None, 2.0, 7.5])
def test_coalition_shares_stay_within_groups(degree: float | None) -> None:
    groups = [[0, 5, 2, 7], [1, 3, 6], [8, 9]]
    graph = ShareGraph.coalition(11, groups=groups, degree=degree, beacon=BEACON)
    group_of = {client: number for number, group in enumerate(groups) for client in group}
    for sender, receiver in zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True):
        assert group_of[sender] == group_of[receiver]
    assert graph.balanced
    assert graph.out_weight[4] == graph.out_weight[10] == 0.0
    expected = [3.0, 2.0, 1.0] if degree is None else [degree] * 3
    for group, weight in zip(groups, expected, strict=True):
        np.testing.assert_allclose(graph.out_weight[group], weight, rtol=1e-14)


def test_coalition_balances_unequal_shares_within_groups() -> None:
    shares = np.array([1.0, 1.5, 2.0, 1.2, 3.0, 2.5, 2.0, 3.5])
    graph = ShareGraph.coalition(8, groups=[[0, 1, 2, 3], [4, 5, 6, 7]], beacon=BEACON, shares=shares)
    np.testing.assert_allclose(graph.in_weight, shares, rtol=1e-9)
    np.testing.assert_allclose(graph.out_weight, shares, rtol=1e-9)


def test_the_regular_graph_is_an_expander_and_a_ring_is_not() -> None:
    """m = 1000, v = 10, tau^2 = 2/m: the worst client against the formula of a dense graph."""
    size, degree = 1000, 10
    tau2 = 2.0 / size
    dense = 1.0 / (1.0 / (size * tau2 * degree) + 1.0 / ((2.0 + tau2) * degree))
    ring = ShareGraph(
        size, [(k, (k + step) % size, 1.0) for k in range(size) for step in range(1, degree + 1)]
    )
    expander = ShareGraph.regular(size, degree=degree, beacon=BEACON)
    worst = {
        name: effective_variance(graph, unit_variance=1.0, residual_variance=tau2 * degree).min() / dense
        for name, graph in (("ring", ring), ("expander", expander))
    }
    assert worst["expander"] >= 0.93
    assert worst["ring"] < 0.6


edge_lists = st.integers(2, 8).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(
            st.tuples(st.integers(0, size - 1), st.integers(1, size - 1), st.floats(0.1, 5.0)), max_size=20
        ).map(lambda rows: [(a, (a + step) % size, c) for a, step, c in rows]),
    )
)


@settings(deadline=None, max_examples=100)
@given(drawn=edge_lists, order=st.randoms(use_true_random=False))
def test_parallel_edges_merge_whatever_their_order(drawn: tuple[int, list[Any]], order: Any) -> None:
    size, edges = drawn
    graph = ShareGraph(size, edges)
    totals: dict[tuple[int, int], float] = {}
    for sender, receiver, weight in edges:
        totals[sender, receiver] = totals.get((sender, receiver), 0.0) + weight
    keys = sorted(totals)
    assert list(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True)) == keys
    np.testing.assert_allclose(graph.weights, [totals[key] for key in keys], rtol=1e-14)
    order.shuffle(edges)
    assert ShareGraph(size, edges) == graph


@settings(deadline=None, max_examples=100)
@given(drawn=edge_lists)
def test_the_laplacian_is_one(drawn: tuple[int, list[Any]]) -> None:
    size, edges = drawn
    graph = ShareGraph(size, edges)
    laplacian = graph.laplacian()
    expected = np.zeros((size, size))
    for sender, receiver, weight in edges:
        difference = np.eye(size)[sender] - np.eye(size)[receiver]
        expected += weight * np.outer(difference, difference)
    np.testing.assert_allclose(laplacian, expected, atol=1e-12)
    np.testing.assert_allclose(laplacian.sum(axis=1), 0.0, atol=1e-12)
    np.testing.assert_array_equal(laplacian, laplacian.T)
    assert np.linalg.eigvalsh(laplacian).min() >= -1e-12


def test_neighbours_are_those_of_either_direction() -> None:
    graph = ShareGraph(5, [(0, 1, 1.0), (2, 0, 1.0), (0, 2, 1.0), (3, 4, 1.0)])
    np.testing.assert_array_equal(graph.neighbours(0), [1, 2])
    np.testing.assert_array_equal(graph.neighbours(4), [3])


def test_a_graph_never_changes() -> None:
    graph = ShareGraph.complete(3)
    for array in (graph.senders, graph.receivers, graph.weights, graph.in_weight, graph.out_weight):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


def test_equality_is_of_size_edges_and_weights() -> None:
    graph = ShareGraph(3, [(0, 1, 1.0)])
    assert graph == ShareGraph(3, [(0, 1, 0.5), (0, 1, 0.5)])
    edges = (np.array(column) for column in ([0], [1], [1.0]))
    assert graph == ShareGraph.from_arrays(3, *edges, "other")
    assert hash(graph) == hash(ShareGraph(3, [(0, 1, 1.0)]))
    assert graph != ShareGraph(4, [(0, 1, 1.0)])
    assert graph != ShareGraph(3, [(1, 0, 1.0)])
    assert graph != ShareGraph(3, [(0, 1, 1.5)])
    assert graph != "graph"
    assert repr(graph) == "ShareGraph(kind='given', size=3, edges=1)"


def test_a_graph_may_have_no_edges() -> None:
    graph = ShareGraph(1, [])
    assert graph.balanced
    np.testing.assert_array_equal(graph.laplacian(), [[0.0]])


@pytest.mark.parametrize(
    ("size", "edges", "field"),
    [
        (0, [], "size"),
        (3, [(0, 3, 1.0)], "edges"),
        (3, [(-1, 0, 1.0)], "edges"),
        (3, [(1, 1, 1.0)], "edges"),
        (3, [(0, 1, 0.0)], "edges"),
        (3, [(0, 1, -1.0)], "edges"),
        (3, [(0, 1, math.nan)], "edges"),
        (3, [(0, 1, math.inf)], "edges"),
        (3, [(0.5, 1, 1.0)], "edges"),
        # To the next round they lead from the first list to the second.
        ((2, 3), [(2, 0, 1.0)], "edges"),
        ((2, 3), [(0, 3, 1.0)], "edges"),
        ((0, 3), [], "size"),
        ((2, 2), [(0, 0, 0.0)], "edges"),
    ],
)
def test_bad_edges_are_refused_by_name(size: Any, edges: list[Any], field: str) -> None:
    with refuses(field):
        ShareGraph(size, edges)


@pytest.mark.parametrize("make", [ShareGraph.regular, ShareGraph.random])
@pytest.mark.parametrize(
    ("size", "arguments", "field"),
    [
        (1, {}, "size"),
        (5, {"degree": 0.9}, "degree"),
        (5, {"degree": math.nan}, "degree"),
        (5, {"degree": math.inf}, "degree"),
        (5, {"beacon": "text"}, "beacon"),
        (5, {"shares": [1.0, 2.0]}, "shares"),
        (5, {"shares": [1.0, 1.0, 1.0, 1.0, 0.5]}, "shares"),
        (5, {"shares": [1.0, 1.0, 1.0, 1.0, math.nan]}, "shares"),
    ],
)
def test_bad_requests_are_refused_by_name(
    make: Callable[..., ShareGraph], size: int, arguments: dict[str, Any], field: str
) -> None:
    with refuses(field):
        make(size, **({"degree": 2, "beacon": BEACON} | arguments))


@pytest.mark.parametrize("groups", [[], [[0, 1], [1, 2]], [[0, 0]], [[0]], [[0, 9]], [[-1, 0]]])
def test_bad_groups_are_refused_by_name(groups: list[list[int]]) -> None:
    with refuses("groups"):
        ShareGraph.coalition(4, groups=groups, beacon=BEACON)


def test_one_client_has_nobody_to_share_with() -> None:
    with pytest.raises(ConfigError, match="cannot share"):
        ShareGraph.complete(1)


@pytest.mark.parametrize(("size", "degree", "spread"), [(30, 3, 9.0), (30, 10, 30.0), (200, 10, 40.0)])
def test_very_unequal_shares_balance_on_sparse_graphs(size: int, degree: int, spread: float) -> None:
    """Neighbours grow with the shares, so that any beacon gives weights that balance."""
    for number in range(5):
        generator = SimStream(number).child("unequal", size).generator()
        shares = degree * generator.uniform(1.0, spread, size)
        graph = ShareGraph.regular(size, degree=degree, beacon=bytes([number]), shares=shares)
        np.testing.assert_allclose(graph.in_weight, shares, rtol=1e-9)
        np.testing.assert_allclose(graph.out_weight, shares, rtol=1e-9)
        assert graph.neighbours(int(shares.argmax())).size > graph.neighbours(int(shares.argmin())).size


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.1, 3.0))
def test_a_graph_to_the_next_round_joins_everyone_to_everyone(first: int, second: int, weight: float) -> None:
    graph = ShareGraph.complete((first, second), weight=weight)
    written = ShareGraph((first, second), [(a, b, weight) for a in range(first) for b in range(second)])
    assert graph.between
    assert graph == written
    assert hash(graph) == hash(written)
    assert graph.out_weight == pytest.approx(written.out_weight, rel=1e-12)
    assert graph.in_weight == pytest.approx(written.in_weight, rel=1e-12)
    assert (graph.sizes, graph.out_weight.size, graph.in_weight.size) == ((first, second), first, second)
    if first == second > 1:
        assert graph != ShareGraph.complete(first, weight=weight)


def test_a_complete_graph_answers_as_if_its_edges_were_written_out() -> None:
    for size in (2, 7, 30):
        graph = ShareGraph.complete(size, weight=0.1)
        written = ShareGraph(size, zip(graph.senders, graph.receivers, graph.weights, strict=True))
        assert np.array_equal(graph.in_weight, written.in_weight)
        assert np.array_equal(graph.out_weight, written.out_weight)
        assert np.array_equal(graph.degrees, written.degrees)
        for client in range(size):
            assert np.array_equal(graph.neighbours(client), written.neighbours(client))
            assert np.array_equal(graph.edges_of(client), written.edges_of(client))
