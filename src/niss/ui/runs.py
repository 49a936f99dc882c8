"""The folder of runs as the pages show it: which there are, how far each has come, and its curves so far.

A run is asked for by its name and found among those that were listed, so no name can lead out of the folder.
"""

from __future__ import annotations

import json
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from niss.claims import duration, rounded_up
from niss.errors import NissError, RunFolderError
from niss.files import LEDGER, MANIFEST, METRICS, RESULT, SUMMARY, TIMING, read_json_lines
from niss.report.attacks import ATTACK, holds_only_an_attack, read_attack_report
from niss.report.ledger import worst_spent
from niss.report.page import read_source, render_page
from niss.report.run_charts import accuracy_chart
from niss.report.summary import noise_of, remarks, settings_of
from niss.runs.folder import MethodResult, ReportInput, read_report_input
from niss.svg import in_two_widths

# How many folders deep a run may lie below the root, and what tells its folder from any other.
_DEPTH = 3
_MARKS = (SUMMARY, MANIFEST, METRICS, ATTACK)
# A round may take long; after this much silence a run counts as stopped.
_SILENCE_SECONDS = 120.0
# Rounds over which the time of one is averaged.
_LATEST_ROUNDS = 10
# What was spent of a ledger of that size: its chain is verified again only when it has grown.
_SPENT: dict[Path, tuple[int, str | None]] = {}


@dataclass(frozen=True)
class RunFolders:
    """The runs below one folder, looked up afresh each time: runs come and go while the server stands.

    root  the folder; it need not exist, and is only ever read
    """

    root: Path

    def names(self) -> dict[str, Path]:
        """Every run by its path below the root; what lies within a run or points out of the root is left out."""
        root = self.root.resolve()
        runs: dict[str, Path] = {}

        def look(folder: Path, depth: int) -> None:
            try:
                inner = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())
            except OSError:
                return
            for path in map(Path, inner):
                if path.name.startswith(".") or not path.resolve().is_relative_to(root):
                    continue
                if any((path / mark).is_file() for mark in _MARKS):
                    runs[path.relative_to(self.root).as_posix()] = path
                elif depth < _DEPTH:
                    look(path, depth + 1)

        look(self.root, 1)
        return runs

    def find(self, name: str) -> Path:
        """The folder of the run of that name; raises `RunFolderError` where there is none."""
        path = self.names().get(name)
        if path is None:
            hint = "choose one from the list of runs"
            raise RunFolderError(f"there is no run {name!r} in {self.root}", hint=hint)
        return path

    def overview(self, now: float) -> list[dict[str, Any]]:
        """One line for each run, the latest change first; a folder that cannot be read says why.

        `now` is in seconds since 1970; by it a run that has not written for long is told from one in progress.
        """
        lines = [_line(name, path, now) for name, path in self.names().items()]
        return sorted(lines, key=lambda line: -line["changed"])


def _line(name: str, path: Path, now: float) -> dict[str, Any]:
    """What the list shows of one run; a folder that cannot be read, whatever is wrong with it, is one bad line."""
    line: dict[str, Any] = {"name": name, "changed": 0.0, "silent_seconds": max(0.0, now)}
    try:
        line |= {"changed": (changed := last_change(path)), "silent_seconds": max(0.0, now - changed)}
        line |= _summary(path, line["silent_seconds"])
        json.dumps(line, allow_nan=False)  # A line that cannot be sent would take all others with it.
    except Exception as error:
        message, hint = "it cannot be read", "the folder is damaged, or not one of a run"
        if isinstance(error, NissError):
            message, hint = error.message, error.hint or hint
        bad = {"state": "unreadable", "message": message, "hint": hint}
        return {key: line[key] for key in ("name", "changed", "silent_seconds")} | bad
    return line


def _summary(path: Path, silent: float) -> dict[str, Any]:
    """How far a run has come: of a comparison, the rounds that all methods have done; of an attack, what it found."""
    if holds_only_an_attack(path):
        attack = read_attack_report(path)
        state, headline = "finished" if attack.finished else "stopped", attack.headline
        return {"title": attack.title, "kind": "attack", "state": state, "headline": headline}
    report = read_report_input(path)
    scored = [one for one in report.methods if one.accuracy is not None]
    best = max(scored, key=lambda one: (one.is_protected, one.accuracy), default=None)
    return {
        "title": report.title,
        "kind": "comparison" if report.is_comparison else "run",
        "state": _state(report, silent),
        "created": report.created,
        "methods": len(report.methods),
        "rounds_done": _rounds_done(report),
        "rounds": report.rounds,
        "best": None if best is None else _method(best),
    }


