"""The paper's Figure 3, panel by panel, and the sweep over sigma_k that looks for its gaps.

A panel is a dataset, a model and a split; a cell of it is one X = tau^2 with one seed. Cells of a seed are paired:
same clients, batches and initial weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.reproduce.paper import (
    FIGURE_3,
    NBAFL,
    ROUNDS,
    SPLITS,
    SWEEP,
    SWEEP_FACTORS,
    X_VALUES,
    Panel,
    Reading,
    Setup,
    given_sigma,
    panel_cell,
)
from experiments.reproduce.results import Result
from experiments.reproduce.runner import run_cells
from niss.data import list_datasets
from niss.errors import ConfigError
from niss.settings import to_values
from niss.simulation import Config, make_config, preset, with_overrides


def base_config(
    panel: Panel, *, rounds: int, device: str = "auto", overrides: Mapping[str, Any] | None = None
) -> Config:
    """The paper's settings for a panel: what all its cells have in common."""
    config = with_overrides(
        preset("paper"),
        {
            "name": panel.name,
            "rounds": rounds,
            "data.dataset": panel.dataset,
            "data.split": SPLITS[panel.split],
            "model.name": panel.model,
            "training.device": device,
        },
    )
    if panel.model == "cnn":
        config = replace(config, model=replace(config.model, hidden=None))
    return with_overrides(config, overrides or {})


def setup_of(config: Config) -> Setup:
    """What the readings of the sensitivity are computed from."""
    epsilon = config.privacy.epsilon
    if isinstance(epsilon, tuple):
        raise ConfigError("one epsilon for all clients, please", field="privacy.epsilon")
    size = next(info.train_size for info in list_datasets() if info.name == config.data.dataset)
    records = config.data.samples_per_client or size // config.clients
    return Setup(
        records=records,
        clip=config.privacy.clip,
        epsilon=epsilon,
        delta=config.privacy.delta,
        learning_rate=config.training.learning_rate,
        batch_size=config.training.batch_size,
        participants=config.participants,
    )


def cell_config(base: Config, *, x: float, seed: int, reading: Reading) -> Config:
    """One cell: NISS to the letter of the paper (one scalar a share), X = tau^2 = `x`, noise sigma_k.

    The simulator takes sigma_k from epsilon by `2 clip / d_k`; another reading of the sensitivity is the same noise
    as that one at an epsilon smaller by the ratio of the two. Nothing here is a guarantee either way.
    """
    setup = setup_of(base)
    scale = 1.0 if reading == NBAFL else NBAFL.sigma(setup) / reading.sigma(setup)
    method = {
        "name": "niss",
        "label": f"X={x:g}",
        "distortion": "scalar",
        "tau2": x,
        "neighbours": float(setup.shares),
    }
    values = to_values(base)
    values["privacy"]["epsilon"] = setup.epsilon * scale
    return make_config({**values, "seed": seed, "methods": [method]})


def panel_cells(
    base: Config, *, xs: Sequence[float], seeds: Sequence[int], reading: Reading
) -> dict[str, tuple[dict[str, Any], Config]]:
    """All cells of a panel, by id, with what tells them apart."""
    sigma = reading.sigma(setup_of(base))
    return {
        panel_cell(reading.name, x, seed): (
            {"reading": reading.name, "sigma_k": sigma, "x": x, "seed": seed},
            cell_config(base, x=x, seed=seed, reading=reading),
        )
        for x in xs
        for seed in seeds
    }


def _run(
    experiment: str, panel: Panel, base: Config, cells: Mapping[str, Any], changed: Any, **places: Any
) -> Result:
    """As one cohort; the file says of its settings what the paper does, and what was changed."""
    own = panel.base | {"rounds": base.rounds} | ({"changed": dict(changed)} if changed else {})
    return run_cells(experiment, panel.name, own, cells, **places)


def run_panel(
    panel: Panel,
    *,
    rounds: int = ROUNDS,
    seeds: Sequence[int] = (1, 2, 3),
    xs: Sequence[float] = X_VALUES,
    reading: Reading = NBAFL,
    device: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    **places: Any,
) -> Result:
    """One panel: every X with every seed; `places` and the rest are as those of `run_cells`."""
    base = base_config(panel, rounds=rounds, device=device, overrides=overrides)
    cells = panel_cells(base, xs=xs, seeds=seeds, reading=reading)
    return _run(FIGURE_3, panel, base, cells, overrides, **places)


def run_sweep(
    panel: Panel,
    *,
    rounds: int = ROUNDS,
    seeds: Sequence[int] = (1,),
    sigmas: Sequence[float] | None = None,
    device: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    **places: Any,
) -> Result:
    """X = 1 over sigma_k, beside X = 0, where the noise cancels whatever its size."""
    base = base_config(panel, rounds=rounds, device=device, overrides=overrides)
    usual = NBAFL.sigma(setup_of(base))
    cells = panel_cells(base, xs=(0.0,), seeds=seeds, reading=NBAFL)
    for sigma in sigmas or [factor * usual for factor in SWEEP_FACTORS]:
        cells |= panel_cells(base, xs=(1.0,), seeds=seeds, reading=given_sigma(sigma))
    return _run(SWEEP, panel, base, cells, overrides, **places)
