"""What a report says in words and numbers: its finding, its table of results, the settings, and all rounds as CSV.

Numbers have the digits that mean something after one run: accuracies a tenth of a percent, variances three digits,
epsilons two decimals, rounded up (`niss.claims`). What is not a number says why: see `WORDS`. Noise is told in two
quantities: in a round, the mean over the rounds of what is in the sum, and in the model, what all rounds left in it.

The finding says what the numbers support and no more. Compared are the methods that protect against a server that sees
every upload, within the target epsilon, each by its accuracy as printed: a difference the reader cannot see is no
difference. Methods that trust the server, that have no guarantee in the joint view or that spend more than the target
are never the finding; `caveats` names them. Neither matplotlib nor torch is needed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from niss.claims import NO_GUARANTEE, NOT_APPLICABLE, digits, percent, rounded_up
from niss.errors import RunFolderError
from niss.files import TIMING, write_output
from niss.report.ledger import worst_spent
from niss.runs.folder import MethodResult, ReportInput, number_at, read_lines, read_report_input, section
from niss.runs.privacy import NOT_PRIVATE, UNFINISHED, format_epsilon, who_is_trusted

NO_NOISE = "none"

# What stands in a cell that holds no number.
WORDS = (NOT_APPLICABLE, NO_NOISE, NO_GUARANTEE, NOT_PRIVATE, UNFINISHED)

RESULTS = ("Method", "Accuracy", "Five rounds before", "ε against the server", "Who is trusted")
NOISE = (
    *("Method", "κ", "τ²", "In a round, measured", "In a round, predicted"),
    *("In the model, predicted", "ε of one upload"),
)


class SummaryTable(NamedTuple):
    """A header, and rows of as many cells; the first cell of a row names it.

    Unpacks as `header, rows = summary_rows(report)`.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def summary_rows(report: ReportInput) -> SummaryTable:
    """One row for each method, in the order of the folder: what it reached, what it promises, and on whose word.

    Of an unfinished method the accuracy is that of its last evaluation, and says so; its epsilon is not known yet.
    """
    rounds = [number for method in report.methods for number, _ in method.evaluations]
    sparse = len(set(rounds)) < max(rounds, default=0)
    header = [heading.replace("rounds", "evaluations") if sparse else heading for heading in RESULTS]
    return SummaryTable(tuple(header), tuple(map(_row, report.methods)))


def _row(method: MethodResult) -> tuple[str, ...]:
    accuracy = percent(method.accuracy)
    if method.accuracy is not None and not method.finished:
        accuracy += f" (round {method.evaluations[-1][0]})"
    epsilon = format_epsilon(method, method.epsilon_joint)
    return method.label, accuracy, percent(method.accuracy_before), epsilon, who_is_trusted(method)


def remarks(report: ReportInput) -> list[str]:
    """What the table of results cannot say in a cell: why a last accuracy flatters, why there is no guarantee."""
    said = []
    if carried := [method.label for method in report.methods if method.finished and method.carries]:
        said.append(
            f"The noise that {_listed(carried)} carries to the next round is all gone after the last one only: compare "
            "by both accuracies."
        )
    for method in report.methods:
        if method.finished and method.shares_noise and method.aggregate_variance_predicted == 0.0:
            alone = method.epsilon_marginal
            upload = "" if alone is None else f"; its ε of {rounded_up(alone)} is that of one upload alone"
            said.append(
                f"All noise of {method.label} cancels when the server adds the uploads up, so nothing hides a client "
                f"from the server, as in the paper with τ = 0{upload}."
            )
    return said


def noise_rows(report: ReportInput) -> SummaryTable:
    """One row for each method: its shares, and the noise that they leave in a round and in the model.

    Where records are hidden, one upload is not looked at alone.
    """
    cells = len(NOISE) - (report.unit == "record")
    rows = (
        (
            method.label,
            digits(method.kappa),
            digits(method.tau2),
            *(format_variance(one, finished=method.finished) for one in noise_of(method)),
            format_epsilon(method, method.epsilon_marginal),
        )
        for method in report.methods
    )
    return SummaryTable(NOISE[:cells], tuple(row[:cells] for row in rows))


