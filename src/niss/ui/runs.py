"""The folder of runs as the pages show it: which there are, how far each has come, and its curves so far.

A run is asked for by its name and found among those that were listed, so no name can lead out of the folder.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from niss.errors import NissError, RunFolderError
from niss.files import read_json_lines
from niss.report import read_report_input
from niss.report.page import render_page
from niss.report.run_folder import MethodResult, ReportInput

_DEPTH = 3
_MARKS = ("summary.json", "manifest.json", "metrics.jsonl")
# A round may take long; after this much silence a run counts as stopped.
_SILENCE_SECONDS = 120.0
_MOST_POINTS = 400
_LATEST_ROUNDS = 10


@dataclass(frozen=True)
class RunFolders:
    """The runs below one folder."""

    root: Path

    def names(self) -> dict[str, Path]:
        """Every run by its path below the root; what lies within a run or points out of the root is left out."""
        root = self.root.resolve()
        found: dict[str, Path] = {}

        def look(folder: Path, depth: int) -> None:
            try:
                inner = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())
            except OSError:
                return
            for path in map(Path, inner):
                if path.name.startswith(".") or not path.resolve().is_relative_to(root):
                    continue
                if any((path / mark).is_file() for mark in _MARKS):
                    found[path.relative_to(self.root).as_posix()] = path
                elif depth < _DEPTH:
                    look(path, depth + 1)

        look(self.root, 1)
        return found

    def find(self, name: str) -> Path:
        """The folder of the run of that name."""
        path = self.names().get(name)
        if path is None:
            raise RunFolderError(
                f"there is no run {name!r} in {self.root}", hint="choose one from the list of runs"
            )
        return path

    def overview(self, now: float) -> list[dict[str, Any]]:
        """One line for each run, the youngest first; a folder that cannot be read says why."""
        lines = [_line(name, path, now) for name, path in self.names().items()]
        return sorted(lines, key=lambda line: -line["changed"])


def _line(name: str, path: Path, now: float) -> dict[str, Any]:
    changed = last_change(path)
    line: dict[str, Any] = {"name": name, "changed": changed, "silent_seconds": max(0.0, now - changed)}
    try:
        report = read_report_input(path)
    except NissError as error:
        return {**line, "state": "unreadable", "message": error.message, "hint": error.hint}
    scored = [one for one in report.methods if one.accuracy is not None]
    best = max(scored, key=lambda one: one.accuracy or 0.0, default=None)
    done = min((one.rounds_done for one in report.methods), default=0)
    return {
        **line,
        "title": report.title,
        "kind": "comparison" if report.is_comparison else "run",
        "state": _state(report, line["silent_seconds"]),
        "created": report.created,
        "methods": len(report.methods),
        "rounds_done": done,
        "rounds": report.rounds,
        "best_method": None if best is None else best.label,
        "best_accuracy": None if best is None else best.accuracy,
    }


def live_view(path: Path, name: str, now: float) -> dict[str, Any]:
    """How far a run has come: its state and, for each method, progress, latest numbers and curve."""
    report = read_report_input(path)
    silent = max(0.0, now - last_change(path))
    return {
        "name": name,
        "title": report.title,
        "state": _state(report, silent),
        "silent_seconds": silent,
        "rounds": report.rounds,
        "methods": [_method(one, report.rounds) for one in report.methods],
        "notes": list(report.notes),
    }


def _method(one: MethodResult, rounds: int | None) -> dict[str, Any]:
    last = one.curve[-1] if one.curve else None
    seconds = _seconds_a_round(one)
    left = None if rounds is None or seconds is None or one.finished else seconds * (rounds - one.rounds_done)
    return {
        "label": one.label,
        "private": one.is_private,
        "rounds_done": one.rounds_done,
        "accuracy": one.accuracy,
        "aggregate_variance": None if last is None else last.aggregate_variance,
        "aggregate_variance_predicted": None if last is None else last.aggregate_variance_predicted,
        "dropped": None if last is None else last.dropped,
        "seconds_a_round": seconds,
        "seconds_left": left,
        "finished": one.finished,
        "curve": _thinned(one.evaluations),
    }


def _seconds_a_round(one: MethodResult) -> float | None:
    if one.folder is None:
        return None
    lines, _ = read_json_lines(one.folder / "timing.jsonl")
    latest = [
        line["seconds"] for line in lines[-_LATEST_ROUNDS:] if isinstance(line.get("seconds"), int | float)
    ]
    return fmean(latest) if latest else None


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    if len(points) <= _MOST_POINTS:
        return points
    last = len(points) - 1
    return [points[round(place * last / (_MOST_POINTS - 1))] for place in range(_MOST_POINTS)]


def _state(report: ReportInput, silent: float) -> str:
    if report.finished:
        return "finished"
    slowest = max((_seconds_a_round(one) or 0.0 for one in report.methods), default=0.0)
    return "running" if silent < max(_SILENCE_SECONDS, 5.0 * slowest) else "stopped"


def last_change(path: Path) -> float:
    """When anything that a run writes was last written, in seconds since 1970."""
    names = ("metrics.jsonl", "result.json", "manifest.json", "summary.json")
    folders = [path, *(inner for inner in path.iterdir() if inner.is_dir())]
    times = [0.0]
    for folder in folders:
        for name in names:
            try:
                times.append((folder / name).stat().st_mtime)
            except OSError:
                continue
    return max(times)


class ReportPages:
    """Report pages, drawn afresh from the folder and kept until something in it changes."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[float, str]] = {}
        # matplotlib's settings belong to the process: one page at a time.
        self._drawing = threading.Lock()

    def page(self, path: Path) -> str:
        with self._drawing:
            changed = last_change(path)
            kept = self._kept.get(path)
            if kept is None or kept[0] != changed:
                kept = (changed, render_page(read_report_input(path)))
                self._kept[path] = kept
            return kept[1]
