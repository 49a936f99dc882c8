"""Edges given to the server, clients that vanish, and drawn factors, against brute-force conditioning."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from niss.accounting import effective_variance
from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A small round: who colludes, who vanished, whose common seeds the server was given."""

    graph: ShareGraph
    unit_variance: float
    residual: FloatArray
    colluders: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    revealed: tuple[tuple[int, int], ...] = ()
    scales: FloatArray | None = None

    @property
    def kept(self) -> list[int]:
        return [k for k in range(self.graph.size) if k not in self.colluders | self.dropped]

    def effective(self) -> FloatArray:
        return effective_variance(
            self.graph,
            unit_variance=self.unit_variance,
            residual_variance=self.residual,
            colluders=self.colluders,
            dropped=self.dropped,
            revealed=self.revealed,
            scales=self.scales,
        )


@st.composite
def cases(draw: Any, *, scaled: bool = False) -> Case:
    size = draw(st.integers(2, 7))
    pairs = st.tuples(st.integers(0, size - 1), st.integers(1, size - 1), st.floats(0.2, 3.0))
    edges = [(a, (a + step) % size, c) for a, step, c in draw(st.lists(pairs, max_size=16))]
    graph = ShareGraph(size, edges)
    clients = st.frozensets(st.integers(0, size - 1), max_size=size - 1)
    colluders = draw(clients)
    # Half of the pairs named are edges, either way round; the others need not exist.
    known = [(a, b) for a, b, _ in edges] + [(b, a) for a, b, _ in edges] + [(0, 1)]
    anyone = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))
    revealed = draw(st.lists(st.one_of(st.sampled_from(known), anyone), max_size=6))
    count = graph.senders.size
    factors = draw(st.lists(st.floats(0.3, 1.7), min_size=count, max_size=count)) if scaled else None
    residual = draw(st.lists(st.floats(0.05, 2.0), min_size=size, max_size=size))
    return Case(
        graph=graph,
        unit_variance=draw(st.floats(0.2, 3.0)),
        residual=np.array(residual),
        colluders=colluders,
        dropped=draw(clients) - colluders,
        revealed=tuple(revealed),
        scales=None if factors is None else np.array(factors),
    )


def brute_force(case: Case) -> FloatArray:
    """Condition the joint Gaussian of all noises on what the adversary holds, one victim at a time.

    The variables are every share and every fresh noise. The adversary knows those of the colluders and of
    the revealed edges outright, and the uploads of all other honest clients that arrived. What is left of
    the variance of the victim's own noise is found by regression on the noises still unknown.
    """
    graph = case.graph
    pairs = {frozenset(pair) for pair in case.revealed}
    columns = []
    for number in range(graph.senders.size):
        a, b = int(graph.senders[number]), int(graph.receivers[number])
        if {a, b} & case.colluders or frozenset((a, b)) in pairs:
            continue
        column = np.zeros(graph.size)
        column[a] = 1.0
        column[b] = -1.0 if case.scales is None else -case.scales[number]
        columns.append(column * math.sqrt(graph.weights[number] * case.unit_variance))
    columns += [np.eye(graph.size)[k] * math.sqrt(case.residual[k]) for k in range(graph.size)]
    uploads = np.array(columns).T[case.kept]
    result = []
    for place, own in enumerate(uploads):
        others = np.delete(uploads, place, axis=0)
        basis, _ = np.linalg.qr(others.T)
        left = own - basis @ (basis.T @ own)
        left = left - basis @ (basis.T @ left)
        result.append(left @ left)
    return np.array(result)


@settings(deadline=None, max_examples=200)
@given(case=cases())
def test_equals_brute_force_conditioning(case: Case) -> None:
    np.testing.assert_allclose(case.effective(), brute_force(case), rtol=1e-9)


@settings(deadline=None, max_examples=100)
@given(case=cases(scaled=True))
def test_equals_brute_force_given_the_drawn_factors(case: Case) -> None:
    np.testing.assert_allclose(case.effective(), brute_force(case), rtol=1e-9)


@settings(deadline=None, max_examples=100)
@given(case=cases(), data=st.data())
def test_a_revealed_edge_never_helps(case: Case, data: Any) -> None:
    pair = data.draw(st.tuples(*[st.integers(0, case.graph.size - 1)] * 2))
    after = replace(case, revealed=(*case.revealed, pair)).effective()
    assert np.all(after <= case.effective() * (1.0 + 1e-10))


