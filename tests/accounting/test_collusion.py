"""The worst set of colluders: the bound on colluding neighbours, enumeration, and the noise that withstands it."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import hypergeom

from niss.errors import PrivacyError
from niss.graph import ShareGraph
from niss.views import (
    Corruption,
    calibrate_for,
    colluding_neighbours,
    collusion,
    effective_variance,
    worst_case,
)
from support.graphs import drawn_graph, left_to, weights_between
from support.known_colluders import calibrate_tau2
from support.refusals import refuses


def _graph(kind: str, size: int, degree: int) -> ShareGraph:
    return drawn_graph(kind, size, degree, np.random.default_rng(4))


def _arguments(graph: ShareGraph, tau2: float) -> dict[str, Any]:
    """Shares of total variance 1 for the client that sends least, targets in proportion."""
    unit = 1.0 / float(graph.out_weight.min())
    return {
        "unit_variance": unit,
        "residual_variance": tau2 * unit * graph.in_weight,
        "target_variance": unit * graph.out_weight,
    }


def _brute_force(graph: ShareGraph, removed: int, limits: list[int], arguments: dict[str, Any]) -> float:
    """Every set of at most `removed` clients, every honest client whose bound it respects, by inversion."""
    weights, anyone = weights_between(graph), np.arange(graph.size)
    best = np.inf
    for count in range(removed + 1):
        for taken in itertools.combinations(anyone, count):
            colluders = np.isin(anyone, taken)
            left = left_to(weights, colluders, arguments["unit_variance"], arguments["residual_variance"])
            near = (weights[:, colluders] > 0.0).sum(axis=1)
            best = min(best, np.min((left / arguments["target_variance"])[near <= limits], initial=np.inf))
    return float(best)


def _tail(above: int, population: int, colluders: int, drawn: int) -> Fraction:
    """P(more than `above` of the neighbours collude), in whole numbers."""
    ways = sum(
        comb(colluders, hit) * comb(population - colluders, drawn - hit)
        for hit in range(above + 1, min(colluders, drawn) + 1)
    )
    return Fraction(ways, comb(population, drawn))


def test_the_number_of_the_theory() -> None:
    assert colluding_neighbours(1_000, 40, 200, 1e-6) == 21


@pytest.mark.parametrize(
    ("participants", "neighbours", "colluders"),
    [(1_000, 40, 200), (1_000, 40, 500), (50, 10, 5), (30, 29, 6), (200, 20, 199), (10, 0, 3), (10, 3, 0)],
)
@pytest.mark.parametrize("failure", [1e-12, 1e-6, 0.01, 0.3])
def test_the_bound_is_the_least_that_holds(
    participants: int, neighbours: int, colluders: int, failure: float
) -> None:
    bound = colluding_neighbours(participants, neighbours, colluders, failure)
    assert hypergeom.sf(bound, participants - 1, colluders, neighbours) <= failure
    assert _tail(bound, participants - 1, colluders, neighbours) <= failure
    if bound:
        assert _tail(bound - 1, participants - 1, colluders, neighbours) > failure


def test_the_bound_is_monotone_and_a_sure_one_counts_everybody() -> None:
    by_failure = [colluding_neighbours(300, 30, 60, failure) for failure in (0.5, 1e-2, 1e-4, 1e-8, 0.0)]
    by_colluders = [colluding_neighbours(300, 30, count, 1e-6) for count in range(0, 300, 13)]
    by_neighbours = [colluding_neighbours(300, count, 60, 1e-6) for count in range(0, 300, 13)]
    for bounds in (by_failure, by_colluders, by_neighbours):
        assert bounds == sorted(bounds)
        assert bounds[0] < bounds[-1]
    assert by_failure[-1] == 30
    # So unlikely that the probability is 0 in floating point; still not impossible.
    assert colluding_neighbours(100_000, 150, 150, 0.0) == 150


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"colluders": -1}, "colluders"),
        ({"colluders": 1.5}, "colluders"),
        ({"revealed": -1}, "revealed"),
        ({"failure": -0.1}, "failure"),
        ({"failure": 1.0}, "failure"),
        ({"failure": float("nan")}, "failure"),
    ],
)
def test_bad_corruption_is_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with refuses(field):
        Corruption(**settings)


@pytest.mark.parametrize("kind", ["regular", "random", "unequal", "complete", "coalition"])
@pytest.mark.parametrize(
    "corruption",
    [
        Corruption(),
        Corruption(colluders=2),
        Corruption(colluders=3, failure=0.3),
        Corruption(colluders=1, revealed=1, failure=0.4),
        Corruption(revealed=2),
        Corruption(colluders=3, revealed=1),
        Corruption(colluders=6),
    ],
)
def test_enumeration_equals_brute_force_over_sets_and_clients(kind: str, corruption: Corruption) -> None:
    graph = _graph(kind, 8, 2)
    # Neighbours that are no uniform sample of the others may all be the colluding ones.
    failure = corruption.failure if kind in ("regular", "random") else 0.0
    limits = []
    for client in range(8):
        near = graph.neighbours(client).size
        # Half of the failure probability is for the neighbours of the others.
        tails = [_tail(q, 7, corruption.colluders, near) <= failure / 2 for q in range(near)]
        limits.append((tails.index(True) if True in tails else near) + corruption.revealed)
    removed = corruption.colluders + corruption.revealed
    for tau2 in (0.05, 0.5):
        arguments = _arguments(graph, tau2)
        found = worst_case(graph, corruption, **arguments)
        assert found.exact
        assert found.ratio == pytest.approx(_brute_force(graph, removed, limits, arguments), rel=1e-9)
        assert found.client not in found.colluders
        assert len(found.colluders) == removed
        near_colluders = set(graph.neighbours(found.client).tolist()) & set(found.colluders)
        assert len(near_colluders) <= limits[found.client]


@pytest.mark.parametrize("field", ["residual_variance", "target_variance"])
def test_complete_rounds_of_unlike_clients_are_no_shortcut(field: str) -> None:
    graph = _graph("complete", 7, 3)
    arguments = _arguments(graph, 0.2)
    arguments[field] = np.linspace(1.0, 2.0, 7) * arguments[field]
    found = worst_case(graph, Corruption(colluders=2), **arguments)
    assert found.exact
    assert found.ratio == pytest.approx(_brute_force(graph, 2, [6] * 7, arguments), rel=1e-9)


def test_the_worst_case_is_who_can_be_cut_off() -> None:
    """One client has only two neighbours among forty well-connected ones."""
    inner = ShareGraph.regular(39, degree=5, beacon=b"b")
    edges = list(zip(inner.senders, inner.receivers, inner.weights, strict=True))
    graph = ShareGraph(40, [*edges, (39, 3, 2.5), (3, 39, 2.5), (39, 20, 2.5), (20, 39, 2.5)])
    arguments = {"unit_variance": 0.2, "residual_variance": 0.1, "target_variance": 1.0}
    found = worst_case(graph, Corruption(colluders=2), **arguments)
    assert (found.client, found.colluders) == (39, (3, 20))
    assert found.ratio == pytest.approx(0.1, rel=1e-9)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_clients_without_fresh_noise_have_no_protection(share: float) -> None:
    graph = ShareGraph.regular(30, degree=3, beacon=b"b")
    arguments = _arguments(graph, 0.2)
    arguments["residual_variance"] = np.where(np.arange(30) < share * 30, 0.2, 0.0)
    assert worst_case(graph, Corruption(colluders=6), **arguments).ratio == 0.0


@pytest.mark.parametrize("exact_sets", [0, 3_000])
def test_worse_assumptions_never_give_a_better_ratio(
    monkeypatch: pytest.MonkeyPatch, exact_sets: int
) -> None:
    """More colluders, more reveals, a smaller failure probability, less residual noise."""
    monkeypatch.setattr(collusion, "EXACT_SETS", exact_sets)
    graph = _graph("regular", *((11, 3) if exact_sets else (60, 20)))

    def ratio(tau2: float = 0.1, **assumed: Any) -> float:
        return worst_case(graph, Corruption(**assumed), **_arguments(graph, tau2)).ratio

    chains = [
        [ratio(colluders=count, failure=1e-3) for count in (0, 1, 2, 3)],
        [ratio(colluders=1, revealed=count, failure=1e-3) for count in (0, 1, 2)],
        [ratio(colluders=3, failure=failure) for failure in (0.5, 0.1, 1e-3, 0.0)],
        [ratio(tau2, colluders=2) for tau2 in (1.0, 0.3, 0.1, 0.01)],
    ]
    for chain in chains:
        for better, worse in itertools.pairwise(chain):
            assert worse <= better * (1.0 + 1e-9)
        assert chain[-1] < 0.98 * chain[0]


@pytest.mark.parametrize(
    ("kind", "size", "corruption"),
    [
        ("regular", 12, Corruption(colluders=2, failure=1e-3)),
        ("unequal", 12, Corruption(colluders=1, revealed=1)),
        ("coalition", 12, Corruption(colluders=2)),
        ("complete", 30, Corruption(colluders=6)),
        ("dense", 40, Corruption(colluders=8, failure=1e-6)),
        ("dense", 250, Corruption(colluders=25, revealed=2, failure=1e-6)),
        *((kind, 12, Corruption()) for kind in ("random", "complete", "coalition")),
        ("complete", 2, Corruption()),
    ],
)
def test_calibration_meets_the_target_in_the_worst_case_and_not_with_less(
    kind: str, size: int, corruption: Corruption
) -> None:
    graph = _graph("regular", size, 30) if kind == "dense" else _graph(kind, size, 4)
    arguments = _arguments(graph, 0.0)
    unit, target = arguments["unit_variance"], arguments["target_variance"]
    tau2, found = calibrate_for(graph, corruption, unit_variance=unit, target_variance=target)
    assert found.ratio == pytest.approx(1.0, abs=1e-9)
    residual = unit * graph.in_weight
    for factor, meets in ((1.0, True), (0.98, False)):
        arguments["residual_variance"] = factor * tau2 * residual
        again = worst_case(graph, corruption, **arguments)
        assert (again.ratio >= 1.0 - 1e-9) is meets


def test_without_corruption_it_is_the_plain_calibration() -> None:
    graph = _graph("unequal", 15, 3)
    target = np.linspace(0.5, 1.0, 15)
    tau2, found = calibrate_for(graph, Corruption(), unit_variance=0.3, target_variance=target)
    assert tau2 == pytest.approx(calibrate_tau2(graph, unit_variance=0.3, target_variance=target), rel=1e-9)
    assert (found.exact, found.colluders) == (True, ())


@pytest.mark.parametrize("size", [2, 3, 6])
def test_two_must_stay_honest(size: int) -> None:
    """All but two may collude; then the two have each other's shares and their own noise."""
    graph = ShareGraph.complete(size)
    given: dict[str, Any] = {"unit_variance": 1.0, "residual_variance": 0.5, "target_variance": 1.0}
    found = worst_case(graph, Corruption(colluders=size - 2), **given)
    covariance = np.array([[2.5, -2.0], [-2.0, 2.5]])
    assert found.ratio == pytest.approx(1.0 / np.linalg.inv(covariance)[0, 0], rel=1e-12)
    for corruption in (Corruption(colluders=size - 1), Corruption(colluders=size - 2, revealed=1)):
        with pytest.raises(PrivacyError, match="leave nobody"):
            worst_case(graph, corruption, **given)