def noise_of(method: MethodResult) -> tuple[float | None, float | None, float | None]:
    """Variances: in a round, measured and predicted, means over the rounds; and in the model after the latest."""
    return method.aggregate_variance, method.aggregate_variance_predicted, method.model_noise_variance


def format_variance(variance: float | None, *, finished: bool = True) -> str:
    """A finished method without a variance adds no noise; of an unfinished one it is only not known yet."""
    return digits(variance) if variance or not finished else NO_NOISE


def settings_of(report: ReportInput) -> dict[str, str | None]:
    """Name and value of each setting, in reading order; None where no file of the folder names it."""
    manifest = report.methods[0].manifest if report.methods else {}
    config = section(manifest, "config")
    model, training, privacy = (section(config, name) for name in ("model", "training", "privacy"))
    steps = {
        "Learning rate": training.get("learning_rate"),
        "Local epochs": training.get("epochs"),
        "Batch size": training.get("batch_size"),
    }
    if report.unit == "record":
        steps = {
            "Share of the records in a batch": privacy.get("batch"),
            "Server's rate": training.get("server_rate"),
        }
    values = {
        "Dataset": report.dataset,
        "Split between clients": report.split,
        "Clients": report.clients,
        "Participants in a round": report.participants,
        "How they are chosen": training.get("sampling"),
        "Rounds": report.rounds,
        "Model": _model(model),
        "Model parameters": report.model_parameters,
        "Clip": privacy.get("clip"),
        **steps,
        "Seed": str(config.get("seed", manifest.get("seed", NOT_APPLICABLE))),
        "Unit of privacy": report.unit,
        "Neighbouring relation": report.relation,
        "δ": report.delta,
        "Target ε, joint view": None if report.target_epsilon is None else rounded_up(report.target_epsilon),
        "Share assumed to collude": privacy.get("collusion"),
        "Engine": _recorded(report, "engine"),
        "Precision": _recorded(report, "precision"),
    }
    return {name: _setting(value) for name, value in values.items()}


