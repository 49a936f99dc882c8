"""Fill the tables and numbers of README and docs from the committed results, so that none is typed by hand.

Usage: python tools/update_results.py [results]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from niss.reproduce.chart import write_figures
from niss.reproduce.text import fill, results_folder

ROOT = Path(__file__).parents[1]


def main() -> None:
    folder = results_folder(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        before = path.read_text(encoding="utf-8")
        after = fill(before, folder)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"filled {path.relative_to(ROOT)}")
    for figure in write_figures(folder):
        target = ROOT / "docs" / "images" / f"reproduce-{figure.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(figure, target)
        print(f"copied {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
