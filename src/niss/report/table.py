"""The table of results and the settings as formatted strings, the same for the page and for the terminal.

Numbers have the digits that mean something after one run: accuracies a tenth of a percent, variances three digits,
epsilons two decimals, rounded up (`niss.claims`). What is not a number says why: see `WORDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from niss.claims import NO_GUARANTEE, rounded_up
from niss.runs.folder import MethodResult, ReportInput
from niss.runs.privacy import NOT_APPLICABLE, NOT_PRIVATE, UNFINISHED, format_epsilon

NO_NOISE = "none"

# What stands in a cell that holds no number.
WORDS = (NOT_APPLICABLE, NO_NOISE, NO_GUARANTEE, NOT_PRIVATE, UNFINISHED)

HEADER = (
    "Method",
    "κ",
    "τ²",
    "Accuracy",
    "Noise variance, measured",
    "Noise variance, predicted",
    "ε, joint view",
    "ε, marginal view",
)


class SummaryTable(NamedTuple):
    """A header, and rows of as many cells; the first cell of a row names it.

    Unpacks as `header, rows = summary_rows(report)`.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def summary_rows(report: ReportInput) -> SummaryTable:
    """One row for each method, in the order of the folder.

    Of an unfinished method the accuracy is that of its last evaluation, and says so; its epsilons are not known yet.
    """
    return SummaryTable(HEADER, tuple(_row(method) for method in report.methods))


def _row(method: MethodResult) -> tuple[str, ...]:
    accuracy = NOT_APPLICABLE if method.accuracy is None else format_accuracy(method.accuracy)
    if method.accuracy is not None and not method.finished:
        accuracy += f" (round {method.evaluations[-1][0]})"
    return (
        method.label,
        _plain(method.kappa),
        _plain(method.tau2),
        accuracy,
        format_variance(method.aggregate_variance, finished=method.finished),
        format_variance(method.aggregate_variance_predicted, finished=method.finished),
        format_epsilon(method, method.epsilon_joint),
        format_epsilon(method, method.epsilon_marginal),
    )


def _plain(value: float | None) -> str:
    return NOT_APPLICABLE if value is None else f"{value:.3g}"


def format_accuracy(accuracy: float) -> str:
    """A share of examples, such as 0.8214, in percent: "82.1 %"."""
    return f"{100 * accuracy:.1f} %"


def format_variance(variance: float | None, *, finished: bool = True) -> str:
    """A finished method without a variance adds no noise; of an unfinished one it is only not known yet."""
    if variance is None and not finished:
        return NOT_APPLICABLE
    return f"{variance:.3g}" if variance else NO_NOISE


def settings_of(report: ReportInput) -> dict[str, str | None]:
    """Name and value of each setting, in reading order; None where no file of the folder names it."""
    config = _section(report.methods[0].manifest if report.methods else {}, "config")
    model, training, privacy = (_section(config, name) for name in ("model", "training", "privacy"))
    return {
        "Dataset": report.dataset,
        "Split between clients": report.split,
        "Clients": _count(report.clients),
        "Participants in a round": _count(report.participants),
        "How they are chosen": _setting(training.get("sampling")),
        "Rounds": _count(report.rounds),
        "Model": _model(model),
        "Model parameters": _count(report.model_parameters),
        "Clip": _setting(privacy.get("clip")),
        "Learning rate": _setting(training.get("learning_rate")),
        "Local epochs": _setting(training.get("epochs")),
        "Batch size": _setting(training.get("batch_size")),
        "Seed": _setting(
            config.get("seed", (report.methods[0].manifest if report.methods else {}).get("seed"))
        ),
        "Unit of privacy": report.unit,
        "Neighbouring relation": report.relation,
        "δ": None if report.delta is None else f"{report.delta:.3g}",
        "Target ε, joint view": None if report.target_epsilon is None else rounded_up(report.target_epsilon),
        "Colluders assumed": _setting(privacy.get("colluders")),
        "Engine": _recorded(report, "engine"),
        "Precision": _recorded(report, "precision"),
    }


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}".replace(",", "\u202f")


def _setting(value: object) -> str | None:
    """A value of the configuration as one would write it."""
    if value is None or isinstance(value, dict):
        return None
    return f"{value:g}" if isinstance(value, float) else str(value)


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
