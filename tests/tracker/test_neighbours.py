"""The one question that every client asks in every round: who may ask it, and when it is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from niss.protocol.keys import Identity
from niss.tracker.app import make_app
from niss.tracker.auth import TrackerSettings
from niss.tracker.service import Tracker
from niss.tracker.store import Attempt, Release, SeatRequest
from niss.tracker.store_sqlite import SqliteStore
from support.protocol_round import seeded_entropy
from tracker.harness import Member, ask_app, member, members

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
        settings=TrackerSettings(address_rate=0),
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
def test_neighbours_are_told_to_those_who_sit_there_once_the_beacon_is_out(
    tracker: Tracker, where: str, by: Member | None, changes: dict[str, Any], status: int
) -> None:
    changes = {"tracker": tracker.public, "time": int(NOW)} | changes
    answered, shown = ask_app(make_app(tracker), "GET", where, by=by, **changes)
    assert answered == status
    if status == 200:
        assert shown == json.loads(tracker.rounds.view(Attempt(RUN, 0, 0)).neighbours_json(MANY[0].public))
        assert shown["neighbours"]
    else:
        assert shown["error"]["hint"]
