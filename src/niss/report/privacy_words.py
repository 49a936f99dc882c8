"""The statement of each method in words: what it guarantees, against whom, and what it does not protect."""

from __future__ import annotations

from html import escape
from typing import Any

from niss.errors import RunFolderError
from niss.report.files import read_json_object
from niss.report.source import MethodResult, ReportInput


def guarantees_section(report: ReportInput) -> str:
    """One entry for each method, and below them what all of them leave open."""
    entries = "\n".join(_guarantee(method) for method in report.methods)
    limits = _shared_lists(report)
    return f"<section>\n<h2>What each method guarantees</h2>\n{entries}\n{limits}</section>"


def _guarantee(method: MethodResult) -> str:
    stated = method.guarantee or _guarantee_missing(method)
    against = f'<p class="adversary">Against: {escape(method.adversary)}</p>\n' if method.adversary else ""
    return f"<h3>{escape(method.label)}</h3>\n{against}<p>{escape(stated)}</p>"


def _guarantee_missing(method: MethodResult) -> str:
    if not method.is_private:
        return "None: the updates are sent as they are."
    return "None was stated." if method.finished else "Not stated yet: the run is unfinished."


def _shared_lists(report: ReportInput) -> str:
    """Each limit once, however many statements name it."""
    statements = [_statement(method) for method in report.methods if method.is_private]
    parts = ""
    for key, heading in (("not_protected", "Not protected"), ("caveats", "To keep in mind")):
        lines = dict.fromkeys(
            line for statement in statements for line in statement.get(key) or [] if isinstance(line, str)
        )
        if lines:
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            parts += f"<h3>{heading}</h3>\n<ul>{items}</ul>\n"
    return parts


def _statement(method: MethodResult) -> dict[str, Any]:
    try:
        found = read_json_object(method.folder / "privacy.json") if method.folder is not None else None
    except RunFolderError:
        return {}
    lists = ("not_protected", "caveats")
    return {key: value for key, value in (found or {}).items() if key in lists and isinstance(value, list)}
