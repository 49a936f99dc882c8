"""The smallest distortion that keeps every client's promise in the joint view."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.accounting import calibrate_tau2, effective_variance
from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph

BEACON = b"beacon of the tests"


def _reached(graph: ShareGraph, unit: float, tau2: float, colluders: Any = ()) -> Any:
    residual = tau2 * unit * graph.in_weight
    return effective_variance(graph, unit_variance=unit, residual_variance=residual, colluders=colluders)


def test_the_papers_thirty_clients_need_a_tau2_of_about_two_over_m() -> None:
    graph = ShareGraph.complete(30)
    assert calibrate_tau2(graph, unit_variance=1 / 29, target_variance=1.0) == pytest.approx(0.061, abs=1e-3)


def _aggregate_on_the_complete_graph(size: int, kappa: float) -> float:
    """m * residual / sigma_k^2 for shares of strength kappa."""
    unit = kappa / (size - 1)
    tau2 = calibrate_tau2(ShareGraph.complete(size), unit_variance=unit, target_variance=1.0)
    return size * tau2 * unit * (size - 1)


@pytest.mark.parametrize("size", [100, 300])
@pytest.mark.parametrize(
    ("kappa", "low", "high"), [(1, 1.84, 2.0), (2, 1.33, 1.33), (4, 1.14, 1.14), (10, 1.05, 1.05)]
)
def test_aggregate_noise_of_the_theory_table(size: int, kappa: float, low: float, high: float) -> None:
    """The row rho = 0, to 2 %, once m is large enough for the dense formula."""
    assert 0.98 * low <= _aggregate_on_the_complete_graph(size, kappa) <= 1.02 * high


@pytest.mark.parametrize("size", [2, 3, 10, 30])
@pytest.mark.parametrize("kappa", [1.0, 2.0, 4.0, 10.0])
def test_aggregate_noise_of_small_complete_rounds_solves_the_exact_equation(size: int, kappa: float) -> None:
    """The eigenvalues of Sigma are r (once, the sum) and r + 2 m w: (Sigma^-1)_kk = 1 by hand."""
    aggregate = _aggregate_on_the_complete_graph(size, kappa)
    difference = aggregate / size + 2 * size * kappa / (size - 1)
    assert 1.0 / aggregate + (1.0 - 1.0 / size) / difference == pytest.approx(1.0, rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(4, 16),
    degree=st.integers(2, 8),
    unit=st.floats(1e-6, 1e3),
    spread=st.floats(1.0, 3.0),
    kappa=st.floats(0.5, 20.0),
    colluding=st.integers(0, 2),
)
def test_meets_every_target_and_no_more_than_needed(
    size: int, degree: int, unit: float, spread: float, kappa: float, colluding: int
) -> None:
    graph = ShareGraph.regular(size, degree=degree, beacon=BEACON)
    target = unit * degree / kappa * np.linspace(1.0, spread, size)
    colluders = range(colluding)
    tau2 = calibrate_tau2(graph, unit_variance=unit, target_variance=target, colluders=colluders)
    honest = target[colluding:]
    assert np.all(_reached(graph, unit, tau2, colluders) >= honest * (1.0 - 1e-12))
    assert np.any(_reached(graph, unit, 0.99 * tau2, colluders) < honest)


def test_the_worst_client_of_an_unbalanced_graph_decides() -> None:
    graph = ShareGraph(4, [(0, 1, 3.0), (1, 2, 1.0), (2, 3, 0.5), (3, 0, 0.2), (1, 0, 2.0)])
    tau2 = calibrate_tau2(graph, unit_variance=2.0, target_variance=[0.1, 0.2, 0.3, 0.4])
    ratios = _reached(graph, 2.0, tau2) / [0.1, 0.2, 0.3, 0.4]
    assert ratios.min() == pytest.approx(1.0, rel=1e-9)
    assert ratios.min() >= 1.0 - 1e-12


def test_groups_pay_for_themselves() -> None:
    """Two groups of five cost as much as one round of five, not of ten."""
    unit = 0.25
    single = calibrate_tau2(ShareGraph.complete(5), unit_variance=unit, target_variance=1.0)
    groups = ShareGraph.coalition(10, groups=[range(5), range(5, 10)])
    assert calibrate_tau2(groups, unit_variance=unit, target_variance=1.0) == pytest.approx(single, rel=1e-9)


def test_more_colluders_need_more_distortion() -> None:
    graph = ShareGraph.complete(20)
    needed = [
        calibrate_tau2(graph, unit_variance=1 / 19, target_variance=1.0, colluders=range(count))
        for count in (0, 4, 10, 19)
    ]
    assert needed == sorted(needed)
    assert len(set(needed)) == 4
    assert needed[-1] == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("kappa", [1e3, 1e6, 1e12])
def test_very_strong_shares_need_the_noise_of_a_trusted_server(kappa: float) -> None:
    """Even where the matrix is so ill-conditioned that small residuals count as none."""
    graph = ShareGraph.complete(10)
    unit = kappa / 9
    tau2 = calibrate_tau2(graph, unit_variance=unit, target_variance=1.0)
    assert _reached(graph, unit, tau2).min() >= 1.0 - 1e-9
    assert 1.0 - 1e-3 <= 10 * tau2 * unit * 9 <= (1.01 if kappa <= 1e6 else 20.0)


def test_a_client_that_receives_nothing_is_refused_with_a_hint() -> None:
    beacons = (bytes([number]) for number in range(256))
    graphs = (ShareGraph.random(12, degree=1, beacon=beacon) for beacon in beacons)
    graph = next(graph for graph in graphs if graph.in_weight.min() == 0.0)
    with pytest.raises(PrivacyError, match="receive no share") as caught:
        calibrate_tau2(graph, unit_variance=1.0, target_variance=1.0)
    assert caught.value.hint is not None
    assert "regular" in caught.value.hint


def test_somebody_must_be_honest() -> None:
    with pytest.raises(PrivacyError, match="no honest client"):
        calibrate_tau2(ShareGraph.complete(3), unit_variance=1.0, target_variance=1.0, colluders=[0, 1, 2])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"unit_variance": 0.0}, "unit_variance"),
        ({"unit_variance": math.nan}, "unit_variance"),
        ({"target_variance": 0.0}, "target_variance"),
        ({"target_variance": -1.0}, "target_variance"),
        ({"target_variance": math.inf}, "target_variance"),
        ({"target_variance": [1.0, 2.0]}, "target_variance"),
        ({"colluders": [7]}, "colluders"),
    ],
)
def test_bad_input_names_the_field(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        calibrate_tau2(ShareGraph.complete(3), **({"unit_variance": 1.0, "target_variance": 1.0} | arguments))
    assert caught.value.field == field
