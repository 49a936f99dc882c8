"""What is said of the settings with other models: a table, and a line for each that says who learned nothing."""

from __future__ import annotations

from pathlib import Path

from experiments.reproduce.checks import setting_of
from experiments.reproduce.claims import learns
from experiments.reproduce.design import DATASETS, EPSILONS, METHODS
from experiments.reproduce.results import read_results, select, spread
from experiments.reproduce.tables import (
    LEAD,
    MISSING,
    at_epsilon,
    epsilon_of_runs,
    final,
    in_order,
    leads,
    local_accuracies,
    or_missing,
    percent,
)


def datasets_table(folder: Path) -> str:
    """Other models and data: accuracy by method and epsilon, beside what the most frequent label is worth."""
    rows = []
    for result in in_order(read_results(folder, DATASETS)):
        title, guess, local = (
            setting_of(result).title,
            percent(spread([result.base["majority"]])),
            local_accuracies(result),
        )
        rows.append([title, "most frequent label", *[guess] * len(EPSILONS), "–", "–"])
        for method in METHODS:
            if cells := select(result, method=method, variant="none"):
                found = [final(at_epsilon(cells, epsilon)) for epsilon in EPSILONS]
                shown = [
                    percent(one) + (", **nothing learned**" if one and not learns(one, result) else "")
                    for one in found
                ]
                rows.append([title, method, *shown, epsilon_of_runs(cells), leads(method, found, local)])
    columns = [f"ε = {epsilon:g}" for epsilon in EPSILONS]
    header = ["Data, model", "Method", *columns, "ε, joint view", LEAD]
    return or_missing(header, rows, words=(0, 1, 5, 6))


def datasets_words(folder: Path) -> str:
    """A line for each setting: how large it is, and who learns nothing in it."""
    lines = []
    for result in in_order(read_results(folder, DATASETS)):
        setting, failing = setting_of(result), []
        for epsilon in EPSILONS:
            found = {
                method: final(select(result, method=method, epsilon=epsilon, variant="none"))
                for method in setting.methods
                if METHODS[method].private
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
