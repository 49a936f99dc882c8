"""The tracker over HTTP: bodies, routes and answers, as OpenAPI shows them.

Keys, hashes and signatures are lower-case hex. Every answer that is not 2xx says what was wrong, in which field, and
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
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.exceptions import HTTPException

from niss.protocol.agreement import LINKS_PER_ROUND
from niss.protocol.keys import LARGEST_UINT64
from niss.protocol.messages import Prekey
from niss.tracker.auth import LARGEST_BATCH, LARGEST_ROUND, LONGEST_RUN, PATTERNS, Refused, Signed
from niss.tracker.gate import BODY, CALLER, CONTENT_TYPE, App, Gate, Metrics, extra_headers, log
from niss.tracker.rounds import RoundView, beacon_entries
from niss.tracker.service import Tracker
from niss.tracker.store import Attempt, Release, Run, SeatRequest, Stock
from niss.version import __version__

HexKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
HexSignature = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
HexCommitment = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{128}|[0-9a-f]{192})$")]
CoalitionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

RunPath = Annotated[
    str, PathPart(pattern=r"^([0-9a-f]{2}){1,64}$", description="The run's name, 1 to 64 bytes in hex.")
]
IdentityPath = Annotated[str, PathPart(pattern=r"^[0-9a-f]{64}$", description="A client's public key.")]


async def attempt_in_path(
    run: RunPath,
    round_number: Annotated[
        int, PathPart(ge=0, lt=LONGEST_RUN, alias="round", description="Rounds count from 0.")
    ],
    attempt: Annotated[int, PathPart(ge=0, lt=LINKS_PER_ROUND, description="Attempts count from 0.")],
) -> Attempt:
    """The attempt that a path names. A coroutine, since FastAPI would run a plain function in a thread."""
    return Attempt(bytes.fromhex(run), round_number, attempt)


AttemptPath = Annotated[Attempt, Depends(attempt_in_path)]


class _Strict(BaseModel):
    """A body as it must be sent: no conversion ("3" is not 3), and no entry that is not described."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PrekeyBody(_Strict):
    """A one-time X25519 key, signed by its owner."""

    number: Annotated[int, Field(ge=0, le=LARGEST_UINT64)]
    public: HexKey
    signature: HexSignature


class Registration(_Strict):
    """The client itself is whoever signs the request."""

    prekeys: Annotated[list[PrekeyBody], Field(max_length=LARGEST_BATCH)]
    coalition: CoalitionName | None = None


class Deposit(_Strict):
    """Fresh prekeys of a client, passed on by the server."""

    prekeys: Annotated[list[PrekeyBody], Field(min_length=1, max_length=LARGEST_BATCH)]


class CoalitionChoice(_Strict):
    """The one coalition to belong to; null for none."""

    coalition: CoalitionName | None


class RunStart(_Strict):
    """How many rounds the chain is for."""

    rounds: Annotated[int, Field(ge=1, le=LONGEST_RUN)]


class SeatsWanted(_Strict):
    """Either `members`, or a `count` of live clients at random, of one coalition if it is named.

    With `absent`, members that are not live are seated too, as long as they have a one-time key.
    """

    members: Annotated[list[HexKey], Field(min_length=2, max_length=LARGEST_ROUND)] | None = None
    count: Annotated[int, Field(ge=2, le=LARGEST_ROUND)] | None = None
    coalition: CoalitionName | None = None
    at_least: Annotated[int, Field(ge=2, le=LARGEST_ROUND)] = 2
    absent: bool = False


class CommitmentBody(_Strict):
    """Hash of the participants, then hash of the terms; and how many neighbours each client has.

    Where noise is carried from round to round, the hash of the next round's participants follows, in every round of the
    run; in the last one, that of an empty list.
    """

    commitment: HexCommitment
    neighbours: Annotated[float, Field(gt=0, le=LARGEST_ROUND, allow_inf_nan=False)] | None = None


class ErrorDetail(BaseModel):
    """What was wrong, in which header, path part or entry of the body, and what to do; null where there is none."""

    message: str
    field: str | None
    hint: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is not 2xx."""

    error: ErrorDetail


class Health(BaseModel):
    status: str


class TrackerAnswer(BaseModel):
    """Who this tracker is, and what it expects of requests."""

    tracker: HexKey
    holder: HexKey
    server: HexKey
    version: str
    time: float
    tolerance_seconds: float
    ttl_seconds: float
    attempts: int


class StockAnswer(BaseModel):
    """One-time keys in stock, how many more are wanted, and what became of those sent."""

    held: int
    wanted: int
    accepted: int
    known: int
    stale: int
    ttl_seconds: float


class RunAnswer(BaseModel):
    """What the holder committed to; the signature is under the run's name, its rounds and the anchor."""

    rounds: int
    anchor: HexKey
    holder: HexKey
    signature: HexSignature
    highest_link: int


class BeaconAnswer(BaseModel):
    """A link of the run's chain; the holder's signature is under index, value and the commitment."""

    index: int
    value: HexKey
    signature: HexSignature


