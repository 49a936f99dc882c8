"""Writes the report: one HTML file that needs nothing beside it, neither network nor other files.

The text of the page stands in templates/; here are the values that go into it:

    page.html.j2     the frame: head, style, content policy
    run.html.j2      a run or a comparison, from its finding and its curves to its provenance
    graph.html.j2    the share graph of a round, with its caption and its signs
    attack.html.j2   an attack alone
    several.html.j2  an overview of several folders, then each as an article, its headings one level deeper

A section whose files are missing is left out; a file that is damaged beside an intact run becomes a notice at the head
of the page. What a folder says is escaped by the templates, wherever it stands.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from niss.claims import digits, duration, percent
from niss.errors import ConfigError, RunFolderError
from niss.files import PRIVACY, REPORT, JsonObject, write_output
from niss.report.attacks import AttackReport, find_attacks, holds_only_an_attack, read_attack_report
from niss.report.ledger import read_spending
from niss.report.round_graph import RoundGraph, find_round_graph, layout
from niss.report.run_charts import accuracy_chart, noise_chart, spending_charts
from niss.report.summary import (
    WORDS,
    SummaryTable,
    caveats,
    finding,
    noise_rows,
    settings_of,
    summary_rows,
)
from niss.runs.folder import ReportInput, read_object, read_report_input
from niss.runs.privacy import promise_of
from niss.svg import in_two_widths

if TYPE_CHECKING:
    from jinja2 import Environment

# The page loads nothing, and says so to the browser: whatever slipped in would still not be fetched or run.
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

# The sizes of a thousand clients' datasets say no more than the first few.
MOST_LISTED = 12

Source = ReportInput | AttackReport


@cache
def environment(room: str, folder: str = "templates") -> Environment:
    """Templates of a folder of a room; an undefined name is an error, and what is put into one is escaped.

    Not escaped is `Markup`, which only our own code makes: drawings, whose texts are escaped one by one, and templates
    that were filled in before.
    """
    # Takes as long to load as the rest of this room together.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(room, folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"prose": _prose, "digits": digits, "percent": percent, "duration": duration}
    return environment


def _prose(text: str) -> str:
    """`text` with no line break between a number and its percent sign."""
    return text.replace(" %", "\u00a0%")


def _render(template: str, **values: Any) -> Markup:
    """A template of this room, filled in."""
    return Markup(environment("niss.report").get_template(template).render(values))


def write_report(folder: Path | Sequence[Path], out: Path | None = None) -> Path:
    """Write the report on one folder or several, and return where it is.

    folder  the folder of a run, a comparison or an attack, finished or not, or several of them
    out     where to write the page; by default folder/report.html, and for several folders reports.html in the
            folder that holds them all

    Raises `RunFolderError` where a folder cannot be read or the page not be written.
    """
    folders = [Path(folder)] if isinstance(folder, str | Path) else [Path(one) for one in folder]
    if not folders:
        raise ConfigError("no folder to report on", hint="give the folder of a run, for example runs/demo")
    page = render_page(*map(read_source, folders))
    return write_output(Path(out) if out is not None else _default_place(folders), page.encode("utf-8"))


def read_source(folder: Path) -> Source:
    """What the folder holds: a run, a comparison, or an attack alone."""
    return read_attack_report(folder) if holds_only_an_attack(folder) else read_report_input(folder)


def _default_place(folders: list[Path]) -> Path:
    """Beside the run, or in the nearest folder that holds all runs, however deep each of them lies."""
    if len(folders) == 1:
        return folders[0] / REPORT
    return Path(os.path.commonpath([one.resolve().parent for one in folders])) / "reports.html"


def render_page(*reports: Source) -> str:
    """The page on one report, or on several with an overview at its head, as a whole HTML document."""
    sheets = files("niss") / "theme.css", files("niss.report") / "style.css"
    style = "".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    if len(reports) == 1:
        title, body = reports[0].title, _body(reports[0], level=1)
    else:
        title, body = _several(reports)
    return _render("page.html.j2", content_policy=CONTENT_POLICY, title=title, style=Markup(style), body=body)


def _several(reports: Sequence[Source]) -> tuple[str, Markup]:
    """The title and the body of a page on several folders."""
    runs = [report for report in reports if isinstance(report, ReportInput)]
    what = "runs" if len(runs) == len(reports) else "reports"
    title = f"{len(reports)} {what}: " + ", ".join(dict.fromkeys(report.name for report in reports))
    overview = None
    if runs:
        tables = [(report.name, summary_rows(report)) for report in runs]
        first, *others = tables[0][1].header
        rows = [(label, name, *cells) for name, table in tables for label, *cells in table.rows]
        overview = SummaryTable((first, "Run", *others), tuple(rows))
    body = _render(
        "several.html.j2",
        title=title,
        overview=overview,
        words=WORDS,
        parts=[(report, _body(report, level=2)) for report in reports],
    )
    return title, body


def _body(report: Source, *, level: int) -> Markup:
    """What the page says about one folder; `level` of its title is 1 where it is that of the page."""
    if isinstance(report, AttackReport):
        return _render("attack.html.j2", level=level, report=report, byline=_byline(report, "Attack", None))
    notes: list[str] = []
    # These two may add notes, which stand at the head of the page.
    spent = read_spending(report, notes)
    attacks = find_attacks(report, notes)
    return _render(
        "run.html.j2",
        level=level,
        report=report,
        byline=_byline(report, "Comparison" if report.is_comparison else "Single run", report.created),
        finding=finding(report),
        caveats=caveats(report),
        notes=[*report.notes, *notes],
        accuracy_svg=in_two_widths(accuracy_chart(report)),
        evaluations=_evaluations(report),
        results=summary_rows(report),
        words=WORDS,
        noise_svg=in_two_widths(noise_chart(report)),
        noise=noise_rows(report),
        spending_svg=in_two_widths(*spending_charts(spent)) if spent else None,
        released_only=[method.label for method in report.methods if method.trusts_the_server],
        graph=graph_figure(graph) if (graph := find_round_graph(report)) else None,
        attacks=attacks,
        promises=[(method, promise_of(method)) for method in report.methods],
        limits=_limits(report),
        settings=settings_of(report),
        **_provenance(report),
    )


def graph_figure(graph: RoundGraph) -> Markup:
    """The drawing of a round's share graph, with its caption and its signs."""
    return _render("graph.html.j2", **layout(graph))


