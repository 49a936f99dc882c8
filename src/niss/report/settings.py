"""The settings of a run that a researcher looks for, by the names they go by; read from its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from niss.claims import rounded_up
from niss.report.run_folder import ReportInput


def settings_of(report: ReportInput) -> dict[str, str | None]:
    """Name and value of each setting, in reading order; None where no file of the folder names it."""
    config = _section(report.methods[0].manifest if report.methods else {}, "config")
    model, training, privacy = (_section(config, name) for name in ("model", "training", "privacy"))
    return {
        "Dataset": report.dataset,
        "Split between clients": report.split,
        "Clients": _count(report.clients),
        "Participants in a round": _count(report.participants),
        "How they are chosen": _text(training.get("sampling")),
        "Rounds": _count(report.rounds),
        "Model": _model(model),
        "Model parameters": _count(report.model_parameters),
        "Clip": _text(privacy.get("clip")),
        "Learning rate": _text(training.get("learning_rate")),
        "Local epochs": _text(training.get("epochs")),
        "Batch size": _text(training.get("batch_size")),
        "Seed": _text(config.get("seed", (report.methods[0].manifest if report.methods else {}).get("seed"))),
        "Unit of privacy": report.unit,
        "Neighbouring relation": report.relation,
        "δ": None if report.delta is None else f"{report.delta:.3g}",
        "Target ε, joint view": None if report.target_epsilon is None else rounded_up(report.target_epsilon),
        "Colluders assumed": _text(privacy.get("colluders")),
        "Engine": _recorded(report, "engine"),
        "Precision": _recorded(report, "precision"),
    }


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}".replace(",", "\u202f")


def _text(value: object) -> str | None:
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
