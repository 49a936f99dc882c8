"""Two tracker processes on one store answer as one: neither admits a copy of what the other did, rounds are alike."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from niss.protocol.agreement import participants_hash
from niss.tracker.auth import sign_request
from niss.tracker.client import TrackerClient
from tracker.harness import (
    REDIS_MISSING,
    Member,
    RedisProcess,
    TrackerProcess,
    member,
    members,
    tracker_process,
)

SERVER = member(0, "server")
Pair = tuple[TrackerProcess, TrackerProcess]


@pytest.fixture(params=["sqlite", "redis"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, redis_process: RedisProcess | None
) -> Iterator[Pair]:
    url = None
    if request.param == "redis":
        if redis_process is None:
            pytest.skip(REDIS_MISSING)
        import redis

        with redis.Redis.from_url(redis_process.url) as plain:
            plain.flushall()
        url = redis_process.url
    with (
        tracker_process(tmp_path, SERVER.public, store=url) as first,
        tracker_process(tmp_path, SERVER.public, store=url) as second,
    ):
        yield first, second


def signed(process: TrackerProcess, by: Member, method: str, target: str) -> dict[str, str]:
    return sign_request(
        by.identity,
        tracker=bytes.fromhex(process.ready["tracker"]),
        method=method,
        target=target,
        body=b"",
        time=int(time.time()),
        nonce=os.urandom(16),
    )


def ask(process: TrackerProcess, method: str, target: str, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = HTTPConnection(urlsplit(process.url).netloc, timeout=60)
    connection.request(method, target, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_a_copy_of_a_request_is_refused_by_the_other_process_too(pair: Pair) -> None:
    one = member(1)
    with TrackerClient(pair[0].url, one.identity) as line:
        line.register(one.batch(2))
    for first, second in (pair, pair[::-1]):
        headers = signed(first, one, "POST", "/v1/clients/me/heartbeat")
        assert ask(first, "POST", "/v1/clients/me/heartbeat", headers)[0] == 200
        status, body = ask(second, "POST", "/v1/clients/me/heartbeat", headers)
        assert status == 401
        assert b"made before" in body
        assert ask(first, "POST", "/v1/clients/me/heartbeat", headers)[0] == 401


def test_a_round_opened_at_one_process_is_answered_alike_by_both(pair: Pair) -> None:
    many, run = members(6), b"pair"
    with (
        TrackerClient(pair[0].url, SERVER.identity) as one,
        TrackerClient(pair[1].url, SERVER.identity) as other,
    ):
        for joining in many:
            with TrackerClient(pair[1].url, joining.identity) as line:
                line.register(joining.batch(2))
        one.start_run(run, 3)
        seated = one.seat(run, 0, 0, count=6)
        target = f"/v1/runs/{run.hex()}/rounds/0/attempts/0/neighbours"
        # Both are asked before the beacon is out, so that neither answers from what it remembers of then.
        for process in pair:
            assert ask(process, "GET", target, signed(process, many[0], "GET", target))[0] == 409
        other.beacon(run, 0, 0, participants_hash(seated) + bytes(32), neighbours=2)
        for asking in many:
            # Twice: by way of the store, and from memory.
            answers = [
                ask(process, "GET", target, signed(process, asking, "GET", target))
                for process in (*pair, *pair)
            ]
            assert {status for status, _ in answers} == {200}
            assert len({body for _, body in answers}) == 1
        stranger = member(99)
        for process in pair:
            assert ask(process, "GET", target, signed(process, stranger, "GET", target))[0] == 403
