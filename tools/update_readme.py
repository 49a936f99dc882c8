"""Fill the demo table and figure of the README from a finished demo, so that no number is typed by hand.

Usage: python tools/update_readme.py [runs/demo]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from niss.report import read_report_input, save_png, summary_rows

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- table: demo -->\n", "<!-- end -->"


def main() -> None:
    report = read_report_input(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
    header, rows = summary_rows(report)
    lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    readme.write_text(before + BEGIN + table + END + rest.split(END, 1)[1], encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        accuracy, _ = save_png(report, Path(folder))
        (ROOT / "docs" / "images").mkdir(parents=True, exist_ok=True)
        shutil.copy(accuracy, ROOT / "docs" / "images" / "demo-accuracy.png")


if __name__ == "__main__":
    main()
