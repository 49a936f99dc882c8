"""Keys nobody can use, connections that go nowhere, questions asked too often, and addresses that are probes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from niss.errors import ConfigError, NissError
from niss.protocol import keys
from niss.protocol.messages import Prekey
from niss.tracker import serve
from niss.tracker.auth import Refused
from niss.tracker.client import TrackerClient
from niss.tracker.databases import SqliteStore
from niss.tracker.options import TrackerOptions
from niss.tracker.service import Tracker
from tracker.harness import SERVER, Member, Scene, free_port, member
from tracker.test_client import Stub

PATIENCE = 30.0


def degenerate(one: Member, number: int) -> Prekey:
    """A one-time key with which everyone agrees on zero, correctly signed."""
    statement = keys._prekey_statement(one.public, number, bytes(32))
    return Prekey(number, bytes(32), one.identity.sign("prekey", statement))


def test_degenerate_keys_are_neither_registered_nor_deposited(scene: Scene) -> None:
    one, tracker = member(1), scene.tracker
    with pytest.raises(Refused, match="degenerate") as refused:
        tracker.register(one.public, (*one.batch(1), degenerate(one, 1)), None)
    assert refused.value.status == 422
    tracker.register(one.public, one.batch(1), None)
    with pytest.raises(Refused, match="degenerate"):
        tracker.deposit(SERVER.public, one.public, (degenerate(one, 5),))


def in_thread(work: Any) -> Any:
    """What `work` returns in another thread; fails where it waits for something that this one holds."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert answers, "it waits for the store"
    return answers[0]


def test_counting_does_not_wait_for_the_store(scene: Scene) -> None:
    tracker, store = scene.tracker, scene.store
    assert isinstance(store, SqliteStore)
    one = member(1)
    tracker.register(one.public, one.batch(2), None)
    scene.now += 2  # The count before that is too old by now.

    def change(_change: object) -> None:
        assert in_thread(tracker.counts).prekeys == 2
        in_thread(store.ping)

    store._change(change)


def test_those_who_ask_for_metrics_share_one_count(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, tracker = [], scene.tracker
    real = tracker.store.counts

    def count(*, now: float) -> Any:
        counted.append(now)
        return real(now=now)

    monkeypatch.setattr(tracker.store, "counts", count)
    for _ in range(50):
        tracker.counts()
    assert len(counted) == 1
    scene.now += 5
    with tracker._counting:
        in_thread(tracker.counts)
    assert len(counted) == 1
    tracker.counts()
    assert len(counted) == 2


@contextmanager
def listening(folder: Path) -> Iterator[int]:
    """The port of a tracker that runs in a thread of this process."""
    chosen, store = (
        TrackerOptions(server_key=SERVER.public.hex()),
        SqliteStore(folder / "a.db", durable=False),
    )
    made = Tracker(store, member(0, "tracker").identity, server=chosen.server)
    running, port = serve._Server(made, chosen), serve.listen("127.0.0.1", 0)
    thread = threading.Thread(target=running.run, args=([port],))
    thread.start()
    try:
        yield port.getsockname()[1]
    finally:
        running.should_exit = True
        thread.join(PATIENCE)
        store.close()


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /he"],
    ids=["nothing", "half a request", "a request and half of another"],
)
def test_a_connection_that_brings_no_whole_request_is_closed(
    tmp_path: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(serve, "_LOOK_SECONDS", 0.05)
    # So that it is not closed for this reason.
    monkeypatch.setattr(serve, "_KEEP_ALIVE_SECONDS", 3600)
    with listening(tmp_path) as port, socket.create_connection(("127.0.0.1", port), PATIENCE) as half_open:
        half_open.sendall(sent)
        received = b""
        try:
            while more := half_open.recv(4096):
                received += more
        except ConnectionResetError:
            pass
        assert received.startswith(b"HTTP/1.1 200" if b"\r\n\r\n" in sent else b"")


def test_connections_with_requests_on_them_stay() -> None:
    class Cycle:
        response_complete = True

    class Open:
        def __init__(self) -> None:
            self.cycle: Cycle | None = None
            self.aborted = False
            self.transport = self

        def abort(self) -> None:
            self.aborted = True

    asking, silent, stuck = Open(), Open(), Open()
    stuck.cycle = Cycle()
    stuck.cycle.response_complete = False
    seen: dict[Any, Any] = {}
    for now in range(0, 150, 5):
        asking.cycle = Cycle()
        seen = serve.drop_half_open([one for one in (asking, silent, stuck) if not one.aborted], seen, now)
        assert silent.aborted == (now > serve._SILENT_SECONDS)
        assert stuck.aborted == (now > serve._UNANSWERED_SECONDS)
    assert not asking.aborted
    assert set(seen) == {asking}


def test_an_authority_means_https_and_its_file_is_not_named_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="https"):
        TrackerClient("http://127.0.0.1:1", member(1).identity, ca=tmp_path / "ca.pem")

    with pytest.raises(ConfigError) as refused:
        TrackerClient("https://127.0.0.1:1", member(1).identity, ca=tmp_path / "secret-place.pem")
    assert "secret-place" not in refused.value.message


def test_the_reason_does_not_tell_what_listens_at_an_address() -> None:
    """A server names the address: what its clients say of it must not describe their network."""
    stub = Stub()
    stub.answers["/v1/tracker"] = {"tracker": "00" * 32, "holder": "11" * 32, "server": "22" * 32}
    answers: list[tuple[int, Any]] = [
        (200, b"SSH-2.0-OpenSSH_9.6"),
        (200, {"password": "hunter2"}),
        (404, {"error": {"message": "the secret is hunter2", "field": 7, "hint": ["x"]}}),
        (500, b"\x1b[31mpanic"),
        (503, {}),
        (200, b"[" * 100_000),
    ]
    reasons = set()

    def ask(url: str) -> None:
        with (
            TrackerClient(url, member(1).identity, retries=0) as line,
            pytest.raises(NissError) as trouble,
        ):
            line.run(b"\xaa")
        assert "hunter2" not in trouble.value.message
        assert "\x1b" not in str(trouble.value)
        reasons.add(trouble.value.message)

    try:
        for status, body in answers:
            stub.answers["/v1/runs/aa"], stub.script = body, [(status, {})] * 3
            ask(stub.url)
    finally:
        stub.close()
    ask(f"http://127.0.0.1:{free_port()}")
    assert reasons == {"the tracker cannot be used"}
