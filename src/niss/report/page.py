"""Writes the report: one HTML file that needs nothing beside it, neither network nor other files."""

from __future__ import annotations

from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path

from niss.report.figures import accuracy_figure, noise_figure
from niss.report.files import write_atomically
from niss.report.finding import caveats, finding
from niss.report.provenance import provenance_section
from niss.report.sections import (
    figure_section,
    guarantees_section,
    prose,
    results_section,
    settings_section,
    views_section,
)
from niss.report.source import ReportInput, read_report_input

# The page loads nothing, and says so to the browser: whatever slipped in would still not be fetched or run.
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Writes the report on `folder` to `out` (folder/report.html unless told) and returns where it is."""
    folder = Path(folder)
    page = render_page(read_report_input(folder))
    return write_atomically(Path(out) if out is not None else folder / "report.html", page.encode("utf-8"))


def render_page(report: ReportInput) -> str:
    style = (files("niss.report") / "style.css").read_text(encoding="utf-8")
    body = "\n".join(
        (
            _header(report),
            figure_section(
                "Accuracy",
                accuracy_figure(report),
                "Share of the test examples classified correctly after each evaluated round. "
                "Each curve is a single run; the number beside a name is its last accuracy.",
            ),
            figure_section(
                "Noise left in the aggregate",
                noise_figure(report),
                "Variance of the noise that remains once the server has averaged the uploads. "
                "Bars are measured, the upright marks are what theory predicts. The axis is logarithmic, so "
                "compare where bars end, not how long they are.",
            ),
            results_section(report),
            views_section(report),
            guarantees_section(report),
            settings_section(report),
            provenance_section(report),
        )
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">
<title>{escape(report.title)} – niss report</title>
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


def _header(report: ReportInput) -> str:
    kind = "Comparison" if report.is_comparison else "Single run"
    version = f"niss {report.niss_version}" if report.niss_version else None
    byline = " · ".join(part for part in (kind, report.name, version, _day(report.created)) if part)
    remarks = caveats(report)
    beside = f'<p class="caveats">{prose(" ".join(remarks))}</p>\n' if remarks else ""
    return (
        f'<header>\n<p class="byline">{escape(byline)}</p>\n<h1>{escape(report.title)}</h1>\n'
        f'<p class="finding">{prose(finding(report))}</p>\n{beside}{_notices(report)}</header>'
    )


def _day(created: str | None) -> str | None:
    """The day alone where the text is a date; the moment stands in the provenance."""
    try:
        return datetime.fromisoformat(created).date().isoformat() if created else None
    except ValueError:
        return created


def _notices(report: ReportInput) -> str:
    notices = list(report.notes)
    if not report.finished:
        missing = "summary.json" if report.is_comparison else "result.json"
        notices.insert(0, f"Unfinished: there is no {missing} in this folder yet, so no ε is final.")
    items = "".join(f"<li>{escape(notice)}</li>" for notice in notices)
    return f'<ul class="notices">{items}</ul>\n' if items else ""
