"""The tables of the text, as Markdown, made from the result files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        "PSNR, dB": decibels(psnr(cells)).removesuffix(" dB"),
        "Best, dB": f"{mean([cell.best_psnr for cell in cells]):.1f}",
        "Grey, dB": f"{leaks.base['grey_psnr']:.1f}",
        "Label": f"{sum(cell.label_found for cell in cells)} of {len(cells)}",
        "ε, joint view": _epsilon_of_attempts(cells),
    }


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


PUBLISHED = {"mnist": 0.981, "cifar10": 0.662}
"""By one trusted curator at these epsilons: Papernot et al. 2021."""


def silos_table(folder: Path) -> str:
    """Accuracy where silos hide single records, and by how much niss is ahead of one curator who has them all."""
    rows = []
    results = read_results(folder, design.SILOS)
    for result in (results[name] for name in design.IN_SILOS if name in results):
        setting = design.find_setting(result.name)

        def reached(method: str, variant: str = "none", of: Result = result) -> list[Cell]:
            return select(of, method=method, variant=variant)

        curator = {cell.labels["seed"]: cell.accuracy for cell in reached("central-dp")}
        paired = [
            cell.accuracy - curator[cell.labels["seed"]]
            for cell in reached("niss-planned")
            if cell.labels["seed"] in curator
        ]
        rows.append(
            {
                "Records": f"{setting.title}, {setting.participants} silos",
                "ε": " / ".join(f"{epsilon:g}" for epsilon in setting.epsilons),
                "No privacy": percent(final(reached("fedavg"))),
                "One curator": percent(final(reached("central-dp"))),
                "niss": percent(final(reached("niss-planned"))),
                "niss, a fifth collude": percent(final(reached("niss-planned", "collusion"))),
                "niss, a tenth late": percent(final(reached("niss-planned", "late"))),
                "Every silo adds all": percent(final(reached("dp-fedavg"))),
                "niss − curator, points": difference(paired),
                "Published, curator": f"{PUBLISHED[setting.dataset]:.1%}",
            }
        )
    return markdown(rows)


def difference(paired: Sequence[float]) -> str:
    """The mean of paired differences in points, and its 95 % interval by Student's t."""
    if len(paired) < 2:
        return MISSING
    from scipy.stats import t

    found = spread(paired)
    half = float(t.ppf(0.975, found.count - 1)) * found.error
    return f"{100 * found.mean:+.2f} ± {100 * half:.2f}".replace("-", "−")


LEAD = "Ahead of DP-FedAvg, points"
_WORDS = ("Variant", "Method", "What goes wrong", "ε, joint view", LEAD)


def beyond_table(folder: Path) -> str:
    """Accuracy of every method at every epsilon promised, by setting and variant, and the epsilon that holds."""
    results = as_listed(read_results(folder, design.BEYOND))
    rows = [{"Setting": result.name, **row} for result in results for row in _setting_rows(result)]
    return markdown(rows, words=_WORDS)


def _setting_rows(result: Result) -> list[dict[str, str]]:
    rows = []
    for variant, method in product(design.VARIANTS, design.METHODS):
        cells = select(result, method=method, variant=variant)
        if cells:
            said = {"Variant": variant, "Method": method}
            rows.append(said | _by_epsilon(result, method, cells, held=epsilon_of_runs(cells)))
    return rows


def _by_epsilon(result: Result, method: str, cells: Sequence[Cell], held: str = "") -> dict[str, str]:
    """The accuracies of a method at each epsilon, the epsilon that is `held` where it is said, and the lead."""
    found = [final(at_epsilon(cells, epsilon)) for epsilon in design.EPSILONS]
    shown = {f"ε = {at:g}": percent(one) for at, one in zip(design.EPSILONS, found, strict=True)}
    if held:
        shown["ε, joint view"] = held
    return shown | {LEAD: leads(method, found, local_accuracies(result))}


def local_accuracies(result: Result) -> list[Spread | None]:
    return [final(select(result, method=_RIVAL, epsilon=epsilon)) for epsilon in design.EPSILONS]


_RIVAL = "dp-fedavg"
HEADLINE = ("mnist-iid-client-1000-of-6000", "mnist-iid-client-100-of-1000")


def headline_table(folder: Path) -> str:
    """Every method under everything that may go wrong, and by how much it leads DP-FedAvg, or is behind."""
    results = read_results(folder, design.BEYOND)
    rows = []
    for result in (results[name] for name in HEADLINE if name in results):
        setting = design.find_setting(result.name)
        size = f"{setting.participants:,} of {setting.clients:,}"
        for method, variant in product(design.METHODS.values(), design.VARIANTS.values()):
            if method.suffers(variant):
                cells = select(result, method=method.name, variant=variant.name)
                said = {"Participants": size, "Method": method.name, "What goes wrong": variant.words}
                rows.append(said | _by_epsilon(result, method.name, cells))
    return markdown(rows, words=_WORDS)


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


