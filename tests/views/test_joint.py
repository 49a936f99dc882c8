"""The joint view against brute force: conditioning on everything the server and the colluders know."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from niss.graph import ShareGraph
from niss.randomness import SimStream
from niss.views import effective_variance
from support.refusals import refuses

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A small round: edges, fresh noise, who colludes, who vanished, whose common seeds the server was given."""

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

    def by_client(self) -> dict[int, float]:
        return dict(zip(self.kept, self.effective().tolist(), strict=True))


@st.composite
def cases(draw: Any, *, scaled: bool = False, bare: bool = False) -> Case:
    size = draw(st.integers(1, 7))
    anyone, positive = st.integers(0, size - 1), st.floats(0.2, 3.0)
    edges = []
    if size > 1:
        pairs = st.tuples(anyone, st.integers(1, size - 1), positive)
        edges = [(a, (a + step) % size, c) for a, step, c in draw(st.lists(pairs, max_size=16))]
    graph = ShareGraph(size, edges)
    clients = st.frozensets(anyone, max_size=size - 1)
    colluders = draw(clients)
    # Half of the pairs named are edges, either way round; the others need not exist.
    known = [(a, b) for a, b, _ in edges] + [(b, a) for a, b, _ in edges] + [(0, size - 1)]
    revealed = draw(st.lists(st.one_of(st.sampled_from(known), st.tuples(anyone, anyone)), max_size=6))
    fresh = st.one_of(st.just(0.0), st.floats(0.05, 2.0)) if bare else st.floats(0.05, 2.0)
    count = graph.senders.size
    scales = draw(st.lists(st.floats(0.3, 1.7), min_size=count, max_size=count)) if scaled else None
    return Case(
        graph=graph,
        unit_variance=draw(positive),
        residual=np.array(draw(st.lists(fresh, min_size=size, max_size=size))),
        colluders=colluders,
        dropped=draw(clients) - colluders,
        revealed=tuple(revealed),
        scales=None if scales is None else np.array(scales),
    )


def brute_force(case: Case) -> FloatArray:
    """Variance of each honest upload given all the other honest ones, from the independent noises.

    Columns are the noises that the adversary does not know (shares between honest clients that were not revealed, fresh
    noise of honest clients), rows the honest uploads that arrived. What is left of a row after regressing it on the
    other rows is what protects it.
    """
    graph, revealed = case.graph, {frozenset(pair) for pair in case.revealed}
    factors = np.ones(graph.senders.size) if case.scales is None else case.scales
    columns = []
    for a, b, c, s in zip(
        graph.senders.tolist(), graph.receivers.tolist(), graph.weights, factors, strict=True
    ):
        if {a, b} & case.colluders or frozenset((a, b)) in revealed:
            continue
        column = np.zeros(graph.size)
        column[a], column[b] = 1.0, -s
        columns.append(column * math.sqrt(c * case.unit_variance))
    columns += [np.eye(graph.size)[k] * math.sqrt(case.residual[k]) for k in range(graph.size)]
    rows = np.array(columns).T[case.kept]
    result = np.empty(len(rows))
    for position, row in enumerate(rows):
        others = np.delete(rows, position, axis=0)
        if len(others):
            row = row - others.T @ np.linalg.lstsq(others.T, row, rcond=1e-12)[0]
        result[position] = row @ row
    return result


@pytest.mark.parametrize(
    ("scaled", "bare", "rtol", "atol"),
    [
        (False, False, 1e-9, 0.0),
        (True, False, 1e-9, 0.0),
        (False, True, 1e-8, 1e-12),
        # Factors near 1 without fresh noise are nearly singular: fewer digits, but no invented noise.
        (True, True, 1e-5, 1e-9),
    ],
)
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_equals_brute_force_conditioning(
    scaled: bool, bare: bool, rtol: float, atol: float, data: Any
) -> None:
    """Given the drawn factors where there are some, and where some clients add nothing."""
    case = data.draw(cases(scaled=scaled, bare=bare))
    if scaled:
        atol *= case.unit_variance * max(case.graph.weights.sum(), 1.0)
    np.testing.assert_allclose(case.effective(), brute_force(case), rtol=rtol, atol=atol)


@settings(deadline=None, max_examples=100)
@given(case=cases(), data=st.data())
def test_more_colluders_reveals_fewer_edges_and_less_noise_never_protect_more(case: Case, data: Any) -> None:
    before, anyone = case.by_client(), st.integers(0, case.graph.size - 1)
    less = case.residual.copy()
    less[data.draw(anyone)] *= 0.5
    pair = data.draw(st.tuples(anyone, anyone))
    changed = [
        replace(case, residual=less),
        replace(case, revealed=(*case.revealed, pair)),
        replace(case, unit_variance=0.5 * case.unit_variance),
    ]
    if len(case.kept) > 1:
        changed.append(replace(case, colluders=case.colluders | {data.draw(st.sampled_from(case.kept))}))
    edges = list(zip(case.graph.senders, case.graph.receivers, case.graph.weights, strict=True))
    if edges:
        edges.pop(data.draw(st.integers(0, len(edges) - 1)))
        changed.append(replace(case, graph=ShareGraph(case.graph.size, edges)))
    for weaker in changed:
        assert all(value <= before[client] * (1.0 + 1e-9) for client, value in weaker.by_client().items())


