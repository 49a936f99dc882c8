"""Reads a run folder, finished or not, and writes about it: a page, figures, tables for other tools.

    from niss.report import write_report
    write_report("runs/demo")                       # runs/demo/report.html: one file, which loads nothing

`read_report_input` gives the values behind the page, `summary_rows` its table of results as text and `remarks` what it
cannot say in a cell; charts are in `niss.report.run_charts`, all numbers round by round, as CSV, in
`niss.report.summary`. Importing this room is cheap: what is heavy is loaded when it is used, matplotlib only for
pictures, jinja2 with the page. Nothing here needs torch.
"""

from __future__ import annotations

from niss.report.page import write_report
from niss.report.summary import remarks, summary_rows
from niss.runs.folder import read_report_input

__all__ = ["read_report_input", "remarks", "summary_rows", "write_report"]
