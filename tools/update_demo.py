"""Fill the tutorial's table and the README's figures from finished runs, so that no number is typed by hand.

Usage: python tools/update_demo.py [runs/demo [runs/silos]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from niss.figures import png
from niss.files import write_output
from niss.report import read_report_input, summary_rows
from niss.report.run_charts import accuracy_chart
from niss.runs.folder import ReportInput
from niss.svg import sheet

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- table: demo -->\n", "<!-- end -->"


def main() -> None:
    report = read_report_input(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
    header, rows = summary_rows(report)
    lines = [header, ("---", "---:", "---:", "---"), *rows]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    page = ROOT / "docs" / "tutorial.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(before + BEGIN + table + END + rest.split(END, 1)[1], encoding="utf-8")
    draw_accuracy(report, "demo")
    if len(sys.argv) > 2:
        draw_accuracy(read_report_input(Path(sys.argv[2])), "silos")


def draw_accuracy(report: ReportInput, name: str) -> None:
    """The curves of a comparison."""
    for dark in (False, True):
        path = ROOT / "docs" / "images" / f"{name}-accuracy{'-dark' if dark else ''}.png"
        write_output(path, png(sheet([accuracy_chart(report)]), dark=dark))


if __name__ == "__main__":
    main()