@settings(deadline=None, max_examples=100)
@given(case=cases(), data=st.data())
def test_a_drop_never_hurts_and_a_repaired_drop_never_helps(case: Case, data: Any) -> None:
    """`dropped` keeps the edges on the diagonal; revealing all of them too is a colluder without knowledge."""
    present = replace(case, dropped=frozenset())
    if len(present.kept) < 2:
        return
    gone = data.draw(st.sampled_from(present.kept))
    before = present.by_client()
    tolerated = replace(present, dropped=frozenset({gone}))
    repaired = replace(
        tolerated, revealed=(*case.revealed, *((gone, int(b)) for b in case.graph.neighbours(gone)))
    )
    corrupt = replace(present, colluders=case.colluders | {gone})
    assert all(value >= before[client] * (1.0 - 1e-10) for client, value in tolerated.by_client().items())
    assert all(value <= before[client] * (1.0 + 1e-10) for client, value in repaired.by_client().items())
    np.testing.assert_allclose(repaired.effective(), corrupt.effective(), rtol=1e-12)


def test_a_revealed_edge_vanishes_where_a_dropped_clients_edge_stays() -> None:
    case = Case(ShareGraph(3, [(0, 1, 1.0), (1, 2, 1.0)]), 2.0, np.full(3, 0.5))
    np.testing.assert_allclose(replace(case, revealed=((1, 2),)).effective()[2], 0.5, rtol=1e-12)
    gone, bare = replace(case, dropped=frozenset({2})), replace(case, residual=np.zeros(3))
    for left, own, other in (
        (gone, 2.5, 4.5),
        (replace(gone, revealed=((2, 1),)), 2.5, 2.5),
        (replace(bare, dropped=frozenset({2})), 2.0, 4.0),
    ):
        covariance = np.array([[own, -2.0], [-2.0, other]])
        np.testing.assert_allclose(left.effective(), 1.0 / np.diag(np.linalg.inv(covariance)), rtol=1e-12)
    np.testing.assert_array_equal(replace(bare, colluders=frozenset({2})).effective(), 0.0)


def test_order_direction_and_repetition_of_revealed_pairs_do_not_matter() -> None:
    graph = ShareGraph(4, [(0, 1, 1.0), (1, 0, 0.5), (1, 2, 2.0), (2, 3, 1.5), (3, 0, 1.0)])
    case = Case(graph, 0.7, np.array([0.1, 0.2, 0.3, 0.4]), revealed=((0, 1), (2, 3)))
    expected = case.effective()
    repeated = ((2, 3), (0, 1), (1, 0), (0, 1))
    for pairs in (((1, 0), (3, 2)), repeated, ((0, 1), (2, 3), (0, 2)), np.array([[0, 1], [2, 3]])):
        np.testing.assert_array_equal(replace(case, revealed=pairs).effective(), expected)


def test_without_fresh_noise_a_connected_group_has_exactly_none() -> None:
    edges = [(0, 1, 1.3), (1, 2, 0.7), (3, 4, 1.1), (4, 3, 0.2), (5, 6, 1.0)]
    values = Case(ShareGraph(7, edges), 1.7, np.array([0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0])).effective()
    assert np.all(values[[0, 1, 2, 5, 6]] == 0.0)
    assert np.all(values[[3, 4]] > 0.0)
    # Nor one that reveals cut off from the rest.
    cut = tuple((a, b) for a in (0, 1) for b in (2, 3))
    values = Case(ShareGraph.complete(4), 1.0, np.array([0.0, 0.0, 0.3, 0.3]), revealed=cut).effective()
    np.testing.assert_array_equal(values[:2], 0.0)
    assert np.all(values[2:] > 0.3)


@pytest.mark.parametrize("size", [2, 30, 400])
def test_undistorted_rounds_protect_nobody_at_any_size(size: int) -> None:
    graph = ShareGraph.regular(size, degree=min(10, size - 1), beacon=b"b")
    np.testing.assert_array_equal(effective_variance(graph, unit_variance=0.3, residual_variance=0.0), 0.0)


@pytest.mark.parametrize("scales", [None, np.full(6, 0.9)])
def test_nobody_honest_is_an_empty_answer(scales: FloatArray | None) -> None:
    case = Case(ShareGraph.complete(3), 1.0, np.ones(3), colluders=frozenset({0, 1, 2}), scales=scales)
    assert case.effective().shape == (0,)


def test_factors_of_one_are_no_distortion() -> None:
    noisy = Case(ShareGraph.complete(4), 1.0, np.full(4, 0.1))
    np.testing.assert_array_equal(noisy.effective(), replace(noisy, scales=np.ones(12)).effective())
    bare = replace(noisy, residual=np.zeros(4))
    np.testing.assert_array_equal(replace(bare, scales=1.0).effective(), 0.0)
    np.testing.assert_array_equal(replace(bare, unit_variance=0.0, scales=np.full(12, 0.5)).effective(), 0.0)


