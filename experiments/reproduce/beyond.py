"""Same epsilon, joint view: every method at epsilon 1, 3 and 8 over the whole training; and the scale of a round.

Every method is tuned on the same small grid, judged on images held out of the training set; test images are never
seen. Every method gets the same number of trials: each combination of clip, rate and width, with one seed. FedAvg does
not clip whole updates, so in the client unit its trials with different clips would be the same run and are run once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reproduce.design import (
    BEYOND,
    EPSILONS,
    IMAGES_PER_CLIENT,
    METHODS,
    SCALE,
    SPLITS,
    TUNING,
    UNTUNED,
    VARIANTS,
    Choice,
    Method,
    Setting,
    Variant,
    find_setting,
)
from experiments.reproduce.results import Result, read_result, result_path, select
from experiments.reproduce.runner import Watch, run_cells
from niss.accounting import Plan, forecast
from niss.data import Dataset, load_dataset
from niss.errors import ConfigError
from niss.randomness import SimStream
from niss.simulation import Config, make_config

DELTA = 1e-5
PROTOCOL_PARTICIPANTS = 100
"""Dropouts of the client unit go through the real protocol in rounds of at most so many; else they are simulated."""
HELD_OUT = 1 / 6
TUNED = ("fedavg", "dp-fedavg", "central-dp", "niss-planned")
GRID = {
    "client": {"clip": (0.05, 0.1, 0.25, 0.5, 1.0), "learning_rate": (0.1, 0.2), "hidden": (16, 32)},
    "record": {"clip": (0.5, 1.0, 2.0), "learning_rate": (0.5, 2.0), "hidden": (32, 128)},
}


def setting_config(
    setting: Setting,
    method: Method,
    choice: Choice,
    *,
    epsilon: float,
    variant: Variant = VARIANTS["none"],
    seed: int = 1,
    device: str = "auto",
) -> Config:
    """The run of one method. Colluders and dropouts count only where noise is shared."""
    client = setting.unit == "client"
    niss = method.kind == "niss"
    drops = variant.dropout if niss else 0.0
    real = drops > 0.0 and client and setting.participants <= PROTOCOL_PARTICIPANTS
    values: dict[str, Any] = {
        "name": setting.name,
        "seed": seed,
        "rounds": setting.rounds,
        "exchange": "protocol" if real else "simulated",
        "data": {"dataset": setting.dataset, "split": SPLITS[setting.split], "clients": setting.clients},
        "model": {"name": "mlp", "hidden": [choice.hidden]},
        "training": {
            "participants": setting.participants,
            "sampling": "shuffled",
            "epochs": 5 if client else 1,
            "batch_size": 10,
            "learning_rate": choice.learning_rate,
            "device": device,
        },
        "privacy": {"unit": setting.unit, "clip": choice.clip, "epsilon": epsilon, "delta": DELTA},
        "methods": [{"name": method.kind, "label": method.name}],
    }
    if niss:
        values["protocol"] = {"mode": variant.mode, "dropout": drops}
        values["privacy"] |= {"colluders": math.ceil(variant.rho * setting.participants - 1e-9)}
        _share_noise(values, setting, method, variant, make_config(values).participations)
    return make_config(values)


def _share_noise(
    values: dict[str, Any], setting: Setting, method: Method, variant: Variant, participations: int
) -> None:
    """Who shares with how many, how strongly, and how much may be revealed: as the planner says."""
    if method.printed:
        values["methods"][0] |= {"distortion": "scalar", "tau2": 0.0}
        return
    planned = _planned(setting.participants, participations, variant, method.kappa)
    values["privacy"] |= {"revealed": planned.revealed, "dropped": planned.dropped}
    values["methods"][0] |= {
        "kappa": planned.kappa,
        "neighbours": planned.neighbours,
        "graph": planned.graph,
    }


@cache
def _planned(participants: int, participations: int, variant: Variant, kappa: float | None) -> Plan:
    """The planner's choice. It depends on ratios of variances alone, so one epsilon serves for all."""
    return forecast(
        participants=participants,
        delta=DELTA,
        participations=participations,
        collusion=variant.rho,
        dropout=variant.dropout,
        mode=variant.mode,
        kappa=kappa,
    ).plan


