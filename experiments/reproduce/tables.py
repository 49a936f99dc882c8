"""The tables of the text, as Markdown, made from the result files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.reproduce import design, paper
from experiments.reproduce.checks import fingerprint
from experiments.reproduce.claims import (
    PAPER_GAPS,
    WINDOW,
    check_claims,
    gap,
    gap_by_round,
    rounds_within,
    stretches,
)
from experiments.reproduce.paper import NBAFL, READINGS, Setup
from experiments.reproduce.results import (
    Attempt,
    Leaks,
    Spread,
    over_seeds,
    read_results,
    select,
)

MISSING = "not measured yet"


def markdown(rows: Sequence[Mapping[str, str]], *, words: Sequence[str] = ()) -> str:
    """A Markdown table of rows by heading, or a line that says that nothing is measured yet.

    The first column, and those of `words`, stand to the left, numbers to the right.
    """
    if not rows:
        return MISSING + "\n"
    header = list(rows[0])
    rule = ["---" if name in (header[0], *words) else "---:" for name in header]
    lines = [header, rule, *(row.values() for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def percent(value: Spread | None) -> str:
    """Mean and deviation over seeds."""
    return _mean(value, 100.0, " %")


def decibels(value: Spread | None) -> str:
    """Mean and deviation over seeds."""
    return _mean(value, 1.0, " dB")


def _mean(value: Spread | None, scale: float, unit: str) -> str:
    if value is None:
        return MISSING
    deviation = f" ± {scale * value.deviation:.1f}" if value.count > 1 else ""
    return f"{scale * value.mean:.1f}{deviation}{unit}"


def short(value: float, digits: int = 2) -> str:
    """So many digits that count, without an exponent where there need be none."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10.0**digits else f"{rounded:.{digits}g}"


def points(value: Spread | None) -> str:
    return MISSING if value is None else f"{100 * value.mean:.1f}"


def leaks_in_order(folder: Path) -> list[Leaks]:
    """The pictures as they are listed, others behind them."""
    listed = {image: place for place, image in enumerate(paper.IMAGES)}
    found = {leaks.base["image"]: leaks for leaks in read_results(folder, paper.FIGURE_4).values()}
    return [found[image] for image in sorted(found, key=lambda one: (listed.get(one, len(listed)), one))]


def figure_4_table(folder: Path) -> str:
    """PSNR at the end and at the best of the frames, label, loss, and the epsilon of the joint view."""
    rows = []
    for leaks in leaks_in_order(folder):
        for level in paper.LEVELS.values():
            cells = select(leaks, level=level.name)
            for noise in dict.fromkeys(cell.labels["noise"] for cell in cells):
                rows.append(
                    _picture_row(leaks, level.title, [c for c in cells if c.labels["noise"] == noise])
                )
    return markdown(rows, words=("Upload and view", "ε, joint view"))


def _picture_row(leaks: Leaks, title: str, cells: Sequence[Attempt]) -> dict[str, str]:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        "Picture": f"`{leaks.base['image']}`",
        "Upload and view": title,
        "σ_k": _noise(cells[0]),
        "Noise ÷ update": short(mean([cell.noise for cell in cells])),
        "Loss": short(mean([cell.loss for cell in cells])),
        "PSNR, dB": decibels(over_seeds(cells, "psnr")).removesuffix(" dB"),
        "Best, dB": f"{mean([cell.best_psnr for cell in cells]):.1f}",
        "Grey, dB": f"{leaks.base['grey_psnr']:.1f}",
        "Label": f"{sum(cell.label_found for cell in cells)} of {len(cells)}",
        "ε, joint view": _epsilon_of_attempts(cells),
    }


def _noise(cell: Attempt) -> str:
    noise = cell.labels["noise"]
    if noise == paper.CLIENT_NOISE:
        return "for\u00a0ε\u00a0=\u00a03"
    return "none" if noise == "none" else f"{cell.labels['sigma_k']:.3g}"


def _epsilon_of_attempts(cells: Sequence[Attempt]) -> str:
    if cells[0].labels["noise"] == "none":
        return "not private"
    known = [cell.epsilon_joint for cell in cells if cell.epsilon_joint is not None]
    if len(known) < len(cells):
        return "none"
    return f"{max(known):.2f}" + ("" if cells[0].labels["noise"] == paper.CLIENT_NOISE else ", heuristic")


GAP_ROUNDS = (10, 25, 50, 100)
"""The last rounds of the windows shown."""
UNIT_VARIANCE = 0.01
"""sigma^2 in the paper's list of settings."""