def test_bad_targets_and_rounds_are_refused_by_name() -> None:
    graph = ShareGraph.complete(4)
    for target, unit, field in ((0.0, 1.0, "target_variance"), (1.0, 0.0, "unit_variance")):
        with refuses(field):
            calibrate_for(graph, Corruption(colluders=1), unit_variance=unit, target_variance=target)
    with refuses("target_variance"):
        worst_case(graph, Corruption(), unit_variance=1.0, residual_variance=1.0, target_variance=0.0)
    lonely = ShareGraph(4, [(0, 1, 1.0), (1, 2, 1.0), (2, 0, 1.0), (3, 0, 1.0)])
    with pytest.raises(PrivacyError, match="1 clients receive no share") as refused:
        calibrate_for(lonely, Corruption(colluders=1), unit_variance=1.0, target_variance=1.0)
    assert refused.value.hint is not None


@pytest.mark.parametrize(
    ("rho", "expected"),
    [(0.2, {1: 11.0, 2: 2.26, 4: 1.61, 10: 1.37}), (0.5, {1: 470.0, 2: 28.7, 4: 3.83, 10: 2.47})],
)
def test_aggregate_noise_of_the_sparse_row(rho: float, expected: dict[int, float]) -> None:
    """m = 1,000, v = 20, random colluders: within 1 % for this draw of graph and colluders.

    These are extreme values of one draw, decided by the client with most colluding neighbours: other
    draws differ much, for example 7 to 16 at rho = 0.2, kappa = 1.
    """
    graph = ShareGraph.regular(1_000, degree=20, beacon=bytes([3]))
    colluders = np.random.default_rng(3).choice(1_000, int(rho * 1_000), replace=False).tolist()
    for kappa, aggregate in expected.items():
        tau2 = calibrate_tau2(graph, unit_variance=kappa / 20, target_variance=1.0, colluders=colluders)
        assert 1_000 * tau2 * kappa == pytest.approx(aggregate, rel=0.01)