class SeatAnswer(BaseModel):
    """A participant, its place in the list, and the one-time key it uses up in this attempt."""

    seat: int
    identity: HexKey
    prekey: PrekeyBody


class _RoundAnswer(BaseModel):
    """What every answer about an attempt begins with; commitment and beacon are null until the link is let out."""

    size: int
    participants_hash: HexKey
    signature: HexSignature
    commitment: HexCommitment | None
    beacon: BeaconAnswer | None


class ParticipantsAnswer(_RoundAnswer):
    """Everyone in the attempt, in order; the tracker's signature is under run, link and hash of the list."""

    participants: list[SeatAnswer]


class NeighboursAnswer(_RoundAnswer):
    """Those with whom the asking client shares noise."""

    seat: int
    neighbours: list[SeatAnswer]


_DESCRIPTION = """Who is live, who sits in a round, and the beacon that fixes who shares noise with whom.

Requests under /v1/clients and below a run are signed: four headers, described in the guide to the tracker.
"""
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": why}
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


def make_app(tracker: Tracker, metrics: Metrics | None = None) -> App:
    """The whole ASGI application: the gate and the routes.

    tracker   what answers
    metrics   where requests are counted; one of its own by default

    The route functions check the signature first where there is one, then ask the tracker. What a route's docstring
    says is shown at /openapi.json. Functions without `async` run in threads, since the store may block.
    """
    metrics, settings = metrics or Metrics(), tracker.settings
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

    @app.get("/healthz", response_model=Health)
    def health() -> Response:
        """Whether the tracker can reach its store."""
        tracker.store.ping()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def show_metrics() -> Response:
        """Counts and latencies, for Prometheus."""
        text = metrics.text(tracker.gauges())
        return Response(text, headers={"content-type": CONTENT_TYPE})

    @app.get("/v1/tracker", response_model=TrackerAnswer)
    async def describe() -> Response:
        """Whose signatures to expect, and what a request must look like."""
        return JSONResponse(
            {
                "tracker": tracker.public.hex(),
                "holder": tracker.holder.public.hex(),
                "server": tracker.server.hex(),
                "version": __version__,
                "time": tracker.now(),
                "tolerance_seconds": tracker.settings.tolerance,
                "ttl_seconds": tracker.settings.ttl,
                "attempts": LINKS_PER_ROUND,
            }
        )


def _clients(app: FastAPI, tracker: Tracker) -> None:
    """What a client does for itself, and the one thing the server does for it (`deposit`).

    All of it changes something, so every request passes `Tracker.admit`: signed, once, not too often.
    """

    def answer(stock: Stock) -> Response:
        more = {"wanted": tracker.members.wanted(stock), "ttl_seconds": tracker.settings.ttl}
        return JSONResponse(asdict(stock) | more)

    @app.put("/v1/clients/me", response_model=StockAnswer, openapi_extra=_SIGNED)
    def register(request: Request, body: Registration) -> Response:
        """Become live, with a batch of one-time keys; again to add some. A key that was used never counts again."""
        caller = tracker.admit(_signed(tracker, request))
        return answer(tracker.members.register(caller, _prekeys(body.prekeys), body.coalition))

    @app.post("/v1/clients/me/heartbeat", response_model=StockAnswer, openapi_extra=_SIGNED)
    def heartbeat(request: Request) -> Response:
        """Stay live for another `ttl_seconds`; the answer says how many more one-time keys are wanted."""
        return answer(tracker.members.heartbeat(tracker.admit(_signed(tracker, request))))

    @app.delete("/v1/clients/me", status_code=204, openapi_extra=_SIGNED)
    def leave(request: Request) -> Response:
        """Be forgotten, with all one-time keys, and be seated no more; attempts that are seated stay as they are."""
        tracker.members.leave(tracker.admit(_signed(tracker, request)))
        return Response(status_code=204)

    @app.put("/v1/clients/me/coalition", status_code=204, openapi_extra=_SIGNED)
    def join(request: Request, body: CoalitionChoice) -> Response:
        """Belong to a coalition and no other, or to none."""
        tracker.members.join(tracker.admit(_signed(tracker, request)), body.coalition)
        return Response(status_code=204)

    @app.post("/v1/clients/{identity}/prekeys", response_model=StockAnswer, openapi_extra=_SIGNED)
    def deposit(request: Request, identity: IdentityPath, body: Deposit) -> Response:
        """The server passes on fresh prekeys of a registered client, each of which the client must have signed."""
        caller = tracker.admit(_signed(tracker, request))
        return answer(tracker.members.deposit(caller, bytes.fromhex(identity), _prekeys(body.prekeys)))