@settings(deadline=None, max_examples=100)
@given(case=cases(), data=st.data())
def test_a_drop_never_hurts_and_a_repaired_drop_never_helps(case: Case, data: Any) -> None:
    """`dropped` keeps the edges on the diagonal; revealing all of them too is a colluder without knowledge."""
    present = replace(case, dropped=frozenset())
    if len(present.kept) < 2:
        return
    gone = data.draw(st.sampled_from(present.kept))
    before = dict(zip(present.kept, present.effective(), strict=True))
    tolerated = replace(present, dropped=frozenset({gone}))
    repaired = replace(
        tolerated, revealed=(*case.revealed, *((gone, int(b)) for b in case.graph.neighbours(gone)))
    )
    corrupt = replace(present, colluders=case.colluders | {gone})
    for client, value in zip(tolerated.kept, tolerated.effective(), strict=True):
        assert value >= before[client] * (1.0 - 1e-10)
    for client, value in zip(repaired.kept, repaired.effective(), strict=True):
        assert value <= before[client] * (1.0 + 1e-10)
    np.testing.assert_allclose(repaired.effective(), corrupt.effective(), rtol=1e-12)


def test_a_revealed_edge_vanishes_where_a_dropped_clients_edge_stays() -> None:
    graph = ShareGraph(3, [(0, 1, 1.0), (1, 2, 1.0)])
    case = Case(graph, 2.0, np.full(3, 0.5))
    np.testing.assert_allclose(replace(case, revealed=((1, 2),)).effective()[2], 0.5, rtol=1e-12)
    covariance = np.array([[2.5, -2.0], [-2.0, 4.5]])
    tolerated = replace(case, dropped=frozenset({2})).effective()
    np.testing.assert_allclose(tolerated, 1.0 / np.diag(np.linalg.inv(covariance)), rtol=1e-12)
    covariance[1, 1] = 2.5
    repaired = replace(case, dropped=frozenset({2}), revealed=((2, 1),)).effective()
    np.testing.assert_allclose(repaired, 1.0 / np.diag(np.linalg.inv(covariance)), rtol=1e-12)


@pytest.mark.parametrize("flip", [False, True])
def test_all_edges_revealed_leave_exactly_the_residual(flip: bool) -> None:
    graph = ShareGraph.regular(12, degree=4, beacon=b"b")
    residual = np.linspace(0.1, 0.7, 12)
    for client in range(12):
        pairs = [(client, int(b)) for b in graph.neighbours(client)]
        case = Case(graph, 1.3, residual, revealed=tuple((b, a) if flip else (a, b) for a, b in pairs))
        assert case.effective()[client] == pytest.approx(residual[client], rel=1e-12)


def test_order_direction_and_repetition_of_revealed_pairs_do_not_matter() -> None:
    graph = ShareGraph(4, [(0, 1, 1.0), (1, 0, 0.5), (1, 2, 2.0), (2, 3, 1.5), (3, 0, 1.0)])
    case = Case(graph, 0.7, np.array([0.1, 0.2, 0.3, 0.4]), revealed=((0, 1), (2, 3)))
    expected = case.effective()
    for pairs in (((1, 0), (3, 2)), ((2, 3), (0, 1), (1, 0), (0, 1)), ((0, 1), (2, 3), (0, 2))):
        np.testing.assert_array_equal(replace(case, revealed=pairs).effective(), expected)
    array = effective_variance(
        graph, unit_variance=0.7, residual_variance=case.residual, revealed=np.array([[0, 1], [2, 3]])
    )
    np.testing.assert_array_equal(array, expected)


def test_a_group_cut_off_by_reveals_and_without_fresh_noise_has_none() -> None:
    graph = ShareGraph.complete(4)
    residual = np.array([0.0, 0.0, 0.3, 0.3])
    cut = tuple((a, b) for a in (0, 1) for b in (2, 3))
    values = Case(graph, 1.0, residual, revealed=cut).effective()
    np.testing.assert_array_equal(values[:2], 0.0)
    assert np.all(values[2:] > 0.3)


@pytest.mark.parametrize("pairs", [[(0, 4)], [(-1, 2)]])
def test_revealed_clients_must_exist(pairs: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError) as caught:
        effective_variance(ShareGraph.complete(4), unit_variance=1.0, residual_variance=1.0, revealed=pairs)
    assert caught.value.field == "revealed"


