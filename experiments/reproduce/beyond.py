"""Same epsilon, joint view: every method at epsilon 1, 3 and 8 over the whole training.

Every method is tuned by the same search (`tuning`), judged on images held out of the training set, on which no client
trains; test images are never seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reproduce import design
from experiments.reproduce.results import Result, read_result, result_path
from experiments.reproduce.runner import Watch, run_cells
from experiments.reproduce.tuning import (
    Axes,
    axes_for,
    axes_of,
    choice_of,
    chosen,
    next_trials,
    trials_of,
)
from niss.accounting import Plan, forecast
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
    method: design.Method,
    choice: design.Choice,
    *,
    epsilon: float,
    variant: design.Variant = design.VARIANTS["none"],
    seed: int = 1,
    device: str = "auto",
) -> Config:
    """The run of one method. Colluders and dropouts count only where they make a difference to it."""
    drops = variant.dropout if method.suffers(variant) else 0.0
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
        "privacy": {"unit": design.UNIT, "clip": choice.clip, "epsilon": epsilon, "delta": design.DELTA},
        "methods": [{"name": method.kind, "label": method.name, **method.settings}],
    }
    if method.faults:
        values["protocol"] = {"mode": variant.mode, "dropout": drops}
        values["privacy"] |= {"colluders": math.ceil(variant.rho * setting.participants - 1e-9)}
    if method.noise == "shares":
        planned = _planned(setting.participants, make_config(values).participations, variant)
        values["privacy"] |= {"revealed": planned.revealed, "dropped": planned.dropped}
        values["methods"][0] |= {name: getattr(planned, name) for name in ("kappa", "neighbours", "graph")}
    if method.noise == "carried":
        kappa = _carried_kappa(setting.participants, setting.clients, setting.rounds, variant)
        values["methods"][0] |= {"kappa": kappa, "neighbours": setting.participants - 1}
    return make_config(values)


@cache
def _carried_kappa(participants: int, clients: int, rounds: int, variant: design.Variant) -> float:
    """The planner's choice where noise is carried to the next round; one epsilon serves for all."""
    return forecast(
        carry=True,
        participants=participants,
        clients=clients,
        rounds=rounds,
        delta=design.DELTA,
        collusion=variant.rho,
        dropout=variant.dropout,
        mode=variant.mode,
    ).kappa


@cache
def _planned(participants: int, participations: int, variant: design.Variant) -> Plan:
    """The planner's choice. It depends on ratios of variances alone, so one epsilon serves for all."""
    return forecast(
        participants=participants,
        delta=design.DELTA,
        participations=participations,
        collusion=variant.rho,
        dropout=variant.dropout,
        mode=variant.mode,
    ).plan


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
    if setting.model == "mlp":
        return {}
    return {"tested": int(dataset.test_labels.size), "majority": majority(dataset)}


@dataclass(frozen=True)
class Contestant:
    """What is tuned: a method under a variant at an epsilon; None where nothing is promised."""

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
    """Everyone who is tuned for these methods, under the variants that make a difference to them."""
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
    out: Path,
    work: Path,
    methods: Sequence[str] | None = None,
    variants: Sequence[str] = ("none",),
    device: str = "auto",
    axes: Axes | None = None,
    at_once: int | None = None,
    progress: Watch | None = None,
) -> Result:
    """The search of everyone in turn, trained without the held-out images; each trial is kept once it is done.

    All searches take their next step together, so that trials of one width train as one cohort.
    """
    data = hold_out(_loaded(setting.dataset))
    cut = setting.cut_to(len(data.train_labels))
    base = {
        **cut.base,
        **_own_base(setting, data),
        "held_out": len(data.test_labels),
        "seed": 1,
    }
    grid = axes or axes_of(setting)
    variants = [variant for variant in variants if variant in setting.variants]
    mine = contestants(epsilons, methods or tuple(design.METHODS), variants)
    while True:
        cells: dict[str, tuple[dict[str, Any], Config]] = {}
        for one in mine:
            tuned = read_result(result_path(out, design.TUNING, setting.name))
            for choice in _open_trials(one, tuned, grid):
                labels = one.labels(choice)
                config = setting_config(
                    cut,
                    one.method,
                    choice,
                    epsilon=one.epsilon or 1.0,
                    variant=one.variant,
                    device=device,
                )
                cells[design.trial_cell(labels)] = labels, config
        result = run_cells(
            design.TUNING,
            setting.name,
            base,
            cells,
            out=out,
            work=work,
            dataset=data,
            at_once=at_once,
            progress=progress,
        )
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
    out: Path,
    work: Path,
    epsilons: Sequence[float] = design.EPSILONS,
    methods: Sequence[str] | None = None,
    variants: Sequence[str] = ("none",),
    seeds: Sequence[int] = (1, 2, 3),
    device: str = "auto",
    at_once: int | None = None,
    progress: Watch | None = None,
    tuned_in: Path | None = None,
) -> Result:
    """All methods at all epsilons under all variants, with the choices tuned for this setting where there are any.

    tuned_in  where the tuning is, unless in `out`
    """
    methods = methods or tuple(design.METHODS)
    variants = [
        variant for variant in variants if variant not in design.VARIANTS or variant in setting.variants
    ]
    unknown = [
        name for name in (*methods, *variants) if name not in design.METHODS and name not in design.VARIANTS
    ]
    if unknown:
        raise ConfigError(
            f"unknown name {unknown[0]!r}",
            hint="use one of: " + ", ".join((*design.METHODS, *design.VARIANTS)),
        )
    tuned = read_result(result_path(tuned_in or out, design.TUNING, setting.name))
    cells: dict[str, tuple[dict[str, Any], Any]] = {}
    for variant, method, epsilon, seed in product(variants, methods, epsilons, seeds):
        cell = _cell(setting, design.VARIANTS[variant], method, epsilon, seed, tuned, device)
        if cell is not None:
            identity, labels, config = cell
            cells.setdefault(identity, (labels, config))
    data = _loaded(setting.dataset)
    return run_cells(
        setting.experiment,
        setting.name,
        {**setting.base, **_own_base(setting, data)},
        cells,
        out=out,
        work=work,
        dataset=data,
        at_once=at_once,
        progress=progress,
    )


def _cell(
    setting: design.Setting,
    variant: design.Variant,
    method: str,
    epsilon: float,
    seed: int,
    tuned: Result | None,
    device: str,
) -> tuple[str, dict[str, Any], Any] | None:
    """One cell; None where a variant leaves a method as it is, so that its plain cell stands for it."""
    contestant = design.METHODS[method]
    if not contestant.suffers(variant):
        return None
    choice, tuned_for = chosen(tuned, setting, method, epsilon, variant.name)
    config = setting_config(
        setting,
        contestant,
        choice,
        epsilon=epsilon,
        variant=variant,
        seed=seed,
        device=device,
    )
    plan, target = config.plan(config.methods[0]), epsilon if contestant.private else None
    labels = {
        "method": method,
        "epsilon": target,
        "rho": variant.rho,
        "dropout": variant.dropout,
        "mode": variant.mode,
        "variant": variant.name,
        "seed": seed,
        "participations": plan.participations,
        "kappa": plan.kappa if plan.kind.uses("kappa") else None,
        "neighbours": plan.neighbours if plan.kind.uses("neighbours") else None,
        "tuned_for": tuned_for,
        **asdict(choice),
    }
    return design.run_cell(variant.name, method, target, seed), labels, config
