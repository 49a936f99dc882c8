"""Reads a finished or unfinished run folder and writes a page, two figures and a table about it.

Importing this room is cheap: matplotlib is loaded only when a figure is drawn.
"""

from __future__ import annotations

from niss.report.figures import save_png
from niss.report.page import write_report
from niss.report.plan_chart import plan_figure
from niss.report.source import read_report_input
from niss.report.table import summary_rows

__all__ = ["plan_figure", "read_report_input", "save_png", "summary_rows", "write_report"]
