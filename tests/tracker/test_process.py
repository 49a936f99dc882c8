"""The tracker as it is run: a real process, real sockets, restarts, kills and TLS."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from niss.protocol.agreement import participants_hash, terms_hash
from niss.protocol.client import Client, Policy
from niss.protocol.keys import Identity
from niss.protocol.messages import Beacon, Participant, Terms
from niss.protocol.server import Server
from niss.tracker.auth import sign_request
from niss.tracker.client import TrackerClient, TrackerRefused, TrackerUnavailable
from support.protocol_round import seeded_entropy
from tracker.harness import (
    TrackerProcess,
    member,
    members,
    self_signed,
    tracker_process,
)

RUN = b"process"
SERVER = member(0, "server")


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


def terms(round_number: int, attempt: int, size: int) -> Terms:
    return Terms(
        run=RUN,
        round=round_number,
        attempt=attempt,
        mode="tolerate",
        coordinates=8,
        grid_bits=16,
        modulus_bits=32,
        clip=1.0,
        neighbours=float(size - 1),
        unit_variance=0.01,
        residual_variance=0.0,
        self_variance=0.0,
        revealed=0,
        dropped=0,
        committee=0,
        threshold=0,
    )


def test_rounds_over_a_tracker_that_is_killed_between_them(running: TrackerProcess) -> None:
    """Clients and server of the protocol, with the tracker between them: sums come out right, prekeys never recur."""
    import numpy as np

    entropy, server = seeded_entropy("process"), Server(SERVER.identity)
    asking = TrackerClient(running.url, SERVER.identity)
    anchor = asking.start_run(RUN, 4)
    about = asking.describe(RUN)
    assert (about.anchor, about.rounds, about.server) == (anchor, 4, SERVER.public)
    policy = Policy(
        participants=3,
        colluders=0,
        mu=1.0,
        clip=1.0,
        server=SERVER.public,
        holder=about.holder,
        anchor=anchor,
    )
    clients, lines = [], []
    for _ in range(3):
        identity = Identity.generate(entropy)
        clients.append(
            Client(
                identity,
                policy,
                assess=lambda *_: 0.5,
                charge=lambda *_: None,
                persist=lambda _: None,
            )
        )
        lines.append(TrackerClient(running.url, identity))
        assert lines[-1].register(clients[-1].enrol(3, entropy)).accepted == 3
    used: set[tuple[bytes, int]] = set()
    for round_number in range(3):
        seated = asking.seat(RUN, round_number, 0, [one.public for one in clients], at_least=3)
        used |= {(one.identity, one.prekey.number) for one in seated}
        agreed = terms(round_number, 0, 3)
        beacon = asking.beacon(
            RUN, round_number, 0, commitment_to(seated, agreed), neighbours=agreed.neighbours
        )
        running.restart(signal.SIGKILL if round_number == 0 else signal.SIGTERM)
        assert asking.beacon(RUN, round_number, 0, commitment_to(seated, agreed), neighbours=2.0) == beacon
        opened = server.open_round(agreed, seated, beacon)
        updates = [np.full(8, 0.1 * (number + 1)) for number in range(3)]
        for one, line, update in zip(clients, lines, updates, strict=True):
            assert line.participants(RUN, round_number, 0) == seated
            around = line.neighbours(RUN, round_number, 0)
            assert {other.identity for other in around.values()} == {c.public for c in clients} - {one.public}
            upload = one.upload(opened, update, entropy)
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
        asking.seat(RUN, 3, 0, count=3)
    asking.close()


def raw(
    process: TrackerProcess, method: str, target: str, headers: dict[str, str], body: bytes = b""
) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection(urlsplit(process.url).netloc, timeout=30)
    connection.request(method, target, body=body or None, headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content) if content else {}


def heartbeat_headers(process: TrackerProcess, by: Identity) -> dict[str, str]:
    return sign_request(
        by,
        tracker=bytes.fromhex(process.ready["tracker"]),
        method="POST",
        target="/v1/clients/me/heartbeat",
        body=b"",
        time=int(time.time()),
        nonce=os.urandom(16),
    )


def test_a_copied_request_is_refused_also_after_a_restart(shared: TrackerProcess) -> None:
    one = member(1, "copied")
    with TrackerClient(shared.url, one.identity) as line:
        line.register(one.batch(2))
    headers = heartbeat_headers(shared, one.identity)
    target = "/v1/clients/me/heartbeat"
    assert raw(shared, "POST", target, headers)[0] == 200
    for number in (signal.SIGTERM, signal.SIGKILL):
        status, body = raw(shared, "POST", target, headers)
        assert (status, body["error"]["field"]) == (401, "niss-nonce")  # type: ignore[index]
        shared.restart(number)
    assert raw(shared, "POST", target, headers)[0] == 401


def test_links_are_not_let_out_twice_across_restarts(shared: TrackerProcess) -> None:
    run, many = b"links_are_not_l", members(2, "links")
    for one in many:
        with TrackerClient(shared.url, one.identity) as line:
            line.register(one.batch(3))
    with TrackerClient(shared.url, SERVER.identity) as asking:
        anchor = asking.start_run(run, 10)

        def seated(round_number: int, attempt: int) -> bytes:
            return participants_hash(asking.seat(run, round_number, attempt, [one.public for one in many]))

        earlier, listed = seated(0, 0), seated(1, 0)
        first = asking.beacon(run, 1, 0, listed + bytes(32))
        shared.restart(signal.SIGKILL)
        assert asking.start_run(run, 10) == anchor
        assert asking.beacon(run, 1, 0, listed + bytes(32)) == first
        for round_number, commitment in ((1, listed + bytes(31) + b"b"), (0, earlier + bytes(32))):
            with pytest.raises(TrackerRefused) as refused:
                asking.beacon(run, round_number, 0, commitment)
            assert refused.value.status == 409
        assert isinstance(asking.beacon(run, 1, 1, seated(1, 1) + bytes(32)), Beacon)


def test_a_request_under_way_is_answered_before_the_tracker_ends(running: TrackerProcess) -> None:
    """The signal comes while the body of a request is still on its way."""
    place = urlsplit(running.url)
    headers = heartbeat_headers(running, member(1).identity)
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        lines = ["POST /v1/clients/me/heartbeat HTTP/1.1", "host: x", "content-length: 2"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n{").encode())
        raw(running, "GET", "/healthz", {})  # By now the tracker has read the first half.
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
    certificate, key = self_signed(tmp_path)
    flags = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with tracker_process(tmp_path, SERVER.public, *flags) as process:
        assert process.url.startswith("https://")
        with TrackerClient(process.url, SERVER.identity, ca=certificate) as line:
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
        status, body = raw(process, "PUT", "/v1/clients/me", {"content-length": str(1 << 30)})
        assert (status, body["error"]["field"]) == (413, "body")  # type: ignore[index]
        statuses = {raw(process, "GET", "/v1/tracker", {})[0] for _ in range(30)}
        assert statuses == {200, 429}
        assert raw(process, "GET", "/healthz", {})[0] == 200


def test_a_chunked_body_is_cut_off_too(shared: TrackerProcess) -> None:
    place = urlsplit(shared.url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        connection.sendall(b"PUT /v1/clients/me HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        try:
            for _ in range(40):
                connection.sendall(chunk)
            answer = connection.recv(1 << 16)
        except ConnectionError:
            answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 413")


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
        listed = participants_hash(line.seat(RUN, 0, 0, [one.public, other.public]))
        beacon = line.beacon(RUN, 0, 0, listed + b"a" * 32)
    raw(running, "GET", "/v1/nowhere", {})
    connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    assert "niss_tracker_clients_live 2\n" in text
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
