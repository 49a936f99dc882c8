"""Roots and tails against scipy's; rounds of thousands by gradients and sparse products, on the safe side."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binom, hypergeom, poisson

from niss.accounting import Plan
from niss.errors import PrivacyError
from niss.graph import ShareGraph
from niss.views import EXACT_LIMIT, Corruption, calibrate_for, effective_variance, joint, numerics
from niss.views.collusion import worst_case
from niss.views.numerics import (
    binomial_quantile,
    binomial_tail,
    conditional_variance,
    find_root,
    hypergeometric_tails,
    poisson_quantile,
    sampled_variance,
)
from support.graphs import drawn_graph
from support.refusals import refuses


@pytest.mark.parametrize("trials", [1, 2, 30, 1_000, 1_000_000])
@pytest.mark.parametrize("probability", [1e-6, 0.05, 0.3, 0.99])
def test_binomial_tails_and_quantiles(trials: int, probability: float) -> None:
    for count in {-1, 0, trials // 20, trials // 3, trials - 1, trials}:
        assert binomial_tail(count, trials, probability) == pytest.approx(
            float(binom.sf(count, trials, probability)), rel=1e-9, abs=1e-280
        )
    for tail in (1e-12, 1e-6, 0.1, 0.9):
        least = binomial_quantile(tail, trials, probability)
        assert least == int(binom.isf(tail, trials, probability))


@pytest.mark.parametrize(
    ("population", "marked", "drawn"),
    [
        (9, 3, 4),
        (9, 8, 7),
        (199, 40, 20),
        (999, 200, 100),
        (1_999, 1_900, 300),
        (999_999, 200_000, 500),
        (5, 0, 3),
    ],
)
def test_hypergeometric_tails(population: int, marked: int, drawn: int) -> None:
    counts = np.arange(min(marked, drawn))
    expected = hypergeom.sf(counts, population, marked, drawn)
    np.testing.assert_allclose(
        hypergeometric_tails(population, marked, drawn), expected, rtol=1e-6, atol=1e-290
    )


@pytest.mark.parametrize("mean", [1e-4, 0.3, 2.0, 50.0])
@pytest.mark.parametrize("tail", [1e-7, 1e-3, 0.2])
def test_poisson_quantiles(mean: float, tail: float) -> None:
    assert poisson_quantile(tail, mean, 10_000) == int(poisson.isf(tail, mean))
    assert poisson_quantile(tail, mean, 0) == 0


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        (lambda x: x**3 - 2.0, 0.0, 5.0),
        (lambda x: math.exp(x) - 1e-6, -50.0, 3.0),
        (lambda x: math.log(x / 7.0), 1e-9, 1e9),
        (lambda x: math.copysign(1.0, x - 0.3), -1.0, 1.0),
        (lambda x: x, 0.0, 1.0),
        (lambda x: math.tanh(40.0 * (x - 0.77)), 0.0, 1.0),
    ],
)
def test_roots_are_those_of_brentq_to_the_last_bit(function, low: float, high: float) -> None:
    for xtol in (2e-12, 1e-6):
        assert find_root(function, low, high, xtol=xtol) == brentq(function, low, high, xtol=xtol)


def test_no_root_where_the_sign_stays() -> None:
    for function in (lambda x: x * x + 1.0, lambda _: math.nan):
        with pytest.raises(ValueError, match="sign"):
            find_root(function, -1.0, 1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--participants", "200", "--collusion", "0.2"],
        ["--participants", "1000000", "--collusion", "0.2", "--dropout", "0.05", "--mode", "repair"],
    ],
)
def test_a_plan_leaves_the_slow_packages_alone(arguments: list[str]) -> None:
    code = (
        "import sys; from niss.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "slow = {'scipy.stats', 'scipy.optimize', 'torch', 'matplotlib', 'flwr'} & set(sys.modules); "
        "assert not slow, slow"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


NOBODY = Corruption()


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group counts as too large for the matrix."""
    monkeypatch.setattr(numerics, "EXACT_LIMIT", 1)
    monkeypatch.setattr(numerics, "DENSE_LIMIT", 1)


