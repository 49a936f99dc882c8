"""One page on several folders: an overview of all their methods, then the report on each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from niss.report.attack_page import AttackReport, attack_body
from niss.report.body import report_body
from niss.report.sections import overview_table
from niss.report.source import ReportInput

_HEADING = re.compile(r"<(/?)h([1-5])>")


Source = ReportInput | AttackReport


def body_of(report: Source, *, prefix: str = "") -> str:
    """What the page says about one folder; `prefix` keeps the ids apart where several share a page."""
    return attack_body(report) if isinstance(report, AttackReport) else report_body(report, prefix=prefix)


def several_title(reports: Sequence[Source]) -> str:
    what = "runs" if all(isinstance(one, ReportInput) for one in reports) else "reports"
    return f"{len(reports)} {what}: " + ", ".join(dict.fromkeys(report.name for report in reports))


def several_body(reports: Sequence[Source]) -> str:
    """An overview with links, then each report in an article of its own, its headings one level deeper."""
    links = "".join(
        f'<li><a href="#run-{number}">{escape(report.title)}</a> '
        f"<span>{escape(report.folder.resolve().name)}</span></li>"
        for number, report in enumerate(reports, start=1)
    )
    articles = "\n".join(
        f'<article id="run-{number}">\n{_deeper(body_of(report, prefix=f"run-{number}-"))}\n</article>'
        for number, report in enumerate(reports, start=1)
    )
    trained = [one for one in reports if isinstance(one, ReportInput)]
    overview = overview_table(trained) if trained else ""
    return (
        f"<header>\n<h1>{escape(several_title(reports))}</h1>\n"
        "<p>Numbers of different runs compare only where data, model, rounds and privacy target are the same; the "
        "settings of each are in its part of the page.</p>\n"
        f'<nav aria-label="Runs on this page"><ol class="runs">{links}</ol></nav>\n</header>\n'
        f"{overview}\n{articles}"
    )


def _deeper(body: str) -> str:
    """Only our own headings match: whatever comes from a folder is escaped."""
    return _HEADING.sub(lambda tag: f"<{tag[1]}h{int(tag[2]) + 1}>", body)
