"""Same epsilon, joint view: every method at epsilon 1, 3 and 8 over the whole training.

Every method is tuned by the same search (`tuning`), judged on images held out of the training set, on which no client
trains; test images are never seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reproduce import design
from experiments.reproduce.results import Result, read_result, result_path
from experiments.reproduce.runner import run_cells
from experiments.reproduce.tuning import (
    Axes,
    axes_for,
    axes_of,
    choice_of,
    chosen,
    next_trials,
    trials_of,
)
from niss.accounting import forecast
from niss.data import Dataset, load_dataset
from niss.errors import ConfigError
from niss.randomness import SimStream
from niss.simulation import Config, make_config

HELD_OUT = 1 / 6
MODELS: dict[str, Callable[[int], dict[str, Any]]] = {
    "mlp": lambda width: {"name": "mlp", "hidden": [width]},
    "gru": lambda width: {"name": "gru", "width": width},
    "resnet": lambda width: {"name": "resnet", "width": width, "layers": 1},
}
"""The `model` section of each for the width that a choice names."""


def setting_config(
    setting: design.Setting,
    contestant: Contestant,
    choice: design.Choice,
    *,
    seed: int = 1,
    device: str = "auto",
) -> Config:
    """The run of one method under a variant that makes a difference to it."""
    method, variant = contestant.method, contestant.variant
    if setting.batch is not None:
        return _silos_config(setting, contestant, choice, seed=seed, device=device)
    values: dict[str, Any] = {
        "name": setting.name,
        "seed": seed,
        "rounds": setting.rounds,
        "data": {
            "dataset": setting.dataset,
            "split": design.SPLITS[setting.split],
            "clients": setting.clients,
            "samples_per_client": setting.images,
        },
        "model": MODELS[setting.model](choice.hidden),
        "training": {
            "participants": setting.participants,
            "sampling": "cyclic",
            "epochs": setting.epochs,
            "batch_size": setting.batch_size,
            "learning_rate": choice.learning_rate,
            "device": device,
            **method.training,
        },
        "privacy": {
            "unit": design.UNIT,
            "clip": choice.clip,
            "epsilon": contestant.epsilon or 1.0,
            "delta": design.DELTA,
        },
        "methods": [{"name": method.kind, "label": method.name, **method.settings}],
    }
    if method.faults:
        values["privacy"] |= {"collusion": variant.rho, "dropout": variant.dropout, "mode": variant.mode}
    if method.noise == "shares":
        rounds = make_config(values).participations
        planned = _planned(variant, participants=setting.participants, participations=rounds).plan
        values["methods"][0] |= {name: getattr(planned, name) for name in ("kappa", "neighbours", "graph")}
    if method.noise == "carried":
        sizes = {name: getattr(setting, name) for name in ("participants", "clients", "rounds")}
        kappa = _planned(variant, carry=True, **sizes).plan.kappa
        values["methods"][0] |= {"kappa": kappa, "neighbours": setting.participants - 1}
    return make_config(values)


def _silos_config(
    setting: design.Setting, contestant: Contestant, choice: design.Choice, *, seed: int, device: str
) -> Config:
    """As `setting_config`, of silos that hide single records."""
    method, variant = contestant.method, contestant.variant
    promise = {"unit": "record", "batch": setting.batch, "delta": design.DELTA}
    faults = {"collusion": variant.rho if method.faults else 0.0, "mode": "tolerate"}
    entry: dict[str, Any] = {"name": method.kind, "label": method.name}
    if method.noise == "shares":
        sizes = {"participants": setting.participants, "records": setting.images, "rounds": setting.rounds}
        planned = _planned(variant, **promise, **sizes, epsilon=contestant.epsilon, mode="tolerate").plan
        entry |= {name: getattr(planned, name) for name in ("kappa", "neighbours", "graph")}
    return make_config(
        {
            "name": setting.name,
            "seed": seed,
            "rounds": setting.rounds,
            "data": {
                "dataset": setting.dataset,
                "split": design.SPLITS[setting.split],
                "silos": setting.clients,
            },
            "model": {"name": setting.model, "activation": "tanh"},
            "training": {
                "server_optimizer": "momentum",
                "server_rate": choice.learning_rate,
                "late": variant.late,
                "device": device,
                "tf32": setting.dataset == "cifar10",
            },
            "privacy": {**promise, **faults, "clip": choice.clip, "epsilon": contestant.epsilon or 1.0},
            "methods": [entry],
        }
    )


@cache
def _planned(variant: design.Variant, **sizes: Any) -> Any:
    """The planner's choice. It depends on ratios of variances alone, so one epsilon serves for all."""
    faults: dict[str, Any] = {"collusion": variant.rho, "dropout": variant.dropout, "mode": variant.mode}
    return forecast(**{"delta": design.DELTA, **faults, **sizes})


