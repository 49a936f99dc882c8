"""The tables of the text, as Markdown, made from the result files."""

from __future__ import annotations

import math
from pathlib import Path

from niss.reproduce.claims import PAPER_GAPS, check_claims, gap
from niss.reproduce.figure3 import FIGURE_3, SWEEP
from niss.reproduce.markdown import markdown, or_missing, percent, points, settled, short
from niss.reproduce.panels import PANELS, X_VALUES, find_panel
from niss.reproduce.results import Result, read_results, select
from niss.reproduce.sensitivity import NBAFL, READINGS, Setup
from niss.reproduce.tables_beyond import beyond_table, scale_table, setting_table, tuning_table
from niss.reproduce.tables_leaks import figure_4_table

__all__ = [
    "beyond_table",
    "claims_table",
    "figure_3_table",
    "figure_4_table",
    "readings_table",
    "scale_table",
    "setting_table",
    "sweep_table",
    "tuning_table",
]

UNIT_VARIANCE = 0.01
"""sigma^2 in the paper's list of settings."""


def figure_3_table(folder: Path) -> str:
    """Settled accuracy by panel and X, the gap between X = 0 and X = 1, and the paper's."""
    results = read_results(folder, FIGURE_3)
    rows = []
    for name, (low, high) in PAPER_GAPS.items():
        result = results.get(name)
        cells = [
            percent(settled(select(result, x=x, reading=NBAFL.name)) if result else None) for x in X_VALUES
        ]
        measured = points(gap(result) if result else None)
        extent = _extent(result)
        rows.append([find_panel(name).title, *cells, measured, f"{low} to {high}", extent])
    header = ["Panel", *[f"X = {x:g}" for x in X_VALUES], "Gap, points", "Gap in the paper", "Rounds × seeds"]
    return markdown(header, rows)


def _extent(result: Result | None) -> str:
    if result is None or not result.cells:
        return "–"
    seeds = {cell.labels["seed"] for cell in result.cells}
    return f"{result.cells[0].rounds} × {len(seeds)}"


def readings_table() -> str:
    """Every reading of the sensitivity, the sigma_k it gives, and what follows from that."""
    mnist, cifar = Setup(records=600), Setup(records=500)
    rows = [
        [
            f"`{reading.name}`",
            reading.formula,
            f"{reading.sigma(mnist):.3g}",
            f"{reading.sigma(cifar):.3g}",
            short(math.sqrt(mnist.participants) * reading.sigma(mnist)),
            short(reading.sigma(mnist) ** 2 / UNIT_VARIANCE, 3),
            reading.meaning,
        ]
        for reading in READINGS
    ]
    header = [
        "Name",
        "Δ",
        "σ_k, MNIST (d_k = 600)",
        "σ_k, CIFAR-10 (d_k = 500)",
        "√30 σ_k, MNIST",
        "v = σ_k² / 0.01, MNIST",
        "What it means",
    ]
    return markdown(header, rows, words=(0, 1, 6))


def sweep_table(folder: Path) -> str:
    """The gap between X = 0 and X = 1 over sigma_k."""
    rows = []
    results = read_results(folder, SWEEP)
    known = [panel.name for panel in PANELS if panel.name in results]
    for name in (*known, *sorted(results.keys() - set(known))):
        result = results[name]
        clean = settled(select(result, x=0.0))
        noisy = sorted({cell.labels["sigma_k"] for cell in result.cells if cell.labels["x"] == 1.0})
        for sigma in noisy:
            found = settled(select(result, x=1.0, sigma_k=sigma))
            lost = "–" if clean is None or found is None else f"{100 * (clean.mean - found.mean):.1f}"
            rows.append([find_panel(name).title, f"{sigma:.3g}", percent(clean), percent(found), lost])
    header = ["Panel", "σ_k", "X = 0", "X = 1", "Gap, points"]
    return or_missing(header, rows)


def claims_table(folder: Path) -> str:
    """Every claim and whether the files bear it out."""
    rows = [[claim.name, claim.verdict, claim.detail] for claim in check_claims(folder)]
    return markdown(["Claim", "Verdict", "Measured"], rows, words=(0, 1, 2))
