"""The paper's experiments and those beyond it: cells to run, result files, figures, tables, claims and their check.

Every number in the text is made from the result files, and `check_claims` recomputes what the text claims.
"""

from __future__ import annotations

from experiments.reproduce.claims import Claim, check_claims
from experiments.reproduce.figure3 import PANELS, Panel, find_panel
from experiments.reproduce.results import Cell, Result, merge_results, read_results

__all__ = [
    "PANELS",
    "Cell",
    "Claim",
    "Panel",
    "Result",
    "check_claims",
    "find_panel",
    "merge_results",
    "read_results",
]
