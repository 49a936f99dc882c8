"""Attacks in the report: `attack.json` with `attack.png`, as `niss attack` writes them.

An attack that lies in the folder of a run, or in its attacks/, is shown in the report on the run (`find_attacks`);
a folder with nothing but an attack gets a page of its own (`read_attack_report`, `attack_body`).
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from niss.charts import Chart, charts_from_json
from niss.claims import printed_claim, rounded_up
from niss.errors import RunFolderError
from niss.files import MANIFEST, METRICS, RESULT, SUMMARY, JsonObject
from niss.report.svg import in_two_widths
from niss.report.table import SummaryTable
from niss.report.templates import render
from niss.runs.folder import ReportInput, read_object
from niss.runs.privacy import NOT_APPLICABLE

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
class AttackPicture:
    """One attack and its picture.

    where     its folder as seen from that of the report, "." for the same
    attack    its kind, such as dlg
    headline  what it found, in words
    finished  whether it came to its end, or was interrupted
    png       what it recovered, None where there is no picture that can be shown
    charts    what its file draws
    """

    where: str
    attack: str
    headline: str
    finished: bool
    png: bytes | None
    charts: list[Chart]

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


@dataclass(frozen=True, slots=True)
class AttackReport:
    """The folder of an attack alone.

    picture   what was recovered, and the finding in words
    settings  by name, as text; those that were not set are left out
    results   a table with a line for each case that was tried; without columns where there is none
    notes     what was wrong with the folder, in sentences for the reader
    """

    folder: Path
    picture: AttackPicture
    niss_version: str | None
    settings: dict[str, str]
    results: SummaryTable
    notes: list[str]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def title(self) -> str:
        return f"Attack: {self.picture.attack}"


def find_attacks(report: ReportInput, notes: list[str]) -> list[AttackPicture]:
    """Every attack in the folder of the report and in those of its methods.

    Looked for are attack.json, attacks/*/attack.json and attacks/attack.json, in this order and folder by folder.
    One that cannot be read, or a picture that cannot be shown, is left out and named in `notes`.
    """
    paths: list[Path] = []
    for folder in dict.fromkeys([report.folder, *(method.folder for method in report.methods)]):
        inner = folder / "attacks"
        paths += [folder / ATTACK, *sorted(inner.glob(f"*/{ATTACK}")), inner / ATTACK]
    attacks: list[AttackPicture] = []
    for path in paths:
        if not path.is_file():
            continue
        if len(attacks) == MOST_PICTURES:
            notes.append(f"More than {MOST_PICTURES} attacks lie in this folder; the others are not shown.")
            break
        try:
            attacks.append(_read_picture(path, path.parent.relative_to(report.folder).as_posix(), notes))
        except RunFolderError as error:
            notes.append(f"An attack was left out: {error.message}")
    return attacks


def _read_picture(path: Path, where: str, notes: list[str]) -> AttackPicture:
    """The attack in `path`; a picture that cannot be shown becomes a note."""
    values = read_object(path) or {}
    attack, headline = values.get("attack"), values.get("headline")
    picture = path.with_suffix(".png")
    png = picture.read_bytes() if picture.is_file() and picture.stat().st_size <= MOST_BYTES else None
    if png is None and picture.is_file():
        notes.append(f"{picture.name} of {where} is too large to be put into the page.")
    elif png is not None and not png.startswith(_PNG):
        notes.append(f"{picture.name} of {where} is not a PNG picture and was left out.")
        png = None
    charts = charts_from_json(values.get("charts"))
    return AttackPicture(
        where=where,
        attack=attack if isinstance(attack, str) else "attack",
        headline=headline if isinstance(headline, str) else "",
        finished=values.get("finished") is True,
        # A picture that only repeats the charts is not shown.
        png=None if charts and values.get("pictures") is False else png,
        charts=charts,
    )


def holds_only_an_attack(folder: Path) -> bool:
    """Whether the folder is that of an attack; one beside a run is shown in the report on the run."""
    marks = (SUMMARY, MANIFEST, METRICS, RESULT)
    return (folder / ATTACK).is_file() and not any((folder / mark).is_file() for mark in marks)


def read_attack_report(folder: Path) -> AttackReport:
    """The attack in `folder`, finished or not; raises `RunFolderError` where its file holds something else."""
    path, notes = folder / ATTACK, list[str]()
    values = read_object(path) or {}
    settings, rows = values.get("settings", {}), values.get("rows", [])
    columns = values.get("columns", {})
    if not isinstance(settings, dict) or not isinstance(rows, list) or not isinstance(columns, dict):
        raise RunFolderError(f"{path} does not contain the results of an attack", hint="run the attack again")
    version = values.get("niss")
    return AttackReport(
        folder=folder,
        picture=_read_picture(path, ".", notes),
        niss_version=version if isinstance(version, str) else None,
        settings={name: _text(value) for name, value in settings.items() if value is not None},
        results=_results(columns, [row for row in rows if isinstance(row, dict)]),
        notes=notes,
    )


def attack_body(report: AttackReport, *, level: int) -> Markup:
    """Header and sections as HTML, headings from `level` on."""
    version = f"niss {report.niss_version}" if report.niss_version else None
    return render(
        "attack.html.j2",
        level=level,
        report=report,
        byline=" · ".join(part for part in ("Attack", report.name, version) if part),
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
        return f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return str(value)
