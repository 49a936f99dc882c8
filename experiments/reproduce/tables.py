"""The tables of the text, as Markdown, made from the result files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from experiments.reproduce import design
from experiments.reproduce.checks import EXPERIMENTS, fingerprint
from experiments.reproduce.claims import (
    PAPER_GAPS,
    WINDOW,
    check_claims,
    gap,
    gap_by_round,
    learns,
    rounds_within,
    stretches,
)
from experiments.reproduce.results import Attempt, Cell, Leaks, Result, Spread, read_results, select, spread
from experiments.reproduce.sensitivity import NBAFL, READINGS, Setup
from experiments.reproduce.tuning import best_trial, edges_of, trials_of

MISSING = "not measured yet"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)) -> str:
    """A Markdown table: columns of words to the left, numbers to the right."""
    rule = ["---" if number in words else "---:" for number in range(len(header))]
    lines = [header, rule, *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def or_missing(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)) -> str:
    """The table, or a line that says that nothing is measured yet."""
    return markdown(header, rows, words=words) if rows else MISSING + "\n"


def percent(value: Spread | None) -> str:
    """Mean and deviation over seeds."""
    if value is None:
        return MISSING
    deviation = f" ± {100 * value.deviation:.1f}" if value.count > 1 else ""
    return f"{100 * value.mean:.1f}{deviation} %"


def decibels(value: Spread | None) -> str:
    """Mean and deviation over seeds."""
    if value is None:
        return MISSING
    deviation = f" ± {value.deviation:.1f}" if value.count > 1 else ""
    return f"{value.mean:.1f}{deviation} dB"


def short(value: float, digits: int = 2) -> str:
    """So many digits that count, without an exponent where there need be none."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10.0**digits else f"{rounded:.{digits}g}"


def points(value: Spread | None) -> str:
    return MISSING if value is None else f"{100 * value.mean:.1f}"


def settled(cells: Sequence[Cell]) -> Spread | None:
    """Accuracy over the last tenth of the rounds, over seeds."""
    return spread([cell.settled for cell in cells]) if cells else None


def final(cells: Sequence[Cell]) -> Spread | None:
    """Accuracy after the last round, over seeds."""
    return spread([cell.accuracy for cell in cells]) if cells else None


def leaks_in_order(folder: Path) -> list[Leaks]:
    """The pictures as they are listed, others behind them."""
    listed = {image: place for place, image in enumerate(design.IMAGES)}
    found = {leaks.base["image"]: leaks for leaks in read_results(folder, design.FIGURE_4).values()}
    return [found[image] for image in sorted(found, key=lambda one: (listed.get(one, len(listed)), one))]


def figure_4_table(folder: Path) -> str:
    """PSNR at the end and at the best of the frames, label, loss, and the epsilon of the joint view."""
    rows = []
    for leaks in leaks_in_order(folder):
        for level in design.LEVELS.values():
            cells = select(leaks, level=level.name)
            for noise in dict.fromkeys(cell.labels["noise"] for cell in cells):
                rows.append(
                    _picture_row(leaks, level.title, [c for c in cells if c.labels["noise"] == noise])
                )
    header = [
        "Picture",
        "Upload and view",
        "σ_k",
        "Noise ÷ update",
        "Loss",
        "PSNR, dB",
        "Best, dB",
        "Grey, dB",
        "Label",
        "ε, joint view",
    ]
    return or_missing(header, rows, words=(0, 1, 9))


def _picture_row(leaks: Leaks, title: str, cells: Sequence[Attempt]) -> list[str]:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return [
        f"`{leaks.base['image']}`",
        title,
        _noise(cells[0]),
        short(mean([cell.noise for cell in cells])),
        short(mean([cell.loss for cell in cells])),
        decibels(psnr(cells)).removesuffix(" dB"),
        f"{mean([cell.best_psnr for cell in cells]):.1f}",
        f"{leaks.base['grey_psnr']:.1f}",
        f"{sum(cell.label_found for cell in cells)} of {len(cells)}",
        _epsilon_of_attempts(cells),
    ]


def psnr(cells: Sequence[Attempt]) -> Spread | None:
    """PSNR at the end, over seeds."""
    return spread([cell.psnr for cell in cells]) if cells else None