def _runs(app: FastAPI, tracker: Tracker) -> None:
    """What the server alone may do: start a run, seat an attempt, have its link let out.

    All of it may be repeated: asked in the same way, the tracker answers the same, also after a restart.
    """

    def answer(run: Run) -> Response:
        return JSONResponse(
            {
                "rounds": run.rounds,
                "anchor": run.anchor.hex(),
                "holder": tracker.holder.public.hex(),
                "signature": run.signature.hex(),
                "highest_link": run.highest,
            }
        )

    @app.put("/v1/runs/{run}", response_model=RunAnswer, openapi_extra=_SIGNED)
    def start_run(request: Request, run: RunPath, body: RunStart) -> Response:
        """The server starts a run: the holder commits to its chain, once. Asked again, the same anchor."""
        caller = tracker.admit(_signed(tracker, request))
        return answer(tracker.rounds.start_run(caller, bytes.fromhex(run), body.rounds))

    @app.get("/v1/runs/{run}", response_model=RunAnswer)
    def show_run(run: RunPath) -> Response:
        """What the holder committed to, and the highest link let out so far."""
        return answer(tracker.rounds.run(bytes.fromhex(run)))

    @app.put(_ATTEMPT + "/seats", response_model=ParticipantsAnswer, openapi_extra=_SIGNED)
    def seat(request: Request, attempt: AttemptPath, body: SeatsWanted) -> Response:
        """The server fixes who takes part, for good; one prekey of each is used up, or none if it is refused.

        Asked again in the same way, the same list.
        """
        caller = tracker.admit(_signed(tracker, request))
        members = None if body.members is None else tuple(bytes.fromhex(one) for one in body.members)
        wanted = SeatRequest(members, body.count or 0, body.coalition, body.at_least, body.absent)
        return _json_bytes(tracker.rounds.seat(caller, attempt, wanted).list_json)

    @app.put(_ATTEMPT + "/beacon", response_model=BeaconAnswer, openapi_extra=_SIGNED)
    def beacon(request: Request, attempt: AttemptPath, body: CommitmentBody) -> Response:
        """The server commits to list and terms, and gets the link of this attempt: once, for this commitment.

        The attempt must be seated, and the commitment be to that list. No link is let out below another. Where noise is
        carried over, the next round must be seated too, and be opened with that list alone.
        """
        caller = tracker.admit(_signed(tracker, request))
        wanted = Release(bytes.fromhex(body.commitment), body.neighbours)
        return JSONResponse(beacon_entries(tracker.rounds.beacon(caller, attempt, wanted)))


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
        if not view.has_seat(caller) and caller != also:
            raise Refused(
                403,
                "this identity does not sit in this attempt",
                field="niss-identity",
                hint="wait for a later round",
            )
        return view, caller

    @app.get(_ATTEMPT + "/participants", response_model=ParticipantsAnswer, openapi_extra=_SIGNED)
    async def participants(request: Request, attempt: AttemptPath) -> Response:
        """The whole list, for those who are on it and for the server."""
        view, _ = await view_for(request, attempt, also=tracker.server)
        return _json_bytes(view.list_json)

    @app.get(_ATTEMPT + "/neighbours", response_model=NeighboursAnswer, openapi_extra=_SIGNED)
    async def neighbours(request: Request, attempt: AttemptPath) -> Response:
        """The asking client's neighbours with their signed keys, once the beacon is out; for participants only."""
        view, caller = await view_for(request, attempt)
        return _json_bytes(view.neighbours_json(caller))


def _json_bytes(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _signed(tracker: Tracker, request: Request) -> Signed:
    """Who signed this request, over its bytes as they came; refused (401) as `check_request` says."""
    scope = request.scope
    query: bytes = scope["query_string"]
    target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
    signed = tracker.check(request.headers, method=scope["method"], target=target, body=scope[BODY])
    scope[CALLER] = signed.identity
    return signed


def _prekeys(bodies: list[PrekeyBody]) -> list[Prekey]:
    return [Prekey(one.number, bytes.fromhex(one.public), bytes.fromhex(one.signature)) for one in bodies]


def _explain_errors(app: FastAPI, trouble: tuple[type[Exception], ...]) -> None:
    """Answer every error in the one form of `Refused.body`, with a hint.

    `trouble` are the errors of the store when it is out of order: they become 503 with Retry-After, and the log says
    which error it was, since a client can do nothing with the details.
    """

    def show(refusal: Refused) -> Response:
        return JSONResponse(refusal.body(), refusal.status, headers=extra_headers(refusal))

    @app.exception_handler(Refused)
    async def refused(_request: Request, refusal: Refused) -> Response:
        return show(refusal)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"]]
        field = ".".join(place[1:]) or place[0]
        hint = "see /openapi.json for what this field may be"
        return show(Refused(422, str(first["msg"]), field=field, hint=hint))

    @app.exception_handler(HTTPException)
    async def other(_request: Request, error: HTTPException) -> Response:
        hint = "see /openapi.json for the paths and methods there are"
        answer = show(Refused(error.status_code, str(error.detail), hint=hint))
        answer.headers.update(error.headers or {})
        return answer

    async def out_of_order(_request: Request, error: Exception) -> Response:
        log("the store is out of order", level=logging.ERROR, kind=type(error).__name__, reason=str(error))
        return show(Refused(503, "the store does not answer", hint="try again", retry_after=1.0))

    for kind in trouble:
        app.add_exception_handler(kind, out_of_order)

    @app.exception_handler(Exception)
    async def defect(_request: Request, _error: Exception) -> Response:
        return show(Refused(500, "a defect of the tracker; its log says more", hint="please report it"))
