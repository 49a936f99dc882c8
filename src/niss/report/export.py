"""The numbers of runs, round by round, for other tools: read once, written as CSV or for TensorBoard.

Neither needs matplotlib or torch; event files need the package `tensorboard`, but not TensorFlow.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from niss.errors import ConfigError, RunFolderError
from niss.files import TIMING, write_output
from niss.report.ledger import worst_spent
from niss.report.run_folder import MethodResult, ReportInput, number_at, read_lines, read_report_input

# What is exported of a round, by its column in a CSV file and its tag in TensorBoard.
#
# `epsilon_spent` is that of the worst-off client so far, in the joint view.
TAGS = {
    "accuracy": "accuracy",
    "loss": "loss",
    "tau2": "noise/tau2",
    "noise_variance_measured": "noise/variance_measured",
    "noise_variance_predicted": "noise/variance_predicted",
    "dropped": "clients/dropped",
    "epsilon_spent": "privacy/epsilon_spent",
    "seconds": "seconds",
}

COLUMNS = tuple(TAGS)

_EVENT_FILE = "events.out.tfevents.{began:.0f}.niss"
_EVENT_VERSION = "brain.Event:2"


@dataclass(frozen=True)
class Series:
    """One method of one run.

    run, label     where it belongs
    is_comparison  whether the run has other methods beside it
    began          when the run was made, in seconds since 1970; 0 where that is not recorded
    rounds         its values by number of the round and column
    """

    run: str
    label: str
    is_comparison: bool
    began: float
    rounds: dict[int, dict[str, float | None]]


def read_series(folders: Sequence[Path]) -> list[Series]:
    """Every method of every folder; runs of the same name are told apart by a number.

    Raises `RunFolderError` where a folder cannot be read, or where none has a round yet.
    """
    series: list[Series] = []
    names: list[str] = []
    for folder in folders:
        report = read_report_input(folder)
        name = report.folder.resolve().name
        names.append(name)
        again = names.count(name)
        run = name if again == 1 else f"{name}-{again}"
        for method in report.methods:
            series.append(Series(run, method.label, report.is_comparison, _began(report), _rounds(method)))
    if not any(one.rounds for one in series):
        raise RunFolderError(
            "no round has been played in " + ", ".join(map(str, folders)), hint="export it when it has begun"
        )
    return series


def _began(report: ReportInput) -> float:
    """The moment in the manifest; one without a time zone is taken as UTC, so that it is the same everywhere."""
    try:
        moment = datetime.fromisoformat(report.created or "")
    except ValueError:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


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


def check_free(paths: Iterable[Path], *, overwrite: bool) -> None:
    """Raise `RunFolderError` where one of `paths` exists, unless `overwrite`."""
    taken = next((path for path in paths if path.exists()), None)
    if taken is not None and not overwrite:
        raise RunFolderError(f"{taken} already exists", hint="choose another place, or add --overwrite")


def write_csv(series: Sequence[Series], path: Path) -> Path:
    """One line per round and method, and return `path`.

    The columns are run, method, round and those of `COLUMNS`. Numbers are written in full, so that reading them gives
    the same numbers; one that is not there is an empty field.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "method", "round", *COLUMNS])
    for one in series:
        for number, values in sorted(one.rounds.items()):
            cells = ["" if value is None else repr(value) for value in values.values()]
            writer.writerow([one.run, one.label, number, *cells])
    return write_output(path, text.getvalue().encode("utf-8"))


def write_event_files(series: Sequence[Series], folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Event files for TensorBoard: a folder for each run, below it one for each method of a comparison.

    series     as `read_series` gives them; labels become names of folders, so those that cannot are refused
    folder     what `tensorboard --logdir` is given
    overwrite  replaces earlier event files and nothing else: a second one beside the first would show every point
               twice; without it they are a `RunFolderError`

    Returns the files. Their times are those of the run, so that the same run gives the same bytes. Raises `ConfigError`
    where the package `tensorboard` is not installed.
    """
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "this export needs tensorboard", field="--tensorboard", hint="pip install 'niss[tensorboard]'"
        ) from None
    for one in series:
        if one.label in ("", ".", "..") or Path(one.label).name != one.label:
            raise RunFolderError(
                f"{one.label!r} cannot be the name of a folder", hint="give the method another label"
            )
    places = [folder / one.run / one.label if one.is_comparison else folder / one.run for one in series]
    earlier = [path for place in places for path in sorted(place.glob("*tfevents*"))]
    check_free(earlier, overwrite=overwrite)
    for path in earlier:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    return [
        write_output(place / _EVENT_FILE.format(began=one.began), _events(one))
        for one, place in zip(series, places, strict=True)
    ]


def _events(one: Series) -> bytes:
    """The content of an event file: its version, then a summary for each round."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    content = io.BytesIO()
    writer = RecordWriter(content)
    clock = one.began
    writer.write(Event(wall_time=clock, file_version=_EVENT_VERSION).SerializeToString())
    for number, values in sorted(one.rounds.items()):
        clock += values["seconds"] or 0.0
        known = {TAGS[name]: value for name, value in values.items() if value is not None}
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()])
        writer.write(Event(wall_time=clock, step=number, summary=summary).SerializeToString())
    return content.getvalue()
