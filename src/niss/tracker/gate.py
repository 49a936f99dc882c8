"""What every request passes before the framework: limits of rate and size, counting and logging.

Counters are for Prometheus and name no client; the log is one JSON object a line on stderr. It says what happened,
never a key, a signature, a nonce or a link.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from niss.protocol.keys import fingerprint
from niss.redaction import redact, safe_traceback
from niss.tracker.api import Counts
from niss.tracker.auth import Buckets, Refused

BODY = "niss.body"
"""Where the body of a request lies in its scope, whole."""
CALLER = "niss.caller"
"""Where the identity that signed it lies, for the log."""
_BODY_SECONDS = 15.0
_UNLIMITED = ("/healthz", "/metrics")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Gate:
    """ASGI middleware around the whole application: rate, size, count and log of every request.

    metrics        where answers are counted, by route
    address_rate   requests a second from one address, on average; 0 for any number
    body_bytes     the largest body that is read

    The body is read here, whole, and put into the scope: signatures are over its bytes, not over what a parser made of
    them. Refused here: an address that asks too often (429), a body that is too large (413) or does not arrive within
    15 seconds (408). A defect of the application is logged and goes no further.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, address_rate: float, body_bytes: int) -> None:
        self._app, self._metrics, self._body_bytes = app, metrics, body_bytes
        self._buckets = Buckets(address_rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def watched(message: Message) -> None:
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
        except Refused as refusal:
            await shown(refusal)(scope, receive, watched)
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
        if client is not None and scope["path"] not in _UNLIMITED:
            self._buckets.check(client[0], time.monotonic(), "requests from this address")

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
            raise Refused(408, None, "the body did not arrive in time", "send it again") from None
        return b"".join(parts)

    def _too_large(self) -> Refused:
        large = f"larger than {self._body_bytes} bytes"
        return Refused(413, "body", large, "send fewer prekeys or members at once")

    def _log(
        self, scope: Scope, route: str, status: int, seconds: float, failure: BaseException | None
    ) -> None:
        """One line an answer: reading at debug level, changes at info, defects with a redacted traceback."""
        if failure is not None:
            level = logging.ERROR
        else:
            level = logging.DEBUG if status < 400 and scope["method"] == "GET" else logging.INFO
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


def shown(refusal: Refused) -> JSONResponse:
    """A refusal as it stands in the API; its headers say when to come back, how to authenticate, not to go on."""
    headers = {}
    if refusal.retry_after is not None:
        headers["retry-after"] = str(math.ceil(refusal.retry_after))
    if refusal.status == 401:
        headers["www-authenticate"] = "niss-signature"
    if refusal.status in (408, 413):
        # The rest of the body is still on its way; it is not to be taken for the next request.
        headers["connection"] = "close"
    error = {"message": refusal.message, "field": refusal.field, "hint": refusal.hint}
    return JSONResponse({"error": error}, refusal.status, headers=headers)


def _method(scope: Scope) -> str:
    # Anyone may invent methods; they must not become labels.
    method: str = scope["method"]
    return method if method in ("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH") else "other"


def _once(body: bytes, receive: Receive) -> Receive:
    """The body as one message, and after it whatever really comes: the end of the connection."""
    delivered = False

    async def replay() -> Message:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class Metrics:
    """What this process counted since it started: requests by route and status, and histograms of seconds by route.

    Of several processes on one store, each counts its own requests, while the gauges (clients, prekeys, runs) come
    from the store and are the same in all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: dict[str, tuple[list[int], float]] = {}

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answer; `route` is the pattern of the path, never the path itself, so that labels stay few."""
        with self._lock:
            self._requests[method, route, status] += 1
            numbers, total = self._seconds.get(route, ([0] * (len(_BOUNDS) + 1), 0.0))
            numbers[bisect_left(_BOUNDS, seconds)] += 1
            self._seconds[route] = numbers, total + seconds

    def text(self, counts: Counts) -> str:
        """Everything in the text format of Prometheus, version 0.0.4; `counts` are the gauges, from the store.

        Labels are patterns of this application and methods that it knows: nothing in them needs to be escaped.
        """
        lines = _head("requests_total", "counter", "Requests answered.")
        with self._lock:
            for (method, route, status), count in sorted(self._requests.items()):
                labels = f'method="{method}",route="{route}",status="{status}"'
                lines.append(f"niss_tracker_requests_total{{{labels}}} {count}")
            lines += _head("request_seconds", "histogram", "Time to answer.")
            for route, (numbers, total) in sorted(self._seconds.items()):
                name, label = "niss_tracker_request_seconds", f'route="{route}"'
                below = zip((*map(str, _BOUNDS), "+Inf"), itertools.accumulate(numbers), strict=True)
                lines += [f'{name}_bucket{{{label},le="{bound}"}} {number}' for bound, number in below]
                lines.append(f"{name}_sum{{{label}}} {total:.6f}")
                lines.append(f"{name}_count{{{label}}} {sum(numbers)}")
        for gauge, meaning, value in (
            ("clients_registered", "Clients registered, live or not.", counts.registered),
            ("clients_live", "Clients that can be seated.", counts.live),
            ("prekeys", "One-time keys in stock.", counts.prekeys),
            ("runs", "Runs begun.", counts.runs),
        ):
            lines += [*_head(gauge, "gauge", meaning), f"niss_tracker_{gauge} {value}"]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, meaning: str) -> list[str]:
    """The lines before the samples of a metric."""
    return [f"# HELP niss_tracker_{name} {meaning}", f"# TYPE niss_tracker_{name} {kind}"]


_LOGGER = "niss.tracker"


class _JsonLines(logging.Formatter):
    """A log record as one JSON object; facts and messages pass `redact`, tracebacks show no values of variables."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "event": redact(record.getMessage()),
        }
        # A reason is what some library said, of an address with its password for example.
        for name, fact in getattr(record, "facts", {}).items():
            entry[name] = redact(fact) if isinstance(fact, str) else fact
        if record.exc_info is not None and record.exc_info[1] is not None:
            # What an exception says could hold a secret.
            entry["traceback"] = safe_traceback(record.exc_info[1]).splitlines()
        return json.dumps(entry, default=str)


def start_logging(level: str) -> None:
    """Send the tracker's log and uvicorn's own to stderr, from that level on ("debug", "info", ...)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    for name in (_LOGGER, "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())


def log(
    event: str, *, level: int = logging.INFO, error: BaseException | None = None, **facts: object
) -> None:
    """Log an event with its facts.

    event   what happened, always in the same words, so that it can be searched for
    error   its traceback is logged, without the values of variables
    facts   entries of the JSON object; strings pass `redact`
    """
    logging.getLogger(_LOGGER).log(level, event, extra={"facts": facts}, exc_info=error)
