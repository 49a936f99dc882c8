"""Settings with other models: tuned over axes of their own, computed again, and told apart from guessing."""

from __future__ import annotations

from dataclasses import fields, make_dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from experiments.reproduce import beyond, design, promises
from experiments.reproduce.beyond import hold_out, majority, run_setting, setting_config, tune
from experiments.reproduce.chart import write_figures
from experiments.reproduce.checks import check_files
from experiments.reproduce.comparisons import accuracies_table, learned_words
from experiments.reproduce.design import BEYOND, METHODS, TUNING, Choice, Search, Setting, find_setting
from experiments.reproduce.results import Result, read_result, result_path
from experiments.reproduce.text import computed_text, figure_faults
from niss.data import load_dataset
from niss.settings import to_values
from niss.simulation import make_config
from support.results import keep, made_up_cell

TRAINING = len(load_dataset("mnist-mini").train_labels)
TINY = Setting(
    "mnist-mini",
    "iid",
    participants=10,
    clients=40,
    rounds=4,
    epochs=1,
    images=TRAINING // 40,
    model="tiny",
    search=Search((0.3, 1.0, 3.0), (0.1, 0.3), (4,), Choice(1.0, 0.1, 4), epsilons=(3.0,), seeds=(1,)),
)
COMPARED = ("fedavg", "dp-fedavg", "central-dp", "niss-planned", "niss-carried")


def small(patch: pytest.MonkeyPatch) -> None:
    """A model of its own in a setting of its own, which takes a second to train."""
    patch.setitem(design.MODELLED, TINY.name, TINY)
    patch.setitem(beyond.MODELS, "tiny", lambda width: {"name": "mlp", "hidden": [width]})
    patch.setitem(promises.TRAINING_IMAGES, "mnist-mini", TRAINING)
    # On so few coordinates what is measured scatters more.
    patch.setattr(promises, "CLOSE", 0.1)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    places = {"out": folder / "results", "work": folder / "work", "methods": COMPARED, "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        tune(TINY, epsilons=(3.0,), **places)
        run_setting(TINY, epsilons=(1.0, 3.0, 8.0), seeds=(1, 2), variants=("none", "repair"), **places)
    return folder / "results"


def files(folder: Path) -> tuple[Result, Result]:
    found = [read_result(result_path(folder, experiment, TINY.name)) for experiment in (TUNING, BEYOND)]
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


def test_everyone_is_tuned_alike_and_runs_without_faults(measured: Path) -> None:
    tuned, runs = files(measured)
    tried = {name: sum(cell.labels["method"] == name for cell in tuned.cells) for name in COMPARED}
    assert tried["fedavg"] == 2
    assert all(4 <= tried[name] <= 6 for name in COMPARED[1:])
    assert len(runs.cells) == 2 + 4 * 3 * 2, "no variant but the one without faults"
    assert {cell.labels["variant"] for cell in runs.cells} == {"none"}
    assert all(cell.labels["tuned_for"] != "nothing" for cell in runs.cells)
    assert check_files(measured, partial=True) == []


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(
            ("settings", lambda runs, wrong=wrong: replace(runs, base=runs.base | wrong))
            for wrong in (
                {"majority": 0.123456789},
                {"participants": 11},
                {"model": "mlp"},
                {"server_rate": 0.1},
            )
        ),
        ("accuracy", lambda runs: _first(runs, accuracy=0.5)),
        (
            "accuracy",
            lambda runs: _first(runs, accuracy=0.50001, curve=tuple((t, 0.50001) for t in range(1, 5))),
        ),
        ("epsilon", lambda runs: _first(runs, epsilon_joint=0.9)),
        ("noise", lambda runs: _first(runs, aggregate_variance=1.0)),
        ("tuning", lambda runs: _first(runs, clip=0.7)),
    ],
)
def test_what_is_wrong_shows(measured: Path, tmp_path: Path, kind: str, change) -> None:
    tuned, runs = files(measured)
    for result in (tuned, change(runs)):
        keep(tmp_path, result)
    assert kind in {fault.kind for fault in check_files(tmp_path, partial=True)}


def test_a_trial_that_is_missing_shows(measured: Path, tmp_path: Path) -> None:
    tuned, _ = files(measured)
    keep(tmp_path, replace(tuned, cells=tuned.cells[1:]))
    assert "tuning" in {fault.kind for fault in check_files(tmp_path, partial=True)}


def _first(runs: Result, **changes: object) -> Result:
    """With changes in the first private cell: in its labels, or in the cell."""
    cell = next(cell for cell in runs.cells if cell.labels["epsilon"] is not None)
    labels = {name: changes.pop(name) for name in list(changes) if name in cell.labels}
    other = replace(cell, labels=cell.labels | labels, **changes)
    return replace(runs, cells=tuple(other if one is cell else one for one in runs.cells))


