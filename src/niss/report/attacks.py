"""Attacks in the report: `attack.json` with `attack.png`, as `niss attack` writes them.

An attack that lies in the folder of a run, or in its attacks/, is shown in the report on the run (`find_attacks`);
a folder with nothing but an attack gets a page of its own (`read_attack_report`).
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from niss.charts import Chart, charts_from_json
from niss.claims import NOT_APPLICABLE, digits, printed_claim, rounded_up
from niss.errors import RunFolderError
from niss.files import MANIFEST, METRICS, RESULT, SUMMARY, JsonObject
from niss.report.summary import SummaryTable
from niss.runs.folder import ReportInput, read_object
from niss.svg import in_two_widths

# So many attacks are shown in the report on a run, with pictures of at most so many bytes each, since they become part
# of the page.
MOST_PICTURES = 12
MOST_BYTES = 4_000_000
_PNG = b"\x89PNG\r\n\x1a\n"
ATTACK = "attack.json"
# The columns of attacks that hold an epsilon someone is promised or has spent. What an attack proves is none of them.
_JOINT = ("epsilon_joint", "joint")
_CLAIMS = ("epsilon", "epsilon_marginal", "marginal", "promised")


@dataclass(frozen=True, slots=True)
class AttackReport:
    """What `attack.json` and its picture say.

    folder    where they lie
    attack    its kind, such as dlg
    headline  what it found, in words
    finished  whether it came to its end, or was interrupted
    png       what it recovered, None where there is no picture that can be shown
    charts    what its file draws
    settings  by name, as text; those that were not set are left out
    results   a table with a line for each case that was tried; without columns where there is none
    notes     what was wrong with the folder, in sentences for the reader
    """

    folder: Path
    attack: str
    headline: str
    finished: bool
    png: bytes | None
    charts: list[Chart]
    niss_version: str | None
    settings: dict[str, str]
    results: SummaryTable
    notes: list[str]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def title(self) -> str:
        return f"Attack: {self.attack}"

    @property
    def words(self) -> str:
        """The headline, and that the attack was interrupted where it was."""
        state = "" if self.finished else " This attack was interrupted; its results are those it had by then."
        return f"{self.headline}{state}".strip()

    @property
    def png_base64(self) -> str:
        """The picture as it stands in a page; empty without one."""
        return base64.b64encode(self.png or b"").decode("ascii")

    @property
    def drawings(self) -> list[tuple[str, Markup]]:
        """The charts as they stand in a page, each with its title."""
        return [(chart.title, in_two_widths(chart)) for chart in self.charts]


def find_attacks(report: ReportInput, notes: list[str]) -> dict[str, AttackReport]:
    """Every attack in the folder of the report and in those of its methods, by where it lies, "." for the same folder.

    Looked for are attack.json, attacks/*/attack.json and attacks/attack.json, in this order and folder by folder.
    One that cannot be read, or a picture that cannot be shown, is left out and named in `notes`.
    """
    folders: list[Path] = []
    for folder in dict.fromkeys([report.folder, *(method.folder for method in report.methods)]):
        inner = folder / "attacks"
        folders += [folder, *(path.parent for path in sorted(inner.glob(f"*/{ATTACK}"))), inner]
    attacks: dict[str, AttackReport] = {}
    for folder in (one for one in folders if (one / ATTACK).is_file()):
        if len(attacks) == MOST_PICTURES:
            notes.append(f"More than {MOST_PICTURES} attacks lie in this folder; the others are not shown.")
            break
        where = folder.relative_to(report.folder).as_posix()
        try:
            attacks[where] = read_attack_report(folder, where)
            notes += attacks[where].notes
        except RunFolderError as error:
            notes.append(f"An attack was left out: {error.message}")
    return attacks


def _picture(path: Path, where: str, notes: list[str]) -> bytes | None:
    """A picture that cannot be shown becomes a note."""
    if not path.is_file():
        return None
    if path.stat().st_size > MOST_BYTES:
        notes.append(f"{path.name} of {where} is too large to be put into the page.")
        return None
    png = path.read_bytes()
    if not png.startswith(_PNG):
        notes.append(f"{path.name} of {where} is not a PNG picture and was left out.")
        return None
    return png


def holds_only_an_attack(folder: Path) -> bool:
    """Whether the folder is that of an attack; one beside a run is shown in the report on the run."""
    marks = (SUMMARY, MANIFEST, METRICS, RESULT)
    return (folder / ATTACK).is_file() and not any((folder / mark).is_file() for mark in marks)


def read_attack_report(folder: Path, where: str = ".") -> AttackReport:
    """The attack in `folder`, finished or not; raises `RunFolderError` where its file holds something else.

    `where` is what notes call the folder.
    """
    path, notes = folder / ATTACK, list[str]()
    values = read_object(path) or {}
    settings, rows = values.get("settings", {}), values.get("rows", [])
    columns = values.get("columns", {})
    if not isinstance(settings, dict) or not isinstance(rows, list) or not isinstance(columns, dict):
        raise RunFolderError(f"{path} does not contain the results of an attack", hint="run the attack again")
    charts, png = charts_from_json(values.get("charts")), _picture(path.with_suffix(".png"), where, notes)
    words = {key: values[key] for key in ("attack", "headline", "niss") if isinstance(values.get(key), str)}
    return AttackReport(
        folder=folder,
        attack=words.get("attack", "attack"),
        headline=words.get("headline", ""),
        finished=values.get("finished") is True,
        # A picture that only repeats the charts is not shown.
        png=None if charts and values.get("pictures") is False else png,
        charts=charts,
        niss_version=words.get("niss"),
        settings={name: _text(value) for name, value in settings.items() if value is not None},
        results=_results(columns, [row for row in rows if isinstance(row, dict)]),
        notes=notes,
    )


def _results(headings: JsonObject, rows: list[JsonObject]) -> SummaryTable:
    """One line for each case that was tried; only values that fit into a cell.

    `headings` are those of the columns, by key. Where an attack names none, every key is a column.
    """
    known = dict.fromkeys(key for row in rows for key in row)
    keys = [key for key in headings if key in known] or list(known)
    keys = [key for key in keys if not any(isinstance(row.get(key), dict | list) for row in rows)]
    return SummaryTable(
        tuple(str(headings.get(key) or key.replace("_", " ")) for key in keys),
        tuple(tuple(attack_cell(row, key) for key in keys) for row in rows),
    )


def attack_cell(row: JsonObject, key: str) -> str:
    """A value as a table of results shows it: an epsilon that is claimed or spent is rounded up.

    In the joint view a missing epsilon, or one that is not finite, means that nothing is guaranteed.
    """
    value = row.get(key)
    if key in _JOINT and (value is None or isinstance(value, float)):
        return printed_claim(value)
    if key in _CLAIMS and isinstance(value, float) and math.isfinite(value):
        return rounded_up(value)
    return _text(value)


def _text(value: Any) -> str:
    """Any JSON value in one line, numbers to three digits."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NOT_APPLICABLE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return digits(value)
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return str(value)
