"""Requests of anyone's making against the tracker's HTTP API: each is answered below 500, and the store stays usable.

An input is a request of the API, whole at first, in which path, query, method, headers, JSON or bytes are then changed;
most are signed, before or after that, by a client, the server or a stranger. Findings: an exception, an answer of 500
or above, an answer that is not what the API promises, and a tracker that a client cannot register with afterwards.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp

from fuzz.driver import Feed, Target
from niss.protocol.keys import Identity
from niss.tracker.app import make_app
from niss.tracker.auth import sign_request
from niss.tracker.databases import SqliteStore
from niss.tracker.options import TrackerSettings
from niss.tracker.service import Tracker
from tracker.harness import Member, member, members

RUNS = ("ab", "cd" * 16, "ef" * 64)
NASTY_PARTS = [
    "",
    ".",
    "..",
    "%00",
    "%2e%2e",
    "AB",
    "a",
    "me",
    "0",
    "-1",
    "1e3",
    "99999",
    "9" * 400,
    "%ff",
    "*",
    "~" * 3000,
]
NASTY_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 2.5, 1e308, 2**31, 2**63, 2**64, 10**400, math.nan, math.inf, "", "3", "\x00",
    "\ud800", "é" * 100, "x" * 70, "ab" * 32, "AB" * 32, "0" * 128, [], {}, [[]], {"": None}, ["ab" * 32] * 3,
]  # fmt: skip
HEADERS = [
    "niss-identity",
    "niss-time",
    "niss-nonce",
    "niss-signature",
    "content-type",
    "content-length",
    "host",
]
METHODS = ["GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "NISS", ""]


@dataclass(frozen=True)
class Call:
    """One request, before it is signed."""

    method: str
    target: str
    values: Any = None
    who: Identity | None = None
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def sent(self) -> bytes:
        if self.body is not None:
            return self.body
        return b"" if self.values is None else json.dumps(self.values).encode()


class World:
    """A tracker with a few clients, two of which belong to a coalition, and what is said to it."""

    def __init__(self, app: ASGIApp, tracker: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self._app, self._tracker, self._loop = app, tracker, loop
        self.server = member(0, "server")
        self.clients = members(5)
        self.stranger = member(9, "stranger")
        self.nonces = random.Random("nonces")

    def send(self, call: Call, *, signed_as: Call | None = None) -> tuple[int, dict[str, str], bytes]:
        """The status, the headers and the body of the answer to a request, signed as itself or as another one."""
        body, other = call.sent(), signed_as or call
        headers = {"content-type": "application/json", **call.headers}
        if call.who is not None:
            headers = {
                **sign_request(
                    call.who,
                    tracker=self._tracker,
                    method=other.method,
                    target=other.target,
                    body=other.sent(),
                    time=int(time.time()),
                    nonce=self.nonces.randbytes(16),
                ),
                **headers,
            }
        path, _, query = call.target.partition("?")
        scope = {
            "type": "http", "method": call.method, "path": unquote(path), "raw_path": path.encode(),
            "query_string": query.encode(), "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "scheme": "http",
            "http_version": "1.1", "root_path": "",
            "headers": [(name.encode(), value.encode("utf-8", "replace")) for name, value in headers.items()],
        }  # fmt: skip
        answered: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            answered.append(message)

        self._loop.run_until_complete(self._app(scope, receive, send))
        if [one["type"] for one in answered].count("http.response.start") != 1:
            raise AssertionError("not one answer")
        shown = {name.decode("latin-1"): value.decode("latin-1") for name, value in answered[0]["headers"]}
        return answered[0]["status"], shown, b"".join(one.get("body", b"") for one in answered[1:])

    def call(self, rng: random.Random) -> Call:
        """A request as it should be."""
        client, run = rng.choice(self.clients), rng.choice(RUNS)
        attempt = f"/v1/runs/{run}/rounds/{rng.randrange(3)}/attempts/{rng.randrange(3)}"
        keys = {"prekeys": prekeys(client, rng.choice([1, 2, 3]))}
        server, own = self.server.identity, client.identity
        return rng.choice(
            [
                Call("GET", rng.choice(["/healthz", "/metrics", "/v1/tracker", "/openapi.json"])),
                Call("PUT", "/v1/clients/me", keys | {"coalition": rng.choice([None, "north"])}, own),
                Call("POST", "/v1/clients/me/heartbeat", None, own),
                Call("PUT", "/v1/clients/me/coalition", {"coalition": rng.choice([None, "north"])}, own),
                Call("DELETE", "/v1/clients/me", None, own),
                Call("POST", f"/v1/clients/{client.public.hex()}/prekeys", keys, server),
                Call("PUT", f"/v1/runs/{run}", {"rounds": rng.choice([2, 3, 3, 3])}, server),
                Call("GET", f"/v1/runs/{run}"),
                Call("PUT", f"{attempt}/seats", self.seats(rng), server),
                Call(
                    "PUT",
                    f"{attempt}/beacon",
                    {"commitment": rng.randbytes(64).hex(), "neighbours": 2.0},
                    server,
                ),
                Call("GET", f"{attempt}/participants", None, rng.choice([own, server])),
                Call("GET", f"{attempt}/neighbours", None, own),
            ]
        )

    def seats(self, rng: random.Random) -> dict[str, Any]:
        """How seats are asked for."""
        chosen = [one.public.hex() for one in rng.sample(self.clients, rng.choice([2, 3]))]
        return rng.choice(
            [{"members": chosen}, {"count": 2}, {"count": 3, "coalition": "north", "at_least": 2}]
        )


def prekeys(client: Member, count: int) -> list[dict[str, Any]]:
    return [
        {"number": one.number, "public": one.public.hex(), "signature": one.signature.hex()}
        for one in client.batch(count)
    ]


def change_values(rng: random.Random, values: Any) -> Any:
    """One entry, somewhere inside, replaced, left out or added."""
    if isinstance(values, dict) and values and rng.random() < 0.9:
        name = rng.choice(sorted(values))
        action = rng.random()
        if action < 0.1:
            return {key: value for key, value in values.items() if key != name}
        if action < 0.2:
            return {**values, rng.choice(["more", "", "\ud800", "rounds"]): rng.choice(NASTY_VALUES)}
        return {**values, name: change_values(rng, values[name])}
    if isinstance(values, list) and values and rng.random() < 0.7:
        place = rng.randrange(len(values))
        return rng.choice(
            [
                values * 100,
                values[:place],
                [*values[:place], change_values(rng, values[place]), *values[place + 1 :]],
            ]
        )
    return rng.choice(NASTY_VALUES)


def change(rng: random.Random, call: Call) -> Call:
    """The request with one part of it changed."""
    kind = rng.randrange(7)
    if kind == 0:
        parts = call.target.split("/")
        parts[rng.randrange(1, len(parts))] = rng.choice([*NASTY_PARTS, *RUNS])
        return replace(call, target="/".join(parts))
    if kind == 1:
        return replace(
            call, target=call.target + rng.choice(["?", "?a=1", "?" + "x" * 9000, "/", "//", "?%ff=%00"])
        )
    if kind == 2:
        return replace(call, method=rng.choice(METHODS))
    if kind == 3:
        raw = call.sent()
        cut = raw[: rng.randrange(len(raw) + 1)]
        nested = rng.choice([b"[", b'{"prekeys":']) * rng.choice([10, 3_000, 100_000])
        return replace(
            call, body=rng.choice([cut, raw + b"x", nested, b"\xff\xfe" + raw, b"\0" * 40, b"null", b'"x"'])
        )
    if kind == 4:
        name = rng.choice(HEADERS)
        value = rng.choice(
            ["", "0", "-1", "9" * 30, "a" * 64, "0" * 128, "²", "text/plain", "é", "\x00", "1" * 32]
        )
        return replace(call, headers={**call.headers, name: value})
    return replace(call, values=change_values(rng, call.values))


def judged(call: Call, status: int, headers: dict[str, str], body: bytes) -> str:
    """What is wrong with an answer; empty where nothing."""
    if not 200 <= status < 500:
        return f"status {status}"
    if call.method == "HEAD" or status == 204 or call.target.startswith("/metrics"):
        return ""
    if not headers.get("content-type", "").startswith("application/json"):
        return "no JSON"
    shown = json.loads(body)
    if status >= 400 and not (
        shown["error"]["message"] and set(shown["error"]) == {"message", "field", "hint"}
    ):
        return "no reason"
    return ""


@contextmanager
def start(label: str) -> Iterator[Feed]:
    """A tracker on a store of its own, in this process."""
    logger, loop = logging.getLogger("niss.tracker"), asyncio.new_event_loop()
    disabled, logger.disabled = logger.disabled, True
    identity = Identity.generate(random.Random(f"tracker {label}").randbytes)
    settings = TrackerSettings(address_rate=0, identity_rate=0)
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "store.db", durable=False)
        app = make_app(Tracker(store, identity, server=member(0, "server").public, settings=settings))
        world, fed = World(app, identity.public, loop), 0

        def one_input(rng: random.Random) -> tuple[str, str]:
            nonlocal fed
            fed += 1
            if fed % 50 == 0:
                one = rng.choice(world.clients)
                check = Call("PUT", "/v1/clients/me", {"prekeys": prekeys(one, 1)}, one.identity)
                status, _, body = world.send(check)
                return (
                    f"still usable, {status}",
                    "" if status == 200 else f"registering: {status} {body[:300]!r}",
                )
            call = original = world.call(rng)
            for _ in range(rng.choice([0, 1, 1, 1, 2])):
                call = change(rng, call)
            if rng.random() < 0.05:
                call = replace(call, who=rng.choice([None, world.stranger.identity, world.server.identity]))
            status, headers, body = world.send(call, signed_as=original if rng.random() < 0.1 else None)
            wrong = judged(call, status, headers, body)
            return f"answered {status}", f"{wrong}: {call!r} {body[:300]!r}" if wrong else ""

        try:
            yield one_input
        finally:
            store.close()
            loop.close()
            logger.disabled = disabled


TARGET = Target("tracker", 1_000, start)
