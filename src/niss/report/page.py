"""Writes the report: one HTML file that needs nothing beside it, neither network nor other files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from niss.errors import ConfigError
from niss.report.attack_page import holds_only_an_attack, read_attack_report
from niss.report.files import write_atomically
from niss.report.several import Source, body_of, several_body, several_title
from niss.report.source import read_report_input

# The page loads nothing, and says so to the browser: whatever slipped in would still not be fetched or run.
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(folder: Path | Sequence[Path], out: Path | None = None) -> Path:
    """Writes the report on one folder or several to `out` and returns where it is.

    Unless told, the page on one folder goes to folder/report.html, and that on several to reports.html in the
    folder that holds them all.
    """
    folders = [Path(folder)] if isinstance(folder, str | Path) else [Path(one) for one in folder]
    if not folders:
        raise ConfigError("no folder to report on", hint="give the folder of a run, for example runs/demo")
    page = render_page(*map(read_source, folders))
    return write_atomically(Path(out) if out is not None else _default_place(folders), page.encode("utf-8"))


def read_source(folder: Path) -> Source:
    """What the folder holds: a run, a comparison, or an attack alone."""
    return read_attack_report(folder) if holds_only_an_attack(folder) else read_report_input(folder)


def _default_place(folders: list[Path]) -> Path:
    if len(folders) == 1:
        return folders[0] / "report.html"
    parents = [one.resolve().parent for one in folders]
    shared = next(
        parent
        for parent in (parents[0], *parents[0].parents)
        if all(one.is_relative_to(parent) for one in parents)
    )
    return shared / "reports.html"


def render_page(*reports: Source) -> str:
    """The page on one report, or on several with an overview at its head."""
    style = (files("niss.report") / "style.css").read_text(encoding="utf-8")
    alone = len(reports) == 1
    title = reports[0].title if alone else several_title(reports)
    body = body_of(reports[0]) if alone else several_body(reports)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">
<title>{escape(title)} – niss report</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
