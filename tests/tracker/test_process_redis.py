"""Several tracker processes on one Redis server, and a Redis server that goes away."""

from __future__ import annotations

from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from niss.protocol.agreement import participants_hash
from niss.tracker.client import TrackerClient, TrackerRefused, TrackerUnavailable
from tracker.harness import REDIS_MISSING, RedisProcess, TrackerProcess, member, members, tracker_process

RUN = b"redis"
SERVER = member(0, "server")


@pytest.fixture
def server(redis_process: RedisProcess | None) -> RedisProcess:
    """An empty Redis server."""
    if redis_process is None:
        pytest.skip(REDIS_MISSING)
    import redis

    with redis.Redis.from_url(redis_process.url) as plain:
        plain.flushall()
    return redis_process


def health(process: TrackerProcess) -> int:
    connection = HTTPConnection(urlsplit(process.url).netloc, timeout=60)
    connection.request("GET", "/healthz")
    status = connection.getresponse().status
    connection.close()
    return status


def test_two_trackers_on_one_redis_let_out_one_link(tmp_path: Path, server: RedisProcess) -> None:
    many = members(3)
    with (
        tracker_process(tmp_path, SERVER.public, store=server.url) as first,
        tracker_process(tmp_path, SERVER.public, store=server.url) as second,
        TrackerClient(first.url, SERVER.identity) as one,
        TrackerClient(second.url, SERVER.identity) as other,
    ):
        assert one.start_run(RUN, 5) == other.start_run(RUN, 5)
        for place, joining in enumerate(many):
            with TrackerClient((first, second)[place % 2].url, joining.identity) as line:
                line.register(joining.batch(2))
        seated = one.seat(RUN, 0, 0, count=3)
        assert other.seat(RUN, 0, 0, count=3) == seated
        commitment = participants_hash(seated) + bytes(32)
        beacon = other.beacon(RUN, 0, 0, commitment)
        server.kill()
        server.start()
        assert one.beacon(RUN, 0, 0, commitment) == beacon
        with pytest.raises(TrackerRefused, match="another commitment"):
            one.beacon(RUN, 0, 0, commitment[:32] + bytes(31) + b"x")


def test_without_its_store_the_tracker_says_so_and_recovers(tmp_path: Path, server: RedisProcess) -> None:
    one = member(1)
    with (
        tracker_process(tmp_path, SERVER.public, store=server.url) as process,
        TrackerClient(process.url, one.identity) as patient,
        TrackerClient(process.url, one.identity, retries=0) as hasty,
    ):
        patient.register(one.batch(2))
        hasty.describe()
        server.kill()
        try:
            assert health(process) == 503
            with pytest.raises(TrackerUnavailable, match="status 503"):
                hasty.heartbeat()
        finally:
            server.start()
        assert patient.heartbeat().held == 2
        assert health(process) == 200
