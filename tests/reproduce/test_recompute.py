"""The verifier's own arithmetic against the package's, which it does not import."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.reproduce import recompute
from experiments.reproduce.promises import noise_in_model, promise_faults
from experiments.reproduce.recompute import Round, delta_at, epsilon_at, mu_at, protection
from experiments.reproduce.results import read_result
from niss.graph import ShareGraph
from niss.mechanism import gdp_epsilon, gdp_mu
from niss.views import effective_variance

RESULTS = Path(__file__).parents[2] / "results" / "paper"


def test_it_imports_nothing_of_the_package():
    tree = ast.parse(Path(recompute.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not [module for module in modules if module and module.split(".")[0] in ("niss", "experiments")]


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 10.0, 700.0])
@pytest.mark.parametrize("delta", [1e-4, 1e-9])
def test_the_gaussian_curve(epsilon, delta):
    mu = mu_at(epsilon, delta)
    assert mu == pytest.approx(gdp_mu(epsilon, delta), rel=1e-8)
    assert epsilon_at(mu, delta) == pytest.approx(gdp_epsilon(mu, delta), rel=1e-8)
    assert delta_at(mu, epsilon) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(("size", "degree"), [(30, 29), (100, 30)])
@pytest.mark.parametrize("gone", [0, 6])
def test_the_joint_view(size, degree, gone):
    """Another graph of the same kind: the worst-off client agrees within two percent."""
    graph = (
        ShareGraph.complete(size, weight=degree / (size - 1))
        if degree == size - 1
        else ShareGraph.regular(size, degree=degree, beacon=b"another")
    )
    theirs = effective_variance(
        graph, unit_variance=4.0 / degree, residual_variance=np.full(size, 2.0 / size), colluders=range(gone)
    ).min()
    assert protection(size, degree, 4.0, 2.0 / size, gone) == pytest.approx(theirs, rel=0.02)


def test_composition():
    promise = Round(sensitivity=0.5, participations=9, epsilon=3.0, delta=1e-5, size=10)
    assert promise.own_variance == pytest.approx(9 * (0.5 / gdp_mu(3.0, 1e-5)) ** 2, rel=1e-8)
    assert promise.epsilon_of(promise.own_variance) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"grid_delta": 2e-5}, "spends delta 2.98e-05"),
        ({"delta": 4.8e-5}, "spends delta 4.8e-05"),
        ({"kappa": 30.0}, "ran with kappa = 30.0"),
        ({"mu_joint": 0.1}, "its rounds compose to at most"),
    ],
)
def test_what_a_run_recorded_of_its_noise_is_checked(changed, words):
    """Delta is the whole delta: what the grid of the protocol costs is in it."""
    whole = read_result(RESULTS / "beyond" / "mnist-iid-client-1000-of-6000.json")
    assert whole is not None
    (cell,) = [one for one in whole.cells if one.id == "none/niss-planned/epsilon=3/seed-1"]
    result = replace(whole, cells=(replace(cell, mechanism={**cell.mechanism, **changed}),))
    found = [detail for _, _, detail in promise_faults(result)]
    assert (found == []) if words is None else any(words in detail for detail in found)


def test_the_mean_of_the_last_models_leaves_out_most_of_the_noise_under_way():
    """The numbers of the page on the paper: at round 95 of 100, beside one model and beside `central-mf`."""
    whole = read_result(RESULTS / "beyond" / "mnist-iid-client-100-of-1000.json")
    carried, banded = (
        next(one for one in whole.cells if one.id == f"none/{method}/epsilon=1/seed-1")
        for method in ("niss-carried", "central-mf")
    )
    rounds = np.arange(1, 96)
    covariance = carried.mechanism["residual"] * np.minimum.outer(rounds, rounds)
    covariance += carried.mechanism["carried"] * np.eye(95)
    single = noise_in_model(whole, carried)[94]
    assert covariance[-1, -1] == pytest.approx(single)
    mean = covariance[-10:, -10:].mean()
    assert mean / single == pytest.approx(0.80, abs=0.005)
    assert mean / noise_in_model(whole, banded)[94] == pytest.approx(1.03, abs=0.005)