def figure_3_table(folder: Path) -> str:
    """Settled accuracy by panel and X, the gap between X = 0 and X = 1, and the paper's."""
    results = read_results(folder, paper.FIGURE_3)
    rows = []
    for name, (low, high) in PAPER_GAPS.items():
        result = results.get(name)
        by_x = {x: over_seeds(select(result, x=x, reading=NBAFL.name), "settled") for x in paper.X_VALUES}
        cells = result.cells if result else ()
        seeds = {cell.labels["seed"] for cell in cells}
        rows.append(
            {
                "Panel": paper.find_panel(name).title,
                **{f"X = {x:g}": percent(found) for x, found in by_x.items()},
                "Gap, points": points(gap(result)),
                "Gap in the paper": f"{low} to {high}",
                "Rounds × seeds": f"{cells[0].rounds} × {len(seeds)}" if cells else "–",
            }
        )
    return markdown(rows)


def gaps_table(folder: Path) -> str:
    """The gap between X = 0 and X = 1 after so many rounds, and where it is the paper's."""
    results = read_results(folder, paper.FIGURE_3)
    rows = []
    for name, (low, high) in PAPER_GAPS.items():
        gaps = gap_by_round(results.get(name))
        if gaps:
            most = max(gaps, key=lambda last: gaps[last].mean)
            rows.append(
                {
                    "Panel": paper.find_panel(name).title,
                    "In the paper": f"{low} to {high}",
                    **{
                        f"Rounds {last - WINDOW + 1} to {last}": points(gaps.get(last)) for last in GAP_ROUNDS
                    },
                    "Largest (rounds)": f"{points(gaps[most])} ({most - WINDOW + 1} to {most})",
                    "Ours is the paper's": stretches(rounds_within(gaps, low, high)),
                }
            )
    return markdown(rows, words=("Ours is the paper's",))


def readings_table() -> str:
    """Every reading of the sensitivity, the sigma_k it gives, and what follows from that."""
    mnist, cifar = Setup(records=600), Setup(records=500)
    rows = [
        {
            "Name": f"`{reading.name}`",
            "Δ": reading.formula,
            "σ_k, MNIST (d_k = 600)": f"{reading.sigma(mnist):.3g}",
            "σ_k, CIFAR-10 (d_k = 500)": f"{reading.sigma(cifar):.3g}",
            "√30 σ_k, MNIST": short(math.sqrt(mnist.participants) * reading.sigma(mnist)),
            "v = σ_k² / 0.01, MNIST": short(reading.sigma(mnist) ** 2 / UNIT_VARIANCE, 3),
            "What it means": reading.meaning,
        }
        for reading in READINGS
    ]
    return markdown(rows, words=("Δ", "What it means"))


def sweep_table(folder: Path) -> str:
    """The gap between X = 0 and X = 1 over sigma_k."""
    rows = []
    results = read_results(folder, paper.SWEEP)
    for panel in paper.panels_in(results):
        result = results[panel.name]
        clean = over_seeds(select(result, x=0.0), "settled")
        noisy = sorted({cell.labels["sigma_k"] for cell in result.cells if cell.labels["x"] == 1.0})
        for sigma in noisy:
            found = over_seeds(select(result, x=1.0, sigma_k=sigma), "settled")
            lost = "–" if clean is None or found is None else f"{100 * (clean.mean - found.mean):.1f}"
            shown = {"X = 0": percent(clean), "X = 1": percent(found), "Gap, points": lost}
            rows.append({"Panel": panel.title, "σ_k": f"{sigma:.3g}", **shown})
    return markdown(rows)


def files_table(folder: Path) -> str:
    """Every result file, and the beginning of its fingerprint: what happens to it afterwards shows."""
    files = {
        f"{one.experiment}/{one.name}": one
        for experiment in design.EXPERIMENTS
        for one in read_results(folder, experiment).values()
    }
    rows = [
        {"File": name, "Cells": f"{len(one.cells)}", "Fingerprint": f"`{fingerprint(one)[:16]}`"}
        for name, one in sorted(files.items())
    ]
    return markdown(rows, words=("Fingerprint",))


def claims_table(folder: Path) -> str:
    """Every claim and whether the files bear it out."""
    rows = [
        {"Claim": claim.name, "Verdict": claim.verdict, "Measured": claim.detail}
        for claim in check_claims(folder)
    ]
    return markdown(rows, words=("Verdict", "Measured"))
