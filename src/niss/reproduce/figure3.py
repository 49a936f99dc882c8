"""The paper's Figure 3, panel by panel, and the sweep over sigma_k that looks for its gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from niss.reproduce.panels import X_VALUES, Panel, base_config, panel_cells, setup_of
from niss.reproduce.results import Result
from niss.reproduce.runner import Watch, common_settings, run_cells
from niss.reproduce.sensitivity import NBAFL, Reading, given_sigma

FIGURE_3 = "figure-3"
SWEEP = "sweep"
SWEEP_FACTORS = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0)
"""sigma_k in a sweep, in units of the NbAFL reading's."""


def run_panel(
    panel: Panel,
    *,
    out: Path,
    work: Path,
    rounds: int = 100,
    seeds: Sequence[int] = (1, 2, 3),
    xs: Sequence[float] = X_VALUES,
    reading: Reading = NBAFL,
    device: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    progress: Watch | None = None,
) -> Result:
    """One panel: every X with every seed, as one cohort."""
    base = base_config(panel, rounds=rounds, device=device, overrides=overrides)
    cells = panel_cells(base, xs=xs, seeds=seeds, reading=reading)
    return run_cells(
        FIGURE_3, panel.name, common_settings(base), cells, out=out, work=work, progress=progress
    )


def run_sweep(
    panel: Panel,
    *,
    out: Path,
    work: Path,
    rounds: int = 100,
    seeds: Sequence[int] = (1,),
    sigmas: Sequence[float] | None = None,
    device: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    progress: Watch | None = None,
) -> Result:
    """X = 1 over sigma_k, beside X = 0, where the noise cancels whatever its size."""
    base = base_config(panel, rounds=rounds, device=device, overrides=overrides)
    usual = NBAFL.sigma(setup_of(base))
    wanted = sigmas or [factor * usual for factor in SWEEP_FACTORS]
    cells = panel_cells(base, xs=(0.0,), seeds=seeds, reading=NBAFL)
    for sigma in wanted:
        cells |= panel_cells(base, xs=(1.0,), seeds=seeds, reading=given_sigma(sigma))
    return run_cells(SWEEP, panel.name, common_settings(base), cells, out=out, work=work, progress=progress)
