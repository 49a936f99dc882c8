"""The pages, what they ask for, and the server that answers.

    /              the planner            /api/plan    a plan, as `niss plan --json` prints it
    /runs          the list of runs       /api/runs    the runs below the folder, the latest first
    /live?run=     a run in progress      /api/run     its state, numbers and curves so far
    /report?run=   its report             /assets/     scripts and styles of the pages

Every answer that is not a page is JSON; an error carries a message, a hint and, where one is to blame, the field. The
server only reads: whoever wants to run a plan is shown the command.

A page on another site can make a browser send requests to this machine. It cannot read the answers, unless its
name is made to point here (DNS rebinding): then the Host header gives it away, and the request is refused (`Guard`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
import webbrowser
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from niss.accounting import PlanQuestion
from niss.errors import ConfigError, NissError, RunFolderError
from niss.report.page import CONTENT_POLICY as REPORT_POLICY
from niss.settings import check
from niss.tracker.serve import TidyServer, address, listen
from niss.ui.pages import CONTROLS, answer, fill, planner_page
from niss.ui.runs import RunFolders, last_change, live_view, report_page
from niss.version import __version__

# Pages run their own scripts and nothing else, talk to this server alone, and cannot be framed.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# What every answer carries, unless the application has set the header itself (a report has a policy of its own).
_HEADERS = (
    (b"content-security-policy", PAGE_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)

_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_PAGES = {"/runs": "runs", "/live": "live"}
# What is computed for whoever asks.
_COMPUTED = ("/api/", "/report")
# The status of an answer that nobody reads: the browser has gone on to another question.
_NOBODY_WAITS = 499
# Plans that are worked out at once, each for a few seconds at most, and for how many a question waits for its turn.
_PLANS_AT_ONCE, _LONGEST_WAIT = 3, 5.0
# A report of a long run takes its time.
_UNANSWERED_SECONDS = 3600.0


def serve(*, host: str, port: int, runs: Path, open_browser: bool, ready: Callable[[str], None]) -> None:
    """Listen until interrupted.

    host, port    where to listen; port 0 takes a free one
    runs          the folder whose runs are shown; it need not exist yet
    open_browser  whether to open the start page in the browser of this machine
    ready         is called with the address once connections are accepted

    Raises `ConfigError` where the address is taken or cannot be listened on.
    """
    listening = listen(host, port)
    url = address(listening) + "/"
    ready(url)
    if open_browser:
        # No browser can open an address that stands for every interface.
        reachable = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        # The socket listens already: a browser that is quicker than the server waits for it.
        threading.Thread(target=webbrowser.open, args=(reachable,), daemon=True).start()
    app = make_app(runs, host=host)
    TidyServer(app, unanswered=_UNANSWERED_SECONDS, timeout_graceful_shutdown=2).run([listening])


def make_app(runs: Path, *, host: str = "127.0.0.1") -> ASGIApp:
    """The whole application behind its guard, for a server that listens on `host`; `runs` is the folder of runs."""
    app = FastAPI(title="niss ui", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _explain_errors(app)
    _serve_files(app)
    _serve_plans(app)
    _serve_runs(app, RunFolders(Path(runs)))
    return Guard(app, host=host)


def _serve_files(app: FastAPI) -> None:
    """The pages and assets of the package, by exact name: read once, so no path is ever made from a request."""
    contents = {
        entry.name: entry.read_bytes()
        for entry in ((files("niss") / "theme.css"), *(files("niss.ui") / "assets").iterdir())
        if Path(entry.name).suffix in _KINDS
    }
    planners = {unit: HTMLResponse(planner_page(unit)) for unit in CONTROLS}

    @app.get("/")
    async def planner(unit: str = "") -> Response:
        return planners.get(unit, planners["client"])

    for path, name in _PAGES.items():
        page = HTMLResponse(fill(f"{name}.html", {"page": name}))
        app.add_route(path, partial(lambda page, _request: page, page))

    @app.get("/assets/{name}")
    async def asset(name: str) -> Response:
        kind = _KINDS.get(Path(name).suffix)
        if kind is None or name not in contents:
            raise HTTPException(404, "there is no such file")
        return Response(contents[name], media_type=kind)


def _serve_plans(app: FastAPI) -> None:
    # Few at a time: whoever moves a slider quickly asks often, and only the last answer is needed.
    turns = asyncio.Semaphore(_PLANS_AT_ONCE)

    @app.get("/api/plan")
    async def plan(request: Request) -> Response:
        asked = request.query_params
        if twice := [name for name in asked if len(asked.getlist(name)) > 1]:
            raise ConfigError("is given more than once", field=twice[0], hint="give every setting once")
        question = check(PlanQuestion, dict(asked))
        try:
            await asyncio.wait_for(turns.acquire(), _LONGEST_WAIT)
        except TimeoutError:
            return _fault(503, "other plans are being worked out", "ask again in a few seconds")
        try:
            if await request.is_disconnected():
                return Response(status_code=_NOBODY_WAITS)
            return JSONResponse(await run_in_threadpool(answer, question))
        finally:
            turns.release()


def _serve_runs(app: FastAPI, folders: RunFolders) -> None:
    @app.get("/api/runs")
    def overview() -> Response:
        listed = {"folder": str(folders.root), "runs": folders.overview(time.time())}
        return JSONResponse(listed | {"html": fill("list.html", listed)})

    @app.get("/api/run")
    def live(run: str) -> Response:
        view = live_view(folders.find(run), run, time.time())
        return JSONResponse(view | {"html": fill("run.html", view | {"chart": view.pop("chart")})})

    @app.get("/report")
    def report(run: str) -> Response:
        path = folders.find(run)
        page = report_page(path, last_change(path))
        return HTMLResponse(page, headers={"content-security-policy": REPORT_POLICY})


def _explain_errors(app: FastAPI) -> None:
    """Answer errors with what the pages show: 404 for a run that is not there, 422 for what cannot be planned."""

    @app.exception_handler(NissError)
    async def intended(_request: Request, error: NissError) -> Response:
        status = 404 if isinstance(error, RunFolderError) else 422
        return _fault(status, error.message, error.hint, getattr(error, "field", None))

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = str(first["loc"][-1])
        return _fault(422, f"{field}: {first['msg']}", "see `niss plan --help` for what it takes", field)

    @app.exception_handler(HTTPException)
    async def other(_request: Request, error: HTTPException) -> Response:
        return _fault(error.status_code, str(error.detail), "go back to the start page")


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches a server that listens on `host`, a name or an address.

    Any name but localhost counts as reachable: what it resolves to can change.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Lets reading requests for a known host through to `app`, and puts the protecting headers on every answer.

    host  what the server listens on. On the loopback address only its own names are known. Elsewhere any bare
          address is (it cannot be rebound), and the name of the machine.

    Refused are, with a message and a hint as JSON: other hosts (421), anything but GET and HEAD (405), and
    (403) what a page of another site makes this machine compute: the interface behind the pages, and reports.
    """

    def __init__(self, app: ASGIApp, *, host: str = "127.0.0.1") -> None:
        self._app = app
        self._loopback = is_loopback(host)
        self._names = {"localhost"}
        if not self._loopback:
            self._names |= {host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                missing = [(name, value) for name, value in _HEADERS if name not in present]
                message["headers"] = [*message["headers"], *missing]
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, protected)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """The answer to what is refused; None for what is let through."""
        headers = Headers(scope=scope)
        again = "open the address that `niss ui` printed"
        if not self._knows(headers.get("host", "")):
            return _fault(421, "this server does not answer to that host name", again)
        if scope["method"] not in ("GET", "HEAD"):
            return _fault(405, "this server only answers reading requests", "use GET")
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"].startswith(_COMPUTED):
            return _fault(403, "the request comes from a page of another site", again)
        return None

    def _knows(self, header: str) -> bool:
        """Whether a Host header names this server; an IPv6 address stands in brackets, any port after a colon."""
        name = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
        name = name.lower().rstrip(".")
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._loopback


def _fault(status: int, message: str, hint: str | None, field: str | None = None) -> JSONResponse:
    """What is wrong, in the one form that the pages show."""
    return JSONResponse({"message": message, "hint": hint, "field": field}, status)
