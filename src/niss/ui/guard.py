"""What stands between the pages and everyone else: who may ask, and what a browser may do with the answer.

A page on another site can make a browser send requests to this machine. It cannot read the answers, unless its
name is made to point here (DNS rebinding): then the Host header gives it away, and the request is refused.

What changes anything (`CHANGING`: jobs) takes more. It is let through only on the loopback address, from a page of this
very server (`Origin`, and `Sec-Fetch-Site` where the browser sends it), as JSON, which no form of another site can send
unasked, and with the token that only these pages carry.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

# The three parts of ASGI, the interface between a Python web application and its server.
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Message, Receive, Send], Awaitable[None]]

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


CHANGING = "/api/jobs"
TOKEN_HEADER = "x-niss-token"


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

    token  what a request that changes something must carry; the pages are given it

    Refused are, with a message and a hint as JSON: other hosts (421), anything but GET and HEAD (405) except to start,
    cancel or resume a job, and (403) what a page of another site asks of the interface behind the pages, which could
    keep this machine computing.
    """

    def __init__(self, app: Asgi, *, host: str = "127.0.0.1", token: str) -> None:
        self._app = app
        self._token = token
        self._loopback = is_loopback(host)
        self._names = {"localhost"}
        if not self._loopback:
            self._names |= {host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
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

    def _refusal(self, scope: Message) -> JSONResponse | None:
        """The answer to what is refused; None for what is let through."""
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        again = "open the address that `niss ui` printed"
        if not self._knows(headers.get("host", "")):
            return _refused(421, "this server does not answer to that host name", again)
        if scope["method"] == "POST" and scope["path"].startswith(CHANGING):
            return self._refused_change(headers)
        if scope["method"] not in ("GET", "HEAD"):
            return _refused(405, "this server only answers reading requests", "use GET")
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"].startswith("/api/"):
            return _refused(403, "the request comes from a page of another site", again)
        return None

    def _refused_change(self, headers: dict[str, str]) -> JSONResponse | None:
        """The answer to a job that is not asked for by a page of this server, on this machine; None: let it through."""
        if not self._loopback:
            return _refused(
                403,
                "jobs are only started from the machine itself",
                "run `niss ui` without --host, or use `niss run`",
            )
        ours = headers.get("origin") == f"http://{headers.get('host', '')}"
        if not ours or headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return _refused(403, "the request comes from another site", "use the page that `niss ui` opened")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _refused(415, "expected JSON", "use the page that `niss ui` opened")
        if not secrets.compare_digest(headers.get(TOKEN_HEADER, "").encode(), self._token.encode()):
            return _refused(403, "the page is from an earlier start of the server", "reload the page")
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


def _refused(status: int, message: str, hint: str) -> JSONResponse:
    return JSONResponse({"message": message, "hint": hint}, status)
