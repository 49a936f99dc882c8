"""What stands between the pages and everyone else: who may ask, and what a browser may do with the answer.

A page on another site can make a browser send requests to this machine. It cannot read the answers, unless its
name is made to point here (DNS rebinding): then the Host header gives it away, and the request is refused.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Message, Receive, Send], Awaitable[None]]

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Lets reading requests for a known host through to `app`, and puts the protecting headers on every answer.

    On the loopback address only its own names are known. Elsewhere any bare address is (it cannot be rebound), and
    the name of the machine.
    """

    def __init__(self, app: Asgi, *, host: str = "127.0.0.1") -> None:
        self._app = app
        self._loopback = is_loopback(host)
        self._names = (
            {"localhost"} if self._loopback else {"localhost", host.lower(), socket.gethostname().lower()}
        )

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                headers = {**_HEADERS, "content-security-policy": PAGE_POLICY}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in headers.items()
                        if name.encode() not in given
                    ),
                ]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await _answer(protected, *refusal)
            return
        await self._app(scope, receive, protected)

    def _refusal(self, scope: Message) -> tuple[int, str, str] | None:
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        if not self._knows(headers.get("host", "")):
            return 421, "this host name is not served here", "open the address that `niss ui` printed"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "nothing can be changed here", "use GET"
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"].startswith("/api/"):
            return 403, "asked for by a page of another site", "open the address that `niss ui` printed"
        return None

    def _knows(self, header: str) -> bool:
        name = _without_port(header).lower().rstrip(".")
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return address.is_loopback or not self._loopback


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


async def _answer(send: Send, status: int, message: str, hint: str) -> None:
    body = json.dumps({"message": message, "hint": hint}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
