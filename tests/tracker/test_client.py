"""The client's side: patience with a tracker that is away, and none with one that lies."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from niss.errors import ConfigError, RemoteProtocolError
from niss.protocol.keys import encode_prekey
from niss.tracker.api import Attempt
from niss.tracker.auth import LIST_PURPOSE, list_message
from niss.tracker.client import TrackerClient, TrackerRefused, TrackerUnavailable
from niss.tracker.rounds import OwnChains, RoundView
from niss.tracker.store import Seating
from tracker.harness import RUN, TRACKER, free_port, member, members

KEYS = {"tracker": TRACKER.public.hex(), "holder": TRACKER.public.hex(), "server": member(0).public.hex()}
ABOUT = {**KEYS, "version": "1", "time": 0.0, "tolerance_seconds": 60.0, "ttl_seconds": 600.0, "attempts": 4}


class Stub:
    """A tracker that says whatever a test wants it to say; it counts what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"/v1/tracker": ABOUT}
        self.hangs_up = False
        self.script: list[tuple[int, dict[str, str]]] = []
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", "0")))
                stub.asked.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
                status, headers = 200, dict[str, str]()
                if self.path != "/v1/tracker" and stub.script:
                    status, headers = stub.script.pop(0)
                found = stub.answers.get(self.path, {})
                body = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
                if stub.hangs_up:
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = _answer

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self._thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self._thread.join()
        self.http.server_close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    yield made
    made.close()


@pytest.fixture
def line(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackerClient]:
    monkeypatch.setattr("niss.tracker.client._FIRST_PAUSE", 0.0)
    with TrackerClient(stub.url, member(1).identity, retries=3) as made:
        yield made


STOCK = {"held": 3, "wanted": 0, "accepted": 0, "known": 0, "stale": 0, "ttl_seconds": 600.0}
BEAT = "/v1/clients/me/heartbeat"


def test_what_may_pass_is_asked_again_and_signed_anew(stub: Stub, line: TrackerClient) -> None:
    stub.answers[BEAT] = STOCK
    stub.script = [(503, {}), (502, {}), (429, {"retry-after": "0"})]
    assert line.heartbeat().held == 3
    nonces = [headers["niss-nonce"] for _, path, headers in stub.asked if path == BEAT]
    assert len(nonces) == len(set(nonces)) == 4


def test_it_gives_up_in_the_end(stub: Stub, line: TrackerClient) -> None:
    stub.script = [(503, {})] * 9
    with pytest.raises(TrackerUnavailable, match="status 503"):
        line.heartbeat()
    assert sum(path == BEAT for _, path, _ in stub.asked) == 4


def test_a_refusal_is_not_asked_again(stub: Stub, line: TrackerClient) -> None:
    stub.answers[BEAT] = {"error": {"message": "no", "field": "niss-identity", "hint": "register first"}}
    stub.script = [(404, {})]
    with pytest.raises(TrackerRefused, match="niss-identity: no") as refused:
        line.heartbeat()
    assert (refused.value.status, refused.value.advice) == (404, "register first")
    assert sum(path == BEAT for _, path, _ in stub.asked) == 1