def setting_base(setting: Setting) -> Mapping[str, Any]:
    """What all cells of a setting have in common, for its result file."""
    return {
        "dataset": setting.dataset,
        "split": setting.split,
        "unit": setting.unit,
        "clients": setting.clients,
        "participants": setting.participants,
        "rounds": setting.rounds,
        "delta": DELTA,
        "local_epochs": 5 if setting.unit == "client" else 1,
        "batch_size": 10,
    }


def held_out_setting(setting: Setting, records: int) -> Setting:
    """The same setting on a training set cut to `records` images: as many to a client, hence fewer clients."""
    if setting.unit == "record":
        return setting
    clients = records // IMAGES_PER_CLIENT
    return replace(setting, clients=clients, participants=min(setting.participants, clients))


def choices(unit: str) -> list[Choice]:
    """The grid of a unit of privacy."""
    grid = GRID[unit]
    return [
        Choice(clip=clip, learning_rate=rate, hidden=int(hidden))
        for clip, rate, hidden in product(grid["clip"], grid["learning_rate"], grid["hidden"])
    ]


def hold_out(dataset: Dataset, share: float = HELD_OUT) -> Dataset:
    """The training images alone, a fixed random part of them in the place of the test images."""
    size = len(dataset.train_labels)
    order = SimStream(0).child("validation", dataset.name).generator().permutation(size)
    held = np.sort(order[: round(share * size)])
    kept = np.sort(order[round(share * size) :])
    return replace(
        dataset,
        name=f"{dataset.name}, validation",
        train_images=dataset.train_images[kept],
        train_labels=dataset.train_labels[kept],
        test_images=dataset.train_images[held],
        test_labels=dataset.train_labels[held],
    )


def tune(
    setting: Setting,
    epsilons: Sequence[float],
    *,
    out: Path,
    work: Path,
    methods: Sequence[str] = TUNED,
    device: str = "auto",
    grid: Sequence[Choice] | None = None,
    at_once: int | None = None,
    progress: Watch | None = None,
) -> Result:
    """Every method at every epsilon with every choice of the grid, trained without the held-out images."""
    data = hold_out(load_dataset(setting.dataset))
    cut = held_out_setting(setting, len(data.train_labels))
    cells = {}
    for method, choice, epsilon in product(methods, grid or choices(setting.unit), epsilons):
        private = METHODS[method].kind != "fedavg"
        labels: dict[str, Any] = {"method": method, "epsilon": epsilon if private else None, **asdict(choice)}
        if not private and setting.unit == "client":
            labels["clip"] = None
        identity = "/".join(
            [method]
            + [f"{name}={labels[name]:g}" for name in ("epsilon", "clip") if labels[name] is not None]
            + [f"rate={choice.learning_rate:g}", f"hidden={choice.hidden}"]
        )
        if identity not in cells:
            config = setting_config(cut, METHODS[method], choice, epsilon=epsilon, seed=1, device=device)
            cells[identity] = (labels, config)
    base = {**setting_base(cut), "held_out": len(data.test_labels), "seed": 1}
    return run_cells(
        TUNING,
        setting.full_name,
        base,
        cells,
        out=out,
        work=work,
        dataset=data,
        at_once=at_once,
        progress=progress,
    )


def chosen(tuned: Result | None, setting: Setting, method: str, epsilon: float) -> tuple[Choice, str]:
    """The best choice for a method on the held-out images, and what was tuned for it.

    It is taken from the epsilon nearest to the one wanted, among those at which the method was tuned.
    """
    untuned = UNTUNED[setting.unit]
    cells = select(tuned, method=METHODS[method].tuned_as) if tuned is not None else []
    if not cells:
        return untuned, "nothing"
    targets = sorted({cell.labels["epsilon"] for cell in cells if cell.labels["epsilon"] is not None})
    target = min(targets, key=lambda one: abs(math.log(one / epsilon)), default=None)
    tried = [cell for cell in cells if cell.labels["epsilon"] == target]
    best = max(tried, key=lambda cell: (cell.accuracy, cell.id)).labels
    clip = untuned.clip if best["clip"] is None else best["clip"]
    choice = Choice(clip=clip, learning_rate=best["learning_rate"], hidden=best["hidden"])
    return choice, METHODS[method].tuned_as + ("" if target is None else f" at epsilon {target:g}")


