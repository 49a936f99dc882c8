"""Which cells the committed results have to hold, from the design: one that is missing, or one too many, is a fault."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from experiments.reproduce.design import (
    BEYOND,
    COMPARED,
    DATASETS,
    EPSILONS,
    FIGURE_3,
    FIGURE_4,
    IMAGES,
    LEVELS,
    METHODS,
    PANELS,
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
)
from experiments.reproduce.sensitivity import NBAFL, Setup, find_reading, given_sigma

SEEDS = (1, 2, 3)
RECORDS = {"mnist": 600, "cifar10": 500}
"""Images of a client in the paper's setting."""
MODELS_MEASURED: tuple[str, ...] = ("shakespeare-gru", "cifar10-resnet")
"""The settings with other models (`MODELLED`) whose files are committed."""
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
    for name in COMPARED:
        found[BEYOND, name], found[TUNING, name] = frozenset(_runs(name)), SEARCHED
    for name in MODELS_MEASURED:
        found[DATASETS, name], found[TUNING, name] = frozenset(_runs(name)), SEARCHED
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
    variants = [VARIANTS[one] for one in find_setting(name).variants]
    for variant, method in product(variants, METHODS.values()):
        if method.suffers(variant):
            for epsilon, seed in product(EPSILONS if method.private else (None,), SEEDS):
                yield run_cell(variant.name, method.name, epsilon, seed)
