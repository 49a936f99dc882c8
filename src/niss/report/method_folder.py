"""Reads the folder of one method: its result if it is finished, and what there is so far if it is not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from niss.errors import RunFolderError
from niss.report.files import JsonObject, number_at, read_json_lines, read_json_object, text_at
from niss.report.records import MethodResult, RoundMetrics


def read_method(
    folder: Path, entry: JsonObject | None, where: Path, notes: list[str], *, fallback_label: str
) -> MethodResult:
    """The method in `folder`; `entry`, read from `where`, holds its results, None while unfinished."""
    manifest = read_json_object(folder / "manifest.json") or {}
    label = (text_at(entry, "label", where) if entry else None) or fallback_label
    curve = _curve(folder / "metrics.jsonl", label, notes)
    if entry is None:
        return _unfinished(folder, label, manifest, curve)
    return MethodResult(
        label=label,
        method=text_at(entry, "method", where) or label,
        kappa=number_at(entry, "kappa", where),
        tau2=number_at(entry, "tau2", where),
        accuracy=number_at(entry, "accuracy", where),
        aggregate_variance=number_at(entry, "aggregate_variance", where),
        aggregate_variance_predicted=number_at(entry, "aggregate_variance_predicted", where),
        epsilon_joint=number_at(entry, "epsilon_joint", where),
        epsilon_marginal=number_at(entry, "epsilon_marginal", where),
        adversary=text_at(entry, "adversary", where),
        guarantee=text_at(entry, "guarantee", where),
        finished=True,
        curve=curve,
        manifest=manifest,
        folder=folder,
    )


def _unfinished(
    folder: Path, label: str, manifest: JsonObject, curve: tuple[RoundMetrics, ...]
) -> MethodResult:
    """What the manifest planned and the rounds have shown; no epsilon, since none is final."""
    planned = planned_methods(manifest)
    plan: JsonObject = planned[0] if len(planned) == 1 else {}
    method = plan.get("name") if isinstance(plan.get("name"), str) else label
    kappa = plan.get("kappa") if method == "niss" else None
    accuracies = [point.accuracy for point in curve if point.accuracy is not None]
    return MethodResult(
        label=label,
        method=str(method),
        kappa=float(kappa) if isinstance(kappa, int | float) else None,
        tau2=_mean(point.tau2 for point in curve) if method == "niss" else None,
        accuracy=accuracies[-1] if accuracies else None,
        aggregate_variance=_mean(point.aggregate_variance for point in curve),
        aggregate_variance_predicted=_mean(point.aggregate_variance_predicted for point in curve),
        epsilon_joint=None,
        epsilon_marginal=None,
        adversary=None,
        guarantee=None,
        finished=False,
        curve=curve,
        manifest=manifest,
        folder=folder,
    )


def planned_methods(manifest: JsonObject) -> list[dict[str, Any]]:
    """The methods as the manifest's configuration lists them."""
    config = manifest.get("config")
    methods = config.get("methods") if isinstance(config, dict) else None
    return [method for method in methods if isinstance(method, dict)] if isinstance(methods, list) else []


def _texts(value: object) -> dict[str, str] | None:
    """An object whose values are texts; anything else counts as not there."""
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        return None
    return value


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _curve(path: Path, label: str, notes: list[str]) -> tuple[RoundMetrics, ...]:
    lines, cut_off = read_json_lines(path)
    if cut_off:
        notes.append(f"The last line of {label}’s metrics.jsonl is cut off and was left out.")
    by_round: dict[int, RoundMetrics] = {}
    for line in lines:
        number, dropped = number_at(line, "round", path), number_at(line, "dropped", path)
        if number is None:
            raise RunFolderError(f"{path} has a line without its round.", hint="Run the experiment again.")
        # A run resumed from a checkpoint writes some rounds twice; what was written last holds.
        by_round[int(number)] = RoundMetrics(
            round=int(number),
            accuracy=number_at(line, "accuracy", path),
            loss=number_at(line, "loss", path),
            aggregate_variance=number_at(line, "aggregate_variance", path),
            aggregate_variance_predicted=number_at(line, "aggregate_variance_predicted", path),
            tau2=number_at(line, "tau2", path),
            dropped=None if dropped is None else int(dropped),
            protocol=_texts(line.get("protocol")),
        )
    if not by_round:
        notes.append(f"{label} has no rounds in metrics.jsonl, so it has no curve.")
    return tuple(by_round[number] for number in sorted(by_round))