SCALES = (30, 100, 1000)


def run_setting(
    setting: Setting,
    *,
    out: Path,
    work: Path,
    epsilons: Sequence[float] = EPSILONS,
    methods: Sequence[str] = tuple(METHODS),
    variants: Sequence[str] = ("none",),
    seeds: Sequence[int] = (1, 2, 3),
    device: str = "auto",
    experiment: str = BEYOND,
    at_once: int | None = None,
    progress: Watch | None = None,
) -> Result:
    """All methods at all epsilons under all variants, with the choices tuned for this setting where there are any."""
    unknown = [name for name in (*methods, *variants) if name not in METHODS and name not in VARIANTS]
    if unknown:
        raise ConfigError(
            f"unknown name {unknown[0]!r}", hint="use one of: " + ", ".join((*METHODS, *VARIANTS))
        )
    # Tuned for rounds of this size; the comparison of sizes takes the same choices for all.
    tuned = read_result(result_path(out, TUNING, setting.name if experiment == SCALE else setting.full_name))
    cells: dict[str, tuple[dict[str, Any], Any]] = {}
    for variant, method, epsilon, seed in product(variants, methods, epsilons, seeds):
        cell = _cell(setting, VARIANTS[variant], method, epsilon, seed, tuned, device)
        if cell is not None:
            identity, labels, config = cell
            cells.setdefault(identity, (labels, config))
    name = setting.full_name if experiment == BEYOND else f"{setting.name}-{setting.participants}"
    return run_cells(
        experiment,
        name,
        setting_base(setting),
        cells,
        out=out,
        work=work,
        at_once=at_once,
        progress=progress,
    )


def _cell(
    setting: Setting,
    variant: Variant,
    method: str,
    epsilon: float,
    seed: int,
    tuned: Result | None,
    device: str,
) -> tuple[str, dict[str, Any], Any] | None:
    """One cell; None where a variant leaves a method as it is, so that its plain cell stands for it."""
    kind = METHODS[method].kind
    if variant.name != "none" and (kind != "niss" or METHODS[method].printed):
        return None
    choice, tuned_for = chosen(tuned, setting, method, epsilon)
    config = setting_config(
        setting, METHODS[method], choice, epsilon=epsilon, variant=variant, seed=seed, device=device
    )
    target = None if kind == "fedavg" else epsilon
    labels = {
        "method": method,
        "epsilon": target,
        "rho": variant.rho,
        "dropout": variant.dropout,
        "mode": variant.mode,
        "variant": variant.name,
        "seed": seed,
        "participations": config.participations,
        "kappa": config.methods[0].kappa if kind == "niss" else None,
        "neighbours": config.methods[0].neighbours if kind == "niss" else None,
        "tuned_for": tuned_for,
        **asdict(choice),
    }
    parts = [variant.name, method, *([] if target is None else [f"epsilon={target:g}"]), f"seed-{seed}"]
    return "/".join(parts), labels, config


def run_scale(
    *,
    out: Path,
    work: Path,
    dataset: str = "mnist",
    sizes: Sequence[int] = SCALES,
    epsilon: float = 3.0,
    seeds: Sequence[int] = (1, 2, 3),
    rounds: int | None = None,
    device: str = "auto",
    methods: Sequence[str] = ("fedavg", "dp-fedavg", "central-dp", "niss-planned"),
    at_once: int | None = None,
    progress: Watch | None = None,
) -> list[Result]:
    """The client unit with m participants a round, out of as many clients, for as many rounds.

    A larger round means more participations of each client, so each upload needs more noise, and it averages over
    more. For a trusted server, and for NISS, the second outweighs the first; for DP-FedAvg, whose m noises all stay
    in the sum, the two cancel: against a trusted server it falls behind by a factor m in variance.
    """
    results = []
    for size in sizes:
        setting = find_setting(f"{dataset}-iid-client", participants=size, rounds=rounds)
        if setting.participants == size:
            results.append(
                run_setting(
                    setting,
                    out=out,
                    work=work,
                    epsilons=(epsilon,),
                    methods=methods,
                    seeds=seeds,
                    device=device,
                    experiment=SCALE,
                    at_once=at_once,
                    progress=progress,
                )
            )
    return results
