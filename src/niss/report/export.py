"""The numbers of runs, round by round, as a table for other tools; neither matplotlib nor torch is needed."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from niss.errors import RunFolderError
from niss.files import TIMING, write_output
from niss.report.ledger import worst_spent
from niss.runs.folder import MethodResult, number_at, read_lines, read_report_input

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
        names.append(name := report.folder.resolve().name)
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
