"""The short way to one's neighbours answers exactly what the long way answers, and only what it may."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from niss.protocol.keys import Identity
from niss.tracker.app import make_app
from niss.tracker.auth import sign_request
from niss.tracker.gate import HotPath
from niss.tracker.limits import Settings
from niss.tracker.rounds import RoundCache, RoundView, Seats
from niss.tracker.service import Tracker
from niss.tracker.store import Attempt, Release, SeatRequest, pack_participants
from niss.tracker.store_sqlite import SqliteStore
from support.protocol_round import seeded_entropy
from tracker.harness import Member, member, members

SERVER = member(0, "server")
RUN = b"run"
NOW = 1_800_000_000.0
MANY = members(6)


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[Tracker]:
    """Round 0 is open; round 1 is seated without a beacon; round 2 was let out without a degree."""
    store = SqliteStore(tmp_path / "store.db", durable=False)
    made = Tracker(
        store,
        Identity.generate(seeded_entropy("tracker")),
        server=SERVER.public,
        settings=Settings(address_rate=0),
        clock=lambda: NOW,
    )
    many = members(6)
    for one in many:
        made.members.register(one.public, one.batch(3), None)
    made.rounds.start_run(SERVER.public, RUN, 5)
    named = tuple(one.public for one in many[:5])
    for number, neighbours in ((0, 2.0), (2, None), (3, None)):
        attempt = Attempt(RUN, number, 0)
        view = made.rounds.seat(SERVER.public, attempt, SeatRequest(named))
        if number < 3:
            made.rounds.beacon(SERVER.public, attempt, Release(view.seats.hash + bytes(32), neighbours))
            made.rounds.view(attempt)
    yield made
    store.close()


def ask(tracker: Tracker, path: str, by: Member | None, **changes: Any) -> tuple[int, Any]:
    """One request through the whole application."""
    target, _, query = path.partition("?")
    headers = {}
    if by is not None:
        signed = {"method": "GET", "target": path, "body": b"", "time": int(NOW), "nonce": bytes(16)}
        headers = sign_request(by.identity, tracker=tracker.public, **(signed | changes))
    scope = {
        "type": "http",
        "method": "GET",
        "path": target,
        "raw_path": target.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(make_app(tracker)(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], json.loads(body)


def path(round_number: int = 0, attempt: int = 0, run: str = RUN.hex(), query: str = "") -> str:
    return f"/v1/runs/{run}/rounds/{round_number}/attempts/{attempt}/neighbours{query}"


@pytest.mark.parametrize(
    ("where", "by", "changes", "status"),
    [
        (path(), MANY[0], {}, 200),
        (path(query="?x=1"), MANY[0], {}, 200),
        (path(), MANY[5], {}, 403),
        (path(), SERVER, {}, 403),
        (path(), None, {}, 401),
        (path(), MANY[0], {"target": path(1)}, 401),
        (path(), MANY[0], {"method": "PUT"}, 401),
        (path(), MANY[0], {"time": 1}, 401),
        (path(2), MANY[0], {}, 409),
        (path(3), MANY[0], {}, 409),
        (path(4), MANY[0], {}, 404),
        (path(0, 1), MANY[0], {}, 404),
        (path(0, 9), MANY[0], {}, 422),
        (path(99999), MANY[0], {}, 422),
        (path(run="ab"), MANY[0], {}, 404),
        (path(run="AB"), MANY[0], {}, 422),
        (path(run="abc"), MANY[0], {}, 422),
    ],
)
def test_both_ways_answer_alike(
    tracker: Tracker,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    by: Member | None,
    changes: dict[str, Any],
    status: int,
) -> None:
    short = ask(tracker, where, by, **changes)
    monkeypatch.setattr(HotPath, "_answer", lambda *_: None)
    assert short == ask(tracker, where, by, **changes)
    assert short[0] == status


def test_the_short_way_is_taken(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would compare the long way with itself."""
    monkeypatch.setattr(RoundView, "neighbours_json", lambda *_: b'"short"')
    monkeypatch.setattr("niss.tracker.app._signed", None)
    assert ask(tracker, path(), MANY[0]) == (200, "short")


def test_views_are_kept_by_the_number_of_their_seats() -> None:
    def view(size: int) -> RoundView:
        packed = pack_participants([(one.public, one.batch(1)[0].encode()) for one in members(size)])
        return RoundView(Seats(packed, lambda found: found), None, None)

    cache = RoundCache(most_seats=5)
    first, second, large = view(2), view(3), view(6)
    cache.keep(Attempt(RUN, 0, 1), first)
    cache.keep(Attempt(RUN, 0, 2), second)
    assert (cache.get(Attempt(RUN, 0, 1)), cache.get(Attempt(RUN, 0, 2))) == (first, second)
    cache.keep(Attempt(RUN, 0, 1), view(2))
    assert cache.get(Attempt(RUN, 0, 2)) is second
    cache.keep(Attempt(RUN, 0, 3), large)
    assert [cache.get(Attempt(RUN, 0, link)) for link in (1, 2, 3)] == [None, None, large]
