"""The pages, what they ask for, and the server that answers.

    /              the planner            /api/plan    a plan, as `niss plan --json` prints it
    /runs          the list of runs       /api/runs    the runs below the folder, the latest first
    /live?run=     a run in progress      /api/run     its state, numbers and curves so far
    /report?run=   its report             /assets/     scripts and styles of the pages

    POST /api/jobs                        start the run of a plan; /cancel and /resume take the name of a run

Every answer that is not a page is JSON; an error carries a message, a hint and, where one is to blame, the field.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from niss.errors import ConfigError, NissError, RunFolderError
from niss.report.page import CONTENT_POLICY as REPORT_POLICY
from niss.tracker.serve import TidyServer
from niss.ui.guard import CHANGING, Asgi, Guard
from niss.ui.jobs import BusyError, Jobs
from niss.ui.planning import USUAL_DATASET, PlanQuestion, answer, data_arguments
from niss.ui.runs import ReportPages, RunFolders, live_view
from niss.version import __version__

_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_PAGES = {"/": "planner", "/runs": "runs", "/live": "live"}
# The status of an answer that nobody reads: the browser has gone on to another question.
_NOBODY_WAITS = 499
# A report of a long run takes its time.
_UNANSWERED_SECONDS = 3600.0


class StartRequest(BaseModel):
    """A run to be started: the plan it carries out, the name of its folder, and the data it trains on."""

    model_config = ConfigDict(extra="forbid")

    question: PlanQuestion
    name: str
    dataset: str = USUAL_DATASET


class JobRequest(BaseModel):
    """A run that is to be cancelled or resumed, by the name under which it is listed."""

    model_config = ConfigDict(extra="forbid")

    run: str


def serve(*, host: str, port: int, runs: Path, open_browser: bool, ready: Callable[[str], None]) -> None:
    """Listen until interrupted.

    host, port    where to listen; port 0 takes a free one
    runs          the folder whose runs are shown; it need not exist yet
    open_browser  whether to open the start page in the browser of this machine
    ready         is called with the address once connections are accepted

    Raises `ConfigError` where the address is taken or cannot be listened on.
    """
    listening = _listen(host, port)
    jobs = Jobs(Path(runs))
    name, number = listening.getsockname()[:2]
    url = f"http://{f'[{name}]' if ':' in name else name}:{number}/"
    config = uvicorn.Config(
        make_app(runs, host=host, jobs=jobs),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
    )
    ready(url)
    if open_browser:
        # No browser can open an address that stands for every interface.
        reachable = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        # The socket listens already: a browser that is quicker than the server waits for it.
        threading.Thread(target=webbrowser.open, args=(reachable,), daemon=True).start()
    try:
        TidyServer(config, unanswered=_UNANSWERED_SECONDS).run([listening])
    finally:
        jobs.close()


def _listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections already, so that the address is known before the server starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error}",
            field="--port",
            hint="another `niss ui` may be using it; --port 0 takes a free one",
        ) from None


def make_app(runs: Path, *, host: str = "127.0.0.1", jobs: Jobs | None = None) -> Asgi:
    """The whole application behind its guard, for a server that listens on `host`; `runs` is the folder of runs.

    jobs  those of this server, for a caller that ends them with it
    """
    token, folders = secrets.token_urlsafe(32), RunFolders(Path(runs))
    jobs = Jobs(Path(runs)) if jobs is None else jobs
    app = FastAPI(title="niss ui", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _explain_errors(app)
    _serve_files(app, token)
    _serve_plans(app)
    _serve_runs(app, folders, jobs)
    _serve_jobs(app, folders, jobs)
    return Guard(app, host=host, token=token)


def _serve_files(app: FastAPI, token: str) -> None:
    """The pages and assets of the package, by exact name: read once, so no path is ever made from a request."""
    contents = {
        entry.name: entry.read_bytes()
        for entry in (files("niss.ui") / "assets").iterdir()
        if Path(entry.name).suffix in _KINDS
    }
    pages = Environment(loader=PackageLoader("niss.ui", "assets"), autoescape=True, undefined=StrictUndefined)
    for path, name in _PAGES.items():
        page = pages.get_template(f"{name}.html").render(page=name, version=__version__, token=token)
        app.add_route(path, _always(HTMLResponse(page)))

    @app.get("/assets/{name}")
    async def asset(name: str) -> Response:
        kind = _KINDS.get(Path(name).suffix)
        if kind is None or name not in contents:
            raise HTTPException(404, "there is no such file")
        return Response(contents[name], media_type=kind)


def _always(page: Response) -> Callable[[Request], Response]:
    return lambda _request: page


def _serve_plans(app: FastAPI) -> None:
    # One plan at a time: whoever moves a slider quickly asks often, and only the last answer is needed.
    turn = asyncio.Lock()

    @app.get("/api/plan")
    async def plan(request: Request, question: Annotated[PlanQuestion, Query()]) -> Response:
        async with turn:
            if await request.is_disconnected():
                return Response(status_code=_NOBODY_WAITS)
            return JSONResponse(await run_in_threadpool(answer, question))


def _serve_runs(app: FastAPI, folders: RunFolders, jobs: Jobs) -> None:
    pages = ReportPages()

    @app.get("/api/runs")
    def overview() -> Response:
        return JSONResponse({"folder": str(folders.root), "runs": folders.overview(time.time())})

    @app.get("/api/run")
    def live(run: str) -> Response:
        job = jobs.about(run)
        if job is not None and run not in folders.names():
            # The process has not written its first file yet, or has been refused.
            return JSONResponse(
                {"name": run, "state": "starting" if job["running"] else "stopped", "job": job}
            )
        return JSONResponse(
            live_view(folders.find(run), run, time.time()) | {"job": job, "busy": jobs.busy()}
        )

    @app.get("/report")
    def report(run: str) -> Response:
        return HTMLResponse(pages.page(folders.find(run)), headers={"content-security-policy": REPORT_POLICY})


def _serve_jobs(app: FastAPI, folders: RunFolders, jobs: Jobs) -> None:
    @app.post(CHANGING)
    def start(asked: StartRequest) -> Response:
        planned = answer(asked.question)
        arguments = planned["run_arguments"] + data_arguments(asked.dataset)
        return JSONResponse(jobs.start(asked.name, arguments).to_json(), 202)

    @app.post(f"{CHANGING}/cancel")
    def cancel(asked: JobRequest) -> Response:
        return JSONResponse(jobs.cancel(asked.run).to_json(), 202)

    @app.post(f"{CHANGING}/resume")
    def resume(asked: JobRequest) -> Response:
        return JSONResponse(jobs.resume(asked.run, folders.find(asked.run)).to_json(), 202)


def _explain_errors(app: FastAPI) -> None:
    """Answer errors with what the pages show: 404 for a run that is not there, 422 for what cannot be planned."""

    def fault(status: int, message: str, hint: str | None = None, field: str | None = None) -> Response:
        return JSONResponse({"message": message, "hint": hint, "field": field}, status)

    @app.exception_handler(NissError)
    async def intended(_request: Request, error: NissError) -> Response:
        status = 404 if isinstance(error, RunFolderError) else 409 if isinstance(error, BusyError) else 422
        return fault(status, error.message, error.hint, getattr(error, "field", None))

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = str(first["loc"][-1])
        return fault(422, f"{field}: {first['msg']}", "see `niss plan --help` for what it takes", field)

    @app.exception_handler(HTTPException)
    async def other(_request: Request, error: HTTPException) -> Response:
        return fault(error.status_code, str(error.detail), "go back to the start page")
