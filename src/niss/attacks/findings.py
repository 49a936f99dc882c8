"""What an attack found, while it runs and afterwards: rows for a table, curves and pictures for a figure.

An experiment fills a `Findings` as it goes, so that an interrupted one still leaves everything it had.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from niss.errors import ConfigError
from niss.version import __version__

Row = dict[str, Any]
Progress = Callable[[str, int, int, str], None]
"""Called with the name of a part, steps done, steps in all, and a note."""

RESULT_FILE = "attack.json"


def no_progress(_part: str, _done: int, _total: int, _note: str) -> None:
    """Says nothing."""


@dataclass
class Findings:
    """Results so far.

    columns    keys of the rows that a table shows, and their headings
    rows       one per case tried; may hold more keys than the table shows
    curves     numbers a figure draws, kept in the JSON too
    pictures   pixels a figure draws, kept nowhere else
    headline   the result in one or two sentences
    """

    attack: str
    settings: dict[str, Any]
    columns: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, Any] = field(default_factory=dict)
    headline: str = ""
    finished: bool = False

    def to_json(self) -> dict[str, Any]:
        values = {
            "attack": self.attack,
            "niss": __version__,
            "finished": self.finished,
            "headline": self.headline,
            "settings": self.settings,
            "columns": self.columns,
            "rows": self.rows,
            "curves": self.curves,
        }
        return plain(values)  # type: ignore[no-any-return]


class Experiment(Protocol):
    """Settings, checked when they are made, that know how to run."""

    def start(self) -> Findings:
        """Check what only the data can tell, and give the empty findings."""
        ...

    def run(self, findings: Findings, progress: Progress) -> None:
        """Fill the findings."""
        ...


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Refuse, before any work, a folder that cannot take the results."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", field="--out", hint="give a folder")
    if (folder / RESULT_FILE).exists() and not overwrite:
        raise ConfigError(
            f"{folder} holds the results of an earlier attack",
            field="--out",
            hint="choose another folder, or add --overwrite",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {error.strerror}", field="--out", hint="choose another place"
        ) from None


def write_findings(findings: Findings, folder: Path) -> Path:
    """Write `attack.json`, whole or not at all."""
    path = folder / RESULT_FILE
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(findings.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return partial.replace(path)


def plain(value: Any) -> Any:
    """`value` in the types of JSON; numbers that JSON cannot hold become null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value