def as_listed(results: Mapping[str, Result]) -> list[Result]:
    """Settings as they are listed, others behind them."""
    known = [name for name in (*design.COMPARED, *design.MODELLED, *design.IN_SILOS) if name in results]
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
    for result in as_listed({name: results[name] for name in results if (name in design.MODELLED) == models}):
        labels = [cell.labels for cell in result.cells]
        groups = {(one["method"], one.get("variant", "none"), one["epsilon"] or 0.0) for one in labels}
        for method, variant, epsilon in sorted(groups):
            trials = trials_of(result, method, variant)
            tried = [cell for cell in trials if cell.labels["epsilon"] == (epsilon or None)]
            best = best_trial(tried)
            clip = best.labels["clip"]
            rows.append(
                {
                    "Setting": result.name,
                    "Method": method if variant == "none" else f"{method}, {variant}",
                    "ε": f"{epsilon:g}" if epsilon else "–",
                    "Trials": f"{len(tried)}",
                    "Clip": "–" if clip is None else f"{clip:g}",
                    "Rate": f"{best.labels['learning_rate']:g}",
                    "Hidden": f"{best.labels['hidden']}",
                    "Held-out accuracy": f"{best.accuracy:.1%}",
                    "On the edge": ", ".join(edges_of(tried, best)) or "–",
                }
            )
    return markdown(rows, words=("Method", "On the edge"))


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
        by_x = {x: settled(select(result, x=x, reading=NBAFL.name)) for x in design.X_VALUES}
        cells = result.cells if result else ()
        seeds = {cell.labels["seed"] for cell in cells}
        rows.append(
            {
                "Panel": design.find_panel(name).title,
                **{f"X = {x:g}": percent(found) for x, found in by_x.items()},
                "Gap, points": points(gap(result)),
                "Gap in the paper": f"{low} to {high}",
                "Rounds × seeds": f"{cells[0].rounds} × {len(seeds)}" if cells else "–",
            }
        )
    return markdown(rows)


def gaps_table(folder: Path) -> str:
    """The gap between X = 0 and X = 1 after so many rounds, and where it is the paper's."""
    results = read_results(folder, design.FIGURE_3)
    rows = []
    for name, (low, high) in PAPER_GAPS.items():
        gaps = gap_by_round(results.get(name))
        if gaps:
            most = max(gaps, key=lambda last: gaps[last].mean)
            rows.append(
                {
                    "Panel": design.find_panel(name).title,
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
    results = read_results(folder, design.SWEEP)
    for panel in design.panels_in(results):
        result = results[panel.name]
        clean = settled(select(result, x=0.0))
        noisy = sorted({cell.labels["sigma_k"] for cell in result.cells if cell.labels["x"] == 1.0})
        for sigma in noisy:
            found = settled(select(result, x=1.0, sigma_k=sigma))
            lost = "–" if clean is None or found is None else f"{100 * (clean.mean - found.mean):.1f}"
            shown = {"X = 0": percent(clean), "X = 1": percent(found), "Gap, points": lost}
            rows.append({"Panel": panel.title, "σ_k": f"{sigma:.3g}", **shown})
    return markdown(rows)


def files_table(folder: Path) -> str:
    """Every result file, and the beginning of its fingerprint: what happens to it afterwards shows."""
    files = {
        f"{one.experiment}/{one.name}": one
        for experiment in EXPERIMENTS
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


def datasets_table(folder: Path) -> str:
    """Other models and data: accuracy by method and epsilon, beside what the most frequent label is worth."""
    rows = []
    for result in as_listed(read_results(folder, design.DATASETS)):
        title, guess = (
            design.find_setting(result.name).title,
            percent(spread([result.base["majority"]])),
        )
        said = {"Data, model": title, "Method": "most frequent label"}
        columns = {f"ε = {epsilon:g}": guess for epsilon in design.EPSILONS}
        rows.append({**said, **columns, "ε, joint view": "–", LEAD: "–"})
        for method in design.METHODS:
            if cells := select(result, method=method, variant="none"):
                row = said | {"Method": method}
                row |= _by_epsilon(result, method, cells, held=epsilon_of_runs(cells))
                for epsilon in design.EPSILONS:
                    one = final(at_epsilon(cells, epsilon))
                    if one and not learns(one, result):
                        row[f"ε = {epsilon:g}"] += ", **nothing learned**"
                rows.append(row)
    return markdown(rows, words=_WORDS)


def datasets_words(folder: Path) -> str:
    """A line for each setting: how large it is, and who learns nothing in it."""
    lines = []
    for result in as_listed(read_results(folder, design.DATASETS)):
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
