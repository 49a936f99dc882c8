"""`niss ui`: a page on this machine to plan with, to read the reports of runs, and to watch one in progress.

The server computes with the same functions as the command line and only ever reads the folder of runs; the planner
shows the command that runs its plan. No page loads anything from elsewhere. Importing this room needs FastAPI and
uvicorn; torch is never loaded, matplotlib only for a report.
"""

from __future__ import annotations

from niss.ui.app import make_app

__all__ = ["make_app"]
