"""Shares cancel, do not depend on the order of the edges, and are streamed; a clique takes one draw a client."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from niss.graph import ShareGraph
from niss.mechanism import DISTORTIONS, add_gaussian, add_shares
from niss.mechanism.shares import add_spread, find_clique
from niss.randomness import SimStream
from niss.randomness.sim import normal_blocks
from niss.simulation.uploads import HostUploads
from support.refusals import refuses

BEACON = b"beacon of the tests"


@dataclass
class LooseEdges:
    """Edges in whatever order they are given."""

    size: int
    senders: NDArray[np.int64]
    receivers: NDArray[np.int64]
    weights: NDArray[np.float64]
    in_weight: NDArray[np.float64]


@pytest.mark.parametrize("clients", [2, 30, 1000])
@pytest.mark.parametrize("distortion", DISTORTIONS)
def test_without_distortion_the_sum_is_exact_up_to_float32_rounding(clients: int, distortion: str) -> None:
    graph = ShareGraph.regular(clients, degree=min(5, clients - 1), beacon=BEACON)
    updates = SimStream(1).generator().standard_normal((clients, 8), dtype=np.float32)
    uploads = updates.copy()
    scales = add_shares(
        uploads, graph, unit_variance=4.0, tau2=0.0, distortion=distortion, stream=SimStream(2)
    )
    difference = np.abs(uploads.sum(axis=0, dtype=np.float64) - updates.sum(axis=0, dtype=np.float64)).max()
    # Two roundings per edge, each at most half a unit in the last place of a partial sum.
    largest = 2.0 * float(np.abs(uploads).max())
    assert difference <= graph.senders.size * float(np.finfo(np.float32).eps) * largest
    assert difference < 0.01
    assert np.std(uploads - updates) > 2.0
    assert (scales is None) == (distortion != "scalar")
    if scales is not None:
        np.testing.assert_array_equal(scales, 1.0)


@pytest.mark.parametrize("distortion", DISTORTIONS)
def test_shares_do_not_depend_on_the_order_of_the_edges(distortion: str) -> None:
    graph = ShareGraph.regular(7, degree=3, beacon=BEACON)
    order = SimStream(5).generator().permutation(graph.senders.size)
    shuffled = LooseEdges(
        7, graph.senders[order], graph.receivers[order], graph.weights[order], graph.in_weight
    )
    first, second = np.zeros((7, 10)), np.zeros((7, 10))
    settings: dict[str, Any] = {"unit_variance": 2.0, "tau2": 0.3, "distortion": distortion}
    scales = add_shares(first, graph, stream=SimStream(4), **settings)
    shuffled_scales = add_shares(second, shuffled, stream=SimStream(4), **settings)
    np.testing.assert_allclose(second, first, rtol=1e-12, atol=1e-12)
    if scales is not None and shuffled_scales is not None:
        np.testing.assert_array_equal(shuffled_scales, scales[order])


@pytest.mark.parametrize("distortion", DISTORTIONS)
def test_noise_is_added_to_what_is_there_and_repeats(distortion: str) -> None:
    graph = ShareGraph.complete(4)
    bare, loaded = np.zeros((4, 6)), np.full((4, 6), 100.0)
    for uploads in (bare, loaded):
        add_shares(uploads, graph, unit_variance=1.0, tau2=0.5, distortion=distortion, stream=SimStream(1))
    np.testing.assert_allclose(loaded - 100.0, bare, atol=1e-12)
    other = np.zeros((4, 6))
    add_shares(other, graph, unit_variance=1.0, tau2=0.5, distortion=distortion, stream=SimStream(2))
    assert np.abs(other - bare).min() > 0.0


@pytest.mark.parametrize("distortion", DISTORTIONS)
def test_memory_beyond_the_uploads_is_a_few_vectors(distortion: str) -> None:
    """A client with v = 50 neighbours in both directions, h = 100,000: never v x h."""
    coordinates = 100_000
    star = [(0, k, 1.0) for k in range(1, 51)] + [(k, 0, 1.0) for k in range(1, 51)]
    graph = ShareGraph(51, star)
    uploads = np.zeros((51, coordinates), dtype=np.float32)
    tracemalloc.start()
    try:
        add_shares(uploads, graph, unit_variance=1.0, tau2=0.5, distortion=distortion, stream=SimStream(1))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.all(uploads.std(axis=1) > 1.0)
    assert peak < 5 * uploads[0].nbytes


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"distortion": "none"}, "distortion"),
        ({"tau2": -0.1}, "tau2"),
        ({"tau2": math.nan}, "tau2"),
        ({"tau2": [0.1, 0.2]}, "tau2"),
        *(({"shape": shape}, "uploads") for shape in ((4, 2), (3,), (3, 2, 2))),
    ],
)
def test_bad_arguments_are_refused_before_any_noise_is_added(change: dict[str, Any], field: str) -> None:
    arguments: dict[str, Any] = {"unit_variance": 1.0, "tau2": 0.1, "distortion": "additive"} | change
    uploads = np.zeros(arguments.pop("shape", (3, 2)))
    with refuses(field):
        add_shares(uploads, ShareGraph.complete(3), stream=SimStream(1), **arguments)
    np.testing.assert_array_equal(uploads, 0.0)


def test_add_gaussian_keeps_the_type_and_adds_in_place() -> None:
    vector = np.ones(4, dtype=np.float32)
    add_gaussian(vector, 0.0, SimStream(1))
    np.testing.assert_array_equal(vector, 1.0)
    add_gaussian(vector, 2.0, SimStream(1))
    ((place, noise),) = normal_blocks(SimStream(1), 4, np.float32)
    assert place == slice(0, 4)
    np.testing.assert_allclose(vector, 1.0 + 2.0 * noise, rtol=1e-6)
    assert vector.dtype == np.float32


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("coordinates", [1, 7, 760, 9_000, 20_000])
def test_additive_shares_are_those_of_one_stream_for_each_edge(kind: type, coordinates: int) -> None:
    """To the last bit, in the order of the edges: what was recorded with a seed can be drawn again."""
    graph = ShareGraph.regular(12, degree=3, beacon=b"one by one")
    start = np.random.default_rng(1).standard_normal((12, coordinates)).astype(kind)
    tau2 = np.linspace(0.0, 1.0, 12)
    found, wanted = start.copy(), start.copy()
    stream = SimStream(5).child("noise")
    add_shares(found, graph, unit_variance=0.3, tau2=tau2, distortion="additive", stream=stream)
    for sender, receiver, weight in zip(graph.senders, graph.receivers, graph.weights, strict=True):
        for place, share in normal_blocks(
            stream.child("share", int(sender), int(receiver)), coordinates, kind
        ):
            share *= np.dtype(kind).type(math.sqrt(weight * 0.3))
            wanted[sender, place] += share
            wanted[receiver, place] -= share
    for client in range(1, 12):
        deviation = math.sqrt(tau2[client]) * math.sqrt(0.3 * graph.in_weight[client])
        add_gaussian(wanted[client], deviation, stream.child("residual", client))
    assert np.array_equal(found, wanted)


COORDINATES = 60_000


def covariance(rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.float64) @ rows.T.astype(np.float64) / rows.shape[1]


def deviation(expected: np.ndarray) -> np.ndarray:
    """Of each entry of a covariance estimated from that many normal samples."""
    own = np.diag(expected)
    return np.sqrt((np.outer(own, own) + expected**2) / COORDINATES)


@pytest.mark.parametrize(("size", "weight"), [(2, 1.0), (7, 0.5), (30, 1.0)])
@pytest.mark.parametrize("tau2", [0.0, 0.3])
def test_it_has_the_covariance_of_the_reference(size: int, weight: float, tau2: float) -> None:
    """In closed form, which both are held to: six deviations an entry."""
    graph, unit = ShareGraph.complete(size, weight=weight), 1.7
    options = {"unit_variance": unit, "tau2": tau2, "distortion": "additive"}
    reference = np.zeros((size, COORDINATES), dtype=np.float32)
    add_shares(reference, graph, stream=SimStream(1), **options)
    fast = HostUploads(np.zeros((size, COORDINATES), dtype=np.float32))
    assert fast.add_shares(graph, stream=SimStream(1), **options) is None
    expected = 2.0 * weight * unit * (size * np.eye(size) - 1.0) + tau2 * unit * graph.in_weight * np.eye(
        size
    )
    for rows in (reference, fast.rows()):
        assert np.abs((covariance(rows) - expected) / deviation(expected)).max() < 6.0
    assert not np.array_equal(reference, fast.rows())


def test_they_cancel_and_can_be_repeated() -> None:
    clique = find_clique(ShareGraph.complete(9))
    assert clique is not None
    drawn = []
    for seed in (1, 1, 2):
        rows = np.zeros((9, 500))
        add_spread(rows, clique.seats, clique.variance(4.0), (), SimStream(seed), "clique")
        assert np.abs(rows.sum(axis=0)).max() < 1e-12
        drawn.append(rows)
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_a_clique_of_some_leaves_the_others_alone() -> None:
    some = ShareGraph(6, [(a, b, 2.0) for a in (1, 3, 4) for b in (1, 3, 4) if a != b])
    clique = find_clique(some)
    assert clique is not None
    assert clique.seats.tolist() == [1, 3, 4]
    assert clique.weight == 2.0
    rows = np.zeros((6, 50))
    add_spread(rows, clique.seats, clique.variance(1.0), (), SimStream(3))
    assert rows[[1, 3, 4]].all()
    assert not rows[[0, 2, 5]].any()


@pytest.mark.parametrize(
    "edges",
    [
        [],
        [(0, 1, 1.0)],
        [(0, 1, 1.0), (1, 0, 2.0)],
        [(0, 1, 1.0), (1, 2, 1.0), (2, 0, 1.0)],
        # As many edges as a clique of its senders has, but one leads out.
        [(0, 1, 1.0), (1, 2, 1.0)],
        [(0, 1, 1.0), (1, 0, 1.0), (2, 3, 1.0), (3, 2, 1.0)],
    ],
)
def test_anything_else_is_no_clique(edges: list[tuple[int, int, float]]) -> None:
    assert find_clique(ShareGraph(4, edges)) is None


@pytest.mark.parametrize("distortion", ["scalar", "coordinate"])
def test_multiplied_shares_are_drawn_one_by_one(distortion: str) -> None:
    graph, options = ShareGraph.complete(4), {"unit_variance": 1.0, "tau2": 0.2, "distortion": distortion}
    one, other = np.zeros((4, 100)), np.zeros((4, 100))
    add_shares(one, graph, stream=SimStream(1), **options)
    HostUploads(other).add_shares(graph, stream=SimStream(1), **options)
    assert np.array_equal(one, other)
