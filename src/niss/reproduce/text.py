"""Numbers in the text come from the result files: between `<!-- result: KEY -->` and `<!-- end -->`.

`fill` writes them, `disagreements` finds where a text says something else than the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from niss.errors import ConfigError
from niss.reproduce import tables
from niss.reproduce.claims import BY_ROUND, gap
from niss.reproduce.figure3 import FIGURE_3
from niss.reproduce.results import read_result, result_path, select, spread
from niss.reproduce.sensitivity import NBAFL

_MARKED = re.compile(r"<!-- result: (?P<key>\S+) -->(?P<text>.*?)<!-- end -->", re.DOTALL)

TABLES: dict[str, Callable[[Path], str]] = {
    "figure-3": tables.figure_3_table,
    "readings": lambda _: tables.readings_table(),
    "sweep": tables.sweep_table,
    "beyond": tables.beyond_table,
    "tuning": tables.tuning_table,
    "scale": tables.scale_table,
    "claims": tables.claims_table,
}


@dataclass(frozen=True)
class Disagreement:
    """A place where the text says something else than the result files."""

    path: Path
    key: str
    written: str
    computed: str


def computed_text(folder: Path, key: str) -> str:
    """What belongs between the marks of `key`: a table, or one number of a panel.

    Numbers: `PANEL.gap` (points), `PANEL.x0` ... (accuracy at an X), `PANEL.early` (accuracy by round 60 at X = 0).
    """
    if key in TABLES:
        return "\n" + TABLES[key](folder)
    panel, _, wanted = key.rpartition(".")
    result = read_result(result_path(folder, FIGURE_3, panel)) if panel else None
    if wanted == "gap":
        return tables.points(gap(result) if result else None)
    if wanted == "early":
        cells = select(result, x=0.0, reading=NBAFL.name) if result else []
        reached = [value for cell in cells if (value := cell.at(BY_ROUND)) is not None]
        return tables.percent(spread(reached) if reached else None)
    if panel and re.fullmatch(r"x[0-9.]+", wanted):
        cells = select(result, x=float(wanted[1:]), reading=NBAFL.name) if result else []
        return tables.percent(tables.settled(cells))
    raise ConfigError(f"unknown key {key!r}", field="result", hint="use one of: " + ", ".join(TABLES))


def fill(text: str, folder: Path) -> str:
    """The text with everything between marks replaced by what the files say."""

    def replaced(found: re.Match[str]) -> str:
        return f"<!-- result: {found['key']} -->{computed_text(folder, found['key'])}<!-- end -->"

    return _MARKED.sub(replaced, text)


def disagreements(path: Path, folder: Path) -> list[Disagreement]:
    """Where the text in `path` disagrees with the results in `folder`."""
    return [
        Disagreement(path, found["key"], found["text"], computed)
        for found in _MARKED.finditer(path.read_text(encoding="utf-8"))
        if (computed := computed_text(folder, found["key"])) != found["text"]
    ]


def results_folder(path: Path) -> Path:
    """`results/` or `results/paper/`: the folder that holds the experiments."""
    return path / "paper" if (path / "paper").is_dir() else path
