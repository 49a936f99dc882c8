"""Odd requests are refused with the field and the way out, and neighbours are told to those who sit with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from niss.tracker.api import Attempt
from niss.tracker.app import make_app
from tracker.harness import RUN, SERVER, Member, Scene, ask_app, members

MANY = members(6)


def put(scene: Scene, path: str, body: bytes, **changes: Any) -> tuple[int, Any]:
    return ask_app(make_app(scene.tracker), "PUT", path, body=body, by=SERVER, **changes)


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
    scene: Scene, body: bytes, status: int | None
) -> None:
    """None: no JSON that can be read, which FastAPI calls one or the other, depending on its version."""
    answered, shown = put(scene, "/v1/runs/ab", body)
    assert answered in ((400, 422) if status is None else (status,))
    if status != 200:
        assert shown["error"]["message"]
        assert shown["error"]["hint"]
    if status == 422:
        assert shown["error"]["field"]


@pytest.mark.parametrize("neighbours", [b"NaN", b"Infinity", b"-1", b"0", b"1e5", b'"2"', b"[]"])
def test_a_degree_is_a_number_above_zero(scene: Scene, neighbours: bytes) -> None:
    put(scene, "/v1/runs/ab", b'{"rounds": 3}')
    body = b'{"commitment": "%s", "neighbours": %s}' % (b"0" * 128, neighbours)
    status, shown = put(scene, "/v1/runs/ab/rounds/0/attempts/0/beacon", body)
    assert (status, shown["error"]["field"]) == (422, "neighbours")


def test_a_body_of_another_type_is_no_json(scene: Scene) -> None:
    assert put(scene, "/v1/runs/ab", b'{"rounds": 3}', kind=b"text/plain")[0] == 422


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
def test_odd_paths_lead_nowhere(scene: Scene, path: str) -> None:
    status, shown = put(scene, path, b'{"rounds": 3}')
    assert status in (404, 405, 422)
    assert shown["error"]["hint"]


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
    scene: Scene, where: str, by: Member | None, changes: dict[str, Any], status: int
) -> None:
    """Round 0 is open; round 2 was let out without a degree; round 3 is seated without a beacon."""
    scene.enrol(members(6))
    scene.rounds.start_run(SERVER.public, RUN, 5)
    for number, neighbours in ((0, 2.0), (2, None), (3, None)):
        view = scene.seat(MANY[:5], number)
        if number < 3:
            scene.let_out(view.hash + bytes(32), number, neighbours=neighbours)
    answered, shown = ask_app(make_app(scene.tracker), "GET", where, by=by, **changes)
    assert answered == status
    if status == 200:
        assert shown == json.loads(scene.rounds.view(Attempt(RUN, 0, 0)).neighbours_json(MANY[0].public))
        assert shown["neighbours"]
    else:
        assert shown["error"]["hint"]
