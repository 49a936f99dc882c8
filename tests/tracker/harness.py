"""Identities with prekeys, and real tracker and Redis processes for the tests of this folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from niss.protocol.keyfile import create_keyfile
from niss.protocol.keys import Identity, PrekeyStore, SignedPrekey
from niss.tracker.auth import sign_request
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

    def batch(self, count: int) -> tuple[SignedPrekey, ...]:
        if not count:
            return ()
        return self.prekeys.batch(count, self.identity, seeded_entropy(f"{self.label}/{len(self.prekeys)}"))


def member(number: int, label: str = "member") -> Member:
    name = f"{label}-{number}"
    return Member(Identity(hashlib.sha256(name.encode()).digest()), label=name)


def members(count: int, label: str = "member") -> list[Member]:
    return [member(number, label) for number in range(count)]


def ask_app(
    app: Any, method: str, path: str, /, *, body: bytes = b"", by: Member | None = None, **changes: Any
) -> tuple[int, Any]:
    """Status and JSON of one request through the whole application, signed `by` somebody for the tracker `tracker`.

    changes   of what is signed: another target than is asked for, another method, time or nonce; `kind` of the body
    """
    kind = changes.pop("kind", b"application/json")
    target, _, query = path.partition("?")
    headers: dict[str, str] = {}
    if by is not None:
        signed = {"method": method, "target": path, "body": body, "nonce": os.urandom(16)}
        headers = sign_request(by.identity, **(signed | {"time": int(time.time())} | changes))
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


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port


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


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key, made for this test."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tracker")])
    today = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=2))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    descriptor = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
    return certificate, private
