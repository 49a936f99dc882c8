"""Settings with fixed cohorts: every rival runs, its promise is computed again, and what is wrong with it shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.reproduce import promises
from experiments.reproduce.beyond import run_setting, setting_config
from experiments.reproduce.design import (
    COMPARED,
    METHODS,
    VARIANTS,
    Choice,
    Contestant,
    Setting,
    find_setting,
)
from experiments.reproduce.promises import promise_faults
from experiments.reproduce.recompute import CarriedNoise, banded_noise, dearest_cohort
from experiments.reproduce.results import Result, select
from niss.errors import ConfigError
from niss.mechanism.noise import correlated_noise


@pytest.fixture(scope="module")
def setting() -> Setting:
    """Seven rounds of three cohorts: the last of them takes part less often."""
    return replace(find_setting("mnist-mini-iid-client-20-of-60", rounds=7), epochs=1, images=5)


@pytest.fixture(scope="module")
def result(setting, tmp_path_factory) -> Result:
    folder = tmp_path_factory.mktemp("rivals")
    return run_setting(
        setting,
        out=folder / "results",
        work=folder / "work",
        epsilons=(3.0,),
        variants=tuple(VARIANTS),
        seeds=(1,),
        device="cpu",
    )


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(promises.TRAINING_IMAGES, "mnist-mini", 10_000)
    # In so few rounds of so few clients it is a matter of luck how many drop out.
    monkeypatch.setattr(promises, "LUCK", 0.3)


def test_everyone_runs_under_what_makes_a_difference_and_keeps_the_promise(result):
    found = {(cell.labels["method"], cell.labels["variant"]) for cell in result.cells}
    wanted = {
        (name, variant.name)
        for name in METHODS
        for variant in VARIANTS.values()
        if METHODS[name].suffers(variant) and not variant.late and name != "alone"
    }
    assert found == wanted
    assert {name for name, _ in found} == set(METHODS) - {"alone"}
    assert list(promise_faults(result)) == []
    assert result.base["sampling"] == "cyclic"
    assert all(cell.mechanism for cell in result.cells if cell.labels["method"] != "fedavg")
    spoiled = replace(result, cells=tuple(replace(cell, epsilon_joint=0.5) for cell in result.cells))
    assert {cell for cell, _, _ in promise_faults(spoiled)} >= {cell.id for cell in result.cells}


def test_dropouts_keep_the_promise(result):
    repaired, tolerated = (
        select(result, method="niss-planned", variant=variant)[0] for variant in ("repair", "tolerate")
    )
    assert [cell.labels["mode"] for cell in (repaired, tolerated)] == ["repair", "tolerate"]
    assert max(cell.epsilon_joint for cell in (repaired, tolerated)) <= 3.0 * (1 + 1e-6)
    assert tolerated.aggregate_variance > 1.3 * repaired.aggregate_variance


NEW = [name for name in ("central-dp-sampled", "central-mf", "secagg-ddg", "niss-carried") if name in METHODS]


@pytest.mark.parametrize("method", NEW)
@pytest.mark.parametrize(
    "change",
    [
        lambda cell: {"epsilon_joint": 0.97 * cell.epsilon_joint},
        lambda cell: {"epsilon_joint": 1.01 * cell.epsilon_joint},
        lambda _: {"epsilon_joint": None},
        lambda cell: {"labels": {**cell.labels, "clip": 1.05 * cell.labels["clip"]}},
        lambda cell: {"labels": {**cell.labels, "participations": cell.labels["participations"] - 1}},
        lambda cell: {"mechanism": {**cell.mechanism, "gaussian_delta": 2e-5}},
    ],
    ids=["smaller", "larger", "none", "clip", "participations", "delta"],
)
def test_a_wrong_number_shows(result, method, change):
    cell = next(
        one for one in result.cells if one.labels["method"] == method and one.labels["variant"] == "none"
    )
    wrong = replace(cell, **change(cell))
    assert list(promise_faults(replace(result, cells=(wrong,))))


@pytest.mark.parametrize("method", NEW)
def test_too_little_noise_shows(result, method):
    for cell in [one for one in result.cells if one.labels["method"] == method]:
        wrong = replace(cell, aggregate_variance=0.5 * cell.aggregate_variance)
        variant = VARIANTS[cell.labels["variant"]]
        if method == "niss-carried" and variant.dropout:
            wrong = replace(cell, mechanism={**cell.mechanism, "residual": 0.8 * cell.mechanism["residual"]})
        assert list(promise_faults(replace(result, cells=(wrong,)))), cell.id


def brute_force(size: int, rounds: int, noise: CarriedNoise, known: int) -> np.ndarray:
    """K of a client, from the covariance over all uploads of the honest in all rounds."""
    honest = size - known
    uploads = honest * rounds
    covariance = noise.residual / size * np.eye(uploads)

    def link(one: int, other: int, variance: float) -> None:
        arrow = np.zeros(uploads)
        arrow[one], arrow[other] = 1.0, -1.0
        covariance[:] += variance * np.outer(arrow, arrow)

    for at in range(rounds):
        for one in range(honest):
            for other in range(one):
                link(at * honest + one, at * honest + other, noise.spatial / (size - 1))
            for other in range(honest if at + 1 < rounds else 0):
                link(at * honest + one, (at + 1) * honest + other, noise.carried / size**2)
    mine = np.arange(rounds) * honest
    return np.linalg.inv(covariance)[np.ix_(mine, mine)]


@pytest.mark.parametrize("known", [0, 2])
def test_carried_noise_by_brute_force(known):
    noise = CarriedNoise(5, 6, spatial=40.0, carried=7.0, residual=2.5, known=known)
    assert noise.spent() == pytest.approx(brute_force(6, 5, noise, known), rel=1e-9)
    assert dearest_cohort(noise.spent(), 2) == pytest.approx(noise.spent()[::2, ::2].sum())


@pytest.mark.parametrize("strategy", ["square-root", "optimised"])
def test_banded_noise_inverts_its_matrix(strategy):
    """The package finds its optimised bands in another way."""
    spent, by_round, model = banded_noise(12, 4, 5, strategy)
    assert model == pytest.approx(correlated_noise(12, 5, 4, strategy=strategy).model_variance, rel=1e-4)
    covariance = np.linalg.inv(spent)
    assert np.diag(covariance) == pytest.approx(by_round)
    prefix = np.tril(np.ones((12, 12)))
    assert np.diag(prefix @ covariance @ prefix.T) == pytest.approx(model)
    # At least four rounds apart the columns do not overlap.
    assert spent[0, 4:] == pytest.approx(np.zeros(8), abs=1e-12)


def test_settings_are_found_by_their_names():
    for name in COMPARED:
        setting = find_setting(name)
        assert setting.name == name
        assert setting.clients % setting.participants == 0
        if setting.split == "natural":
            continue  # a training set of text is not cut
        cut = setting.cut_to({"mnist": 50_000, "cifar10": 41_667}[setting.dataset])
        assert cut.clients % cut.participants == 0
        assert (cut.participants, cut.images) == (setting.participants, setting.images)
        for name, sampling in (
            ("fedavg", "cyclic"),
            ("dp-fedavg", "cyclic"),
            ("central-dp", "cyclic"),
            ("central-dp-sampled", "poisson"),
        ):
            contestant = Contestant(METHODS[name], VARIANTS["none"], 3.0)
            config = setting_config(setting, contestant, Choice())
            assert config.sampling_of(config.methods[0]) == sampling
            assert (config.training.sampling, config.privacy.scope) == ("cyclic", "training")
            assert config.privacy.epsilon == 3.0
    large, small = map(find_setting, ("mnist-iid-client-1000-of-6000", "cifar10-iid-client-100-of-1000"))
    assert (large.images, large.rounds, small.images, small.rounds) == (10, 30, 50, 100)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mnist-iid", "unknown setting"),
        ("mnist-client-10-of-20", "unknown setting"),
        ("nothing-iid-client-10-of-20", "unknown setting"),
        ("mnist-iid-record-10-of-20", "unknown setting"),
        ("mnist-iid-client-30-of-100", "cannot deal"),
        ("mnist-iid-client-1-of-10", "cannot deal"),
    ],
)
def test_settings_that_cannot_be(name, words):
    with pytest.raises(ConfigError, match=words):
        find_setting(name)
