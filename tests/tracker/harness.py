"""Identities with prekeys, a tracker in this process, and real tracker and Redis processes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from niss.local.deployment import free_port
from niss.protocol.keyfile import create_keyfile
from niss.protocol.keys import Identity, PrekeyStore
from niss.protocol.messages import Beacon, Prekey, Terms
from niss.tracker.api import Attempt, CommitmentBody, SeatsWanted
from niss.tracker.auth import sign_request
from niss.tracker.rounds import RoundView
from niss.tracker.service import Tracker
from niss.tracker.store import TrackerStore
from support.protocol_round import seeded_entropy

REDIS_MISSING = "the Redis store is not tested: apt-get install redis-server, pip install redis"
_PATIENCE = 60.0


@dataclass
class Member:
    """A client of the tracker: an identity and the private halves of its prekeys."""

    identity: Identity
    prekeys: PrekeyStore = field(default_factory=PrekeyStore)
    label: str = "member"

    @property
    def public(self) -> bytes:
        return self.identity.public

    def batch(self, count: int) -> tuple[Prekey, ...]:
        if not count:
            return ()
        return self.prekeys.batch(count, self.identity, seeded_entropy(f"{self.label}/{len(self.prekeys)}"))


def member(number: int, label: str = "member") -> Member:
    name = f"{label}-{number}"
    return Member(Identity(hashlib.sha256(name.encode()).digest()), label=name)


def members(count: int, label: str = "member") -> list[Member]:
    return [member(number, label) for number in range(count)]


SERVER = member(0, "server")
TRACKER = Identity.generate(seeded_entropy("tracker"))
RUN = b"run"
START = 1_800_000_000.0


def terms(
    number: int = 0, attempt: int = 0, neighbours: float = 4.0, *, run: bytes = RUN, **changes: Any
) -> Terms:
    """Of an attempt in which everything is right."""
    sizes = {"coordinates": 8, "grid_bits": 16, "modulus_bits": 32, "clip": 1.0}
    noise = {"unit_variance": 0.1, "residual_variance": 0.1, "self_variance": 0.0}
    repair = dict.fromkeys(("revealed", "dropped", "committee", "threshold"), 0)
    place: dict[str, Any] = {"run": run, "round": number, "attempt": attempt, "neighbours": neighbours}
    return Terms(mode="tolerate", **(place | sizes | noise | repair | changes))


class Scene:
    """A tracker in this process, whose clock stands still unless a test moves `now`, and its server.

    open_store   opens its store, once more after a crash
    given        settings of the tracker
    """

    def __init__(self, open_store: Callable[[], TrackerStore], **given: Any) -> None:
        self.now, self._open, self._given = START, open_store, given
        self.open()

    def open(self) -> None:
        """Start, or start again after a crash: from the store and the identity alone."""
        self.store = self._open()
        self.tracker = Tracker(
            self.store,
            TRACKER,
            server=SERVER.public,
            clock=lambda: self.now,
            monotonic=lambda: self.now,
            **self._given,
        )
        self.rounds = self.tracker.rounds

    def crash(self) -> None:
        self.store.close()
        self.open()

    def enrol(self, many: Sequence[Member], prekeys: int = 4) -> None:
        for one in many:
            self.tracker.register(one.public, one.batch(prekeys), None)

    def seat(self, many: Sequence[Member], number: int = 0, attempt: int = 0, **more: Any) -> RoundView:
        request = SeatsWanted(members=[one.public for one in many], **more)
        return self.rounds.seat(SERVER.public, Attempt(RUN, number, attempt), request)

    def let_out(
        self, commitment: bytes, number: int = 0, attempt: int = 0, *, neighbours: float | None = None
    ) -> Beacon:
        wanted = CommitmentBody(commitment=commitment, neighbours=neighbours)
        return self.rounds.beacon(SERVER.public, Attempt(RUN, number, attempt), wanted)


def ask_app(
    app: Any, method: str, path: str, /, *, body: bytes = b"", by: Member | None = None, **changes: Any
) -> tuple[int, Any]:
    """Status and JSON of one request through the whole application, signed `by` somebody for `TRACKER`.

    changes   of what is signed: another target than is asked for, another method, time or nonce; `kind` of the body
    """
    kind = changes.pop("kind", b"application/json")
    target, _, query = path.partition("?")
    headers: dict[str, str] = {}
    if by is not None:
        signed = {"method": method, "target": path, "body": body, "time": int(START)}
        headers = sign_request(by.identity, tracker=TRACKER.public, **(signed | changes))
    scope = {
        "type": "http",
        "method": method,
        "path": target,
        "raw_path": target.encode(),
        "query_string": query.encode(),
        "headers": [(b"content-type", kind), *((k.encode(), v.encode()) for k, v in headers.items())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


class RedisProcess:
    """A real Redis server that logs every write to disk before it answers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--daemonize", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait_for_port(self.port, self._process)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisProcess | None]:
    """A Redis server, or None where there is none to start."""
    try:
        import redis  # noqa: F401
    except ImportError:
        yield None
        return
    if shutil.which("redis-server") is None:
        yield None
        return
    process = RedisProcess(folder)
    try:
        yield process
    finally:
        process.kill()


class TrackerProcess:
    """`niss tracker` as a process of its own; `restart` starts it again on the same store, port and identity."""

    def __init__(self, folder: Path, server: bytes, *flags: str, store: str | None = None) -> None:
        self.folder, self.port = folder, free_port()
        self._key = folder / "tracker.key"
        if not self._key.exists():
            create_keyfile(self._key, Identity(hashlib.sha256(str(folder).encode()).digest()))
        store = f"sqlite:///{folder / 'tracker.db'}" if store is None else store
        self._flags = ["--server-key", server.hex(), "--store", store, "--identity", str(self._key)]
        self._flags += ["--port", str(self.port), *flags]
        self.log = folder / f"tracker-{self.port}.log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "niss", "tracker", *self._flags], stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the tracker did not start:\n{self.log.read_text()}")
        self.ready: dict[str, Any] = json.loads(line)
        self.url: str = self.ready["url"]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(_PATIENCE)
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()

    def restart(self, number: int = signal.SIGTERM) -> None:
        self.stop(number)
        self.start()

    def entries(self) -> list[dict[str, Any]]:
        """The log, line by line."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def tracker_process(
    folder: Path, server: bytes, *flags: str, store: str | None = None
) -> Iterator[TrackerProcess]:
    running = TrackerProcess(folder, server, *flags, store=store)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.stop(signal.SIGKILL)


def ask_process(
    process: TrackerProcess, method: str, target: str, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and body of one request to a tracker that runs."""
    connection = HTTPConnection(urlsplit(process.url).netloc, timeout=60)
    connection.request(method, target, headers=dict(headers or {}))
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def signed_headers(process: TrackerProcess, by: Member, method: str, target: str) -> dict[str, str]:
    """The headers of a request without a body."""
    tracker = bytes.fromhex(process.ready["tracker"])
    return sign_request(by.identity, tracker=tracker, method=method, target=target)


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        if process.poll() is not None:
            raise AssertionError(f"it ended with status {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise AssertionError(f"nothing listens on port {port}")
