"""What the shell offers when TAB is pressed: names, names after a comma, and folders that hold runs.

`niss --install-completion` sets it up. Where nothing is offered the shell completes file names as usual.

Most names are written down here because completion must answer at once, and the rooms that define them load torch; a
test compares each with its origin.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from niss.files import MANIFEST, METRICS, SUMMARY

PRESETS = ("demo", "paper")
MODELS = ("mlp", "cnn", "resnet", "logistic", "gru", "lstm", "transformer")
SPLITS = ("iid", "shards", "dirichlet", "natural")
GRAPHS = ("regular", "complete", "random", "coalition")
ONE_DEVICE = ("auto", "cpu", "cuda")
DEVICES = (*ONE_DEVICE, "cuda:all")
RELATIONS = ("zero-out", "replace-one")
MODES = ("tolerate", "repair")
PATTERNS = ("cyclic", "any")
DATASETS = ("mnist-mini", "mnist", "fashion-mnist", "cifar10", "cifar100", "shakespeare")
LOG_LEVELS = ("debug", "info", "warning", "error")

_RUN_MARKS = (SUMMARY, MANIFEST, METRICS, "attack.json")
_DEPTH = 3
# Completion must answer at once, also where someone presses TAB in a home folder.
_MOST_FOLDERS = 2000

Completer = Callable[[str], list[str]]
Names = Sequence[str] | Callable[[], Iterable[str]]
"""Names, or a function that finds them when TAB is pressed."""


def one_of(names: Names) -> Completer:
    """Offers the names that begin as the word does."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in _names(names) if name.startswith(incomplete)]

    return complete


def several_of(names: Names) -> Completer:
    """Offers names for the last part of a comma-separated list, each only once."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        taken = before.split(",")
        rest = [name for name in _names(names) if name not in taken]
        return [before + comma + name for name in rest if name.startswith(last)]

    return complete


def _names(names: Names) -> Iterable[str]:
    """The names themselves."""
    return names() if callable(names) else names


def run_folders(incomplete: str) -> list[str]:
    """Offers folders that hold a run, a comparison or an attack, below what is typed so far."""
    typed = incomplete.rpartition("/")[0]
    start = Path(typed or ("/" if incomplete.startswith("/") else "."))
    runs = (str(path) for path in _runs_below(start))
    return sorted(path for path in runs if path.startswith(incomplete.removeprefix("./")))


def _runs_below(start: Path) -> Iterator[Path]:
    """The runs in `start` and below, nearest first; what lies within a run is its own."""
    level, seen = [start], 0
    for _ in range(_DEPTH):
        inner: list[Path] = []
        for folder in level:
            for path in _folders(folder):
                seen += 1
                if seen > _MOST_FOLDERS:
                    return
                if any((path / mark).is_file() for mark in _RUN_MARKS):
                    yield path
                else:
                    inner.append(path)
        level = inner


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, hidden ones left out; none where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                folder / one.name for one in entries if one.is_dir() and not one.name.startswith(".")
            )
    except OSError:
        return []