def test_dropped_clients_beyond_the_revealed_edges_count_too() -> None:
    """A repair may declare many clients dropped while no single client reveals more than its cap."""
    graph = ShareGraph.regular(60, degree=14, beacon=b"repair")
    arguments = _arguments(graph, 0.05)
    few = worst_case(graph, Corruption(revealed=2), **arguments)
    many = worst_case(graph, Corruption(revealed=2, dropped=15), **arguments)
    assert many.ratio < few.ratio
    assert Corruption(colluders=3, revealed=2, dropped=15).removed == 18


BEACON = b"beacon of the tests"


def least_tau2(graph: ShareGraph, **given: Any) -> float:
    return calibrate_for(graph, Corruption(), **given)[0]


def _reached(graph: ShareGraph, unit: float, tau2: float) -> Any:
    residual = tau2 * unit * graph.in_weight
    return effective_variance(graph, unit_variance=unit, residual_variance=residual)


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(4, 16),
    degree=st.integers(2, 8),
    unit=st.floats(1e-6, 1e3),
    spread=st.floats(1.0, 3.0),
    kappa=st.floats(0.5, 20.0),
)
def test_meets_every_target_and_no_more_than_needed(
    size: int, degree: int, unit: float, spread: float, kappa: float
) -> None:
    graph = ShareGraph.regular(size, degree=degree, beacon=BEACON)
    target = unit * degree / kappa * np.linspace(1.0, spread, size)
    tau2 = least_tau2(graph, unit_variance=unit, target_variance=target)
    assert np.all(_reached(graph, unit, tau2) >= target * (1.0 - 1e-12))
    assert np.any(_reached(graph, unit, 0.99 * tau2) < target)


@pytest.mark.parametrize("kappa", [1e3, 1e6, 1e12])
def test_very_strong_shares_need_the_noise_of_a_trusted_server(kappa: float) -> None:
    """Even where a matrix is so ill-conditioned that small residuals count as none; a clique has a closed form."""
    clique, sparse = ShareGraph.complete(10), ShareGraph.regular(10, degree=3, beacon=BEACON)
    tau2 = least_tau2(clique, unit_variance=kappa / 9, target_variance=1.0)
    assert 10 * tau2 * kappa == pytest.approx(1.0, abs=2.0 / kappa + 1e-9)
    tau2 = least_tau2(sparse, unit_variance=kappa / 3, target_variance=1.0)
    assert _reached(sparse, kappa / 3, tau2).min() >= 1.0 - 1e-9
    assert 1.0 - 1e-3 <= 10 * tau2 * kappa <= (1.01 if kappa <= 1e6 else 20.0)
