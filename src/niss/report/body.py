"""What the page says about one run or comparison, from its headline to its provenance."""

from __future__ import annotations

from datetime import datetime
from html import escape

from niss.report.attack_pictures import attacks_section, find_attacks
from niss.report.figures import accuracy_figure, noise_figure, spending_figure
from niss.report.finding import caveats, finding
from niss.report.privacy_words import guarantees_section
from niss.report.provenance import provenance_section
from niss.report.sections import (
    figure_section,
    prose,
    results_section,
    settings_section,
    values_table,
    views_section,
)
from niss.report.source import ReportInput


def report_body(report: ReportInput, *, prefix: str = "") -> str:
    """Header and sections as HTML; `prefix` keeps the ids apart where several reports share a page."""
    notes: list[str] = []
    sections = [
        figure_section(
            "Accuracy",
            accuracy_figure(report, prefix=f"{prefix}accuracy"),
            "Share of the test examples classified correctly after each evaluated round. Each curve is a single "
            "run; the number beside a name is its last accuracy. Point at a round to read its values.",
            values_table(report),
        ),
        figure_section(
            "Noise left in the aggregate",
            noise_figure(report, prefix=f"{prefix}noise"),
            "Variance of the noise that remains once the server has averaged the uploads. "
            "Bars are measured, the upright marks are what theory predicts. The axis is logarithmic, so "
            "compare where bars end, not how long they are.",
        ),
        results_section(report),
        _spending_section(report, notes, prefix),
        _graph_section(report),
        views_section(report),
        attacks_section(find_attacks(report, notes)),
        guarantees_section(report),
        settings_section(report),
        provenance_section(report),
    ]
    return "\n".join([_header(report, notes), *(section for section in sections if section)])


def _spending_section(report: ReportInput, notes: list[str], prefix: str) -> str:
    figure = spending_figure(report, notes, prefix=f"{prefix}spending")
    if figure is None:
        return ""
    delta = "" if report.delta is None else f" at δ = {report.delta:.3g}"
    trusting = [method.label for method in report.methods if method.trusts_the_server]
    trusted = f" Of {', '.join(trusting)} it is the view of those who see only the released models."
    return figure_section(
        "Privacy loss of each client",
        figure,
        f"ε that each client has spent in the joint view after each round{delta}, added up from the ledger. A client "
        "pays only in the rounds it takes part in. The dashed line is its budget, which is the claim: the ledger "
        f"refuses any round that would cross it.{trusted if trusting else ''}",
    )


def _graph_section(report: ReportInput) -> str:
    from niss.report.round_graph import find_round_graph
    from niss.report.round_graph_chart import graph_caption, graph_legend, round_graph_svg

    shown = find_round_graph(report)
    if shown is None:
        return ""
    return figure_section(
        "Who shares noise with whom", round_graph_svg(shown), graph_caption(shown), graph_legend(shown)
    )


def _header(report: ReportInput, notes: list[str]) -> str:
    kind = "Comparison" if report.is_comparison else "Single run"
    version = f"niss {report.niss_version}" if report.niss_version else None
    byline = " · ".join(part for part in (kind, report.name, version, _day(report.created)) if part)
    remarks = caveats(report)
    beside = f'<p class="caveats">{prose(" ".join(remarks))}</p>\n' if remarks else ""
    return (
        f'<header>\n<p class="byline">{escape(byline)}</p>\n<h1>{escape(report.title)}</h1>\n'
        f'<p class="finding">{prose(finding(report))}</p>\n{beside}{_notices(report, notes)}</header>'
    )


def _day(created: str | None) -> str | None:
    """The day alone where the text is a date; the moment stands in the provenance."""
    try:
        return datetime.fromisoformat(created).date().isoformat() if created else None
    except ValueError:
        return created


def _notices(report: ReportInput, notes: list[str]) -> str:
    notices = [*report.notes, *notes]
    if not report.finished:
        missing = "summary.json" if report.is_comparison else "result.json"
        notices.insert(0, f"Unfinished: there is no {missing} in this folder yet, so no ε is final.")
    items = "".join(f"<li>{escape(notice)}</li>" for notice in notices)
    return f'<ul class="notices">{items}</ul>\n' if items else ""
