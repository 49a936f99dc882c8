"""Rounds of thousands in which nobody colludes: bounded by sparse products, never above the exact matrix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.accounting import Plan
from niss.errors import PrivacyError
from niss.graph import ShareGraph
from niss.views import EXACT_LIMIT, Corruption, calibrate_for, covariance, effective_variance, spectrum
from niss.views.collusion import worst_case

NOBODY = Corruption()


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group counts as too large for the matrix."""
    monkeypatch.setattr(spectrum, "EXACT_LIMIT", 1)
    monkeypatch.setattr(spectrum, "DENSE_LIMIT", 1)


@pytest.fixture
def no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that inverts a whole matrix may be called."""

    def refuse(*_: object) -> None:
        raise AssertionError("a dense matrix was inverted")

    monkeypatch.setattr(covariance.lapack, "dpotrf", refuse)
    monkeypatch.setattr(np.linalg, "eigh", refuse)


def _drawn(kind: str, size: int, degree: float, draw: np.random.Generator) -> ShareGraph:
    beacon = draw.bytes(8)
    if kind == "unequal":
        return ShareGraph.regular(size, degree=2, beacon=beacon, shares=draw.uniform(2.0, 3.0, size))
    if kind == "coalition":
        groups = [range(size // 2), range(size // 2, size)]
        return ShareGraph.coalition(size, groups=groups, degree=min(degree, size // 2 - 1), beacon=beacon)
    if kind == "random":
        return ShareGraph.random(size, degree=degree, beacon=beacon)
    return ShareGraph.regular(size, degree=degree, beacon=beacon)


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("kind", ["regular", "random", "unequal", "coalition"])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(6, 40),
    degree=st.sampled_from([1.0, 1.5, 2.0, 3.0, 5.0]),
    unit=st.floats(0.01, 100.0),
    spread=st.floats(0.0, 0.99),
)
def test_it_is_never_above_the_exact_view(
    kind: str, seed: int, size: int, degree: float, unit: float, spread: float
) -> None:
    draw = np.random.default_rng(seed)
    graph = _drawn(kind, size, degree, draw)
    residual = draw.uniform(1.0 - spread, 1.0, size) * 10.0 ** draw.uniform(-4.0, 0.0)
    exact = effective_variance(graph, unit_variance=unit, residual_variance=residual)
    bound = spectrum.connected_bound.__wrapped__(graph).variance(unit, residual)
    assert np.all(bound <= exact * (1.0 + 1e-8))
    assert np.all(bound >= residual)


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize(("degree", "close"), [(5, 0.98), (10, 0.995), (20, 0.998)])
def test_it_is_close_on_graphs_as_they_are_drawn(degree: int, close: float) -> None:
    graph = ShareGraph.regular(800, degree=degree, beacon=b"close")
    residual = np.full(800, 1.15 / 800)
    exact = effective_variance(graph, unit_variance=4.0 / degree, residual_variance=residual)
    bound = spectrum.connected_bound.__wrapped__(graph).variance(4.0 / degree, residual)
    assert np.min(bound / exact) > close


def test_small_groups_of_a_large_round_are_exact() -> None:
    groups = np.arange(60).reshape(6, 10).tolist()
    graph = ShareGraph.coalition(60, groups=groups, degree=3, beacon=b"groups")
    residual = np.linspace(0.1, 1.0, 60)
    residual[groups[2]] = 0.0
    exact = effective_variance(graph, unit_variance=0.7, residual_variance=residual)
    found = spectrum.connected_bound(graph).variance(0.7, residual)
    np.testing.assert_allclose(found, exact, rtol=1e-9)
    assert np.all(found[groups[2]] == 0.0)


@pytest.mark.usefixtures("no_matrix")
def test_a_round_of_ten_thousand_is_calibrated_without_its_matrix() -> None:
    graph = ShareGraph.regular(10_000, degree=10, beacon=b"many")
    tau2, worst = calibrate_for(graph, NOBODY, unit_variance=0.4, target_variance=1.0)
    assert worst.ratio == pytest.approx(1.0, abs=1e-9)
    assert not worst.exact
    residual = tau2 * 0.4 * graph.in_weight
    # Conjugate gradients, with an error bound of their own, find at least what was promised, and little more.
    few = effective_variance(
        graph, unit_variance=0.4, residual_variance=residual, clients=[worst.client, 0, 1]
    )
    assert np.all(few >= 1.0)
    assert np.all(few < 1.01)
    assert residual.sum() < 1.16


@pytest.mark.usefixtures("no_matrix")
@pytest.mark.parametrize("tau2", [None, 1e-4])
def test_what_a_large_round_charges_holds_for_everyone(tau2: float | None) -> None:
    size = EXACT_LIMIT + 500
    plan = Plan(epsilon=8.0, delta=1e-6, clip=1.0, participations=1, kappa=4.0, neighbours=6, tau2=tau2)
    weights = np.full(size, 1.0 / size)
    made = plan.for_round(np.arange(size), weights=weights, records=np.ones(size, dtype=int), beacon=b"b")
    charged = made.joint_variance
    assert charged is not None
    few = effective_variance(
        made.graph,
        unit_variance=made.unit_variance,
        residual_variance=made.residual_variance,
        clients=range(5),
    )
    assert np.all(charged[:5] <= few)
    assert np.all(charged[:5] > 0.97 * few)
    if tau2 is None:
        assert np.all(made.joint_mu <= plan.sensitivity(weights, 1) / np.sqrt(made.own_variance) * (1 + 1e-9))


def test_the_exact_view_and_the_bound_meet_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = ShareGraph.regular(300, degree=10, beacon=b"limit")
    exact = worst_case(graph, NOBODY, unit_variance=0.4, residual_variance=0.004, target_variance=1.0)
    monkeypatch.setattr(spectrum, "EXACT_LIMIT", 299)
    monkeypatch.setattr("niss.views.collusion.EXACT_LIMIT", 299)
    spectrum.connected_bound.cache_clear()
    bound = worst_case(graph, NOBODY, unit_variance=0.4, residual_variance=0.004, target_variance=1.0)
    spectrum.connected_bound.cache_clear()
    assert exact.exact
    assert not bound.exact
    assert 0.995 * exact.ratio < bound.ratio <= exact.ratio


@pytest.mark.usefixtures("all_large")
def test_a_graph_of_which_nothing_is_proved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niss.views.collusion.EXACT_LIMIT", 1)
    plan = Plan(epsilon=8.0, delta=1e-6, clip=1.0, participations=1, kappa=4.0, neighbours=1)
    with pytest.raises(PrivacyError, match="nothing is proved"):
        plan.for_round(
            np.arange(2_001), weights=np.full(2_001, 1.0 / 2_001), records=np.ones(2_001, int), beacon=b"b"
        )
