"""The joint view against brute force: conditioning on everything the server and the colluders know."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from niss.accounting import effective_variance
from niss.errors import ConfigError
from niss.graph import ShareGraph

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Round:
    """A small round: edges, fresh noise, who colludes, who drops out, and perhaps drawn factors."""

    graph: ShareGraph
    unit_variance: float
    residual: FloatArray
    colluders: frozenset[int]
    dropped: frozenset[int]
    scales: FloatArray | None

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
            scales=self.scales,
        )


@st.composite
def rounds(draw: Any, *, scaled: bool = False, bare: bool = False, dropping: bool = True) -> Round:
    size = draw(st.integers(1, 7))
    positive = st.floats(0.2, 3.0)
    edges = []
    if size > 1:
        pairs = st.tuples(st.integers(0, size - 1), st.integers(1, size - 1), positive)
        edges = [(a, (a + step) % size, c) for a, step, c in draw(st.lists(pairs, max_size=14))]
    graph = ShareGraph(size, edges)
    fresh = st.one_of(st.just(0.0), st.floats(0.05, 2.0)) if bare else st.floats(0.05, 2.0)
    clients = st.frozensets(st.integers(0, size - 1), max_size=size - 1)
    colluders = draw(clients)
    dropped = draw(clients) if dropping else frozenset()
    count = graph.senders.size
    scales = draw(st.lists(st.floats(0.3, 1.7), min_size=count, max_size=count)) if scaled else None
    return Round(
        graph=graph,
        unit_variance=draw(positive),
        residual=np.array(draw(st.lists(fresh, min_size=size, max_size=size))),
        colluders=colluders,
        dropped=dropped - colluders,
        scales=None if scales is None else np.array(scales),
    )


def brute_force(case: Round) -> FloatArray:
    """Variance of each honest upload given all the other honest ones, from the independent noises.

    Columns are the noises nobody but their owners knows (shares between honest clients, fresh noise of
    honest clients), rows the honest uploads that arrived. What is left of a row after regressing it on the
    other rows is what protects it.
    """
    graph = case.graph
    factors = np.ones(graph.senders.size) if case.scales is None else case.scales
    columns = []
    for a, b, c, s in zip(graph.senders, graph.receivers, graph.weights, factors, strict=True):
        if int(a) in case.colluders or int(b) in case.colluders:
            continue
        column = np.zeros(graph.size)
        column[a] += math.sqrt(c * case.unit_variance)
        column[b] -= s * math.sqrt(c * case.unit_variance)
        columns.append(column)
    for client in range(graph.size):
        if client not in case.colluders:
            columns.append(np.eye(graph.size)[client] * math.sqrt(case.residual[client]))
    rows = np.array(columns).T[case.kept]
    result = np.empty(len(rows))
    for position, row in enumerate(rows):
        others = np.delete(rows, position, axis=0)
        if len(others):
            row = row - others.T @ np.linalg.lstsq(others.T, row, rcond=1e-12)[0]
        result[position] = row @ row
    return result


@settings(deadline=None, max_examples=200)
@given(case=rounds())
def test_equals_brute_force_conditioning(case: Round) -> None:
    np.testing.assert_allclose(case.effective(), brute_force(case), rtol=1e-9)


@settings(deadline=None, max_examples=150)
@given(case=rounds(scaled=True))
def test_equals_brute_force_given_the_drawn_factors(case: Round) -> None:
    np.testing.assert_allclose(case.effective(), brute_force(case), rtol=1e-9)


@settings(deadline=None, max_examples=200)
@given(case=rounds(bare=True))
def test_equals_brute_force_where_some_clients_add_nothing(case: Round) -> None:
    np.testing.assert_allclose(case.effective(), brute_force(case), rtol=1e-8, atol=1e-12)


@settings(deadline=None, max_examples=150)
@given(case=rounds(scaled=True, bare=True))
def test_never_above_brute_force_given_factors_where_some_clients_add_nothing(case: Round) -> None:
    """Factors near 1 without fresh noise are nearly singular: fewer digits, but no invented noise."""
    scale = case.unit_variance * (case.graph.weights.sum() if case.graph.weights.size else 1.0)
    np.testing.assert_allclose(case.effective(), brute_force(case), rtol=1e-5, atol=1e-9 * scale)


def test_fresh_noise_alone_is_its_own_protection() -> None:
    residual = [0.5, 0.0, 2.0]
    values = effective_variance(ShareGraph(3, []), unit_variance=1.0, residual_variance=residual)
    np.testing.assert_allclose(values, residual)


def test_without_fresh_noise_a_connected_group_has_exactly_none() -> None:
    edges = [(0, 1, 1.3), (1, 2, 0.7), (3, 4, 1.1), (4, 3, 0.2), (5, 6, 1.0)]
    residual = [0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0]
    values = effective_variance(ShareGraph(7, edges), unit_variance=1.7, residual_variance=residual)
    assert np.all(values[[0, 1, 2, 5, 6]] == 0.0)
    assert np.all(values[[3, 4]] > 0.0)


@pytest.mark.parametrize("size", [2, 30, 400])
def test_undistorted_rounds_protect_nobody_at_any_size(size: int) -> None:
    graph = ShareGraph.regular(size, degree=min(10, size - 1), beacon=b"b")
    np.testing.assert_array_equal(effective_variance(graph, unit_variance=0.3, residual_variance=0.0), 0.0)


def test_a_dropped_client_leaves_its_edges_as_protection() -> None:
    graph = ShareGraph(3, [(0, 1, 1.0), (1, 2, 1.0)])
    values = effective_variance(graph, unit_variance=2.0, residual_variance=0.0, dropped=[2])
    covariance = np.array([[2.0, -2.0], [-2.0, 4.0]])
    np.testing.assert_allclose(values, 1.0 / np.diag(np.linalg.inv(covariance)))
    np.testing.assert_array_equal(
        effective_variance(graph, unit_variance=2.0, residual_variance=0.0, colluders=[2]), 0.0
    )


def test_colluding_neighbours_leave_the_fresh_noise_alone() -> None:
    graph = ShareGraph.complete(5)
    values = effective_variance(graph, unit_variance=1.0, residual_variance=0.25, colluders=range(1, 5))
    np.testing.assert_allclose(values, [0.25])


def test_nobody_honest_is_an_empty_answer() -> None:
    graph = ShareGraph.complete(3)
    for scales in (None, np.full(6, 0.9)):
        values = effective_variance(
            graph, unit_variance=1.0, residual_variance=1.0, colluders=[0, 1, 2], scales=scales
        )
        assert values.shape == (0,)


def test_factors_of_one_are_no_distortion() -> None:
    graph = ShareGraph.complete(4)
    plain = effective_variance(graph, unit_variance=1.0, residual_variance=0.1)
    same = effective_variance(graph, unit_variance=1.0, residual_variance=0.1, scales=np.ones(12))
    np.testing.assert_array_equal(plain, same)
    np.testing.assert_array_equal(
        effective_variance(graph, unit_variance=1.0, residual_variance=0.0, scales=1.0), 0.0
    )
    np.testing.assert_array_equal(
        effective_variance(graph, unit_variance=0.0, residual_variance=0.0, scales=np.full(12, 0.5)), 0.0
    )


def test_scalar_factors_protect_less_than_their_average_says() -> None:
    """The worst client over several draws at m = 30, v = 3, tau^2 = 2/m: far below the averaged matrix."""
    graph = ShareGraph.regular(30, degree=3, beacon=b"b")
    tau2 = 2.0 / 30
    averaged = effective_variance(graph, unit_variance=1.0, residual_variance=3 * tau2).min()
    worst = []
    for seed in range(20):
        scales = 1.0 + math.sqrt(tau2) * np.random.default_rng(seed).standard_normal(90)
        drawn = effective_variance(graph, unit_variance=1.0, residual_variance=0.0, scales=scales)
        worst.append(drawn.min())
    assert np.median(worst) < 0.8 * averaged


@settings(deadline=None, max_examples=100)
@given(case=rounds(dropping=False), data=st.data())
def test_more_colluders_fewer_edges_and_less_noise_never_protect_more(case: Round, data: Any) -> None:
    before = dict(zip(case.kept, case.effective(), strict=True))

    def assert_no_better(changed: Round) -> None:
        for client, value in zip(changed.kept, changed.effective(), strict=True):
            assert value <= before[client] * (1.0 + 1e-9)

    fields: dict[str, Any] = {"unit_variance": case.unit_variance, "dropped": case.dropped, "scales": None}
    if len(case.kept) > 1:
        turned = data.draw(st.sampled_from(case.kept))
        assert_no_better(
            Round(case.graph, residual=case.residual, colluders=case.colluders | {turned}, **fields)
        )
    edges = list(zip(case.graph.senders, case.graph.receivers, case.graph.weights, strict=True))
    if edges:
        edges.pop(data.draw(st.integers(0, len(edges) - 1)))
        thinner = ShareGraph(case.graph.size, edges)
        assert_no_better(Round(thinner, residual=case.residual, colluders=case.colluders, **fields))
    less = case.residual.copy()
    less[data.draw(st.integers(0, case.graph.size - 1))] *= 0.5
    assert_no_better(Round(case.graph, residual=less, colluders=case.colluders, **fields))
    weaker = fields | {"unit_variance": 0.5 * case.unit_variance}
    assert_no_better(Round(case.graph, residual=case.residual, colluders=case.colluders, **weaker))


def test_tiny_fresh_noise_is_not_overstated() -> None:
    """Nearly singular: the variance of the sum bounds every client's, and may be counted as none."""
    graph = ShareGraph.complete(20)
    for residual in (1e-6, 1e-9, 1e-12, 1e-15):
        values = effective_variance(graph, unit_variance=1.0, residual_variance=residual)
        assert np.all(values <= 20 * residual * (1.0 + 1e-2))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"unit_variance": -1.0}, "unit_variance"),
        ({"unit_variance": math.nan}, "unit_variance"),
        ({"residual_variance": -0.1}, "residual_variance"),
        ({"residual_variance": math.inf}, "residual_variance"),
        ({"residual_variance": [0.1, 0.2]}, "residual_variance"),
        ({"residual_variance": [[0.1, 0.2, 0.3]]}, "residual_variance"),
        ({"colluders": [3]}, "colluders"),
        ({"dropped": [-1]}, "dropped"),
        ({"scales": [1.0, 2.0]}, "scales"),
        ({"scales": [math.nan] * 6}, "scales"),
    ],
)
def test_bad_input_names_the_field(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        effective_variance(
            ShareGraph.complete(3), **({"unit_variance": 1.0, "residual_variance": 0.1} | arguments)
        )
    assert caught.value.field == field