@lru_cache(maxsize=1)
def _loaded(name: str) -> Dataset:
    """A process runs many cells of one dataset."""
    return load_dataset(name)


def hold_out(dataset: Dataset, share: float = HELD_OUT) -> Dataset:
    """The training samples alone, a fixed random part of them in the place of the test samples.

    Where they belong to clients, everyone keeps the same part of its own, rounded up.
    """
    size = len(dataset.train_labels)
    order = SimStream(0).child("validation", dataset.name).generator().permutation(size)
    owners = getattr(dataset, "owners", None)
    if owners is None:
        held = np.sort(order[: round(share * size)])
    else:
        by_owner = order[np.argsort(owners[order], kind="stable")]
        sizes = np.bincount(owners)
        place = np.arange(size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        held = np.sort(by_owner[place < np.repeat((share * sizes).astype(int), sizes)])
    kept = np.setdiff1d(np.arange(size), held)
    whose = {} if owners is None else {"owners": owners[kept]}
    return replace(
        dataset,
        name=f"{dataset.name}, validation",
        train_inputs=dataset.train_inputs[kept],
        train_labels=dataset.train_labels[kept],
        test_inputs=dataset.train_inputs[held],
        test_labels=dataset.train_labels[held],
        **whose,
    )


def majority(dataset: Dataset) -> float:
    """Accuracy on the test samples of whoever always says what is most frequent among the training labels."""
    most = np.bincount(dataset.train_labels.ravel()).argmax()
    return float((dataset.test_labels == most).mean())


def _own_base(setting: design.Setting, dataset: Dataset) -> dict[str, Any]:
    """What a setting with a model of its own says of its data: how often it is tested, and what needs no learning."""
    if setting.model == "mlp" or setting.batch is not None:
        return {}
    return {"tested": int(dataset.test_labels.size), "majority": majority(dataset)}


@dataclass(frozen=True)
class Contestant:
    """A method under a variant at an epsilon; None where nothing is promised."""

    method: design.Method
    variant: design.Variant
    epsilon: float | None

    def labels(self, choice: design.Choice) -> dict[str, Any]:
        """Of one trial."""
        return {
            "method": self.method.name,
            "variant": self.variant.name,
            "epsilon": self.epsilon,
            **asdict(choice),
            "clip": choice.clip if self.method.private else None,
        }


def contestants(
    epsilons: Sequence[float], methods: Sequence[str], variants: Sequence[str] = ("none",)
) -> list[Contestant]:
    """Everyone who is tuned and run for these methods, under the variants that make a difference to them."""
    return [
        Contestant(method, design.VARIANTS[variant], epsilon)
        for method, variant in product((design.METHODS[name] for name in methods), variants)
        if method.suffers(design.VARIANTS[variant])
        for epsilon in (epsilons if method.private else (None,))
    ]


def tune(
    setting: design.Setting,
    epsilons: Sequence[float],
    *,
    methods: Sequence[str] | None = None,
    variants: Sequence[str] = ("none",),
    device: str = "auto",
    axes: Axes | None = None,
    **places: Any,
) -> Result:
    """The search of everyone in turn, trained without the held-out images; each trial is kept once it is done.

    All searches take their next step together, so that trials of one width train as one cohort. `places` and the rest
    are as those of `run_cells`.
    """
    data = hold_out(_loaded(setting.dataset))
    cut = setting.cut_to(len(data.train_labels))
    base = {**cut.base, **_own_base(setting, data), "held_out": len(data.test_labels), "seed": 1}
    grid = axes or axes_of(setting)
    variants = [variant for variant in variants if variant in setting.variants]
    mine = contestants(epsilons, methods or [one.name for one in design.contestants_of(setting)], variants)
    while True:
        cells: dict[str, tuple[dict[str, Any], Config]] = {}
        tuned = read_result(result_path(places["out"], design.TUNING, setting.name))
        for one in mine:
            for choice in _open_trials(one, tuned, grid):
                labels = one.labels(choice)
                cells[design.trial_cell(labels)] = labels, setting_config(cut, one, choice, device=device)
        result = run_cells(design.TUNING, setting.name, base, cells, dataset=data, **places)
        if not cells:
            return result


def _open_trials(one: Contestant, tuned: Result | None, axes: Axes) -> list[design.Choice]:
    trials = {
        choice_of(cell.labels, axes): cell.accuracy
        for cell in trials_of(tuned, one.method.name, one.variant.name)
        if cell.labels["epsilon"] == one.epsilon
    }
    return next_trials(axes_for(one.method, axes), trials)


def run_setting(
    setting: design.Setting,
    *,
    epsilons: Sequence[float] | None = None,
    methods: Sequence[str] | None = None,
    variants: Sequence[str] = ("none",),
    seeds: Sequence[int] | None = None,
    device: str = "auto",
    tuned_in: Path | None = None,
    **places: Any,
) -> Result:
    """All methods at all epsilons under all variants, with the choices tuned for this setting where there are any.

    epsilons, seeds  the setting's, unless they are given
    tuned_in  where the tuning is, unless in `out`; `places` and the rest are as those of `run_cells`
    """
    methods = methods or [one.name for one in design.contestants_of(setting)]
    names = (*design.METHODS, *design.VARIANTS)
    unknown = [name for name in (*methods, *variants) if name not in names]
    if unknown:
        raise ConfigError(f"unknown name {unknown[0]!r}", hint="use one of: " + ", ".join(names))
    variants = [variant for variant in variants if variant in setting.variants]
    tuned = read_result(result_path(tuned_in or places["out"], design.TUNING, setting.name))
    cells: dict[str, tuple[dict[str, Any], Config]] = {}
    mine = contestants(epsilons or setting.epsilons, methods, variants)
    for one, seed in product(mine, seeds or setting.seeds):
        method, variant = one.method.name, one.variant.name
        # Without noise the one choice serves for every epsilon.
        choice, tuned_for = chosen(tuned, setting, method, one.epsilon or 1.0, variant)
        config = setting_config(setting, one, choice, seed=seed, device=device)
        plan = config.plan(config.methods[0])
        labels = {
            "method": method,
            "epsilon": one.epsilon,
            "rho": one.variant.rho,
            "dropout": one.variant.dropout,
            "mode": one.variant.mode,
            "variant": variant,
            "seed": seed,
            "participations": plan.participations,
            "kappa": plan.kappa if plan.kind.uses("kappa") else None,
            "neighbours": plan.neighbours if plan.kind.uses("neighbours") else None,
            "tuned_for": tuned_for,
            **asdict(choice),
        }
        cells[design.run_cell(variant, method, one.epsilon, seed)] = labels, config
    data = _loaded(setting.dataset)
    base = {**setting.base, **_own_base(setting, data)}
    return run_cells(setting.experiment, setting.name, base, cells, dataset=data, **places)