@pytest.fixture
def no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that inverts a whole matrix may be called."""

    def refuse(*_: object) -> None:
        raise AssertionError("a dense matrix was inverted")

    monkeypatch.setattr(numerics.lapack, "dpotrf", refuse)
    monkeypatch.setattr(np.linalg, "eigh", refuse)


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
    graph = drawn_graph(kind, size, degree, draw)
    residual = draw.uniform(1.0 - spread, 1.0, size) * 10.0 ** draw.uniform(-4.0, 0.0)
    exact = effective_variance(graph, unit_variance=unit, residual_variance=residual)
    bound = numerics.connected_bound.__wrapped__(graph).variance(unit, residual)
    assert np.all(bound <= exact * (1.0 + 1e-8))
    assert np.all(bound >= residual)


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize(("degree", "close"), [(5, 0.98), (10, 0.995), (20, 0.998)])
def test_it_is_close_on_graphs_as_they_aredrawn_graph(degree: int, close: float) -> None:
    graph = ShareGraph.regular(800, degree=degree, beacon=b"close")
    residual = np.full(800, 1.15 / 800)
    exact = effective_variance(graph, unit_variance=4.0 / degree, residual_variance=residual)
    bound = numerics.connected_bound.__wrapped__(graph).variance(4.0 / degree, residual)
    assert np.min(bound / exact) > close


def test_small_groups_of_a_large_round_are_exact() -> None:
    groups = np.arange(60).reshape(6, 10).tolist()
    graph = ShareGraph.coalition(60, groups=groups, degree=3, beacon=b"groups")
    residual = np.linspace(0.1, 1.0, 60)
    residual[groups[2]] = 0.0
    exact = effective_variance(graph, unit_variance=0.7, residual_variance=residual)
    found = numerics.connected_bound(graph).variance(0.7, residual)
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


@pytest.mark.usefixtures("no_matrix")
@pytest.mark.parametrize("kappa", [1.0, 10.0])
@pytest.mark.parametrize(("size", "degree"), [(501, 20), (1_500, 20), (1_000, 30)])
def test_rounds_with_many_neighbours_need_no_matrix_and_hardly_more_noise(
    size: int, degree: int, kappa: float
) -> None:
    """Half a per cent of what conjugate gradients find for the client that the bound leaves least."""
    graph = drawn_graph("regular", size, degree, np.random.default_rng(7))
    given = {"unit_variance": kappa / degree, "residual_variance": 1.15 / size}
    worst = worst_case(graph, NOBODY, target_variance=1.0, **given)
    (true,) = effective_variance(graph, clients=[worst.client], **given)
    assert not worst.exact
    assert 0.995 * true < worst.ratio <= true


def test_rounds_with_few_neighbours_keep_the_exact_view() -> None:
    for kind, degree, limit in (
        ("regular", 10, EXACT_LIMIT),
        ("unequal", 2, EXACT_LIMIT),
        ("regular", 20, 500),
    ):
        assert numerics.exact_limit(drawn_graph(kind, 700, degree, np.random.default_rng(8))) == limit


def test_the_exact_view_and_the_bound_meet_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = ShareGraph.regular(300, degree=10, beacon=b"limit")
    exact = worst_case(graph, NOBODY, unit_variance=0.4, residual_variance=0.004, target_variance=1.0)
    monkeypatch.setattr(numerics, "EXACT_LIMIT", 299)
    numerics.connected_bound.cache_clear()
    bound = worst_case(graph, NOBODY, unit_variance=0.4, residual_variance=0.004, target_variance=1.0)
    numerics.connected_bound.cache_clear()
    assert exact.exact
    assert not bound.exact
    assert 0.995 * exact.ratio < bound.ratio <= exact.ratio


@pytest.mark.usefixtures("all_large")
def test_a_graph_of_which_nothing_is_proved_is_refused() -> None:
    plan = Plan(epsilon=8.0, delta=1e-6, clip=1.0, participations=1, kappa=4.0, neighbours=1)
    with pytest.raises(PrivacyError, match="nothing is proved"):
        plan.for_round(
            np.arange(2_001), weights=np.full(2_001, 1.0 / 2_001), records=np.ones(2_001, int), beacon=b"b"
        )


GRAPHS: dict[str, tuple[str, int, int]] = {
    "regular": ("regular", 600, 20), "sparse": ("regular", 450, 3), "unequal": ("unequal", 280, 2),
    "random": ("random", 300, 8),
}  # fmt: skip


def _graph(kind: str) -> ShareGraph:
    return drawn_graph(*GRAPHS[kind], np.random.default_rng(0))


@pytest.mark.parametrize("kind", sorted(GRAPHS))
@pytest.mark.parametrize("tau2", [1e-3, 0.3])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_few_clients_agree_with_the_whole_and_are_never_above_it(
    kind: str, tau2: float, share: float
) -> None:
    graph = _graph(kind)
    rng = np.random.default_rng(1)
    colluders = rng.choice(graph.size, int(share * graph.size), replace=False).tolist()
    common: dict[str, Any] = {
        "unit_variance": 0.07,
        "residual_variance": tau2 * 0.07 * graph.in_weight * rng.uniform(0.5, 1.5, graph.size),
        "colluders": colluders,
    }
    honest = np.setdiff1d(np.arange(graph.size), colluders)
    whole = effective_variance(graph, **common)
    places = rng.permutation(honest.size)[:6]
    few = effective_variance(graph, clients=honest[places].tolist(), **common)
    np.testing.assert_allclose(few, whole[places], rtol=1e-8)
    # The whole matrix has rounding errors of its own, of about 1e-13 / tau2.
    assert np.all(few <= whole[places] * (1.0 + 1e-10))
    assert np.any(few != whole[places])


def test_the_error_bound_covers_a_solution_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """With crude solutions the result is lower by percents, and still never above the truth."""
    graph = _graph("regular")
    covariance = joint.hidden_noise(graph, unit_variance=0.05, residual=np.full(600, 0.05)).covariance
    truth = conditional_variance(covariance.toarray())
    exact = numerics.cg
    for tolerance in (1e-1, 1e-2, 1e-4):

        def crude(*args: Any, rtol: float, _crude: float = tolerance, **options: Any) -> Any:
            assert rtol < _crude
            return exact(*args, rtol=_crude, **options)

        monkeypatch.setattr(numerics, "cg", crude)
        found = sampled_variance(covariance, np.arange(5), least_residual=0.05)
        assert np.all(found <= truth[:5])
        assert np.all(found >= truth[:5] * (1.0 - 20.0 * tolerance))


def test_a_solver_that_gives_up_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    covariance = joint.hidden_noise(_graph("sparse"), unit_variance=1.0, residual=np.ones(450)).covariance
    monkeypatch.setattr(numerics, "cg", lambda _matrix, unit, **_: (unit, 1))
    with pytest.raises(PrivacyError, match="full precision"):
        sampled_variance(covariance, np.array([3]), least_residual=1.0)


@pytest.mark.parametrize("kind", ["sparse", "unequal"])
def test_clients_are_answered_in_the_order_asked(kind: str) -> None:
    graph = _graph(kind)
    common: dict[str, Any] = {
        "unit_variance": 0.2,
        "residual_variance": np.linspace(0.01, 0.1, graph.size),
        "colluders": range(0, graph.size, 7),
        "dropped": [1, 2],
    }
    whole = effective_variance(graph, **common)
    honest = [k for k in range(3, graph.size) if k % 7]
    for asked in ([honest[40], honest[3], honest[40]], honest[::-1], honest[5:30]):
        few = effective_variance(graph, clients=asked, **common)
        np.testing.assert_allclose(few, whole[[honest.index(k) for k in asked]], rtol=1e-8)
    assert effective_variance(graph, clients=[], **common).shape == (0,)


@pytest.mark.parametrize(
    ("size", "asked", "colluders"),
    [
        *((size, asked, [1]) for size in (4, 400) for asked in ([1], [2], [0, 400], [-1])),
        (4, [0], [0, 1, 3]),
    ],
)
def test_only_honest_clients_that_uploaded_can_be_asked_for(
    size: int, asked: list[int], colluders: list[int]
) -> None:
    graph = ShareGraph.regular(size, degree=3, beacon=b"b")
    with refuses("clients", match="not among the honest"):
        effective_variance(
            graph, unit_variance=1.0, residual_variance=1.0, colluders=colluders, dropped=[2], clients=asked
        )


@pytest.fixture
def _small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (numerics, joint):
        monkeypatch.setattr(module, "DENSE_LIMIT", 50)


@pytest.mark.usefixtures("_small_limit")
def test_a_matrix_too_large_is_refused_with_a_hint() -> None:
    graph = ShareGraph.regular(51, degree=3, beacon=b"b")
    with refuses("clients", "51 clients are too many") as caught:
        effective_variance(graph, unit_variance=1.0, residual_variance=1.0)
    assert caught.value.hint is not None
    assert "clients=" in caught.value.hint
    assert effective_variance(graph, unit_variance=1.0, residual_variance=1.0, colluders=[0]).size == 50
    assert effective_variance(graph, unit_variance=1.0, residual_variance=1.0, clients=range(20)).size == 20


@pytest.mark.usefixtures("_small_limit")
def test_clients_laid_open_need_no_matrix() -> None:
    """No residual in a group: the answer is 0 at any size; a group that has some is not held up by it."""
    graph = ShareGraph.coalition(90, groups=[range(30), range(30, 90)])
    residual = np.where(np.arange(90) < 30, 0.0, 0.5)
    values = effective_variance(graph, unit_variance=1.0, residual_variance=residual, clients=[0, 80, 29])
    np.testing.assert_array_equal(values[[0, 2]], 0.0)
    alone = effective_variance(ShareGraph.complete(60), unit_variance=1.0, residual_variance=0.5, clients=[0])
    assert values[1] == pytest.approx(alone[0], rel=1e-8)
    bare = effective_variance(graph, unit_variance=1.0, residual_variance=0.0, clients=range(5))
    np.testing.assert_array_equal(bare, 0.0)


@pytest.mark.usefixtures("_small_limit")
def test_without_a_bound_on_the_eigenvalues_nothing_is_claimed() -> None:
    graph = ShareGraph.complete(60)
    residual = np.where(np.arange(60) < 30, 0.0, 0.5)
    for scales in (None, np.full(60 * 59, 0.9)):
        with pytest.raises(PrivacyError, match="without residual noise") as caught:
            effective_variance(
                graph, unit_variance=1.0, residual_variance=residual, clients=[40], scales=scales
            )
        assert caught.value.hint is not None


@pytest.mark.parametrize("coordinates", [None, 2])
def test_drawn_factors_agree_too(coordinates: int | None) -> None:
    graph = _graph("sparse")
    shape = (graph.senders.size,) if coordinates is None else (graph.senders.size, coordinates)
    scales = np.random.default_rng(5).normal(1.0, 0.2, shape)
    common: dict[str, Any] = {"unit_variance": 0.3, "residual_variance": 0.01, "scales": scales}
    whole = effective_variance(graph, **common)
    few = effective_variance(graph, clients=[7, 100], **common)
    np.testing.assert_allclose(few, whole[[7, 100]], rtol=1e-8)


@pytest.mark.slow
def test_a_hundred_thousand_clients_follow_the_dense_formula() -> None:
    """1/eff = 1/(m tau^2 sigma_k^2) + 1/((2 + tau^2) sigma_k^2), to 5 % for v = 20."""
    size = 100_000
    graph = ShareGraph.regular(size, degree=20, beacon=b"b")
    tau2 = 2.0 / size
    values = effective_variance(
        graph, unit_variance=1 / 20, residual_variance=tau2, clients=[0, 50_000, 99_999]
    )
    formula = 1.0 / (1.0 / (size * tau2) + 1.0 / (2.0 + tau2))
    np.testing.assert_allclose(values, formula, rtol=0.05)