def test_tables_and_figure_are_made_of_the_files(measured: Path) -> None:
    table, words = accuracies_table(measured), learned_words(measured)
    for name in ("most frequent label", *COMPARED):
        assert f"| {name} |" in table
    assert words.startswith("- **mnist-mini, tiny**, 10 of 40 clients a round, 4 rounds: ")
    assert computed_text(measured, "learned") == "\n" + words
    assert "| mnist-mini-tiny | niss-carried |" in computed_text(measured, "tuning")
    assert {path.name for path in write_figures(measured)} >= {"rivals.png", "rivals-dark.png"}
    assert not [fault for fault in figure_faults(measured, None) if fault.where.startswith("rivals")]


def made_up(accuracies: dict[str, list[float]]) -> Result:
    """Runs of two seeds at epsilon 1, 3 and 8."""
    cells = [
        made_up_cell(
            f"{method}/{epsilon}/{seed}",
            {"method": method, "epsilon": epsilon, "variant": "none", "seed": seed, "tuned_for": "nothing"},
            accuracy + 0.001 * seed,
            epsilon_joint=epsilon,
        )
        for method, values in accuracies.items()
        for epsilon, accuracy in zip(
            (1.0, 3.0, 8.0) if METHODS[method].private else (None,), values, strict=True
        )
        for seed in (1, 2)
    ]
    return Result(BEYOND, TINY.name, {**TINY.base, "majority": 0.3, "tested": 1000}, tuple(cells))


@pytest.mark.parametrize(
    ("accuracies", "said", "marked"),
    [
        ({"fedavg": [0.6], "dp-fedavg": [0.2, 0.3, 0.5], "central-dp": [0.31, 0.5, 0.6]},
         "Nothing is learned at ε = 1 by dp-fedavg; at ε = 3 by dp-fedavg.", 2),
        ({"fedavg": [0.6], "dp-fedavg": [0.2, 0.5, 0.5], "central-dp": [0.3, 0.5, 0.6]},
         "Nothing is learned at ε = 1 by any private method.", 2),
        ({"fedavg": [0.6], "dp-fedavg": [0.4, 0.5, 0.5]}, "Every private method learns something.", 0),
        ({"fedavg": [0.3], "dp-fedavg": [0.4, 0.5, 0.5]}, "Not even FedAvg learns anything in so few rounds. ", 3),
    ],
)  # fmt: skip
def test_the_text_says_where_nothing_is_learned(tmp_path, accuracies, said: str, marked: int) -> None:
    """A point above the most frequent label, which is right 30 % of the time."""
    keep(tmp_path, made_up(accuracies))
    words = learned_words(tmp_path)
    assert said in words
    assert "the most frequent label is right 30.0 % of the time" in words
    assert accuracies_table(tmp_path).count("nothing learned") == marked


def test_who_owns_samples_keeps_most_of_its_own() -> None:
    base = load_dataset("mnist-mini")
    kind = make_dataclass("Owned", [("owners", object, None)], bases=(type(base),), frozen=True, eq=False)
    owners = np.sort(np.arange(len(base.train_labels)) ** 2 % 97)
    owners = np.unique(owners, return_inverse=True)[1].astype(np.int64)
    values = {one.name: getattr(base, one.name) for one in fields(base)}
    held = hold_out(kind(**{**values, "owners": owners}))
    before, after = np.bincount(owners), np.bincount(held.owners)
    np.testing.assert_array_equal(before - after, before // 6)
    assert len(held.train_labels) == len(held.owners) == after.sum()
    assert len(held.train_labels) + len(held.test_labels) == len(base.train_labels)
    # As many of each label in all as there were.
    both = np.concatenate([held.train_labels, held.test_labels])
    np.testing.assert_array_equal(np.sort(both), np.sort(base.train_labels))


def test_guessing_is_judged_on_every_label_of_the_test() -> None:
    base = load_dataset("mnist-mini")
    most = np.bincount(base.train_labels).argmax()
    assert majority(base) == np.mean(base.test_labels == most)
    texts = type("Texts", (), {"train_labels": np.array([[1, 1], [2, 0]]), "test_labels": np.array([[1, 2]])})
    assert majority(texts) == 0.5


@pytest.mark.parametrize("name", ["shakespeare-gru", "cifar10-resnet"])
def test_the_settings_are_whole(name: str) -> None:
    setting = find_setting(name)
    assert setting.name == name
    assert setting.clients % setting.participants == 0
    assert (setting.experiment, setting.variants) == (BEYOND, ("none",))
    assert len(design.methods_of(setting)) == len(METHODS) - 1
    assert find_setting(name, rounds=2).rounds == 2
    for method in METHODS.values():
        contestant = design.Contestant(method, design.VARIANTS["none"], 3.0)
        config = setting_config(setting, contestant, setting.search.start)
        assert config.training.participants == setting.participants
        assert config.privacy.collusion == 0.0
    assert make_config(to_values(config)) == config
