"""Event files for TensorBoard. Needs the package `tensorboard`, but neither torch nor TensorFlow.

Tags: `accuracy`, `loss`, `privacy/epsilon_spent`, `noise/tau2`, `noise/variance_measured`,
`noise/variance_predicted`, `clients/dropped`, `seconds`. The times are those of the run, so that the same run gives the
same bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from niss.errors import RunFolderError
from niss.report.export import COLUMNS, Series, check_free

TAGS = dict(
    zip(
        COLUMNS,
        (
            "accuracy",
            "loss",
            "noise/tau2",
            "noise/variance_measured",
            "noise/variance_predicted",
            "clients/dropped",
            "privacy/epsilon_spent",
            "seconds",
        ),
        strict=True,
    )
)
_FILE = "events.out.tfevents.{began:.0f}.niss"
_VERSION = "brain.Event:2"


def write_event_files(series: Sequence[Series], folder: Path, *, overwrite: bool = False) -> list[Path]:
    """A folder for each run, below it one for each method of a comparison; returns the files written."""
    for one in series:
        if one.label in ("", ".", "..") or Path(one.label).name != one.label:
            raise RunFolderError(
                f"{one.label!r} cannot be the name of a folder", hint="give the method another label"
            )
    places = [folder / one.run if one.alone else folder / one.run / one.label for one in series]
    earlier = [path for place in places for path in sorted(place.glob("*tfevents*"))]
    check_free(earlier, overwrite=overwrite)
    for path in earlier:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    return [_write(one, place) for one, place in zip(series, places, strict=True)]


def _write(one: Series, place: Path) -> Path:
    path = place / _FILE.format(began=one.began)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            writer = RecordWriter(file)
            for event in _events(one):
                writer.write(event.SerializeToString())
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}", hint="choose another place") from None
    return path


def _events(one: Series) -> Iterator[Event]:
    clock = one.began
    yield Event(wall_time=clock, file_version=_VERSION)
    for number, values in sorted(one.rounds.items()):
        clock += values["seconds"] or 0.0
        known = {TAGS[name]: value for name, value in values.items() if value is not None}
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()])
        yield Event(wall_time=clock, step=number, summary=summary)
