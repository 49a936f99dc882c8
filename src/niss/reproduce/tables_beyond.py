"""The tables beyond the paper: every method at the same epsilon, the size of a round, and what was tuned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from niss.reproduce.beyond import BEYOND, SCALE
from niss.reproduce.markdown import final, or_missing, percent
from niss.reproduce.results import Cell, Result, read_results, select
from niss.reproduce.settings import EPSILONS, METHODS, SETTINGS, VARIANTS
from niss.reproduce.tuning import TUNING

_COLUMNS = ["Variant", "Method", *[f"ε = {epsilon:g}" for epsilon in EPSILONS], "ε, joint view"]


def beyond_table(folder: Path) -> str:
    """Accuracy of every method at every epsilon promised, by setting and variant, and the epsilon that holds."""
    results = _in_order(read_results(folder, BEYOND))
    rows = [[result.name, *row] for result in results for row in _rows(result)]
    return or_missing(["Setting", *_COLUMNS], rows, words=(0, 1, 2, 6))


def setting_table(folder: Path, name: str) -> str:
    """The part of `beyond_table` for one setting."""
    result = read_results(folder, BEYOND).get(name)
    return or_missing(_COLUMNS, _rows(result) if result else [], words=(0, 1, 5))


def _rows(result: Result) -> list[list[str]]:
    rows = []
    for variant in VARIANTS:
        for method in METHODS:
            cells = select(result, method=method, variant=variant)
            if cells:
                shown = [percent(final(_at(cells, epsilon))) for epsilon in EPSILONS]
                rows.append([variant, method, *shown, _held(cells)])
    return rows


def scale_table(folder: Path) -> str:
    """Accuracy by the participants of a round, and the noise left in the average."""
    rows = []
    results = sorted(
        read_results(folder, SCALE).values(), key=lambda one: (one.base["dataset"], one.base["participants"])
    )
    for result in results:
        for method in METHODS:
            for epsilon in sorted({cell.labels["epsilon"] or 0.0 for cell in select(result, method=method)}):
                cells = select(result, method=method, epsilon=epsilon or None)
                variance = sum(cell.aggregate_variance for cell in cells) / len(cells)
                rows.append(
                    [
                        result.base["dataset"],
                        f"{result.base['participants']:,}",
                        method,
                        percent(final(cells)),
                        f"{variance:.2g}",
                        _held(cells),
                    ]
                )
    header = ["Dataset", "Participants", "Method", "Accuracy", "Noise variance in the sum", "ε, joint view"]
    return or_missing(header, rows, words=(0, 2, 5))


def _in_order(results: dict[str, Result]) -> list[Result]:
    """Settings as they are listed, others behind them."""
    known = [name for name in SETTINGS if name in results]
    return [results[name] for name in (*known, *sorted(results.keys() - set(known)))]


def _at(cells: Sequence[Cell], epsilon: float) -> list[Cell]:
    return [cell for cell in cells if cell.labels["epsilon"] in (None, epsilon)]


def _held(cells: Sequence[Cell]) -> str:
    """The largest epsilon of the joint view over the seeds, for each one promised."""
    if cells[0].labels["method"] == "fedavg":
        return "not private"
    if any(cell.epsilon_joint is None for cell in cells):
        return "none is finite"
    promised = sorted({cell.labels["epsilon"] for cell in cells})
    held = [max(cell.epsilon_joint or 0.0 for cell in _at(cells, epsilon)) for epsilon in promised]
    trusted = ", server trusted" if cells[0].labels["method"] == "central-dp" else ""
    return " / ".join(f"{epsilon:.2f}" for epsilon in held) + trusted


def tuning_table(folder: Path) -> str:
    """What the grid chose for each method at each epsilon."""
    rows = []
    for result in _in_order(read_results(folder, TUNING)):
        groups = sorted({(cell.labels["method"], cell.labels["epsilon"] or 0.0) for cell in result.cells})
        for method, epsilon in groups:
            tried = select(result, method=method, epsilon=epsilon or None)
            best = max(tried, key=lambda cell: (cell.accuracy, cell.id))
            clip = best.labels["clip"]
            rows.append(
                [
                    result.name,
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
    return or_missing(header, rows, words=(0, 1))