def _noise(cell: Attempt) -> str:
    noise = cell.labels["noise"]
    if noise == design.CLIENT_NOISE:
        return "for\u00a0ε\u00a0=\u00a03"
    return "none" if noise == "none" else f"{cell.labels['sigma_k']:.3g}"


def _epsilon_of_attempts(cells: Sequence[Attempt]) -> str:
    if cells[0].labels["noise"] == "none":
        return "not private"
    known = [cell.epsilon_joint for cell in cells if cell.epsilon_joint is not None]
    if len(known) < len(cells):
        return "none"
    return f"{max(known):.2f}" + ("" if cells[0].labels["noise"] == design.CLIENT_NOISE else ", heuristic")


LEAD = "Ahead of DP-FedAvg, points"
_COLUMNS = ["Variant", "Method", *[f"ε = {epsilon:g}" for epsilon in design.EPSILONS], "ε, joint view", LEAD]


def beyond_table(folder: Path) -> str:
    """Accuracy of every method at every epsilon promised, by setting and variant, and the epsilon that holds."""
    results = in_order(read_results(folder, design.BEYOND))
    rows = [[result.name, *row] for result in results for row in _setting_rows(result)]
    return or_missing(["Setting", *_COLUMNS], rows, words=(0, 1, 2, 6, 7))


def setting_table(folder: Path, name: str) -> str:
    """The part of `beyond_table` for one setting."""
    result = read_results(folder, design.BEYOND).get(name)
    return or_missing(_COLUMNS, _setting_rows(result) if result else [], words=(0, 1, 5, 6))


def _setting_rows(result: Result) -> list[list[str]]:
    rows = []
    local = local_accuracies(result)
    for variant, method in product(design.VARIANTS, design.METHODS):
        cells = select(result, method=method, variant=variant)
        if cells:
            found = [final(at_epsilon(cells, epsilon)) for epsilon in design.EPSILONS]
            shown = [percent(one) for one in found]
            rows.append([variant, method, *shown, epsilon_of_runs(cells), leads(method, found, local)])
    return rows


def local_accuracies(result: Result) -> list[Spread | None]:
    return [final(select(result, method=_RIVAL, epsilon=epsilon)) for epsilon in design.EPSILONS]


_RIVAL = "dp-fedavg"
HEADLINE = ("mnist-iid-client-1000-of-6000", "mnist-iid-client-100-of-1000")


def headline_table(folder: Path) -> str:
    """Every method under everything that may go wrong, and by how much it leads DP-FedAvg, or is behind."""
    results = read_results(folder, design.BEYOND)
    rows = []
    for result in (results[name] for name in HEADLINE if name in results):
        local, setting = local_accuracies(result), design.find_setting(result.name)
        size = f"{setting.participants:,} of {setting.clients:,}"
        for method, variant in product(design.METHODS.values(), design.VARIANTS.values()):
            if method.suffers(variant):
                cells = select(result, method=method.name, variant=variant.name)
                found = [final(at_epsilon(cells, epsilon)) for epsilon in design.EPSILONS]
                shown = [percent(one) for one in found]
                rows.append([size, method.name, variant.words, *shown, leads(method.name, found, local)])
    columns = [f"ε = {epsilon:g}" for epsilon in design.EPSILONS]
    header = ["Participants", "Method", "What goes wrong", *columns, LEAD]
    return or_missing(header, rows, words=(1, 2, 6))


def leads(method: str, found: Sequence[Spread | None], local: Sequence[Spread | None]) -> str:
    """Points at each epsilon; where DP-FedAvg is better it says so."""
    if method == _RIVAL:
        return "–"
    if any(one is None or other is None for one, other in zip(found, local, strict=True)):
        return MISSING
    points_ahead = [
        100 * (one.mean - other.mean) for one, other in zip(found, local, strict=True) if one and other
    ]
    shown = " / ".join(f"{lead:+.1f}".replace("-", "−") for lead in points_ahead)
    return shown + ("; **behind**" if min(points_ahead) < 0.0 else "")


def in_order(results: dict[str, Result]) -> list[Result]:
    """Settings as they are listed, others behind them."""
    known = [name for name in (*design.COMPARED, *design.MODELLED) if name in results]
    return [results[name] for name in (*known, *sorted(results.keys() - set(known)))]


