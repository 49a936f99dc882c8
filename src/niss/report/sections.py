"""The sections of the page, each a function from the report to HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from niss.report.source import MethodResult, ReportInput
from niss.report.table import (
    NO_GUARANTEE,
    NOT_APPLICABLE,
    NOT_PRIVATE,
    UNFINISHED,
    format_accuracy,
    format_epsilon,
    summary_rows,
)

_WORDS = {NO_GUARANTEE, NOT_PRIVATE, UNFINISHED, NOT_APPLICABLE, "none"}


def prose(text: str) -> str:
    """`text` escaped, with no line break between a number and its percent sign."""
    return escape(text).replace(" %", "&nbsp;%")


def figure_section(heading: str, svg: str, caption: str, more: str = "") -> str:
    """A figure under its heading; `more` is HTML that follows the caption."""
    return (
        f"<section>\n<h2>{escape(heading)}</h2>\n<figure>\n"
        f'<div class="scrolls" role="group" tabindex="0" aria-label="Figure: {escape(heading)}">{svg}</div>\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>\n{more}</section>"
    )


def values_table(report: ReportInput) -> str:
    """The curves as a table, folded away: for those who cannot point at the figure, and for copying."""
    columns = [method for method in report.methods if method.evaluations]
    if not columns:
        return ""
    known = [dict(method.evaluations) for method in columns]
    rounds = sorted({number for one in known for number in one})
    head = "".join(f'<th scope="col">{escape(method.label)}</th>' for method in columns)
    body = "\n".join(
        f'<tr><th scope="row">{number}</th>'
        + "".join(
            f"<td>{format_accuracy(one[number]) if number in one else NOT_APPLICABLE}</td>" for one in known
        )
        + "</tr>"
        for number in rounds
    )
    return f"""<details class="values">
<summary>The same values as a table</summary>
<div class="scrolls" role="group" tabindex="0" aria-label="Table of accuracies">
<table>
<caption><span class="fits">Test accuracy after each evaluated round</span></caption>
<thead><tr><th scope="col">Round</th>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>
</details>
"""


def results_section(report: ReportInput) -> str:
    header, rows = summary_rows(report)
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "\n".join(_table_row(row) for row in rows)
    return f"""<section>
<h2>Results</h2>
<div class="scrolls" role="group" tabindex="0" aria-label="Table of results">
<table>
<caption><span class="fits">
Accuracy, noise and privacy loss of each method{_after_rounds(report)}
</span></caption>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>{_trust_note(report.methods)}
</section>"""


def overview_table(reports: Sequence[ReportInput]) -> str:
    """The rows of several reports in one table, each with the name of its run."""
    names = [report.folder.resolve().name for report in reports]
    tables = [summary_rows(report) for report in reports]
    header = (tables[0].header[0], "Run", *tables[0].header[1:])
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "\n".join(
        _table_row((row[0], name, *row[1:]))
        for name, table in zip(names, tables, strict=True)
        for row in table.rows
    )
    return f"""<section>
<h2>Overview</h2>
<div class="scrolls" role="group" tabindex="0" aria-label="Table of all results">
<table>
<caption><span class="fits">Accuracy, noise and privacy loss of every method on this page.</span></caption>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>{_trust_note(method for report in reports for method in report.methods)}
</section>"""


def _trust_note(methods: Iterable[MethodResult]) -> str:
    """Without it, an epsilon that assumes a trusted server would stand in the joint column as an equal."""
    trusting = (one.label for one in methods if one.trusts_the_server and one.epsilon_joint is not None)
    names = ", ".join(dict.fromkeys(trusting))
    said = f"The ε of {names} assumes a trusted server: it holds only for those who see the released models."
    return f'\n<p class="note">{escape(said)}</p>' if names else ""


def _after_rounds(report: ReportInput) -> str:
    delta = (
        ""
        if report.delta is None
        else f'; every ε is stated at <span class="whole">δ = {report.delta:.3g}</span>'
    )
    if not report.finished:
        return f" as far as the run has come{delta}."
    return f" after {report.rounds} rounds{delta}." if report.rounds else f"{delta}."


def _table_row(row: tuple[str, ...]) -> str:
    cells = "".join(
        f'<td class="word">{escape(cell)}</td>' if cell in _WORDS else f"<td>{escape(cell)}</td>"
        for cell in row[1:]
    )
    return f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>'


def views_section(report: ReportInput) -> str:
    differing = [
        method
        for method in report.methods
        if method.is_private
        and method.finished
        and not method.trusts_the_server
        and format_epsilon(method, method.epsilon_marginal) != format_epsilon(method, method.epsilon_joint)
    ]
    here = f"<p>{escape(_difference_here(differing))}</p>" if differing else ""
    return f"""<section>
<h2>Two ways to count the privacy loss</h2>
<p>Epsilon (ε) bounds how much anything that is seen can depend on {escape(_protected_thing(report))};
smaller is more private. How large it is depends on what the observer is assumed to see.</p>
<dl>
<dt>Joint view</dt>
<dd>The server sees all uploads of a round and can combine them, as a real server can. Noise that
cancels between clients cancels for the server too when it adds them up, so the sum is protected only by the
noise that remains. This is the honest count, and the one this report compares methods by.</dd>
<dt>Marginal view</dt>
<dd>Someone sees a single upload alone, with all of its noise, and none of the others. This is what the paper
counts. It is right for an eavesdropper on one line, and too good for a server.</dd>
</dl>
{here}
</section>"""


def _protected_thing(report: ReportInput) -> str:
    return "one single record" if report.unit == "record" else "the data of one client"


def _difference_here(differing: list[MethodResult]) -> str:
    said = [
        f"{method.label}, joint view: {format_epsilon(method, method.epsilon_joint)}, "
        f"marginal view: {format_epsilon(method, method.epsilon_marginal)}"
        for method in differing
    ]
    return f"The two views differ here for {'; '.join(said)}."


def settings_section(report: ReportInput) -> str:
    settings = {
        "Dataset": report.dataset,
        "Split between clients": report.split,
        "Clients": _count(report.clients),
        "Participants in a round": _count(report.participants),
        "Rounds": _count(report.rounds),
        "Model parameters": _count(report.model_parameters),
        "Unit of privacy": report.unit,
        "Neighbouring relation": report.relation,
        "δ": None if report.delta is None else f"{report.delta:.3g}",
        "Target ε, joint view": None if report.target_epsilon is None else f"{report.target_epsilon:.2f}",
        "Engine": _recorded(report, "engine"),
        "Precision": _recorded(report, "precision"),
    }
    return f"<section>\n<h2>Settings</h2>\n{pairs(settings)}\n</section>"


def _recorded(report: ReportInput, key: str) -> str | None:
    """What the manifests say under `key`: each answer once."""
    said = dict.fromkeys(
        method.manifest[key] for method in report.methods if isinstance(method.manifest.get(key), str)
    )
    return "; ".join(said) or None


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}".replace(",", "\u202f")


def pairs(values: dict[str, str | None]) -> str:
    """A list of names with their values; what is not known is said to be so."""
    rows = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape('not set' if value is None else value)}</dd></div>"
        for name, value in values.items()
    )
    return f'<dl class="pairs">\n{rows}\n</dl>'
