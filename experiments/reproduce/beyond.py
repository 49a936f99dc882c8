"""Same epsilon, joint view: every method at the epsilons of a setting, over the whole training.

Every method is tuned by the same search (`tuning`), judged on samples held out of the training set, on which no client
trains; test samples are never seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reproduce import design
from experiments.reproduce.design import Choice, Contestant, Setting
from experiments.reproduce.paper import SPLITS
from experiments.reproduce.results import Result, read_result, result_path, write_result
from experiments.reproduce.runner import Watch, cell_of, run_cells
from experiments.reproduce.tuning import chosen, open_trials
from niss.accounting import forecast
from niss.data import Dataset, load_dataset
from niss.errors import ConfigError
from niss.randomness import SimStream
from niss.simulation import Config, make_config, preset, with_overrides
from niss.simulation.runner import compare_together

HELD_OUT, TESTED = 1 / 6, 1 / 5
MODELS: dict[str, Callable[[int], dict[str, Any]]] = {
    "mlp": lambda width: {"name": "mlp", "hidden": [width]},
    "gru": lambda width: {"name": "gru", "width": width},
    "resnet": lambda width: {"name": "resnet", "width": width, "layers": 1},
    "cnn": lambda _: {"name": "cnn", "activation": "tanh"},
    "logistic": lambda _: {"name": "logistic"},
}
"""The `model` section of each for the width that a choice names."""


def setting_config(
    setting: Setting, one: Contestant, choice: Choice, *, seed: int = 1, device: str = "auto"
) -> Config:
    """The run of one method under a variant that makes a difference to it."""
    method, variant = one.method, one.variant
    data: dict[str, Any] = {"dataset": setting.dataset, "split": SPLITS[setting.split]}
    privacy: dict[str, Any] = {"clip": choice.clip, "epsilon": one.epsilon or 1.0, "delta": design.DELTA}
    faults = {"collusion": variant.rho, "dropout": variant.dropout, "mode": variant.mode}
    if setting.batch is None:
        data |= {"clients": setting.clients, "samples_per_client": setting.images}
        training = {
            "participants": setting.participants,
            "sampling": "cyclic",
            "epochs": setting.epochs,
            "batch_size": setting.batch_size,
            "learning_rate": choice.learning_rate,
        }
        privacy |= {"unit": design.UNIT} | (faults if method.faults else {})
    else:
        data |= {"silos": setting.clients}
        training = {
            "server_optimizer": "momentum",
            "server_rate": choice.learning_rate,
            "late": variant.late,
        }
        privacy |= {"unit": "record", "batch": setting.batch} | faults
    return make_config(
        {
            "name": setting.name,
            "seed": seed,
            "rounds": setting.rounds,
            "data": data,
            "model": MODELS[setting.model](choice.hidden),
            "training": training | {"device": device},
            "privacy": privacy,
            "methods": [
                {"name": method.kind, "label": method.name, **method.settings, **_own_settings(setting, one)}
            ],
        }
    )


@cache
def _own_settings(setting: Setting, one: Contestant) -> dict[str, Any]:
    """The bands of a matrix; how strong the planner has shares be, and between whom."""
    kind, faults = one.method.noise, one.variant
    if kind == "banded":
        return {"strategy": setting.bands}
    if kind not in ("shares", "carried"):
        return {}
    assumed: dict[str, Any] = {
        "collusion": faults.rho,
        "dropout": faults.dropout,
        "mode": faults.mode,
        "delta": design.DELTA,
    }
    sizes: dict[str, Any] = {"participants": setting.participants}
    if setting.batch is not None:
        sizes |= {"unit": "record", "batch": setting.batch, "records": setting.images}
        sizes |= {"rounds": setting.rounds, "epsilon": one.epsilon}
    elif kind == "carried":
        sizes |= {"carry": True, "clients": setting.clients, "rounds": setting.rounds}
    else:
        # The choice depends on ratios of variances alone, so one epsilon serves for all.
        sizes |= {"participations": setting.participations}
    plan = forecast(**assumed, **sizes).plan
    if kind == "carried":
        return {"kappa": plan.kappa, "neighbours": setting.participants - 1}
    return {name: getattr(plan, name) for name in ("kappa", "neighbours", "graph")}


@lru_cache(maxsize=1)
def load(name: str) -> Dataset:
    """A dataset of niss, or one of the tables that come with scikit-learn; a process runs many cells of one."""
    return _table(name) if name in design.TABULAR else load_dataset(name)


def _table(name: str) -> Dataset:
    """Measurements as pictures of one row: three deviations to each side in 256 steps, as a fixed range would be.

    A fifth of the records, drawn once for all, are those that models are tested on.
    """
    import sklearn.datasets

    values, labels = getattr(sklearn.datasets, f"load_{name.replace('-', '_')}")(return_X_y=True)
    scaled = (values - values.mean(axis=0)) / np.maximum(values.std(axis=0), 1e-9)
    steps = np.rint(255.0 * np.clip((scaled + 3.0) / 6.0, 0.0, 1.0)).astype(np.uint8)[:, None, None, :]
    order = SimStream(0).child("test", name).generator().permutation(len(labels))
    tested, trained = np.split(order, [round(TESTED * len(labels))])
    classes, labels = int(labels.max()) + 1, labels.astype(np.int64)
    scale: dict[str, Any] = {"mean": (0.5,), "std": (1.0 / 6.0,)}
    return Dataset(name, steps[trained], labels[trained], steps[tested], labels[tested], classes, **scale)


def hold_out(dataset: Dataset, share: float = HELD_OUT) -> Dataset:
    """The training samples alone, a fixed random part of them in the place of the test samples.

    Where they belong to clients, everyone keeps the same part of its own, rounded up.
    """
    size = len(dataset.train_labels)
    order = SimStream(0).child("validation", dataset.name).generator().permutation(size)
    owners = dataset.owners
    if owners is None:
        held = np.sort(order[: round(share * size)])
    else:
        by_owner = order[np.argsort(owners[order], kind="stable")]
        sizes = np.bincount(owners)
        place = np.arange(size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        held = np.sort(by_owner[place < np.repeat((share * sizes).astype(int), sizes)])
    kept = np.setdiff1d(np.arange(size), held)
    return replace(
        dataset,
        name=f"{dataset.name}, validation",
        train_inputs=dataset.train_inputs[kept],
        train_labels=dataset.train_labels[kept],
        test_inputs=dataset.train_inputs[held],
        test_labels=dataset.train_labels[held],
        owners=None if owners is None else owners[kept],
    )


def majority(dataset: Dataset) -> float:
    """Accuracy on the test samples of whoever always says what is most frequent among the training labels."""
    most = np.bincount(dataset.train_labels.ravel()).argmax()
    return float((dataset.test_labels == most).mean())


def _own_base(setting: Setting, dataset: Dataset) -> dict[str, Any]:
    """What a setting with data of its own says of them: how often it is tested, and what needs no learning."""
    if not setting.guesses:
        return {}
    return {"tested": int(dataset.test_labels.size), "majority": majority(dataset)}


def held_out(setting: Setting) -> tuple[Setting, Dataset, dict[str, Any]]:
    """The setting of a search, its data, and what all trials have in common."""
    data = hold_out(load(setting.dataset))
    cut = setting.cut_to(len(data.train_labels))
    own = _own_base(setting, data)
    return cut, data, {**cut.base, **own, **setting.held_out_base(len(data.test_labels))}


def tune(
    setting: Setting,
    *,
    epsilons: Sequence[float] | None = None,
    methods: Sequence[str] | None = None,
    variants: Sequence[str] = ("none",),
    device: str = "auto",
    **places: Any,
) -> Result:
    """The search of everyone, trained without the held-out samples; each trial is kept once it is done.

    All searches take their next step together, so that trials of one width train as one cohort. The first epsilon,
    from which the others begin, is always among them. `places` and the rest are as those of `run_cells`.
    """
    cut, data, base = held_out(setting)
    first = setting.search.epsilons[:1] if setting.search.walks else ()
    wanted = dict.fromkeys((*first, *(epsilons or setting.search.epsilons)))
    mine = _contestants(setting, tuple(wanted), methods, variants)
    path = result_path(places["out"], design.TUNING, setting.name)
    seeds: tuple[int | None, ...] = (None,) if len(setting.search.seeds) == 1 else setting.search.seeds
    while True:
        cells: dict[str, tuple[dict[str, Any], Config]] = {}
        tuned = read_result(path)
        for one in mine:
            for choice, seed in product(open_trials(tuned, setting, one) or (), seeds):
                labels = one.trial(choice, seed)
                config = setting_config(cut, one, choice, seed=seed or 1, device=device)
                cells[design.trial_cell(labels)] = labels, config
        result = run_cells(design.TUNING, setting.name, base, cells, dataset=data, **places)
        if not cells:
            return result


def run_setting(
    setting: Setting,
    *,
    epsilons: Sequence[float] | None = None,
    methods: Sequence[str] | None = None,
    variants: Sequence[str] = ("none",),
    seeds: Sequence[int] | None = None,
    device: str = "auto",
    **places: Any,
) -> Result:
    """All methods at all epsilons under all variants, with the choices tuned for this setting where there are any.

    epsilons, seeds  the setting's, unless they are given; `places` and the rest are as those of `run_cells`
    """
    tuned = read_result(result_path(places["out"], design.TUNING, setting.name))
    cells: dict[str, tuple[dict[str, Any], Config]] = {}
    mine = _contestants(setting, epsilons or setting.epsilons, methods, variants)
    for one, seed in product(mine, seeds or setting.seeds):
        choice, tuned_for = chosen(tuned, setting, one)
        config = setting_config(setting, one, choice, seed=seed, device=device)
        plan = config.plan(config.methods[0])
        labels = one.labels | {
            "rho": one.variant.rho,
            "dropout": one.variant.dropout,
            "mode": one.variant.mode,
            "seed": seed,
            "participations": plan.participations,
            "kappa": plan.kappa if plan.kind.uses("kappa") else None,
            "neighbours": plan.neighbours if plan.kind.uses("neighbours") else None,
            "tuned_for": tuned_for,
            **asdict(choice),
        }
        cells[design.run_cell(labels)] = labels, config
    data = load(setting.dataset)
    base = {**setting.base, **_own_base(setting, data)}
    return run_cells(setting.experiment, setting.name, base, cells, dataset=data, **places)


def run_demo(
    name: str, *, out: Path, work: Path, device: str = "auto", progress: Watch | None = None
) -> Result:
    """The comparison that a preset ships with, all of its methods in one, as `niss compare` has them."""
    whole, (base, labels) = with_overrides(preset(name), {"training.device": device}), design.demo(name)
    (found,) = compare_together({name: whole}, out=work / design.DEMOS, progress=progress).values()
    cells = [
        cell_of(design.run_cell(own), own, replace(whole, methods=(method,)), run, found)
        for method, run in zip(whole.methods, found.results, strict=True)
        for own in [labels[method.title]]
    ]
    result = Result(design.DEMOS, name, base).with_cells(cells)
    write_result(result_path(out, design.DEMOS, name), result)
    return result


def _contestants(
    setting: Setting, epsilons: Sequence[float], methods: Sequence[str] | None, variants: Sequence[str]
) -> list[Contestant]:
    methods = methods or [one.name for one in design.methods_of(setting)]
    names = (*design.METHODS, *design.VARIANTS)
    unknown = [name for name in (*methods, *variants) if name not in names]
    if unknown:
        raise ConfigError(f"unknown name {unknown[0]!r}", hint="use one of: " + ", ".join(names))
    return design.contestants(epsilons, methods, [one for one in variants if one in setting.variants])
