"""The pages and what they ask for. Every answer that is not a page is JSON; faults carry a message and a hint."""

from __future__ import annotations

import asyncio
import time
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from niss.errors import NissError, RunFolderError
from niss.report.page import CONTENT_POLICY as REPORT_POLICY
from niss.ui.guard import Asgi, Guard
from niss.ui.planning import PlanQuestion, answer
from niss.ui.runs import ReportPages, RunFolders, live_view
from niss.version import __version__

_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_PAGES = {"/": "planner.html", "/runs": "runs.html", "/live": "live.html"}
# The browser has gone on to another question; nobody reads this.
_NOBODY_WAITS = 499


def make_app(runs: Path, *, host: str = "127.0.0.1") -> Asgi:
    """The whole application behind its guard, for a server that listens on `host`."""
    app = FastAPI(title="niss ui", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _explain_errors(app)
    _serve_files(app)
    _plan(app)
    _runs(app, RunFolders(Path(runs)))
    return Guard(app, host=host)


def _serve_files(app: FastAPI) -> None:
    """The pages and assets of the package, by exact name: read once, so no path is ever made from a request."""
    found = {
        entry.name: entry.read_bytes()
        for entry in (files("niss.ui") / "assets").iterdir()
        if Path(entry.name).suffix in (*_KINDS, ".html")
    }
    version = __version__.encode()

    def page(name: str) -> Any:
        content = found[name].replace(b"{version}", version)

        async def show() -> Response:
            return HTMLResponse(content)

        return show

    for path, name in _PAGES.items():
        app.get(path)(page(name))

    @app.get("/assets/{name}")
    async def asset(name: str) -> Response:
        kind = _KINDS.get(Path(name).suffix)
        if kind is None or name not in found:
            raise HTTPException(404, "there is no such file")
        return Response(found[name], media_type=kind)


def _plan(app: FastAPI) -> None:
    # One plan at a time: whoever moves a slider quickly asks often, and only the last answer is wanted.
    turn = asyncio.Lock()

    @app.get("/api/plan")
    async def plan(request: Request, question: Annotated[PlanQuestion, Query()]) -> Response:
        async with turn:
            if await request.is_disconnected():
                return Response(status_code=_NOBODY_WAITS)
            return JSONResponse(await run_in_threadpool(answer, question))


def _runs(app: FastAPI, folders: RunFolders) -> None:
    pages = ReportPages()

    @app.get("/api/runs")
    def overview() -> Response:
        return JSONResponse({"folder": str(folders.root), "runs": folders.overview(time.time())})

    @app.get("/api/run")
    def live(run: str) -> Response:
        return JSONResponse(live_view(folders.find(run), run, time.time()))

    @app.get("/report")
    def report(run: str) -> Response:
        return HTMLResponse(pages.page(folders.find(run)), headers={"content-security-policy": REPORT_POLICY})


def _explain_errors(app: FastAPI) -> None:
    def fault(status: int, message: str, hint: str | None = None, field: str | None = None) -> Response:
        return JSONResponse({"message": message, "hint": hint, "field": field}, status)

    @app.exception_handler(NissError)
    async def intended(_request: Request, error: NissError) -> Response:
        status = 404 if isinstance(error, RunFolderError) else 422
        return fault(status, error.message, error.hint, getattr(error, "field", None))

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = str(first["loc"][-1])
        return fault(422, f"{field}: {first['msg']}", "see `niss plan --help` for what it takes", field)

    @app.exception_handler(HTTPException)
    async def other(_request: Request, error: HTTPException) -> Response:
        return fault(error.status_code, str(error.detail), "go back to the start page")
