"""Uniform masks in the joint view: the limit of strong Gaussian shares, and never better than what is proved."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.randomness import SimStream
from niss.views import Corruption, calibrate_masks, effective_variance, worst_case
from niss.views.collusion import spectral_bound

HUGE = 1e7


def drawn(size: int, degree: float, name: str) -> ShareGraph:
    return ShareGraph.regular(size, degree=degree, beacon=hashlib.sha256(name.encode()).digest())


def knowledge(size: int, name: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Some colluders and some revealed pairs, at random."""
    order = SimStream(3).child(name).generator().permutation(size).tolist()
    return order[:3], list(itertools.pairwise(order[4:9]))


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("degree", [1.0, 2.0, 4.0])
def test_masks_are_the_limit_of_strong_gaussian_shares(number: int, degree: float) -> None:
    graph = drawn(14, degree, f"limit {number}")
    residual = 1.0 + np.arange(14) / 14
    colluders, revealed = knowledge(14, f"limit {number}")
    known = {"colluders": colluders, "revealed": revealed, "residual_variance": residual}
    endless = effective_variance(graph, unit_variance=math.inf, **known)
    strong = effective_variance(graph, unit_variance=HUGE, **known)
    np.testing.assert_allclose(endless, strong, rtol=1e-5)
    assert np.all(endless >= strong * (1.0 - 1e-9))


def test_it_is_the_brute_force_view_of_sums_that_do_not_change() -> None:
    """Conditioned on all uploads of a connected group, what is left is the variance of its sum."""
    graph = ShareGraph.coalition(7, groups=[[0, 1, 2], [3, 4, 5, 6]], degree=2.0, beacon=bytes(32))
    residual = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    seen = effective_variance(graph, unit_variance=math.inf, residual_variance=residual)
    np.testing.assert_allclose(seen, [6.0] * 3 + [22.0] * 4)
    cut = effective_variance(graph, unit_variance=math.inf, residual_variance=residual, colluders=[1])
    np.testing.assert_allclose(cut, [4.0] * 2 + [22.0] * 4)
    apart = effective_variance(
        graph, unit_variance=math.inf, residual_variance=residual, revealed=[(0, 1), (2, 0)]
    )
    np.testing.assert_allclose(apart, [1.0, 5.0, 5.0] + [22.0] * 4)
    one = effective_variance(graph, unit_variance=math.inf, residual_variance=residual, clients=[5, 0])
    np.testing.assert_allclose(one, [22.0, 6.0])


def test_masks_of_a_client_that_never_uploaded_hide_without_limit() -> None:
    graph = ShareGraph.complete(5)
    seen = effective_variance(graph, unit_variance=math.inf, residual_variance=1.0, dropped=[2])
    assert np.all(np.isinf(seen))
    alone = effective_variance(
        graph,
        unit_variance=math.inf,
        residual_variance=1.0,
        dropped=[2],
        revealed=[(2, k) for k in (0, 1, 3, 4)],
    )
    np.testing.assert_allclose(alone, 4.0)


def test_masks_cannot_be_distorted() -> None:
    graph = ShareGraph.complete(4)
    with pytest.raises(ConfigError, match="cannot be distorted"):
        effective_variance(graph, unit_variance=math.inf, residual_variance=1.0, scales=0.5)
    with pytest.raises(ConfigError, match="unit_variance"):
        effective_variance(graph, unit_variance=math.nan, residual_variance=1.0)


@pytest.mark.parametrize(("colluders", "dropped"), [(0, 0), (6, 0), (6, 5), (0, 9)])
def test_on_a_complete_graph_the_noise_is_that_of_ideal_secure_aggregation(
    colluders: int, dropped: int
) -> None:
    corruption = Corruption(colluders=colluders, revealed=dropped, dropped=dropped)
    residual, worst = calibrate_masks(ShareGraph.complete(30), corruption, target_variance=2.0)
    assert worst.exact
    assert 30 * residual / 2.0 == pytest.approx(30 / (30 - colluders - dropped), rel=1e-12)


@pytest.mark.parametrize("number", range(4))
def test_trying_all_sets_finds_the_client_that_can_be_cut_off(number: int) -> None:
    """Brute force: every set of three, of each honest client the size of its connected group."""
    graph = drawn(11, 1.0, f"cut {number}")
    corruption = Corruption(colluders=2, revealed=1, dropped=1)
    least = 11.0
    for taken in itertools.combinations(range(11), 3):
        left = [client for client in range(11) if client not in taken]
        near = {client: set(graph.neighbours(client).tolist()) - set(taken) for client in left}
        for client in left:
            group, edge = {client}, {client}
            while edge:
                edge = set().union(*(near[one] for one in edge)) - group
                group |= edge
            least = min(least, float(len(group)))
    found = worst_case(graph, corruption, unit_variance=math.inf, residual_variance=1.0, target_variance=1.0)
    assert found.exact
    assert found.ratio == least
    assert calibrate_masks(graph, corruption, target_variance=1.0)[0] == pytest.approx(1.0 / least)


@pytest.mark.parametrize("number", range(3))
def test_the_bound_on_a_sparse_graph_is_the_limit_of_the_one_for_gaussians(number: int) -> None:
    graph = drawn(150, 30.0, f"bound {number}")
    corruption = Corruption(colluders=15, revealed=6, dropped=6, failure=1e-9)
    settings = {"residual_variance": 1.0, "target_variance": 1.0}
    endless = worst_case(graph, corruption, unit_variance=math.inf, **settings)
    strong = worst_case(graph, corruption, unit_variance=HUGE, **settings)
    assert not endless.alone
    assert endless.ratio == pytest.approx(150 - 21)
    assert strong.ratio == pytest.approx(endless.ratio, rel=1e-4)


def test_where_the_bound_speaks_no_colluders_and_no_lying_server_disconnect_anyone() -> None:
    """Random colluders; then the server declares dropped whoever leaves one client the fewest neighbours."""
    graph = drawn(120, 16.0, "connected")
    corruption = Corruption(colluders=10, revealed=4, dropped=8, failure=1e-9)
    bound = spectral_bound(graph, corruption)
    assert math.isfinite(bound.energy)
    claimed = worst_case(
        graph, corruption, unit_variance=math.inf, residual_variance=1.0, target_variance=1.0
    )
    generator = SimStream(8).child("drops").generator()
    for victim in range(40):
        colluders = set(generator.choice(np.delete(np.arange(120), victim), 10, replace=False).tolist())
        near = [one for one in graph.neighbours(victim).tolist() if one not in colluders]
        others = [one for one in range(120) if one not in {victim, *near, *colluders}]
        removed = sorted(colluders | set(near[:4]) | set(others[:4]))
        left = effective_variance(
            graph, unit_variance=math.inf, residual_variance=1.0, colluders=removed, clients=[victim]
        )
        assert left[0] >= claimed.ratio


def test_a_graph_too_sparse_for_its_colluders_is_not_called_connected() -> None:
    graph = drawn(150, 2.0, "sparse")
    corruption = Corruption(colluders=60, failure=1e-9)
    found = worst_case(graph, corruption, unit_variance=math.inf, residual_variance=1.0, target_variance=1.0)
    assert found.alone
    assert found.ratio == 1.0
    # No neighbour is left for certain: nothing but the client's own noise, and no division by zero.
    everything = replace(corruption, colluders=100, failure=0.0)
    assert worst_case(
        graph, everything, unit_variance=math.inf, residual_variance=1.0, target_variance=1.0
    ).alone
