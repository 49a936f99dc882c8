"""The tracker over HTTP: its routes, as OpenAPI shows them.

Every answer that is not 2xx says what was wrong, in which field, and
what to do.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi import Path as PathPart
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from niss.protocol.keys import LINKS_PER_ROUND
from niss.tracker import api
from niss.tracker.api import Attempt, Stock
from niss.tracker.auth import IDENTITY, LONGEST_RUN, PATTERNS, Refused, Signed, check_request
from niss.tracker.gate import BODY, CALLER, CONTENT_TYPE, Gate, Metrics, log, shown
from niss.tracker.rounds import RoundView
from niss.tracker.service import Tracker
from niss.tracker.store import Run
from niss.version import __version__

RunPath = Annotated[api.RunName, PathPart(description="The run's name, 1 to 64 bytes in hex.")]
IdentityPath = Annotated[api.HexKey, PathPart(description="A client's public key.")]


async def attempt_in_path(
    run: RunPath,
    round_number: Annotated[
        int, PathPart(ge=0, lt=LONGEST_RUN, alias="round", description="Rounds count from 0.")
    ],
    attempt: Annotated[int, PathPart(ge=0, lt=LINKS_PER_ROUND, description="Attempts count from 0.")],
) -> Attempt:
    """The attempt that a path names. A coroutine, since FastAPI would run a plain function in a thread."""
    return Attempt(run, round_number, attempt)


AttemptPath = Annotated[Attempt, Depends(attempt_in_path)]


_DESCRIPTION = """Who is live, who sits in a round, and the beacon that fixes who shares noise with whom.

