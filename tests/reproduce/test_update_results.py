"""`tools/update_results.py` fills the pages of a repository from a results folder, figures included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from experiments.reproduce.results import Result
from experiments.reproduce.text import disagreements
from support.results import keep, made_up_cell

TOOL = Path(__file__).parents[2] / "tools" / "update_results.py"
PAGE = """<!-- result: figure-3.image --><!-- end -->
<!-- result: rivals.image -->?<!-- end -->
<!-- result: figure-3 --><!-- end -->
"""


def test_pages_and_figures(tmp_path):
    labels = {"reading": "nbafl", "sigma_k": 0.00434, "x": 0.0, "seed": 1}
    cell = made_up_cell("nbafl/X=0/seed-1", labels, 0.9, rounds=2, curve=((1, 0.5), (2, 0.9)))
    results = tmp_path / "results" / "paper"
    keep(results, Result("figure-3", "mnist-mlp-iid", {}, (cell,)))
    page = tmp_path / "docs" / "concepts" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE, encoding="utf-8")
    (tmp_path / "README.md").write_text("no marks\n", encoding="utf-8")
    command = [sys.executable, str(TOOL), str(tmp_path / "results"), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    text = page.read_text(encoding="utf-8")
    assert "](../images/reproduce-figure-3.png)" in text
    assert (tmp_path / "docs" / "images" / "reproduce-figure-3.png").stat().st_size < 1_000_000
    assert "<!-- result: rivals.image -->\nnot measured yet\n<!-- end -->" in text
    assert "| 90.0 % |" in text
    assert disagreements(page, results) == []
    # Once more changes nothing.
    again = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert again.stdout == ""
