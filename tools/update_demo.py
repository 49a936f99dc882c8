"""Fill the tutorial's tables and the README's figures from finished runs, so that no number is typed by hand.

Usage: python tools/update_demo.py [runs/demo [runs/silos]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from niss.figures import png
from niss.files import write_output
from niss.report import read_report_input, summary_rows
from niss.report.run_charts import accuracy_chart
from niss.report.summary import SummaryTable, noise_rows
from niss.runs.folder import ReportInput
from niss.svg import sheet

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- table: demo -->\n", "<!-- end -->"


def main() -> None:
    report = read_report_input(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
    tables = [in_markdown(summary_rows(report), "---"), in_markdown(noise_rows(report), "---:")]
    page = ROOT / "docs" / "tutorial.md"
    first, *rest = page.read_text(encoding="utf-8").split(BEGIN)
    filled = [BEGIN + table + END + part.split(END, 1)[1] for table, part in zip(tables, rest, strict=True)]
    page.write_text(first + "".join(filled), encoding="utf-8")
    draw_accuracy(report, "demo")
    if len(sys.argv) > 2:
        draw_accuracy(read_report_input(Path(sys.argv[2])), "silos")


def in_markdown(table: SummaryTable, last: str) -> str:
    """The table, its numbers to the right; `last` is how the last column is aligned."""
    header, rows = table
    lines = [header, ("---", *["---:"] * (len(header) - 2), last), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def draw_accuracy(report: ReportInput, name: str) -> None:
    """The curves of a comparison."""
    for dark in (False, True):
        path = ROOT / "docs" / "images" / f"{name}-accuracy{'-dark' if dark else ''}.png"
        write_output(path, png(sheet([accuracy_chart(report)]), dark=dark))


if __name__ == "__main__":
    main()