def at_epsilon(cells: Sequence[Cell], epsilon: float) -> list[Cell]:
    return [cell for cell in cells if cell.labels["epsilon"] in (None, epsilon)]


def epsilon_of_runs(cells: Sequence[Cell]) -> str:
    """The largest epsilon of the joint view over the seeds, for each one promised."""
    method = design.METHODS[cells[0].labels["method"]]
    if not method.private:
        return "not private"
    if any(cell.epsilon_joint is None for cell in cells):
        return "none is finite"
    promised = sorted({cell.labels["epsilon"] for cell in cells})
    held = [max(cell.epsilon_joint or 0.0 for cell in at_epsilon(cells, epsilon)) for epsilon in promised]
    trusted = ", server trusted" if method.trusting else ""
    return " / ".join(f"{epsilon:.2f}" for epsilon in held) + trusted


def tuning_table(folder: Path, *, models: bool = False) -> str:
    """What the grid chose for each method at each epsilon; `models`: in the settings with other models."""
    rows = []
    results = read_results(folder, design.TUNING)
    for result in in_order({name: results[name] for name in results if (name in design.MODELLED) == models}):
        labels = [cell.labels for cell in result.cells]
        groups = {(one["method"], one.get("variant", "none"), one["epsilon"] or 0.0) for one in labels}
        for method, variant, epsilon in sorted(groups):
            trials = trials_of(result, method, variant)
            tried = [cell for cell in trials if cell.labels["epsilon"] == (epsilon or None)]
            best = best_trial(tried)
            clip = best.labels["clip"]
            rows.append(
                [
                    result.name,
                    method if variant == "none" else f"{method}, {variant}",
                    f"{epsilon:g}" if epsilon else "–",
                    f"{len(tried)}",
                    "–" if clip is None else f"{clip:g}",
                    f"{best.labels['learning_rate']:g}",
                    f"{best.labels['hidden']}",
                    f"{best.accuracy:.1%}",
                    ", ".join(edges_of(tried, best)) or "–",
                ]
            )
    header = [
        "Setting",
        "Method",
        "ε",
        "Trials",
        "Clip",
        "Rate",
        "Hidden",
        "Held-out accuracy",
        "On the edge",
    ]
    return or_missing(header, rows, words=(0, 1, 8))


GAP_ROUNDS = (10, 25, 50, 100)
"""The last rounds of the windows shown."""
UNIT_VARIANCE = 0.01
"""sigma^2 in the paper's list of settings."""


def figure_3_table(folder: Path) -> str:
    """Settled accuracy by panel and X, the gap between X = 0 and X = 1, and the paper's."""
    results = read_results(folder, design.FIGURE_3)
    rows = []
    for name, (low, high) in PAPER_GAPS.items():
        result = results.get(name)
        shown = [percent(settled(select(result, x=x, reading=NBAFL.name))) for x in design.X_VALUES]
        cells = result.cells if result else ()
        seeds = {cell.labels["seed"] for cell in cells}
        extent = f"{cells[0].rounds} × {len(seeds)}" if cells else "–"
        title, paper = design.find_panel(name).title, f"{low} to {high}"
        rows.append([title, *shown, points(gap(result)), paper, extent])
    header = [
        "Panel",
        *[f"X = {x:g}" for x in design.X_VALUES],
        "Gap, points",
        "Gap in the paper",
        "Rounds × seeds",
    ]
    return markdown(header, rows)