def _setting(value: object) -> str | None:
    """A value of the configuration as one would write it."""
    if value is None or isinstance(value, dict):
        return None
    return digits(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _model(model: Mapping[str, Any]) -> str | None:
    """The network, with the widths of its hidden layers where they are set."""
    name, hidden = model.get("name"), model.get("hidden")
    if not isinstance(name, str):
        return None
    if not isinstance(hidden, list):
        return name
    return (
        f"{name}, hidden layers {', '.join(map(str, hidden))}" if hidden else f"{name} without a hidden layer"
    )


def _recorded(report: ReportInput, key: str) -> str | None:
    """What the manifests say under `key`: each answer once."""
    answers = dict.fromkeys(
        method.manifest[key] for method in report.methods if isinstance(method.manifest.get(key), str)
    )
    return "; ".join(answers) or None


# Calibration stops a little below its target; two epsilons this close, relatively, are the same budget.
SAME_BUDGET = 0.01


@dataclass(frozen=True, slots=True)
class Scored:
    """A method that has an accuracy.

    tenths  the accuracy as printed, in tenths of a percentage point: 821 for 82.1 %
    """

    result: MethodResult
    tenths: int

    @property
    def accuracy(self) -> str:
        return percent(self.tenths / 1000)

    @property
    def before(self) -> str:
        """Beside the accuracy, where noise that was carried has made that of the last round the best one."""
        mean = self.result.accuracy_before
        return f" ({percent(mean)} over the five before)" if self.result.carries and mean else ""


def finding(report: ReportInput) -> str:
    """The one sentence that the page begins with.

    Of an unfinished run it draws no conclusion, of a single one it states accuracy and epsilon. In a comparison it
    names the best protected method, how far that is from the best without privacy, and the best of the others.
    """
    if not report.finished:
        return _unfinished(report)
    scored = _scored(report)
    if not scored:
        return "No accuracy was measured, so there is nothing to compare."
    if len(report.methods) == 1:
        return _single(scored[0], report)
    protected = _within_budget(scored, report)
    if not protected:
        return "No method here has both an accuracy and a guarantee against a server that sees every upload."
    return _compared(protected, _best([one for one in scored if not one.result.is_private]))


def caveats(report: ReportInput) -> list[str]:
    """What a reader of the finding must know beside it, as sentences: which methods were left out and why.

    Of a single or an unfinished run, where nothing is compared, only what the table needs.
    """
    if not report.finished or len(report.methods) == 1:
        return remarks(report)
    scored = _scored(report)
    affordable = _within_budget(scored, report)
    proven = [one for one in scored if one.result.epsilon_joint is not None]
    left_out = {
        "since the server is trusted, and ε holds only for those who see the released models": [
            one for one in proven if one.result.trusts_the_server
        ],
        "for want of a guarantee against the server": [
            one for one in scored if one.result.is_private and one not in proven
        ],
        "for more than the target ε": [
            one for one in scored if one.result.is_protected and one not in affordable
        ],
    }
    left = [
        f"Left out of the finding: {_listed([f'{one.result.label} ({one.accuracy})' for one in methods])}, {why}."
        for why, methods in left_out.items()
        if methods
    ]
    return [
        *left,
        *remarks(report),
        "Each method was run once, so small differences between neighbours may be chance.",
    ]


def _unfinished(report: ReportInput) -> str:
    """How far the run or the comparison has come, and that nothing can be concluded from it."""
    if report.is_comparison:
        begun = len(report.methods)
        state = f"comparison is unfinished: {begun} method{'s have' if begun != 1 else ' has'} begun"
    else:
        of_all = f" of {report.rounds}" if report.rounds else ""
        state = f"run is unfinished: {report.methods[0].rounds_done}{of_all} rounds are done"
    return f"This {state}, the figures show what there is so far, and nothing follows yet."


def _single(one: Scored, report: ReportInput) -> str:
    """The accuracy of the only method and the epsilon it was reached at, or that there is none."""
    rounds = f" after {report.rounds} rounds" if report.rounds else ""
    head = f"{one.result.label} reached {one.accuracy} accuracy{rounds}{one.before}"
    if not one.result.is_private:
        return f"{head}, without any privacy."
    if one.result.epsilon_joint is None:
        return f"{head}, without a guarantee against the server."
    view = (
        "for those who see only the released models" if one.result.trusts_the_server else "against the server"
    )
    return f"{head}, at ε = {rounded_up(one.result.epsilon_joint)} {view}."


def _compared(protected: list[Scored], reference: list[Scored]) -> str:
    """The best of `protected`, several where they are level, measured against the best without privacy, if any.

    After it comes the best of the others: where noise shares won, one with noise of each client's own, which does not
    cancel, and the other way round. That is the comparison this package is about.
    """
    best = _best(protected)
    names = _listed([one.result.label for one in best])
    before = best[0].before if len(best) == 1 else ""
    found = f"{names} reach{'es' * (len(best) == 1)} {best[0].accuracy}{before}"
    if reference:
        without = reference[0]
        gap = without.tenths - best[0].tenths
        far = f"{_points(abs(gap))} {'below' if gap > 0 else 'above'}" if gap else "as much as"
        found += f", {far} {without.result.label} without privacy ({without.accuracy})"
    won_by = {one.result.method for one in best}
    rivals = [one for one in protected if one.result.method not in won_by]
    others = _best([one for one in rivals if not one.result.shares_noise] or rivals)
    if others:
        found += f"; {others[0].result.label} reaches {others[0].accuracy}"
    return f"{_budget_phrase(protected)}, {found}."


def _budget_phrase(protected: list[Scored]) -> str:
    """The epsilon of the comparison; "the same" only where all of them are, else the largest as a bound."""
    epsilons = [one.result.epsilon_joint for one in protected if one.result.epsilon_joint is not None]
    largest = max(epsilons)
    if largest - min(epsilons) <= SAME_BUDGET * largest:
        same = "the same" if len(protected) > 1 else "an"
        return f"At {same} ε of {rounded_up(largest)} against the server"
    return f"At an ε of at most {rounded_up(largest)} against the server"


def _scored(report: ReportInput) -> list[Scored]:
    """The methods that have an accuracy, rounded once, by printing: so no sentence contradicts the table."""
    return [
        Scored(method, round(10 * float(f"{100 * method.accuracy:.1f}")))
        for method in report.methods
        if method.accuracy is not None
    ]


def _within_budget(scored: list[Scored], report: ReportInput) -> list[Scored]:
    """The protected ones that spend no more than the target; all of them where there is none."""
    most = math.inf if report.target_epsilon is None else (1 + SAME_BUDGET) * report.target_epsilon
    return [one for one in scored if one.result.is_protected and (one.result.epsilon_joint or 0.0) <= most]


def _best(scored: list[Scored]) -> list[Scored]:
    """Those with the highest accuracy as printed."""
    top = max((one.tenths for one in scored), default=0)
    return [one for one in scored if one.tenths == top]


def _points(tenths: int) -> str:
    return "1 percentage point" if tenths == 10 else f"{tenths / 10:.1f} percentage points"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


COLUMNS = (
    *("accuracy", "loss", "tau2", "noise_variance_measured", "noise_variance_predicted"),
    *("dropped", "epsilon_spent", "seconds"),
)
"""What is exported of a round; `epsilon_spent` is that of the worst-off client so far, in the joint view."""

Rows = list[tuple[str, str, int, dict[str, float | None]]]
"""The run, the method, the round, and its values by column."""


def read_rows(folders: Sequence[Path]) -> Rows:
    """Every round of every method of every folder; runs of the same name are told apart by a number.

    Raises `RunFolderError` where a folder cannot be read, or where none has a round yet.
    """
    rows: Rows = []
    names: list[str] = []
    for folder in folders:
        report = read_report_input(folder)
        names.append(name := report.name)
        run = name if (again := names.count(name)) == 1 else f"{name}-{again}"
        for method in report.methods:
            rows += [(run, method.label, number, values) for number, values in _rounds(method).items()]
    if not rows:
        raise RunFolderError(
            "no round has been played in " + ", ".join(map(str, folders)), hint="export it when it has begun"
        )
    return rows


def _rounds(method: MethodResult) -> dict[int, dict[str, float | None]]:
    """The values of each round by column, from metrics.jsonl, timing.jsonl and the ledger."""
    path = method.folder / TIMING
    lines, _ = read_lines(path)
    seconds = {int(number_at(line, "round", path) or 0): number_at(line, "seconds", path) for line in lines}
    spent = worst_spent(method)
    return {
        point.round: {
            "accuracy": point.accuracy,
            "loss": point.loss,
            "tau2": point.tau2 if method.shares_noise else None,
            "noise_variance_measured": point.aggregate_variance,
            "noise_variance_predicted": point.aggregate_variance_predicted,
            "dropped": point.dropped,
            "epsilon_spent": spent.get(point.round),
            "seconds": seconds.get(point.round),
        }
        for point in method.curve
    }


def write_csv(rows: Rows, path: Path) -> Path:
    """One line per round and method, and return `path`.

    The columns are run, method, round and those of `COLUMNS`. Numbers are written in full, so that reading them gives
    the same numbers; one that is not there is an empty field.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "method", "round", *COLUMNS])
    for run, label, number, values in rows:
        cells = ["" if values[name] is None else repr(values[name]) for name in COLUMNS]
        writer.writerow([run, label, number, *cells])
    return write_output(path, text.getvalue().encode("utf-8"))