@pytest.mark.parametrize("residual", [0.0, 0.2])
@pytest.mark.parametrize("colluders", [(), (0, 5)])
def test_factors_per_coordinate_count_by_the_worst_coordinate(residual: float, colluders: Any) -> None:
    graph = ShareGraph.regular(9, degree=3, beacon=b"b")
    scales = 1.0 + 0.4 * np.random.default_rng(1).standard_normal((graph.senders.size, 6))
    common: dict[str, Any] = {
        "unit_variance": 0.8,
        "residual_variance": residual,
        "colluders": colluders,
        "revealed": [(1, int(graph.neighbours(1)[0]))],
    }
    single = np.array([effective_variance(graph, scales=column, **common) for column in scales.T])
    together = effective_variance(graph, scales=scales, **common)
    np.testing.assert_allclose(together, single.min(axis=0), rtol=1e-12)
    assert np.unique(single.argmin(axis=0)).size > 1
    np.testing.assert_allclose(
        effective_variance(graph, scales=scales, clients=[7, 2], **common),
        together[[[k for k in range(9) if k not in colluders].index(k) for k in (7, 2)]],
        rtol=1e-12,
    )


def test_a_coordinate_without_distortion_is_bare_whatever_the_others_are() -> None:
    graph = ShareGraph.complete(4)
    scales = np.random.default_rng(2).normal(1.0, 0.5, (12, 3))
    assert effective_variance(graph, unit_variance=1.0, residual_variance=0.0, scales=scales).min() > 0.0
    scales[:, 1] = 1.0
    bare = effective_variance(graph, unit_variance=1.0, residual_variance=0.0, scales=scales)
    np.testing.assert_array_equal(bare, 0.0)


def test_shares_received_from_colluders_earn_nothing_however_distorted() -> None:
    """The factors on the in-edges from colluders may be anything: the result stays that without the edges."""
    graph = ShareGraph.complete(6)
    rng = np.random.default_rng(3)
    scales = rng.normal(1.0, 0.3, graph.senders.size)
    touched = np.isin(graph.senders, [1, 4]) | np.isin(graph.receivers, [1, 4])
    common: dict[str, Any] = {"unit_variance": 1.0, "residual_variance": 0.0, "colluders": [1, 4]}
    values = effective_variance(graph, scales=scales, **common)
    wild = scales.copy()
    wild[touched] = rng.normal(1.0, 50.0, int(touched.sum()))
    np.testing.assert_array_equal(effective_variance(graph, scales=wild, **common), values)
    edges = [
        (int(a), int(b), float(c))
        for a, b, c, out in zip(graph.senders, graph.receivers, graph.weights, touched, strict=True)
        if not out
    ]
    rest = effective_variance(
        ShareGraph(6, edges), unit_variance=1.0, residual_variance=0.0, scales=scales[~touched]
    )
    np.testing.assert_allclose(values, rest[[0, 2, 3, 5]], rtol=1e-12)
    # Without colluders those shares do protect, so the zero credit is seen.
    assert np.all(
        values
        < effective_variance(graph, unit_variance=1.0, residual_variance=0.0, scales=scales)[[0, 2, 3, 5]]
    )


def test_all_neighbours_colluding_leave_a_distorted_client_bare() -> None:
    graph = ShareGraph.complete(4)
    scales = np.random.default_rng(4).normal(1.0, 0.5, (12, 2))
    values = effective_variance(
        graph, unit_variance=1.0, residual_variance=0.0, scales=scales, colluders=[0, 2, 3]
    )
    np.testing.assert_array_equal(values, [0.0])


def test_factors_per_coordinate_in_stacks_equal_one_by_one() -> None:
    graph = ShareGraph.regular(9, degree=3, beacon=b"stacks")
    generator = SimStream(5).generator()
    factors = 1.0 + 0.6 * generator.standard_normal((graph.senders.size, 600))
    given_view: dict[str, Any] = {
        "unit_variance": 0.7,
        "residual_variance": 0.0,
        "colluders": [2],
        "dropped": [5],
    }
    together = effective_variance(graph, scales=factors, **given_view)
    apart = np.min([effective_variance(graph, scales=column, **given_view) for column in factors.T], axis=0)
    np.testing.assert_allclose(together, apart, rtol=1e-9)
    # One coordinate in which nothing is distorted lays everyone open, however many others are.
    factors[:, 17] = 1.0
    bare: dict[str, Any] = {"unit_variance": 0.7, "residual_variance": 0.0}
    assert np.all(effective_variance(graph, scales=factors, **bare) == 0.0)