Requests under /v1/clients and below a run are signed: four headers, described in the guide to the tracker.
"""
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": api.ErrorAnswer, "description": why}
    for status, why in {
        400: "Not a request of this API.",
        401: "Not signed, signed wrongly, too old, or a copy.",
        403: "Signed by someone who may not do this.",
        404: "Not there.",
        409: "Contradicts what was done before.",
        413: "Too large.",
        422: "A field is missing or wrong.",
        429: "Too often; see Retry-After.",
        503: "Not now; see Retry-After.",
    }.items()
}
_SIGNED: dict[str, Any] = {
    "parameters": [
        {"name": name, "in": "header", "required": True, "schema": {"type": "string", "pattern": pattern}}
        for name, pattern in PATTERNS.items()
    ]
}
_ATTEMPT = "/v1/runs/{run}/rounds/{round}/attempts/{attempt}"


def make_app(tracker: Tracker) -> ASGIApp:
    """The whole ASGI application: the gate and the routes, which ask `tracker`.

    The route functions check the signature first where there is one, then ask the tracker. What a route's docstring
    says is shown at /openapi.json. Functions without `async` run in threads, since the store may block.
    """
    metrics, settings = Metrics(), tracker.settings
    app = FastAPI(
        title="NISS tracker",
        version=__version__,
        description=_DESCRIPTION,
        responses=_REFUSALS,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _explain_errors(app, tracker.store.trouble)
    _about(app, tracker, metrics)
    _clients(app, tracker)
    _runs(app, tracker)
    _reading(app, tracker)
    return Gate(app, metrics=metrics, address_rate=settings.address_rate, body_bytes=settings.body_bytes)


def _about(app: FastAPI, tracker: Tracker, metrics: Metrics) -> None:
    """What anyone may ask without signing: whether it lives, its counters, and whose keys it holds."""

    @app.get("/healthz")
    def health() -> api.Health:
        """Whether the tracker can reach its store."""
        tracker.store.ping()
        return api.Health(status="ok")

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def show_metrics() -> Response:
        """Counts and latencies, for Prometheus."""
        return Response(metrics.text(tracker.counts()), headers={"content-type": CONTENT_TYPE})

    @app.get("/v1/tracker")
    async def describe() -> api.TrackerAnswer:
        """Whose signatures to expect, and what a request must look like."""
        return api.TrackerAnswer(
            tracker=tracker.public,
            holder=tracker.holder.public,
            server=tracker.server,
            version=__version__,
            time=tracker.now(),
            tolerance_seconds=tracker.settings.tolerance,
            ttl_seconds=tracker.settings.ttl,
            attempts=LINKS_PER_ROUND,
        )


def _clients(app: FastAPI, tracker: Tracker) -> None:
    """What a client does for itself, and the one thing the server does for it (`deposit`).

    All of it changes something, so every request passes `Tracker.admit`: signed, once, not too often.
    """

    def answer(stock: Stock) -> api.StockAnswer:
        wanted, ttl = tracker.wanted(stock), tracker.settings.ttl
        return api.StockAnswer(**asdict(stock), wanted=wanted, ttl_seconds=ttl)

    @app.put("/v1/clients/me", openapi_extra=_SIGNED)
    def register(request: Request, body: api.Registration) -> api.StockAnswer:
        """Become live, with a batch of one-time keys; again to add some. A key that was used never counts again."""
        caller = tracker.admit(_signed(tracker, request))
        return answer(tracker.register(caller, [prekey.prekey() for prekey in body.prekeys], body.coalition))

    @app.post("/v1/clients/me/heartbeat", openapi_extra=_SIGNED)
    def heartbeat(request: Request) -> api.StockAnswer:
        """Stay live for another `ttl_seconds`; the answer says how many more one-time keys are wanted."""
        return answer(tracker.heartbeat(tracker.admit(_signed(tracker, request))))

    @app.delete("/v1/clients/me", status_code=204, openapi_extra=_SIGNED)
    def leave(request: Request) -> None:
        """Be forgotten, with all one-time keys, and be seated no more; attempts that are seated stay as they are."""
        tracker.leave(tracker.admit(_signed(tracker, request)))

    @app.put("/v1/clients/me/coalition", status_code=204, openapi_extra=_SIGNED)
    def join(request: Request, body: api.CoalitionChoice) -> None:
        """Belong to a coalition and no other, or to none."""
        tracker.join(tracker.admit(_signed(tracker, request)), body.coalition)

    @app.post("/v1/clients/{identity}/prekeys", openapi_extra=_SIGNED)
    def deposit(request: Request, identity: IdentityPath, body: api.Deposit) -> api.StockAnswer:
        """The server passes on fresh prekeys of a registered client, each of which the client must have signed."""
        caller = tracker.admit(_signed(tracker, request))
        return answer(tracker.deposit(caller, identity, [prekey.prekey() for prekey in body.prekeys]))


def _runs(app: FastAPI, tracker: Tracker) -> None:
    """What the server alone may do: start a run, seat an attempt, have its link let out.

    All of it may be repeated: asked in the same way, the tracker answers the same, also after a restart.
    """

    def answer(run: Run) -> api.RunAnswer:
        return api.RunAnswer(
            rounds=run.rounds,
            anchor=run.anchor,
            holder=tracker.holder.public,
            signature=run.signature,
            highest_link=run.highest,
        )

    @app.put("/v1/runs/{run}", openapi_extra=_SIGNED)
    def start_run(request: Request, run: RunPath, body: api.RunStart) -> api.RunAnswer:
        """The server starts a run: the holder commits to its chain, once. Asked again, the same anchor."""
        caller = tracker.admit(_signed(tracker, request))
        return answer(tracker.rounds.start_run(caller, run, body.rounds))

    @app.get("/v1/runs/{run}")
    def show_run(run: RunPath) -> api.RunAnswer:
        """What the holder committed to, and the highest link let out so far."""
        return answer(tracker.rounds.run(run))

    @app.put(_ATTEMPT + "/seats", response_model=api.ParticipantsAnswer, openapi_extra=_SIGNED)
    def seat(request: Request, attempt: AttemptPath, body: api.SeatsWanted) -> Response:
        """The server fixes who takes part, for good; one prekey of each is used up, or none if it is refused.

        Asked again in the same way, the same list.
        """
        caller = tracker.admit(_signed(tracker, request))
        return _json(tracker.rounds.seat(caller, attempt, body).list_json)

    @app.put(_ATTEMPT + "/beacon", openapi_extra=_SIGNED)
    def beacon(request: Request, attempt: AttemptPath, body: api.CommitmentBody) -> api.BeaconAnswer:
        """The server commits to list and terms, and gets the link of this attempt: once, for this commitment.

        The attempt must be seated, and the commitment be to that list. No link is let out below another. Where noise is
        carried over, the next round must be seated too, and be opened with that list alone.
        """
        caller = tracker.admit(_signed(tracker, request))
        return api.BeaconAnswer(**asdict(tracker.rounds.beacon(caller, attempt, body)))


def _reading(app: FastAPI, tracker: Tracker) -> None:
    """What participants read in a round. Signed, but not counted against replays: see `niss.tracker.auth`.

    These two are asked by all participants of a round at once. A view that is in memory is answered on the event loop;
    only one that has to be made from the store goes to a thread.
    """

    async def view_for(
        request: Request, attempt: Attempt, *, also: bytes | None = None
    ) -> tuple[RoundView, bytes]:
        """The view of an attempt and who asks for it: someone who has a seat, or `also`; refused (403) otherwise."""
        caller = _signed(tracker, request).identity
        view = tracker.rounds.final_view(attempt)
        if view is None:
            view = await run_in_threadpool(tracker.rounds.view, attempt)
        if caller not in view.numbers and caller != also:
            outside = "this identity does not sit in this attempt"
            raise Refused(403, IDENTITY, outside, "wait for a later round")
        return view, caller

    @app.get(_ATTEMPT + "/participants", response_model=api.ParticipantsAnswer, openapi_extra=_SIGNED)
    async def participants(request: Request, attempt: AttemptPath) -> Response:
        """The whole list, for those who are on it and for the server."""
        view, _ = await view_for(request, attempt, also=tracker.server)
        return _json(view.list_json)

    @app.get(_ATTEMPT + "/neighbours", response_model=api.NeighboursAnswer, openapi_extra=_SIGNED)
    async def neighbours(request: Request, attempt: AttemptPath) -> Response:
        """The asking client's neighbours with their signed keys, once the beacon is out; for participants only."""
        view, caller = await view_for(request, attempt)
        return _json(view.neighbours_json(caller))


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _signed(tracker: Tracker, request: Request) -> Signed:
    """Who signed this request, over its bytes as they came; refused (401) as `check_request` says."""
    scope = request.scope
    query: bytes = scope["query_string"]
    signed = check_request(
        request.headers,
        tracker=tracker.public,
        method=scope["method"],
        target=scope["raw_path"] + (b"?" + query if query else b""),
        body=scope[BODY],
        now=tracker.now(),
        tolerance=tracker.settings.tolerance,
    )
    scope[CALLER] = signed.identity
    return signed