def test_scalar_factors_protect_less_than_their_average_says() -> None:
    """The worst client over several draws at m = 30, v = 3, tau^2 = 2/m: far below the averaged matrix."""
    graph, tau2 = ShareGraph.regular(30, degree=3, beacon=b"b"), 2.0 / 30
    averaged = effective_variance(graph, unit_variance=1.0, residual_variance=3 * tau2).min()
    worst = []
    for seed in range(20):
        scales = 1.0 + math.sqrt(tau2) * np.random.default_rng(seed).standard_normal(90)
        worst.append(Case(graph, 1.0, np.zeros(30), scales=scales).effective().min())
    assert np.median(worst) < 0.8 * averaged


def test_tiny_fresh_noise_is_not_overstated() -> None:
    """Nearly singular: the variance of the sum bounds every client's, and may be counted as none."""
    graph = ShareGraph.complete(20)
    for residual in (1e-6, 1e-9, 1e-12, 1e-15):
        values = effective_variance(graph, unit_variance=1.0, residual_variance=residual)
        assert np.all(values <= 20 * residual * (1.0 + 1e-2))


@pytest.mark.parametrize("coordinates", [6, 600])
@pytest.mark.parametrize("residual", [0.0, 0.2])
@pytest.mark.parametrize(("colluders", "dropped"), [((), ()), ((0, 5), ()), ((2,), (5,))])
def test_factors_per_coordinate_count_by_the_worst_coordinate(
    coordinates: int, residual: float, colluders: Any, dropped: Any
) -> None:
    """Few coordinates, and so many that they are stacked in blocks: the same as one by one."""
    graph = ShareGraph.regular(9, degree=3, beacon=b"b")
    scales = 1.0 + 0.4 * SimStream(1).generator().standard_normal((graph.senders.size, coordinates))
    common: dict[str, Any] = {
        "unit_variance": 0.8,
        "residual_variance": residual,
        "colluders": colluders,
        "dropped": dropped,
        "revealed": [(1, int(graph.neighbours(1)[0]))],
    }
    single = np.array([effective_variance(graph, scales=column, **common) for column in scales.T])
    together, rtol = effective_variance(graph, scales=scales, **common), 1e-12 if coordinates == 6 else 1e-9
    np.testing.assert_allclose(together, single.min(axis=0), rtol=rtol)
    assert np.unique(single.argmin(axis=0)).size > 1
    kept = [k for k in range(9) if k not in (*colluders, *dropped)]
    np.testing.assert_allclose(
        effective_variance(graph, scales=scales, clients=[7, 1], **common),
        together[[kept.index(7), kept.index(1)]],
        rtol=rtol,
    )


@pytest.mark.parametrize("coordinates", [3, 600])
def test_a_coordinate_without_distortion_is_bare_whatever_the_others_are(coordinates: int) -> None:
    scales = np.random.default_rng(2).normal(1.0, 0.5, (12, coordinates))
    case = Case(ShareGraph.complete(4), 1.0, np.zeros(4), scales=scales)
    assert case.effective().min() > 0.0
    np.testing.assert_array_equal(replace(case, colluders=frozenset({0, 2, 3})).effective(), [0.0])
    scales[:, 1] = 1.0
    np.testing.assert_array_equal(case.effective(), 0.0)


def test_shares_received_from_colluders_earn_nothing_however_distorted() -> None:
    """The factors on the in-edges from colluders may be anything: the result stays that without the edges."""
    graph, rng = ShareGraph.complete(6), np.random.default_rng(3)
    scales = rng.normal(1.0, 0.3, graph.senders.size)
    touched = np.isin(graph.senders, [1, 4]) | np.isin(graph.receivers, [1, 4])
    alone = Case(graph, 1.0, np.zeros(6), scales=scales)
    case = replace(alone, colluders=frozenset({1, 4}))
    values, wild = case.effective(), scales.copy()
    wild[touched] = rng.normal(1.0, 50.0, int(touched.sum()))
    np.testing.assert_array_equal(replace(case, scales=wild).effective(), values)
    edges = zip(graph.senders[~touched], graph.receivers[~touched], graph.weights[~touched], strict=True)
    rest = replace(alone, graph=ShareGraph(6, edges), scales=scales[~touched]).effective()
    np.testing.assert_allclose(values, rest[[0, 2, 3, 5]], rtol=1e-12)
    # Without colluders those shares do protect, so the zero credit is seen.
    assert np.all(values < alone.effective()[[0, 2, 3, 5]])


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
        ({"revealed": [(0, 3)]}, "revealed"),
        ({"revealed": [(-1, 2)]}, "revealed"),
        ({"scales": [1.0, 2.0]}, "scales"),
        ({"scales": [math.nan] * 6}, "scales"),
    ],
)
def test_bad_input_names_the_field(arguments: dict[str, Any], field: str) -> None:
    with refuses(field):
        effective_variance(
            ShareGraph.complete(3), **({"unit_variance": 1.0, "residual_variance": 0.1} | arguments)
        )
