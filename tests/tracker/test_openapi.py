"""Whatever is sent to the API as it describes itself, or nearly so, is answered as it describes: never with 5xx.

Three senders: one that signs nothing, a registered client, and the server. The requests of the latter two are signed
on their way, so that what is made up reaches the code behind the signature check.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from niss.protocol.keys import Identity
from niss.tracker.app import make_app
from niss.tracker.auth import sign_request
from niss.tracker.options import TrackerSettings
from niss.tracker.service import Tracker
from tracker.harness import RUN, SERVER, START, Scene, member, members

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")
import hypothesis  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
CLIENT = member(0)


class SigningSender:
    """Signs every request for an identity before it reaches the application."""

    def __init__(self, app: ASGIApp, identity: Identity | None, tracker: bytes) -> None:
        self._app, self._identity, self._tracker = app, identity, tracker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._identity is None:
            await self._app(scope, receive, send)
            return
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body, query = b"".join(parts), scope["query_string"]
        # The test transport names the path in `path` alone; a real server gives the bytes as they came.
        target = scope.get("raw_path") or scope["path"].encode()
        scope["raw_path"] = target
        signed = sign_request(
            self._identity,
            tracker=self._tracker,
            method=scope["method"],
            target=(target + (b"?" + query if query else b"")).decode("latin-1"),
            body=body,
            time=int(START),
        )
        kept = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in signed]
        scope["headers"] = kept + [(name.encode(), value.encode()) for name, value in signed.items()]

        async def again() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)


def make_schema(tracker: Tracker, sender: str) -> Any:
    for one in members(5):
        tracker.register(one.public, one.batch(20), "clinics")
    tracker.rounds.start_run(SERVER.public, RUN, 20_000)
    signer = {"nobody": None, "a client": CLIENT.identity, "the server": SERVER.identity}[sender]
    app = SigningSender(make_app(tracker), signer, tracker.public)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)

    @schema.hook
    def map_path_parameters(_context: Any, path_parameters: Any) -> Any:
        # Half of all made-up runs become the one there is; otherwise next to nothing would get further than 404.
        if isinstance(path_parameters, dict) and zlib.crc32(str(path_parameters.get("run")).encode()) % 2:
            path_parameters["run"] = RUN.hex()
        return path_parameters

    return schema


@pytest.fixture(params=["nobody", "a client", "the server"])
def api(request: pytest.FixtureRequest, make_scene: Callable[..., Scene]) -> Any:
    made = make_scene(settings=TrackerSettings(address_rate=0, identity_rate=0))
    return make_schema(made.tracker, request.param)


def send_what_the_strategies_make(api: Any, examples: int, *, repeatable: bool) -> set[tuple[str, int]]:
    """Every operation, with data that fits its description and data that does not; what was answered where."""
    seen: set[tuple[str, int]] = set()
    for found in api.get_all_operations():
        operation = found.ok()
        for mode in schemathesis.GenerationMode:

            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            @hypothesis.settings(
                max_examples=examples,
                derandomize=repeatable,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            def send(case: Any) -> None:
                answer = case.call()
                seen.add((operation.label, answer.status_code))  # noqa: B023
                case.validate_response(answer, checks=CHECKS)

            with contextlib.suppress(Unsatisfiable):  # Some operations have nothing that could be wrong.
                send()
    return seen


def test_no_request_makes_the_tracker_fail(api: Any) -> None:
    seen = send_what_the_strategies_make(api, 2, repeatable=True)
    assert len({label for label, _ in seen}) == 14
    assert 422 in {status for _, status in seen}


@pytest.mark.slow
def test_no_request_of_very_many_makes_the_tracker_fail(api: Any) -> None:
    send_what_the_strategies_make(api, 100, repeatable=False)
