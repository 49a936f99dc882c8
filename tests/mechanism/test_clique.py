"""Shares of a clique from one draw a client: the law of the reference, which draws each share."""

from __future__ import annotations

import numpy as np
import pytest

from niss import ShareGraph
from niss.mechanism import add_shares
from niss.mechanism.shares import add_clique_shares, find_clique
from niss.randomness import SimStream
from niss.simulation.uploads import HostUploads

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
        add_clique_shares(rows, clique, unit_variance=4.0, stream=SimStream(seed))
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
    add_clique_shares(rows, clique, unit_variance=1.0, stream=SimStream(3))
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
