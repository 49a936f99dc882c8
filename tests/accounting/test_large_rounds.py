"""Many clients: conjugate gradients for a few of them, against the whole matrix, on the safe side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from niss.accounting import effective_variance
from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.views import covariance as covariance_module
from niss.views import joint
from niss.views.covariance import conditional_variance, sampled_variance

SIZES = {"regular": 600, "sparse": 450, "unequal": 280, "random": 300}


def _graph(kind: str) -> ShareGraph:
    size = SIZES[kind]
    if kind == "unequal":
        shares = np.random.default_rng(0).uniform(5.0, 15.0, size)
        return ShareGraph.regular(size, degree=5, beacon=b"b", shares=shares)
    if kind == "random":
        return ShareGraph.random(size, degree=8, beacon=b"b")
    return ShareGraph.regular(size, degree=20 if kind == "regular" else 3, beacon=b"b")


@pytest.mark.parametrize("kind", sorted(SIZES))
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
    exact = covariance_module.cg
    for tolerance in (1e-1, 1e-2, 1e-4):

        def crude(*args: Any, rtol: float, _crude: float = tolerance, **options: Any) -> Any:
            assert rtol < _crude
            return exact(*args, rtol=_crude, **options)

        monkeypatch.setattr(covariance_module, "cg", crude)
        found = sampled_variance(covariance, np.arange(5), least_residual=0.05)
        assert np.all(found <= truth[:5])
        assert np.all(found >= truth[:5] * (1.0 - 20.0 * tolerance))


def test_a_solver_that_gives_up_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    covariance = joint.hidden_noise(_graph("sparse"), unit_variance=1.0, residual=np.ones(450)).covariance
    monkeypatch.setattr(covariance_module, "cg", lambda _matrix, unit, **_: (unit, 1))
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


@pytest.mark.parametrize("size", [4, 400])
@pytest.mark.parametrize("asked", [[1], [2], [0, 400], [-1]])
def test_only_honest_clients_that_uploaded_can_be_asked_for(size: int, asked: list[int]) -> None:
    graph = ShareGraph.regular(size, degree=3, beacon=b"b")
    with pytest.raises(ConfigError, match="not among the honest") as caught:
        effective_variance(
            graph, unit_variance=1.0, residual_variance=1.0, colluders=[1], dropped=[2], clients=asked
        )
    assert caught.value.field == "clients"


def test_nobody_honest_can_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="not among the honest") as caught:
        effective_variance(
            ShareGraph.complete(3), unit_variance=1.0, residual_variance=1.0, colluders=range(3), clients=[0]
        )
    assert caught.value.field == "clients"


@pytest.fixture
def _small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (covariance_module, joint):
        monkeypatch.setattr(module, "DENSE_LIMIT", 50)


@pytest.mark.usefixtures("_small_limit")
def test_a_matrix_too_large_is_refused_with_a_hint() -> None:
    graph = ShareGraph.regular(51, degree=3, beacon=b"b")
    with pytest.raises(ConfigError, match="51 clients are too many") as caught:
        effective_variance(graph, unit_variance=1.0, residual_variance=1.0)
    assert caught.value.field == "clients"
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
def test_ten_thousand_clients_dense_and_sampled() -> None:
    graph = ShareGraph.regular(10_000, degree=20, beacon=b"b")
    common: dict[str, Any] = {"unit_variance": 1 / 20, "residual_variance": 2e-4}
    whole = effective_variance(graph, **common)
    sample = np.random.default_rng(0).choice(10_000, 20, replace=False)
    few = np.concatenate(
        [effective_variance(graph, clients=part.tolist(), **common) for part in np.split(sample, 2)]
    )
    np.testing.assert_allclose(few, whole[sample], rtol=1e-8)
    assert np.all(few <= whole[sample] * (1.0 + 1e-9))


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