def _byline(report: Source, kind: str, created: str | None) -> str:
    """Kind, name, version and day, as far as they are known."""
    version = f"niss {report.niss_version}" if report.niss_version else None
    # The day alone where the text is a date; the moment stands in the provenance.
    with suppress(ValueError):
        created = datetime.fromisoformat(created).date().isoformat() if created else None
    return " · ".join(part for part in (kind, report.name, version, created) if part)


def _evaluations(report: ReportInput) -> SummaryTable:
    """The curves as a table: for those who cannot point at the figure, and for copying."""
    methods = [method for method in report.methods if method.evaluations]
    columns = [dict(method.evaluations) for method in methods]
    rows = [
        (str(number), *(percent(one.get(number)) for one in columns))
        for number in sorted({number for one in columns for number in one})
    ]
    return SummaryTable(("Round", *(method.label for method in methods)), tuple(rows))


def _limits(report: ReportInput) -> dict[str, list[str]]:
    """What the statements of the methods leave open, each line once, however many name it."""
    headings = {"not_protected": "Not protected", "caveats": "To keep in mind"}
    limits: dict[str, list[str]] = {heading: [] for heading in headings.values()}
    for method in report.methods:
        # A damaged privacy.json is left out: the rest of the page still stands.
        with suppress(RunFolderError):
            statement = (read_object(method.folder / PRIVACY) if method.is_private else None) or {}
            for key, heading in headings.items():
                lines = statement.get(key)
                limits[heading] += lines if isinstance(lines, list) else []
    return {
        heading: list(dict.fromkeys(line for line in lines if isinstance(line, str)))
        for heading, lines in limits.items()
    }


def _provenance(report: ReportInput) -> dict[str, object]:
    """Where the numbers come from: versions, seeds, checksums of the data, and the full configuration.

    `provenance` holds what all manifests share, `origins` for each method the rest of its manifest and its
    configuration as JSON.
    """
    facts = [_facts(method.manifest) for method in report.methods]
    shared = {
        name: value
        for name, value in (facts[0] if facts else {}).items()
        if all(one.get(name) == value for one in facts)
    }
    general = {"folder": report.name}
    if report.niss_version:
        general["niss_version"] = report.niss_version
    if report.created:
        general["created"] = report.created
    origins = []
    for method, one in zip(report.methods, facts, strict=True):
        own = {name: value for name, value in one.items() if name not in shared}
        config = method.manifest.get("config")
        text = json.dumps(config, indent=2, ensure_ascii=False) if config else None
        origins.append((method, own, text))
    return {"provenance": general | shared, "origins": origins}


def _facts(manifest: JsonObject, under: str = "") -> dict[str, str]:
    """The manifest without its configuration, flattened to dotted names."""
    facts: dict[str, str] = {}
    for key, value in manifest.items():
        name = f"{under}{key}"
        if isinstance(value, dict) and name != "config":
            facts |= _facts(value, under=f"{name}.")
        elif value is not None and name != "config":
            facts[name] = _fact(value)
    return facts


def _fact(value: object) -> str:
    """A value of a manifest as text, long lists cut short."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) > MOST_LISTED:
        return f"{json.dumps(value[:MOST_LISTED], ensure_ascii=False)[:-1]}, … ({len(value)} in all)"
    return json.dumps(value, ensure_ascii=False)