def gaps_table(folder: Path) -> str:
    """The gap between X = 0 and X = 1 after so many rounds, and where it is the paper's."""
    results = read_results(folder, design.FIGURE_3)
    rows = []
    for name, (low, high) in PAPER_GAPS.items():
        gaps = gap_by_round(results.get(name))
        if gaps:
            most = max(gaps, key=lambda last: gaps[last].mean)
            rows.append(
                [
                    design.find_panel(name).title,
                    f"{low} to {high}",
                    *[points(gaps.get(last)) for last in GAP_ROUNDS],
                    f"{points(gaps[most])} ({most - WINDOW + 1} to {most})",
                    stretches(rounds_within(gaps, low, high)),
                ]
            )
    shown = [f"Rounds {last - WINDOW + 1} to {last}" for last in GAP_ROUNDS]
    header = ["Panel", "In the paper", *shown, "Largest (rounds)", "Ours is the paper's"]
    return or_missing(header, rows, words=(0, 7))


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
    results = read_results(folder, design.SWEEP)
    known = [panel.name for panel in design.PANELS if panel.name in results]
    for name in (*known, *sorted(results.keys() - set(known))):
        result = results[name]
        clean = settled(select(result, x=0.0))
        noisy = sorted({cell.labels["sigma_k"] for cell in result.cells if cell.labels["x"] == 1.0})
        for sigma in noisy:
            found = settled(select(result, x=1.0, sigma_k=sigma))
            lost = "–" if clean is None or found is None else f"{100 * (clean.mean - found.mean):.1f}"
            rows.append([design.find_panel(name).title, f"{sigma:.3g}", percent(clean), percent(found), lost])
    header = ["Panel", "σ_k", "X = 0", "X = 1", "Gap, points"]
    return or_missing(header, rows)


def files_table(folder: Path) -> str:
    """Every result file, and the beginning of its fingerprint: what happens to it afterwards shows."""
    rows = sorted(
        [f"{one.experiment}/{one.name}", f"{len(one.cells)}", f"`{fingerprint(one)[:16]}`"]
        for experiment in EXPERIMENTS
        for one in read_results(folder, experiment).values()
    )
    return or_missing(["File", "Cells", "Fingerprint"], rows, words=(0, 2))


def claims_table(folder: Path) -> str:
    """Every claim and whether the files bear it out."""
    rows = [[claim.name, claim.verdict, claim.detail] for claim in check_claims(folder)]
    return markdown(["Claim", "Verdict", "Measured"], rows, words=(0, 1, 2))


def datasets_table(folder: Path) -> str:
    """Other models and data: accuracy by method and epsilon, beside what the most frequent label is worth."""
    rows = []
    for result in in_order(read_results(folder, design.DATASETS)):
        title, local = design.find_setting(result.name).title, local_accuracies(result)
        guess = percent(spread([result.base["majority"]]))
        rows.append([title, "most frequent label", *[guess] * len(design.EPSILONS), "–", "–"])
        for method in design.METHODS:
            if cells := select(result, method=method, variant="none"):
                found = [final(at_epsilon(cells, epsilon)) for epsilon in design.EPSILONS]
                shown = [
                    percent(one) + (", **nothing learned**" if one and not learns(one, result) else "")
                    for one in found
                ]
                rows.append([title, method, *shown, epsilon_of_runs(cells), leads(method, found, local)])
    columns = [f"ε = {epsilon:g}" for epsilon in design.EPSILONS]
    header = ["Data, model", "Method", *columns, "ε, joint view", LEAD]
    return or_missing(header, rows, words=(0, 1, 5, 6))


def datasets_words(folder: Path) -> str:
    """A line for each setting: how large it is, and who learns nothing in it."""
    lines = []
    for result in in_order(read_results(folder, design.DATASETS)):
        setting, failing = design.find_setting(result.name), []
        for epsilon in design.EPSILONS:
            found = {
                method: final(select(result, method=method, epsilon=epsilon, variant="none"))
                for method in design.METHODS
                if design.METHODS[method].private
            }
            known = {method: one for method, one in found.items() if one is not None}
            names = [method for method, one in known.items() if not learns(one, result)]
            if names:
                everyone = "by any private method" if len(names) == len(known) else "by " + ", ".join(names)
                failing.append(f"at ε = {epsilon:g} {everyone}")
        private = "; ".join(failing)
        verdict = f"Nothing is learned {private}." if failing else "Every private method learns something."
        plain = final(select(result, method="fedavg", variant="none"))
        if plain is not None and not learns(plain, result):
            verdict = "Not even FedAvg learns anything in so few rounds. " + verdict
        lines.append(
            f"- **{setting.title}**, {setting.participants:,} of {setting.clients:,} clients a round, "
            f"{setting.rounds} rounds: the most frequent label is right {100 * result.base['majority']:.1f} % of the "
            f"time. {verdict}\n"
        )
    return "".join(lines) or MISSING + "\n"
