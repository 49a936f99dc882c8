"""Fill the tables, numbers and figures of README and docs from the committed results, so that none is made by hand.

Usage: python tools/update_results.py [results [repository]]
"""

from __future__ import annotations

import shutil
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.reproduce import text  # noqa: E402
from experiments.reproduce.chart import write_figures  # noqa: E402
from niss.files import write_output  # noqa: E402

MOST_BYTES = 1_000_000


def main() -> None:
    root = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT
    folder = text.results_folder(Path(sys.argv[1]) if len(sys.argv) > 1 else root / "results")
    write_figures(folder)
    write_output(folder / text.TABLES_FILE, text.tables_text(folder).encode())
    for name, dark in product(text.FIGURES, (False, True)):
        figure = folder / text.figure_name(name, dark=dark)
        if figure.exists():
            copy_figure(figure, root / "docs" / "images" / text.copy_name(figure))
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        before = path.read_text(encoding="utf-8")
        after = text.fill(before, folder)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"filled {path.relative_to(root)}")


def copy_figure(figure: Path, target: Path) -> None:
    """Beside the other images of the documentation, which is built from `docs/` alone."""
    if figure.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{figure} is larger than {MOST_BYTES:,} bytes")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or target.read_bytes() != figure.read_bytes():
        shutil.copyfile(figure, target)
        print(f"copied {target}")


if __name__ == "__main__":
    main()
