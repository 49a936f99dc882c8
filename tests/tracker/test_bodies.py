"""Bodies that no description covers: broken, deep, huge, of other types. Refused with the field and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from niss.protocol.keys import Identity
from niss.tracker.app import make_app
from niss.tracker.auth import TrackerSettings
from niss.tracker.gate import App
from niss.tracker.service import Tracker
from niss.tracker.store_sqlite import SqliteStore
from support.protocol_round import seeded_entropy
from tracker.harness import ask_app, member

SERVER = member(0, "server")
TRACKER = Identity.generate(seeded_entropy("tracker"))


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    store = SqliteStore(tmp_path / "store.db", durable=False)
    yield make_app(Tracker(store, TRACKER, server=SERVER.public, settings=TrackerSettings(address_rate=0)))
    store.close()


def put(app: App, path: str, body: bytes, **changes: Any) -> tuple[int, Any]:
    return ask_app(app, "PUT", path, body=body, by=SERVER, tracker=TRACKER.public, **changes)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"rounds": 3}', 200),
        (b"", 422),
        (b"{", 422),
        (b'{"rounds\xff": 3}', None),
        (b"[" * 500_000, None),
        (b'{"rounds":' * 50_000 + b"1" + b"}" * 50_000, None),
        (b'{"rounds": ' + b"9" * 5000 + b"}", None),
        (b'{"rounds": 1e999}', 422),
        (b'{"rounds": NaN}', 422),
        (b'{"rounds": "3"}', 422),
        (b'{"rounds": true}', 422),
        (b'{"rounds": 3.5}', 422),
        (b'{"rounds": -1}', 422),
        (b'{"rounds": 25001}', 422),
        (b'{"rounds": 3, "more": 1}', 422),
        (b'{"rounds": 3, "\\ud800": 1}', 422),
        (b"null", 422),
        (b"[]", 422),
        (b'"\\ud800"', 422),
    ],
)
def test_a_run_is_started_by_a_number_of_rounds_and_nothing_else(
    app: App, body: bytes, status: int | None
) -> None:
    """None: no JSON that can be read, which FastAPI calls one or the other, depending on its version."""
    answered, shown = put(app, "/v1/runs/ab", body)
    assert answered in ((400, 422) if status is None else (status,))
    if status != 200:
        assert shown["error"]["message"]
        assert shown["error"]["hint"]
    if status == 422:
        assert shown["error"]["field"]


@pytest.mark.parametrize("neighbours", [b"NaN", b"Infinity", b"-1", b"0", b"1e5", b'"2"', b"[]"])
def test_a_degree_is_a_number_above_zero(app: App, neighbours: bytes) -> None:
    put(app, "/v1/runs/ab", b'{"rounds": 3}')
    body = b'{"commitment": "%s", "neighbours": %s}' % (b"0" * 128, neighbours)
    status, shown = put(app, "/v1/runs/ab/rounds/0/attempts/0/beacon", body)
    assert (status, shown["error"]["field"]) == (422, "neighbours")


def test_a_body_of_another_type_is_no_json(app: App) -> None:
    assert put(app, "/v1/runs/ab", b'{"rounds": 3}', kind=b"text/plain")[0] == 422


@pytest.mark.parametrize(
    "path",
    [
        "/v1/runs/",
        "/v1/runs/%00",
        "/v1/runs/AB",
        "/v1/runs/abc",
        "/v1/runs/" + "ab" * 65,
        "/v1//runs/ab",
        "/..",
    ],
)
def test_odd_paths_lead_nowhere(app: App, path: str) -> None:
    status, shown = put(app, path, b'{"rounds": 3}')
    assert status in (404, 405, 422)
    assert shown["error"]["hint"]
