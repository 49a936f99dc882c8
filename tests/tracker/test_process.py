"""The tracker as it is run: real processes and sockets, restarts, kills, TLS; two on one store, or one for another."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from niss.local.deployment import make_certificates
from niss.protocol.agreement import participants_hash, terms_hash
from niss.protocol.client import Client
from niss.protocol.keyfile import create_keyfile
from niss.protocol.keys import Identity, link_of, verify_beacon
from niss.protocol.messages import Participant, Terms
from niss.protocol.schedule import Policy
from niss.protocol.server import Server
from niss.tracker.api import Attempt
from niss.tracker.client import TrackerClient, TrackerRefused, TrackerUnavailable
from support.protocol_round import seeded_entropy
from tracker.harness import (
    REDIS_MISSING,
    SERVER,
    Member,
    RedisProcess,
    TrackerProcess,
    ask_process,
    member,
    members,
    signed_headers,
    terms,
    tracker_process,
)

RUN = b"process"
HEARTBEAT = "/v1/clients/me/heartbeat"
Pair = tuple[TrackerProcess, TrackerProcess]


def register(process: TrackerProcess, many: list[Member], prekeys: int = 2) -> None:
    for one in many:
        with TrackerClient(process.url, one.identity) as line:
            line.register(one.batch(prekeys))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrackerProcess]:
    """One tracker for the tests that leave it running; each has runs and members of its own."""
    with tracker_process(tmp_path_factory.mktemp("shared"), SERVER.public) as process:
        yield process


@pytest.fixture
def running(tmp_path: Path) -> Iterator[TrackerProcess]:
    with tracker_process(tmp_path, SERVER.public) as process:
        yield process


def commitment_to(participants: tuple[Participant, ...], agreed: Terms) -> bytes:
    return participants_hash(participants) + terms_hash(agreed)


def test_rounds_over_a_tracker_that_is_killed_between_them(running: TrackerProcess) -> None:
    """Clients and server of the protocol, with the tracker between them: sums come out right, prekeys never recur."""
    import numpy as np

    entropy, server = seeded_entropy("process"), Server(SERVER.identity)
    asking = TrackerClient(running.url, SERVER.identity)
    anchor = asking.start_run(RUN, 4)
    about = asking.run(RUN)
    assert (about.anchor, about.rounds, asking.describe().server) == (anchor, 4, SERVER.public)
    policy = Policy(
        participants=3,
        collusion=0.0,
        mu=1.0,
        clip=1.0,
        run=RUN,
        server=SERVER.public,
        holder=about.holder,
        anchor=anchor,
    )
    clients, lines = [], []
    for _ in range(3):
        identity = Identity.generate(entropy)
        clients.append(
            Client(identity, policy, assess=lambda *_: 0.5, charge=lambda *_: None, persist=lambda _: None)
        )
        lines.append(TrackerClient(running.url, identity))
        assert lines[-1].register(clients[-1].enrol(3, entropy)).accepted == 3
    used: set[tuple[bytes, int]] = set()
    for round_number in range(3):
        seated = asking.seat(Attempt(RUN, round_number, 0), [one.public for one in clients], at_least=3)
        used |= {(one.identity, one.prekey.number) for one in seated}
        agreed = terms(round_number, 0, 2.0, run=RUN, unit_variance=0.01, residual_variance=0.0)
        beacon = asking.beacon(
            Attempt(RUN, round_number, 0), commitment_to(seated, agreed), neighbours=agreed.neighbours
        )
        running.restart(signal.SIGKILL if round_number == 0 else signal.SIGTERM)
        assert (
            asking.beacon(Attempt(RUN, round_number, 0), commitment_to(seated, agreed), neighbours=2.0)
            == beacon
        )
        assert asking.start_run(RUN, 4) == anchor
        with pytest.raises(TrackerRefused, match="another commitment"):
            asking.beacon(Attempt(RUN, round_number, 0), participants_hash(seated) + bytes(32))
        opened = server.open_round(agreed, seated, beacon)
        updates = [np.full(8, 0.1 * (number + 1)) for number in range(3)]
        for one, line, update in zip(clients, lines, updates, strict=True):
            assert line.participants(Attempt(RUN, round_number, 0)) == seated
            around = line.neighbours(Attempt(RUN, round_number, 0))
            assert {other.identity for other in around.values()} == {c.public for c in clients} - {one.public}
            one.accept(opened, entropy)
            upload = one.answer(update, entropy)
            server.take_upload(upload)
            one.close_round()
            assert asking.deposit(one.public, upload.fresh_prekeys).accepted == 1
            assert line.heartbeat().held == 3
        total = server.finish().total
        np.testing.assert_allclose(total, sum(updates) / 3, atol=3 * 2.0**-16)
    assert len(used) == 9
    for line in lines:
        line.leave()
        line.leave()
        line.close()
    with pytest.raises(TrackerRefused, match="0 of the clients"):
        asking.seat(Attempt(RUN, 3, 0), count=3)
    asking.close()


def test_a_copied_request_is_refused_also_after_a_restart(shared: TrackerProcess) -> None:
    one = member(1, "copied")
    register(shared, [one])
    headers = signed_headers(shared, one, "POST", HEARTBEAT)
    assert ask_process(shared, "POST", HEARTBEAT, headers)[0] == 200
    for number in (signal.SIGTERM, signal.SIGKILL):
        status, body = ask_process(shared, "POST", HEARTBEAT, headers)
        assert (status, json.loads(body)["error"]["field"]) == (401, "niss-nonce")
        shared.restart(number)
    assert ask_process(shared, "POST", HEARTBEAT, headers)[0] == 401


def test_a_request_under_way_is_answered_before_the_tracker_ends(running: TrackerProcess) -> None:
    """The signal comes while the body of a request is still on its way."""
    place = urlsplit(running.url)
    headers = signed_headers(running, member(1), "POST", HEARTBEAT)
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        lines = [f"POST {HEARTBEAT} HTTP/1.1", "host: x", "content-length: 2"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n{").encode())
        ask_process(running, "GET", "/healthz")  # By now the tracker has read the first half.
        running.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 30
        while not any(entry["event"] == "Shutting down" for entry in running.entries()):
            assert time.monotonic() < until
            time.sleep(0.01)
        connection.sendall(b"}")
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 401")  # The body is not the one that was signed; but it was answered.
    assert running.stop() == 0
    assert running.entries()[-1]["event"] == "stopped"


def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, datetime.now(UTC))
    flags = ("--tls-cert", str(made.certificate), "--tls-key", str(made.key))
    with tracker_process(tmp_path, SERVER.public, *flags) as process:
        assert process.url.startswith("https://")
        with TrackerClient(process.url, SERVER.identity, ca=made.authority) as line:
            line.start_run(RUN, 2)
        with (
            TrackerClient(process.url, SERVER.identity, retries=0) as line,
            pytest.raises(TrackerUnavailable, match="does not verify"),
        ):
            line.describe()
        place = urlsplit(process.url)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection((place.hostname, place.port), timeout=30) as plain,
            old.wrap_socket(plain) as secure,
        ):
            assert secure.version() == "TLSv1.2"


def test_limits_of_size_and_rate(tmp_path: Path) -> None:
    with tracker_process(tmp_path, SERVER.public, "--address-rate", "2") as process:
        status, body = ask_process(process, "PUT", "/v1/clients/me", {"content-length": str(1 << 30)})
        assert (status, json.loads(body)["error"]["field"]) == (413, "body")
        assert {ask_process(process, "GET", "/v1/tracker")[0] for _ in range(30)} == {200, 429}
        assert ask_process(process, "GET", "/healthz")[0] == 200


def test_metrics_and_logs_say_enough_and_not_too_much(running: TrackerProcess) -> None:
    one, other = members(2)
    prekeys = one.batch(3)
    with TrackerClient(running.url, one.identity) as line:
        line.register(prekeys)
        line.heartbeat()
    with TrackerClient(running.url, other.identity) as line:
        line.register(other.batch(1))
    with TrackerClient(running.url, SERVER.identity) as line:
        line.start_run(RUN, 2)
        listed = participants_hash(line.seat(Attempt(RUN, 0, 0), [one.public, other.public]))
        beacon = line.beacon(Attempt(RUN, 0, 0), listed + b"a" * 32)
    ask_process(running, "GET", "/v1/nowhere")
    text, until = "", time.monotonic() + 30
    while "niss_tracker_clients_live 2\n" not in text:  # A count may be a second old.
        assert time.monotonic() < until
        time.sleep(0.1)
        text = ask_process(running, "GET", "/metrics")[1].decode()
    assert "niss_tracker_prekeys 2\n" in text
    assert 'niss_tracker_requests_total{method="PUT",route="/v1/clients/me",status="200"} 2\n' in text
    assert 'route="unmatched",status="404"} 1\n' in text
    assert 'niss_tracker_request_seconds_count{route="/v1/clients/me"} 2\n' in text
    assert running.stop() == 0
    entries = running.entries()
    routes = {entry.get("route") for entry in entries if entry["event"] == "request"}
    assert {"/v1/clients/me", "/v1/clients/me/heartbeat", "unmatched"} <= routes
    logged = running.log.read_text()
    for hidden in (
        one.public,
        prekeys[0].public,
        prekeys[0].signature,
        beacon.value,
        beacon.signature,
        b"a" * 32,
    ):
        assert hidden.hex() not in logged


def test_the_files_of_the_store_are_for_its_owner_alone(shared: TrackerProcess) -> None:
    with TrackerClient(shared.url, SERVER.identity) as line:
        line.start_run(b"the_files_of_th", 2)
    kept = list(shared.folder.glob("tracker.db*"))
    assert len(kept) == 3
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}


def test_a_tracker_that_comes_back_in_time_is_waited_for(shared: TrackerProcess) -> None:
    with TrackerClient(shared.url, SERVER.identity) as line:
        line.describe()
        shared.stop(signal.SIGKILL)
        back = threading.Thread(target=shared.start)
        back.start()
        assert line.start_run(b"a_tracker_that_", 2)
        back.join()


# Several processes


@pytest.fixture
def redis(redis_process: RedisProcess | None) -> RedisProcess:
    """An empty Redis server."""
    if redis_process is None:
        pytest.skip(REDIS_MISSING)
    from redis import Redis

    with Redis.from_url(redis_process.url) as plain:
        plain.flushall()
    return redis_process


@pytest.fixture(params=["sqlite", "redis"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Two trackers on one store."""
    url = None if request.param == "sqlite" else request.getfixturevalue("redis").url
    with (
        tracker_process(tmp_path, SERVER.public, store=url) as first,
        tracker_process(tmp_path, SERVER.public, store=url) as second,
    ):
        yield first, second