def test_a_connection_that_grew_old_is_no_trouble(stub: Stub) -> None:
    """The other side closes it after every answer without a word; even one who never retries does not notice."""
    stub.answers[BEAT], stub.hangs_up = STOCK, True
    with TrackerClient(stub.url, member(1).identity, retries=0) as hasty:
        assert [hasty.heartbeat().held for _ in range(3)] == [3, 3, 3]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long a client would have waited."""
    waited: list[float] = []
    monkeypatch.setattr("niss.tracker.client.time.sleep", waited.append)
    return waited


def test_nobody_there_is_said_after_the_pauses(pauses: list[float]) -> None:
    away = TrackerClient(f"http://127.0.0.1:{free_port()}", member(1).identity)
    with pytest.raises(TrackerUnavailable, match="ConnectionRefusedError"):
        away.describe()
    assert len(pauses) == 6
    for pause, most in zip(pauses, (0.25, 0.5, 1, 2, 4, 8), strict=True):
        assert most / 2 <= pause <= most


def test_the_tracker_s_wish_to_wait_is_heeded(stub: Stub, pauses: list[float]) -> None:
    stub.answers[BEAT] = STOCK
    with TrackerClient(stub.url, member(1).identity, retries=2) as asking:
        stub.script = [(429, {"retry-after": "3"}), (503, {"retry-after": "99"})]
        asking.heartbeat()
        stub.script = [(503, {"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"})]
        asking.heartbeat()
    assert pauses[:2] == [3.0, 8.0]
    assert pauses[2] <= 0.25


@pytest.mark.parametrize("url", ["tracker:80", "ftp://x", "http://", "http://x/path", "", "http://x:port"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError):
        TrackerClient(url, member(1).identity)


def test_another_tracker_than_the_pinned_one_is_refused(stub: Stub) -> None:
    with (
        TrackerClient(stub.url, member(1).identity, tracker=member(7).public) as pinned,
        pytest.raises(RemoteProtocolError, match="not the one expected"),
    ):
        pinned.heartbeat()


def test_an_anchor_the_holder_did_not_sign_for_this_run_is_refused(stub: Stub, line: TrackerClient) -> None:
    anchor, signature = OwnChains(TRACKER).commit(RUN, 5, b"s" * 32)
    shown = {"rounds": 5, "anchor": anchor.hex(), "signature": signature.hex()}
    shown |= {"holder": TRACKER.public.hex(), "highest_link": 0}
    path = f"/v1/runs/{RUN.hex()}"
    stub.answers[path] = shown
    assert line.start_run(RUN, 5) == line.run(RUN).anchor == anchor
    for change, said in (
        ({"anchor": bytes(32).hex()}, "signature"),
        ({"rounds": 6}, "signature"),
        ({"holder": member(7).public.hex()}, "another holder"),
    ):
        stub.answers[path] = shown | change
        with pytest.raises(RemoteProtocolError, match=said):
            line.run(RUN)


def listed(link: int) -> tuple[dict[str, Any], Seating]:
    packed = b"".join(one.public + encode_prekey(one.batch(1)[0]) for one in members(3))
    seating = Seating(bytes(32), packed)
    view = RoundView(
        seating, lambda found: TRACKER.sign(LIST_PURPOSE, list_message(RUN, link, found)), None, None
    )
    return json.loads(view.list_json), seating


def test_a_list_is_believed_only_as_the_tracker_signed_it(stub: Stub, line: TrackerClient) -> None:
    path = f"/v1/runs/{RUN.hex()}/rounds/0/attempts/1/participants"
    shown, seating = listed(link=2)
    stub.answers[path] = shown
    assert line.participants(Attempt(RUN, 0, 1)) == seating.participants()
    for other in (shown | {"participants": shown["participants"][::-1]}, listed(link=1)[0]):
        stub.answers[path] = other
        with pytest.raises(RemoteProtocolError, match="'participants'"):
            line.participants(Attempt(RUN, 0, 1))


def test_a_swapped_prekey_is_noticed(stub: Stub, line: TrackerClient) -> None:
    """A lying relay or tracker puts its own key under a client's name."""
    shown, _ = listed(link=2)
    liar = member(8).batch(1)[0]
    shown["participants"][1]["prekey"] |= {"public": liar.public.hex(), "signature": liar.signature.hex()}
    stub.answers[f"/v1/runs/{RUN.hex()}/rounds/0/attempts/1/participants"] = shown
    told = shown | {"seat": 0, "neighbours": shown["participants"]}
    stub.answers[f"/v1/runs/{RUN.hex()}/rounds/0/attempts/1/neighbours"] = told
    for asked in (line.participants, line.neighbours):
        with pytest.raises(RemoteProtocolError, match="'prekey'"):
            asked(Attempt(RUN, 0, 1))


def test_a_beacon_of_another_attempt_is_noticed(stub: Stub, line: TrackerClient) -> None:
    shown = {"index": 1, "value": bytes(32).hex(), "signature": bytes(64).hex()}
    stub.answers[f"/v1/runs/{RUN.hex()}/rounds/0/attempts/1/beacon"] = shown
    with pytest.raises(RemoteProtocolError, match="another attempt"):
        line.beacon(Attempt(RUN, 0, 1), bytes(64))


@pytest.mark.parametrize(
    "odd",
    [None, [], 3, "text", {}, {"held": "3"}, {"held": None}, {**STOCK, "wanted": True}, b"<html>", b"\xff"],
)
def test_odd_answers_are_errors_of_the_other_side(stub: Stub, line: TrackerClient, odd: object) -> None:
    stub.answers[BEAT] = stub.answers["/v1/runs/72756e"] = odd
    for ask in (line.heartbeat, lambda: line.run(RUN)):
        with pytest.raises(RemoteProtocolError):
            ask()


def test_the_client_needs_neither_torch_nor_the_service() -> None:
    program = (
        "import sys, niss.tracker.client; "
        "print([m for m in ('torch', 'fastapi', 'uvicorn', 'redis', 'httpx', 'flwr') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
