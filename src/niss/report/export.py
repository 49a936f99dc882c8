"""The numbers of runs, round by round, for other tools: read once, written as CSV or for TensorBoard."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from niss.errors import RunFolderError
from niss.report.files import number_at, read_json_lines, write_atomically
from niss.report.records import MethodResult, ReportInput
from niss.report.source import read_report_input
from niss.report.spending import worst_spent

COLUMNS = (
    "accuracy",
    "loss",
    "tau2",
    "noise_variance_measured",
    "noise_variance_predicted",
    "dropped",
    "epsilon_spent",
    "seconds",
)
"""What is exported of a round; `epsilon_spent` is that of the worst-off client so far, in the joint view."""


@dataclass(frozen=True)
class Series:
    """One method of one run: where it belongs (`run`, `label`), when it began, and its rounds by number."""

    run: str
    label: str
    alone: bool
    began: float
    rounds: dict[int, dict[str, float | None]]


def read_series(folders: Sequence[Path]) -> list[Series]:
    """Every method of every folder; runs of the same name are told apart by a number."""
    found: list[Series] = []
    names: list[str] = []
    for folder in folders:
        report = read_report_input(folder)
        name = report.folder.resolve().name
        names.append(name)
        again = names.count(name)
        run = name if again == 1 else f"{name}-{again}"
        for method in report.methods:
            found.append(Series(run, method.label, not report.is_comparison, _began(report), _rounds(method)))
    if not any(one.rounds for one in found):
        raise RunFolderError(
            "no round has been played in " + ", ".join(map(str, folders)), hint="export it when it has begun"
        )
    return found


def _began(report: ReportInput) -> float:
    """When the run was made, in seconds since 1970; 0 where that is not recorded."""
    try:
        moment = datetime.fromisoformat(report.created or "")
    except ValueError:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _rounds(method: MethodResult) -> dict[int, dict[str, float | None]]:
    spent, seconds = worst_spent(method), _seconds(method)
    return {
        point.round: dict(
            zip(
                COLUMNS,
                (
                    point.accuracy,
                    point.loss,
                    point.tau2 if method.method == "niss" else None,
                    point.aggregate_variance,
                    point.aggregate_variance_predicted,
                    point.dropped,
                    spent.get(point.round),
                    seconds.get(point.round),
                ),
                strict=True,
            )
        )
        for point in method.curve
    }


def _seconds(method: MethodResult) -> dict[int, float | None]:
    if method.folder is None:
        return {}
    path = method.folder / "timing.jsonl"
    lines, _ = read_json_lines(path)
    return {int(number_at(line, "round", path) or 0): number_at(line, "seconds", path) for line in lines}


def check_free(paths: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse to write over what is there, unless told to."""
    taken = [path for path in paths if path.exists()]
    if taken and not overwrite:
        raise RunFolderError(f"{taken[0]} exists", hint="choose another place, or add --overwrite")


def write_csv(series: Sequence[Series], path: Path) -> Path:
    """One line a round and method; a number that is not there is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "method", "round", *COLUMNS])
    for one in series:
        for number, values in sorted(one.rounds.items()):
            cells = ["" if value is None else repr(value) for value in values.values()]
            writer.writerow([one.run, one.label, number, *cells])
    return write_atomically(path, text.getvalue().encode("utf-8"))