def test_two_trackers_on_one_store_answer_as_one(pair: Pair, request: pytest.FixtureRequest) -> None:
    many, run, stranger = members(6), b"pair", member(99)
    for first, second in (pair, pair[::-1]):
        register(first, many[:3])
        register(second, many[3:])
        headers = signed_headers(first, many[0], "POST", HEARTBEAT)
        assert ask_process(first, "POST", HEARTBEAT, headers)[0] == 200
        status, body = ask_process(second, "POST", HEARTBEAT, headers)
        assert status == 401
        assert b"made before" in body
        assert ask_process(first, "POST", HEARTBEAT, headers)[0] == 401
    target = f"/v1/runs/{run.hex()}/rounds/0/attempts/0/neighbours"

    def ask(process: TrackerProcess, by: Member) -> tuple[int, bytes]:
        return ask_process(process, "GET", target, signed_headers(process, by, "GET", target))

    with (
        TrackerClient(pair[0].url, SERVER.identity) as one,
        TrackerClient(pair[1].url, SERVER.identity) as other,
    ):
        assert one.start_run(run, 3) == other.start_run(run, 3)
        seated = one.seat(Attempt(run, 0, 0), count=6)
        assert other.seat(Attempt(run, 0, 0), count=6) == seated
        # Both are asked before the beacon is out, so that neither answers from what it remembers of then.
        assert {ask(process, many[0])[0] for process in pair} == {409}
        commitment = participants_hash(seated) + bytes(32)
        beacon = other.beacon(Attempt(run, 0, 0), commitment, neighbours=2)
        for asking in many:
            # Twice: by way of the store, and from memory.
            answers = [ask(process, asking) for process in (*pair, *pair)]
            assert {status for status, _ in answers} == {200}
            assert len({body for _, body in answers}) == 1
        assert {ask(process, stranger)[0] for process in pair} == {403}
        if "redis" in request.node.name:
            server = request.getfixturevalue("redis")
            server.kill()
            server.start()
        assert one.beacon(Attempt(run, 0, 0), commitment, neighbours=2) == beacon
        with pytest.raises(TrackerRefused, match="another commitment"):
            one.beacon(Attempt(run, 0, 0), commitment[:32] + bytes(31) + b"x")