def live_view(path: Path, name: str, now: float) -> dict[str, Any]:
    """How far the run in `path` has come: its state and, for each method, progress and numbers so far; a chart.

    `name` is what the page calls it, `now` as in `RunFolders.overview`. Raises `RunFolderError` for a folder that
    cannot be read, such as one that is being written for the first time.
    """
    report = read_report_input(path)
    silent = max(0.0, now - last_change(path))
    state, done = _state(report, silent), _rounds_done(report)
    words = {
        "finished": "finished",
        "stopped": f"stopped before its end, silent for {duration(silent)}",
        "running": f"training round {done + 1}" + (f" of {report.rounds}" if report.rounds else ""),
    }
    return {
        "name": name,
        "title": report.title,
        "state": state,
        "state_words": words[state],
        "silent_seconds": silent,
        "seconds_left": _seconds_left(report) if state == "running" else None,
        "rounds": report.rounds,
        "folder": str(path.resolve()),
        "resume": shlex.join(["niss", "run", "--resume", str(path.resolve())]),
        "settings": {name: value for name, value in settings_of(report).items() if value is not None},
        "target": None if report.target_epsilon is None else rounded_up(report.target_epsilon),
        "methods": [_method(one) for one in report.methods],
        "chart": in_two_widths(accuracy_chart(report)),
        "notes": [*report.notes, *remarks(report)],
    }


def _rounds_done(report: ReportInput) -> int:
    """Of a comparison those that all methods have done."""
    return min((one.rounds_done for one in report.methods), default=0)


def _method(one: MethodResult) -> dict[str, Any]:
    """What is shown of one method while it goes; noise in a round is the mean over the rounds, as in its report."""
    return {
        "label": one.label,
        "rounds_done": one.rounds_done,
        "accuracy": one.accuracy,
        "accuracy_before": one.accuracy_before if one.carries else None,
        "epsilon_spent": _spent(one),
        "protected": one.is_protected,
        "server_trusted": one.trusts_the_server,
        "noise": noise_of(one),
        "seconds_a_round": _seconds_a_round(one),
    }


def _seconds_left(report: ReportInput) -> float | None:
    """What the remaining rounds of all methods take at the latest speed; None where that is not known yet."""
    left = [
        seconds * (report.rounds - one.rounds_done)
        for one in report.methods
        if report.rounds is not None and (seconds := _seconds_a_round(one)) is not None
    ]
    return sum(left) if left and len(left) == len(report.methods) else None


def _spent(one: MethodResult) -> str | None:
    """Epsilon that the worst-off client has spent so far, as printed; None where nothing is guaranteed yet.

    Of a finished run it is what its statement says; while it goes, the ledger is added up when it has grown.
    """
    if one.finished:
        return None if one.epsilon_joint is None else rounded_up(one.epsilon_joint)
    path = one.folder / LEDGER
    with suppress(OSError):
        size = path.stat().st_size
        if _SPENT.get(path, (-1, None))[0] != size:
            spent = worst_spent(one)
            _SPENT[path] = (size, rounded_up(spent[max(spent)]) if spent else None)
        return _SPENT[path][1]
    return None


def _seconds_a_round(one: MethodResult) -> float | None:
    """The mean over the latest rounds; None before the first."""
    lines, _ = read_json_lines(one.folder / TIMING)
    seconds = [line.get("seconds") for line in lines[-_LATEST_ROUNDS:]]
    latest = [value for value in seconds if isinstance(value, int | float)]
    return fmean(latest) if latest else None


def _state(report: ReportInput, silent: float) -> str:
    """finished, running, or stopped: one that has been silent for much longer than a round takes."""
    if report.finished:
        return "finished"
    slowest = max((_seconds_a_round(one) or 0.0 for one in report.methods), default=0.0)
    return "running" if silent < max(_SILENCE_SECONDS, 5.0 * slowest) else "stopped"


def last_change(path: Path) -> float:
    """When anything that a run writes was last written, in seconds since 1970; 0 for an empty folder."""
    times = [0.0]
    for folder in (path, *(inner for inner in path.iterdir() if inner.is_dir())):
        for name in (METRICS, RESULT, MANIFEST, SUMMARY, ATTACK):
            with suppress(OSError):
                times.append((folder / name).stat().st_mtime)
    return max(times)


@lru_cache(maxsize=32)
def report_page(path: Path, changed: float) -> str:  # noqa: ARG001
    """The report on the run in `path`, drawn afresh from the folder and kept until that changes.

    A report.html in the folder is never shown: whoever can write there could put a script into it. Raises
    `RunFolderError` where the folder cannot be read.
    """
    return render_page(read_source(path))
