"""The tables of the text, as Markdown, made from the result files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from niss.reproduce.beyond import BEYOND, SCALE
from niss.reproduce.claims import PAPER_GAPS, check_claims, gap
from niss.reproduce.figure3 import FIGURE_3, SWEEP
from niss.reproduce.panels import X_VALUES, find_panel
from niss.reproduce.results import Cell, Result, Spread, read_results, select, spread
from niss.reproduce.sensitivity import NBAFL, READINGS, Setup
from niss.reproduce.settings import EPSILONS, METHODS, VARIANTS
from niss.reproduce.tuning import TUNING

MISSING = "not measured yet"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)) -> str:
    """A Markdown table: columns of words to the left, numbers to the right."""
    rule = ["---" if number in words else "---:" for number in range(len(header))]
    lines = [header, rule, *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def percent(value: Spread | None) -> str:
    """Mean and deviation over seeds."""
    if value is None:
        return MISSING
    deviation = f" ± {100 * value.deviation:.1f}" if value.count > 1 else ""
    return f"{100 * value.mean:.1f}{deviation} %"


def points(value: Spread | None) -> str:
    return MISSING if value is None else f"{100 * value.mean:.1f}"


def settled(cells: Sequence[Cell]) -> Spread | None:
    """Accuracy over the last tenth of the rounds, over seeds."""
    return spread([cell.settled for cell in cells]) if cells else None


def _accuracy(cells: Sequence[Cell]) -> Spread | None:
    return spread([cell.accuracy for cell in cells]) if cells else None


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
    """Every reading of the sensitivity and the sigma_k it gives."""
    mnist, cifar = Setup(records=600), Setup(records=500)
    rows = [
        [
            f"`{reading.name}`",
            reading.formula,
            f"{reading.sigma(mnist):.3g}",
            f"{reading.sigma(cifar):.3g}",
            reading.meaning,
        ]
        for reading in READINGS
    ]
    header = ["Name", "Δ", "σ_k, MNIST (d_k = 600)", "σ_k, CIFAR-10 (d_k = 500)", "What it means"]
    return markdown(header, rows, words=(0, 1, 4))


def sweep_table(folder: Path) -> str:
    """The gap between X = 0 and X = 1 over sigma_k."""
    rows = []
    for name, result in read_results(folder, SWEEP).items():
        clean = settled(select(result, x=0.0))
        noisy = sorted({cell.labels["sigma_k"] for cell in result.cells if cell.labels["x"] == 1.0})
        for sigma in noisy:
            found = settled(select(result, x=1.0, sigma_k=sigma))
            lost = "–" if clean is None or found is None else f"{100 * (clean.mean - found.mean):.1f}"
            rows.append([find_panel(name).title, f"{sigma:.3g}", percent(clean), percent(found), lost])
    header = ["Panel", "σ_k", "X = 0", "X = 1", "Gap, points"]
    return markdown(header, rows) if rows else MISSING + "\n"


def beyond_table(folder: Path, experiment: str = BEYOND) -> str:
    """Accuracy of every method at every epsilon, by setting and variant, with the epsilon that really holds."""
    rows = []
    for name, result in read_results(folder, experiment).items():
        for variant in VARIANTS:
            for method in METHODS:
                cells = select(result, method=method, variant=variant)
                if not cells:
                    continue
                shown = [
                    percent(_accuracy([cell for cell in cells if cell.labels["epsilon"] in (None, epsilon)]))
                    for epsilon in EPSILONS
                ]
                rows.append([name, variant, method, *shown, _held(cells)])
    header = [
        "Setting",
        "Variant",
        "Method",
        *[f"ε = {epsilon:g}" for epsilon in EPSILONS],
        "ε, joint view",
    ]
    return markdown(header, rows, words=(0, 1, 2, 6)) if rows else MISSING + "\n"


def _held(cells: Sequence[Cell]) -> str:
    if cells[0].labels["method"] == "fedavg":
        return "not private"
    if any(cell.epsilon_joint is None for cell in cells):
        return "none is finite"
    return "as promised" if cells[0].labels["method"] != "central-dp" else "as promised, server trusted"


def scale_table(folder: Path) -> str:
    return beyond_table(folder, SCALE)


def tuning_table(folder: Path) -> str:
    """What the grid chose for each method at each epsilon."""
    rows = []
    for name, result in read_results(folder, TUNING).items():
        groups = sorted({(cell.labels["method"], cell.labels["epsilon"] or 0.0) for cell in result.cells})
        for method, epsilon in groups:
            tried = select(result, method=method, epsilon=epsilon or None)
            best = max(tried, key=lambda cell: (cell.accuracy, cell.id))
            clip = best.labels["clip"]
            rows.append(
                [
                    name,
                    method,
                    f"{epsilon:g}" if epsilon else "–",
                    f"{len(tried)}",
                    "–" if clip is None else f"{clip:g}",
                    f"{best.labels['learning_rate']:g}",
                    f"{best.labels['hidden']}",
                    f"{best.accuracy:.1%}",
                ]
            )
    header = ["Setting", "Method", "ε", "Trials", "Clip", "Rate", "Hidden", "Accuracy on held-out images"]
    return markdown(header, rows, words=(0, 1)) if rows else MISSING + "\n"


def claims_table(folder: Path) -> str:
    """Every claim and whether the files bear it out."""
    words = {True: "holds", False: "does not hold", None: MISSING}
    rows = [[claim.name, words[claim.holds], claim.detail] for claim in check_claims(folder)]
    return markdown(["Claim", "Verdict", "Measured"], rows, words=(0, 1, 2))
