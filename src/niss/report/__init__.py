"""Reads a run folder, finished or not, and writes about it: a page, figures, tables for other tools.

    from niss.report import write_report
    write_report("runs/demo")                       # runs/demo/report.html, one file, no network

`read_report_input` gives the values behind the page, `summary_rows` its table of results as text, `read_series` and
`write_csv` all numbers round by round. Importing this room is cheap: each name is loaded when it is first used, and
matplotlib only with what draws. Nothing here needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niss.report.export import read_series, write_csv, write_event_files
    from niss.report.ledger_charts import save_ledger_chart
    from niss.report.method_charts import save_png
    from niss.report.page import render_page, write_report
    from niss.report.plan_chart import plan_figure
    from niss.report.run_folder import read_report_input
    from niss.report.table import summary_rows

_HOME = {
    "plan_figure": "plan_chart",
    "read_report_input": "run_folder",
    "read_series": "export",
    "render_page": "page",
    "save_ledger_chart": "ledger_charts",
    "save_png": "method_charts",
    "summary_rows": "table",
    "write_csv": "export",
    "write_event_files": "export",
    "write_report": "page",
}

__all__ = [
    "plan_figure",
    "read_report_input",
    "read_series",
    "render_page",
    "save_ledger_chart",
    "save_png",
    "summary_rows",
    "write_csv",
    "write_event_files",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'niss.report' has no attribute {name!r}")
    value = getattr(import_module(f"niss.report.{_HOME[name]}"), name)
    globals()[name] = value
    return value
