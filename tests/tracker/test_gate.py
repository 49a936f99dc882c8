"""What never reaches the application, and what is said when the application itself fails."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from niss.tracker.api import Counts
from niss.tracker.auth import Refused
from niss.tracker.gate import Gate, Metrics, log, start_logging


def ask(
    app: Any, receive: Receive, metrics: Metrics | None = None, **scope: Any
) -> tuple[int, Any, dict[str, str]]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    whole = {"type": "http", "method": "PUT", "path": "/x", "headers": [], "client": ("127.0.0.1", 1)} | scope
    gate = Gate(app, metrics=metrics or Metrics(), address_rate=0, body_bytes=10)
    asyncio.run(gate(whole, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], json.loads(sent[1]["body"]), headers


def chunks(*parts: bytes) -> Receive:
    left = list(parts)

    async def receive() -> Any:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return receive


async def forever() -> Any:
    await asyncio.sleep(3600)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(body.decode()).encode()})
    del scope


def logged(capsys: pytest.CaptureFixture[str], work: Callable[[], object]) -> Any:
    """The one line that a tracker logs while it does this."""
    start_logging("info")
    try:
        work()
        return json.loads(capsys.readouterr().err)
    finally:
        for name in ("niss.tracker", "uvicorn"):
            logging.getLogger(name).handlers = []


def test_a_body_is_handed_on_whole() -> None:
    assert ask(echo, chunks(b"12345", b"67890"))[:2] == (200, "1234567890")


def test_a_body_that_is_too_large_is_cut_off_wherever_that_shows() -> None:
    for receive, headers in ((chunks(b"123456", b"78901"), []), (forever, [(b"content-length", b"11")])):
        status, body, extra = ask(echo, receive, headers=headers)
        assert (status, body["error"]["field"], extra["connection"]) == (413, "body", "close")


def test_a_sender_that_stalls_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niss.tracker.gate._BODY_SECONDS", 0.01)
    status, body, _ = ask(echo, forever)
    assert (status, body["error"]["hint"]) == (408, "send it again")


def test_invented_methods_do_not_become_labels() -> None:
    metrics = Metrics()
    for method in ("PUT", "BREW", "WHEN"):
        ask(echo, chunks(b""), metrics, method=method)
    text = metrics.text(Counts(1, 2, 3, 4))
    assert 'method="other",route="unmatched",status="200"} 2' in text
    assert "BREW" not in text
    assert text.count("# TYPE") == 6


def test_a_refusal_says_when_to_come_back() -> None:
    async def busy(*_: Any) -> None:
        raise Refused(429, None, "too often", None, retry_after=0.3)

    status, body, headers = ask(busy, chunks(b""))
    assert (status, headers["retry-after"]) == (429, "1")
    assert body == {"error": {"message": "too often", "field": None, "hint": None}}


def test_a_defect_is_logged_with_its_place_and_without_values(capsys: pytest.CaptureFixture[str]) -> None:
    async def broken(_scope: Scope, _receive: Receive, send: Send) -> None:
        secret = "hush" * 2
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        raise ValueError(len(secret))

    entry = logged(capsys, lambda: ask(broken, chunks(b"")))
    assert (entry["event"], entry["level"], entry["status"]) == ("defect", "error", 500)
    assert any("broken" in line for line in entry["traceback"])
    assert "hushhush" not in json.dumps(entry)


def test_what_an_exception_says_is_logged_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    key, address = bytes(range(100, 132)), "redis://user:word@store:6379/0"

    def fail() -> None:
        try:
            raise ValueError(f"bad key {key.hex()} of {key!r}")
        except ValueError as error:
            log("defect", error=error, reason=f"cannot reach {address}", milliseconds=1.5)

    entry = logged(capsys, fail)
    assert entry["traceback"][-1] == "ValueError: bad key [redacted] of [redacted]"
    assert any("test_gate.py" in line for line in entry["traceback"])
    assert entry["reason"] == "cannot reach redis://[redacted]@store:6379/0"
    assert entry["milliseconds"] == 1.5