def test_without_its_store_the_tracker_says_so_and_recovers(tmp_path: Path, redis: RedisProcess) -> None:
    one = member(1)
    with (
        tracker_process(tmp_path, SERVER.public, store=redis.url) as process,
        TrackerClient(process.url, one.identity) as patient,
        TrackerClient(process.url, one.identity, retries=0) as hasty,
    ):
        patient.register(one.batch(2))
        hasty.describe()
        redis.kill()
        try:
            assert ask_process(process, "GET", "/healthz")[0] == 503
            with pytest.raises(TrackerUnavailable, match="status 503"):
                hasty.heartbeat()
        finally:
            redis.start()
        assert patient.heartbeat().held == 2
        assert ask_process(process, "GET", "/healthz")[0] == 200


def test_links_come_from_a_holder_apart_also_in_runs_that_carry(tmp_path: Path) -> None:
    """Two trackers, run by different people: one keeps the lists, the other holds the beacon."""
    keeper, many = member(0, "lists"), members(4)
    (tmp_path / "holder").mkdir()
    create_keyfile(tmp_path / "tracker.key", keeper.identity)
    with (
        tracker_process(tmp_path / "holder", keeper.public, "--holder-only") as holder,
        tracker_process(tmp_path, SERVER.public, "--external-beacon", holder.url) as lists,
        TrackerClient(lists.url, SERVER.identity, retries=0) as asking,
        TrackerClient(holder.url, keeper.identity, retries=0) as behind,
        TrackerClient(holder.url, SERVER.identity, retries=0) as stranger,
        TrackerClient(lists.url, many[0].identity) as line,
    ):
        anchor, about = asking.start_run(RUN, 3), asking.run(RUN)
        assert about.holder.hex() == holder.ready["tracker"] != lists.ready["tracker"]
        assert asking.describe().tracker.hex() == lists.ready["tracker"]
        register(lists, many, 4)
        commitment = participants_hash(asking.seat(Attempt(RUN, 0, 0), count=4)) + bytes(32)
        beacon = asking.beacon(Attempt(RUN, 0, 0), commitment, neighbours=3.0)
        verify_beacon(beacon, commitment, expected=link_of(0, 0), anchor=anchor, holder=about.holder, after=0)
        assert len(line.neighbours(Attempt(RUN, 0, 0))) == 3
        # Behind the lists' back, their owner spends the next link; the holder stays with its first commitment.
        behind.beacon(Attempt(RUN, 0, 1), bytes(64))
        with pytest.raises(TrackerRefused, match="nobody is seated"):
            asking.beacon(Attempt(RUN, 0, 1), b"b" * 64)
        again = participants_hash(asking.seat(Attempt(RUN, 0, 1), count=4)) + bytes(32)
        with pytest.raises(TrackerRefused, match="another commitment"):
            asking.beacon(Attempt(RUN, 0, 1), again)
        with pytest.raises(TrackerRefused, match="only the server"):
            stranger.beacon(Attempt(RUN, 0, 2), bytes(64))

        carried, nobody = b"carried", participants_hash(())
        asking.start_run(carried, 2)
        cohorts = [[one.public for one in half] for half in (many[:2], many[2:])]
        hashes = [
            participants_hash(asking.seat(Attempt(carried, number, 0), cohort, at_least=2, absent=True))
            for number, cohort in enumerate(cohorts)
        ]
        asking.beacon(Attempt(carried, 0, 0), hashes[0] + bytes(32) + hashes[1], neighbours=1.0)
        with pytest.raises(TrackerRefused, match="another list than round 0 announced"):
            behind.beacon(Attempt(carried, 1, 0), hashes[0] + bytes(32) + nobody)
        asking.beacon(Attempt(carried, 1, 0), hashes[1] + bytes(32) + nobody)
        assert len(line.participants(Attempt(carried, 0, 0))) == 2