def _explain_errors(app: FastAPI, trouble: tuple[type[Exception], ...]) -> None:
    """Answer every error in the one form of `shown`, with a hint.

    `trouble` are the errors of the store when it is out of order: they become 503 with Retry-After, and the log says
    which error it was, since a client can do nothing with the details.
    """

    @app.exception_handler(Refused)
    async def refused(_request: Request, refusal: Refused) -> Response:
        return shown(refusal)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"]]
        field = ".".join(place[1:]) or place[0]
        return shown(Refused(422, field, str(first["msg"]), "see /openapi.json for what this field may be"))

    @app.exception_handler(HTTPException)
    async def other(_request: Request, error: HTTPException) -> Response:
        hint = "see /openapi.json for the paths and methods there are"
        answer = shown(Refused(error.status_code, None, str(error.detail), hint))
        answer.headers.update(error.headers or {})
        return answer

    async def out_of_order(_request: Request, error: Exception) -> Response:
        log("the store is out of order", level=logging.ERROR, kind=type(error).__name__, reason=str(error))
        return shown(Refused(503, None, "the store does not answer", "try again", retry_after=1.0))

    for kind in trouble:
        app.add_exception_handler(kind, out_of_order)

    @app.exception_handler(Exception)
    async def defect(_request: Request, _error: Exception) -> Response:
        return shown(Refused(500, None, "a defect of the tracker; its log says more", "please report it"))
