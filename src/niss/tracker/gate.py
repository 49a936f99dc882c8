"""What every request passes before the framework: limits of rate and size, counting, logging, and a fast path.

Routing and validation cost as much as the signature check. A plain request for neighbours in a round that is in
memory, the one question every client asks in every round, is answered by `HotPath`; everything else, and every doubt,
is passed on to the application, which checks it all.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

from niss.protocol.keys import fingerprint
from niss.tracker.auth import Refusal
from niss.tracker.limits import Buckets
from niss.tracker.observability import Metrics, log
from niss.tracker.service import Tracker
from niss.tracker.store import Attempt

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY = "niss.body"
"""Where the body of a request lies in its scope, whole."""
CALLER = "niss.caller"
"""Where the identity that signed it lies, for the log."""
_BODY_SECONDS = 15.0
_UNLIMITED = ("/healthz", "/metrics")


class Gate:
    """ASGI middleware around the whole application: rate, size, count and log of every request.

    metrics        where answers are counted, by route
    address_rate   requests a second from one address, on average; 0 for any number
    body_bytes     the largest body that is read

    The body is read here, whole, and put into the scope: signatures are over its bytes, not over what a parser made of
    them. Refused here: an address that asks too often (429), a body that is too large (413) or does not arrive within
    15 seconds (408). A defect of the application is logged and goes no further.
    """

    def __init__(self, app: App, *, metrics: Metrics, address_rate: float, body_bytes: int) -> None:
        self._app, self._metrics, self._body_bytes = app, metrics, body_bytes
        self._buckets = Buckets(address_rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        failure: BaseException | None = None
        try:
            self._check_rate(scope)
            body = await self._body(scope, receive)
            scope[BODY] = body
            await self._app(scope, _once(body, receive), watched)
        except Refusal as refusal:
            await answer(refusal, watched)
        except Exception as error:
            # Answered with 500 by the application before it raised.
            failure = error
        seconds = time.perf_counter() - began
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.answered(_method(scope), route, status, seconds)
        self._log(scope, route, status, seconds, failure)

    def _check_rate(self, scope: Scope) -> None:
        """Refuse an address that asks too often; health and metrics are exempt, so that monitoring keeps working."""
        client = scope.get("client")
        if client is None or scope["path"] in _UNLIMITED:
            return
        wait = self._buckets.take(client[0], time.monotonic())
        if wait:
            raise Refusal(
                429, "too many requests from this address", hint=f"wait {wait:.1f} s", retry_after=wait
            )

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body; nothing beyond the limit is read (413), and a sender that stalls is not waited for (408)."""
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._body_bytes:
            raise self._too_large()
        if scope["method"] in ("GET", "HEAD") and announced == b"0":
            return b""
        parts, size = [], 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                more = True
                while more:
                    message = await receive()
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._body_bytes:
                        raise self._too_large()
                    more = message.get("more_body", False)
        except TimeoutError:
            raise Refusal(408, "the body did not arrive in time", hint="send it again") from None
        return b"".join(parts)

    def _too_large(self) -> Refusal:
        return Refusal(
            413,
            f"larger than {self._body_bytes} bytes",
            field="body",
            hint="send fewer prekeys or members at once",
        )

    def _log(
        self, scope: Scope, route: str, status: int, seconds: float, failure: BaseException | None
    ) -> None:
        """One line an answer: reading at debug level, changes at info, defects with a redacted traceback."""
        if failure is not None:
            level = logging.ERROR
        else:
            level = logging.DEBUG if status < 400 and scope["method"] == "GET" else logging.INFO
        if not logging.getLogger("niss.tracker").isEnabledFor(level):
            return
        caller = scope.get(CALLER)
        log(
            "request" if failure is None else "defect",
            level=level,
            error=failure,
            method=_method(scope),
            route=route,
            status=status,
            milliseconds=round(1000 * seconds, 2),
            caller=None if caller is None else fingerprint(caller),
        )


async def answer(refusal: Refusal, send: Send) -> None:
    """Send a refusal as it stands in the API."""
    body = json.dumps(refusal.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in extra_headers(refusal).items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def extra_headers(refusal: Refusal) -> dict[str, str]:
    """The headers that a refusal needs beside its body: when to come back, how to authenticate, not to go on."""
    headers = {}
    if refusal.retry_after is not None:
        headers["retry-after"] = str(math.ceil(refusal.retry_after))
    if refusal.status == 401:
        headers["www-authenticate"] = "niss-signature"
    if refusal.status in (408, 413):
        # The rest of the body is still on its way; it is not to be taken for the next request.
        headers["connection"] = "close"
    return headers


def _method(scope: Scope) -> str:
    # Anyone may invent methods; they must not become labels.
    method: str = scope["method"]
    return method if method in ("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH") else "other"


def _once(body: bytes, receive: Receive) -> Receive:
    """The body as one message, and after it whatever really comes: the end of the connection."""
    delivered = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


NEIGHBOURS_ROUTE = "/v1/runs/{run}/rounds/{round}/attempts/{attempt}/neighbours"
_PATH = re.compile(rb"/v1/runs/((?:[0-9a-f]{2}){1,64})/rounds/([0-9]{1,5})/attempts/([0-9])/neighbours")
_ROUTE = SimpleNamespace(path=NEIGHBOURS_ROUTE)


class HotPath:
    """ASGI middleware right before the application, for the request every client makes in every round.

    It answers only a plain, signed, well-formed GET of neighbours from someone who has a seat, in a round whose view
    is in memory. It refuses nothing itself: the application answers everything else, so the two cannot disagree about
    what is allowed. No store is asked and no thread is used; nearly all of the time is the signature check.
    """

    def __init__(self, app: App, tracker: Tracker) -> None:
        self._app, self._tracker = app, tracker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._answer(scope)
        if body is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = _ROUTE
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _answer(self, scope: Scope) -> bytes | None:
        """The body of the answer, or None where the application has to decide."""
        if scope["type"] != "http" or scope["method"] != "GET" or scope["query_string"]:
            return None
        parts = _PATH.fullmatch(scope["raw_path"])
        if parts is None:
            return None
        attempt = Attempt(bytes.fromhex(parts[1].decode()), int(parts[2]), int(parts[3]))
        view = self._tracker.rounds.final_view(attempt)
        if view is None:
            return None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            signed = self._tracker.check(headers, method="GET", target=scope["raw_path"], body=b"")
            if not view.has_seat(signed.identity):
                return None
            scope[CALLER] = signed.identity
            return view.neighbours_json(signed.identity)
        except Refusal:
            return None
