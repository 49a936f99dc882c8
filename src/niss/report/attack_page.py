"""The report on an attack alone: its finding, its picture, its numbers and its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from niss.errors import RunFolderError
from niss.report.attack_pictures import AttackPicture, attack_figure, read_attack_picture
from niss.report.files import JsonObject, read_json_object
from niss.report.sections import pairs, prose

_RUN_MARKS = ("summary.json", "manifest.json", "metrics.jsonl", "result.json")


@dataclass(frozen=True, slots=True)
class AttackReport:
    """An `attack.json` with what lies beside it; `columns` are the headings of the keys that a table shows."""

    folder: Path
    picture: AttackPicture
    niss_version: str | None
    settings: JsonObject
    columns: dict[str, str]
    rows: tuple[JsonObject, ...]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def title(self) -> str:
        return f"Attack: {self.picture.attack}"


def holds_only_an_attack(folder: Path) -> bool:
    """Whether the folder is that of an attack; one beside a run is shown in the report on the run."""
    return (folder / "attack.json").is_file() and not any((folder / mark).is_file() for mark in _RUN_MARKS)


def read_attack_report(folder: Path) -> AttackReport:
    """The attack in `folder`, finished or not."""
    path, notes = folder / "attack.json", list[str]()
    values = read_json_object(path) or {}
    settings, rows = values.get("settings", {}), values.get("rows", [])
    columns = values.get("columns", {})
    if not isinstance(settings, dict) or not isinstance(rows, list) or not isinstance(columns, dict):
        raise RunFolderError(f"{path} holds no results of an attack.", hint="Run the attack again.")
    version = values.get("niss")
    return AttackReport(
        folder=folder,
        picture=read_attack_picture(path, ".", notes),
        niss_version=version if isinstance(version, str) else None,
        settings=settings,
        columns={key: str(heading) for key, heading in columns.items()},
        rows=tuple(row for row in rows if isinstance(row, dict)),
        notes=tuple(notes),
    )


def attack_body(report: AttackReport) -> str:
    """Header and sections as HTML."""
    version = f"niss {report.niss_version}" if report.niss_version else None
    byline = " · ".join(part for part in ("Attack", report.name, version) if part)
    notices = list(report.notes)
    if not report.picture.finished:
        notices.insert(0, "Interrupted: the results are those the attack had by then.")
    items = "".join(f"<li>{escape(notice)}</li>" for notice in notices)
    settings = {name: _shown(value) for name, value in report.settings.items() if value is not None}
    return "\n".join(
        [
            f'<header>\n<p class="byline">{escape(byline)}</p>\n<h1>{escape(report.title)}</h1>\n'
            f'<p class="finding">{prose(report.picture.headline or "Nothing was found yet.")}</p>\n'
            '<p class="caveats">A failed attack is no proof of privacy; only the guarantee is.</p>\n'
            + (f'<ul class="notices">{items}</ul>\n' if items else "")
            + "</header>",
            _picture_section(report),
            _rows_section(report.columns, report.rows),
            f"<section>\n<h2>Settings</h2>\n{pairs(dict(settings))}\n</section>",
        ]
    )


def _picture_section(report: AttackReport) -> str:
    if report.picture.png is None:
        return ""
    figure = attack_figure(report.picture, "The figure of the attack; its numbers are in the table below.")
    return f"<section>\n<h2>What the attacker recovered</h2>\n{figure}\n</section>"


def _rows_section(headings: dict[str, str], rows: tuple[JsonObject, ...]) -> str:
    """One line for each case that was tried; only values that fit into a cell.

    An attack of an older version names no headings: then every key is a column.
    """
    known = dict.fromkeys(key for row in rows for key in row)
    shown = [key for key in headings if key in known] or list(known)
    columns = [key for key in shown if not any(isinstance(row.get(key), dict | list) for row in rows)]
    if not columns:
        return ""
    head = "".join(
        f'<th scope="col">{escape(headings.get(key) or key.replace("_", " "))}</th>' for key in columns
    )
    body = "\n".join(
        f'<tr><th scope="row">{escape(_shown(row.get(columns[0])))}</th>'
        + "".join(f"<td>{escape(_cell(row, key))}</td>" for key in columns[1:])
        + "</tr>"
        for row in rows
    )
    return f"""<section>
<h2>Results</h2>
<div class="scrolls" role="group" tabindex="0" aria-label="Table of results">
<table>
<caption><span class="fits">One line for each case that was tried.</span></caption>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>
</section>"""


def _cell(row: JsonObject, key: str) -> str:
    return "no guarantee" if key == "epsilon_joint" and row.get(key) is None else _shown(row.get(key))


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    return str(value)
