"""Which cells the committed results have to hold, from the design: one that is missing, or one too many, is a fault."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from experiments.reproduce.design import (
    BEYOND,
    DATASETS,
    EPSILONS,
    FIGURE_3,
    FIGURE_4,
    IMAGES,
    LEVELS,
    METHODS,
    PANELS,
    SCALE,
    SCALE_EPSILON,
    SCALE_METHODS,
    SCALES,
    SETTINGS,
    SWEEP,
    SWEEP_FACTORS,
    TUNING,
    VARIANTS,
    X_VALUES,
    Panel,
    cells_of,
    find_levels,
    find_setting,
    panel_cell,
    picture_name,
    run_cell,
    trial_cell,
)
from experiments.reproduce.sensitivity import NBAFL, Setup, find_reading, given_sigma

SEEDS = (1, 2, 3)
RECORDS = {"mnist": 600, "cifar10": 500}
"""Images of a client in the paper's setting."""
MEASURED: tuple[str, ...] = (
    "mnist-iid-client-100-of-1000",
    "mnist-iid-client-1000-of-6000",
    "mnist-non-iid-client-100-of-1000",
    "mnist-non-iid-client-1000-of-6000",
    "mnist-iid-client-30-of-300",
    "cifar10-iid-client-1000-of-5000",
    "cifar10-non-iid-client-1000-of-5000",
    "mnist-non-iid-client-30-of-300",
    "cifar10-iid-client-100-of-1000",
    "cifar10-non-iid-client-100-of-1000",
    "cifar10-iid-client-30-of-300",
    "cifar10-non-iid-client-30-of-300",
)
"""The settings with fixed cohorts whose files are committed: all rivals and variants, tuned by the search."""
MODELS_MEASURED: tuple[str, ...] = ("shakespeare-gru", "cifar10-resnet")
"""Likewise of the settings with other models (`MODELLED`)."""
SEARCHED = None
"""In place of the cells: those of a search, which are known once it is played again."""

Cells = frozenset[str] | None


def expected_cells() -> dict[tuple[str, str], Cells]:
    """The ids that each result file has to hold, by experiment and name."""
    found: dict[tuple[str, str], Cells] = {}
    for panel in PANELS:
        found[FIGURE_3, panel.name] = frozenset(
            panel_cell(NBAFL.name, x, seed) for x, seed in product(X_VALUES, SEEDS)
        )
        found[SWEEP, panel.name] = frozenset(_sweep(panel))
    for image in IMAGES:
        found[FIGURE_4, picture_name(image)] = frozenset(_attacks())
    for name in SETTINGS:
        found[BEYOND, name] = frozenset(_runs(name))
        found[TUNING, name] = frozenset(_trials(name))
        if name.endswith("-client"):
            found[BEYOND, f"{name}-100"] = frozenset(_runs(f"{name}-100"))
    for name in MEASURED:
        found[BEYOND, name], found[TUNING, name] = frozenset(_runs(name)), SEARCHED
    for name in MODELS_MEASURED:
        found[DATASETS, name], found[TUNING, name] = frozenset(_runs(name)), SEARCHED
    for size in SCALES:
        found[SCALE, f"mnist-iid-client-{size}"] = frozenset(
            run_cell("none", method, SCALE_EPSILON if METHODS[method].private else None, seed)
            for method, seed in product(SCALE_METHODS, SEEDS)
        )
    return found


def _sweep(panel: Panel) -> Iterator[str]:
    usual = NBAFL.sigma(Setup(records=RECORDS[panel.dataset]))
    for seed in SEEDS if panel.model == "mlp" else SEEDS[:1]:
        yield panel_cell(NBAFL.name, 0.0, seed)
        for factor in SWEEP_FACTORS:
            yield panel_cell(given_sigma(factor * usual).name, 1.0, seed)


def _attacks() -> Iterator[str]:
    yield from cells_of(list(LEVELS.values()), [NBAFL], SEEDS)
    yield from cells_of(find_levels(["dp-fedavg", "niss"]), [find_reading("0.013")], SEEDS)


def _runs(name: str) -> Iterator[str]:
    """Before there were cohorts, dropouts were run in rounds of 100 and for records; there CIFAR-10 has one seed."""
    setting = find_setting(name.removesuffix("-100"))
    variants = [VARIANTS[one] for one in setting.variants]
    for variant, method in product(variants, (METHODS[one] for one in setting.methods)):
        seeds: tuple[int, ...] = SEEDS
        if not method.suffers(variant):
            continue
        if variant.dropout and not setting.cohorts:
            if name.endswith("-client"):
                continue
            seeds = SEEDS[:1] if name.startswith("cifar10") and name.endswith("-record") else SEEDS
        for epsilon, seed in product(EPSILONS if method.private else (None,), seeds):
            yield run_cell(variant.name, method.name, epsilon, seed)


def _trials(name: str) -> Iterator[str]:
    """The grid before the search: DP-FedAvg was tried with smaller clips too."""
    client = name.endswith("-client")
    rates, widths = ((0.1, 0.2), (16, 32)) if client else ((0.5, 2.0), (32, 128))
    for method in ("fedavg", "dp-fedavg", "central-dp", "niss-planned"):
        private = METHODS[method].private
        clips: tuple[float | None, ...] = (0.25, 0.5, 1.0) if client else (0.5, 1.0, 2.0)
        if client:
            clips = (0.05, 0.1, *clips) if method == "dp-fedavg" else clips if private else (None,)
        for epsilon, clip, rate, hidden in product(EPSILONS if private else (None,), clips, rates, widths):
            yield trial_cell(
                {"method": method, "epsilon": epsilon, "clip": clip, "learning_rate": rate, "hidden": hidden}
            )
