"""How many neighbour requests a second a tracker answers, and how soon.

A real `niss tracker` process, pinned to one core where the machine has two, or several on one store (`--trackers`),
each on a core of its own as far as there are any, with all clients registered and seated in rounds of up to 10,000.
Each request comes from another client, is signed by it, and is answered with its neighbours and their signed keys.
Requests are sent at fixed times whether or not earlier ones were answered; a latency counts from the moment a request
was due, so a tracker that falls behind cannot hide it. The requests are signed beforehand.

Where other work takes the cores, the rate says little: CPU time a request, of the trackers and of the load, says what
the machine could do.

The store is filled directly, the rounds are opened through the tracker's client. A request does not touch the store
once its round was asked for; what the store costs shows in `opening a round`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness import Report, command_line, cpu_seconds, megabytes

from niss.protocol.agreement import participants_hash
from niss.protocol.keyfile import create_keyfile
from niss.protocol.keys import Identity, PrekeyStore
from niss.tracker.api import Attempt
from niss.tracker.auth import LARGEST_ROUND, sign_request
from niss.tracker.client import TrackerClient
from niss.tracker.databases import SqliteStore, open_store
from niss.tracker.store import TrackerStore

NEIGHBOURS = 10
CONNECTIONS = 32
_TTL = 86_400.0


def make_clients(count: int) -> list[tuple[Identity, Any]]:
    """Identities, each with one signed prekey."""
    identities = [Identity.generate(os.urandom) for _ in range(count)]
    return [(one, PrekeyStore().batch(1, one, os.urandom)[0]) for one in identities]


def fill(store: TrackerStore, clients: Sequence[tuple[Identity, Any]]) -> None:
    expires = time.time() + _TTL
    for identity, prekey in clients:
        store.register(identity.public, [prekey], expires=expires, largest=16)


@contextmanager
def redis_process(folder: Path) -> Iterator[str]:
    """A Redis server that logs every write before it answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", "always"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def prepare(kind: str, url: str, clients: Sequence[tuple[Identity, Any]]) -> None:
    """Register everyone, without waiting for the disk each time; the tracker itself always waits."""
    if kind == "sqlite":
        store: TrackerStore = SqliteStore(url.removeprefix("sqlite:///"), durable=False)
        fill(store, clients)
    else:
        import redis

        with redis.Redis.from_url(url) as plain:
            store = open_store(url)
            plain.config_set("appendfsync", "no")
            fill(store, clients)
            plain.config_set("appendfsync", "always")
    store.close()


@contextmanager
def tracker_process(key: Path, url: str, server: Identity, core: int) -> Iterator[tuple[int, str]]:
    """A tracker on that core; its process number and its address."""
    flags = ["--server-key", server.public.hex(), "--store", url, "--identity", str(key), "--port", "0"]
    flags += ["--address-rate", "0", "--identity-rate", "0", "--log-level", "warning"]
    command = [sys.executable, "-m", "niss", "tracker", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            os.sched_setaffinity(process.pid, {core})
            yield process.pid, told["url"]
        finally:
            process.terminate()


def open_rounds(
    url: str, server: Identity, clients: Sequence[tuple[Identity, Any]]
) -> tuple[list[str], float]:
    """Seat everyone, each in one round; for each client its path, and the median time to open a round."""
    paths, times = [], []
    size = min(LARGEST_ROUND, len(clients))
    with TrackerClient(url, server, timeout=120) as asking:
        for place, start in enumerate(range(0, len(clients) - size + 1, size)):
            run = b"benchmark-%d" % place
            members = [identity.public for identity, _ in clients[start : start + size]]
            asking.start_run(run, 1)
            began = time.perf_counter()
            shown = asking._ask(
                "PUT",
                f"/v1/runs/{run.hex()}/rounds/0/attempts/0/seats",
                {"members": [one.hex() for one in members]},
            )
            listed = bytes.fromhex(shown["participants_hash"])
            asking.beacon(Attempt(run, 0, 0), listed + bytes(32), neighbours=NEIGHBOURS)
            times.append(time.perf_counter() - began)
            if place == 0:
                assert participants_hash(asking.participants(Attempt(run, 0, 0))) == listed
            paths += [f"/v1/runs/{run.hex()}/rounds/0/attempts/0/neighbours"] * size
    return paths, statistics.median(times)


def signed_requests(
    url: str, tracker: bytes, clients: Sequence[tuple[Identity, Any]], paths: Sequence[str], count: int
) -> list[bytes]:
    host = urlsplit(url).netloc
    step = max(1, len(paths) // count)
    requests, now = [], int(time.time()) + 10
    for number in range(count):
        which = number * step % len(paths)
        headers = sign_request(
            clients[which][0],
            tracker=tracker,
            method="GET",
            target=paths[which],
            body=b"",
            time=now,
            nonce=os.urandom(16),
        )
        lines = [f"GET {paths[which]} HTTP/1.1", f"host: {host}", *(f"{k}: {v}" for k, v in headers.items())]
        requests.append(("\r\n".join(lines) + "\r\n\r\n").encode())
    return requests


async def load(
    urls: Sequence[str], requests: Sequence[bytes], rate: float
) -> tuple[list[float], int, int, float]:
    """Latencies of all that succeeded, how many failed, bytes received, seconds it took."""
    waiting: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
    latencies: list[float] = []
    failed = received = 0

    async def worker(url: str) -> None:
        nonlocal failed, received
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
        while (entry := await waiting.get()) is not None:
            due, request = entry
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            if head.startswith(b"HTTP/1.1 200"):
                latencies.append(time.perf_counter() - due)
                received += length
            else:
                failed += 1
        writer.close()

    workers = [asyncio.create_task(worker(urls[place % len(urls)])) for place in range(CONNECTIONS)]
    began = time.perf_counter() + 0.1
    for number, request in enumerate(requests):
        due = began + number / rate
        pause = due - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        waiting.put_nowait((due, request))
    for _ in workers:
        waiting.put_nowait(None)
    await asyncio.gather(*workers)
    return latencies, failed, received, time.perf_counter() - began


def measure(kind: str, url: str, folder: Path, options: argparse.Namespace, report: Report) -> None:
    """All rates and repeats on one store."""
    server, clients = Identity.generate(os.urandom), options.made
    prepare(kind, url, clients)
    key, cores = folder / "tracker.key", sorted(os.sched_getaffinity(0))
    tracker = create_keyfile(key, Identity.generate(os.urandom)).public
    with ExitStack() as stack:
        started = [
            stack.enter_context(tracker_process(key, url, server, cores[-1 - place % len(cores)]))
            for place in range(options.trackers)
        ]
        pids, urls = [pid for pid, _ in started], [address for _, address in started]
        if len(cores) > options.trackers:
            os.sched_setaffinity(0, set(cores[: -options.trackers]))
            stack.callback(os.sched_setaffinity, 0, set(cores))
        paths, opening = open_rounds(urls[0], server, clients)
        # Warm up; each tracker reads the round into its memory.
        asyncio.run(load(urls, signed_requests(urls[0], tracker, clients, paths, 1_000), 250))
        for rate, _ in itertools.product(options.rate, range(options.repeats)):
            count = int(rate * options.seconds)
            requests = signed_requests(urls[0], tracker, clients, paths, count)
            gc.collect()
            gc.freeze()  # A collection of the load's own objects would be measured as latency.
            before, own = cpu_seconds(pids), time.process_time()
            latencies, failed, received, seconds = asyncio.run(load(urls, requests, rate))
            used, own = cpu_seconds(pids) - before, time.process_time() - own
            ranked = sorted(latencies) or [float("nan")]
            row = {"store": kind, "trackers": options.trackers, "clients": len(clients)}
            row |= {"wanted/s": rate, "reached/s": len(latencies) / seconds, "failed": failed}
            for name, share in {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}.items():
                row[f"{name} ms"] = 1000 * ranked[min(len(ranked) - 1, int(share * len(ranked)))]
            row |= {"CPU ms a request": 1000 * used / count, "of the load": 1000 * own / count}
            row |= {"answer B": received / max(1, len(latencies)), "opening a round ms": 1000 * opening}
            row |= {"MB": megabytes(pids, "Rss"), "load of the machine": os.getloadavg()[0]}
            report.add("neighbour requests", [row])


def main() -> None:
    """Measure, print, write."""
    number = {"type": float, "nargs": "+"}
    options = command_line(
        __doc__,
        only=("sqlite", "redis"),
        repeats=1,
        clients={"type": int, "default": 100_000},
        rate=number | {"default": [1000.0]},
        seconds={"type": float, "default": 20.0},
        trackers={"type": int, "default": 1, "help": "processes on one store"},
    )
    if options.quick:
        options.clients, options.seconds = 2000, 3.0
    report = Report(options, "fastapi", "uvicorn", "httptools", "uvloop", "redis", "cryptography")
    options.made = make_clients(options.clients)
    for kind in options.only:
        if kind == "redis" and shutil.which("redis-server") is None:
            print("redis skipped: apt-get install redis-server, pip install redis")
            continue
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            folder = Path(name)
            url = f"sqlite:///{folder / 'tracker.db'}"
            if kind == "redis":
                url = stack.enter_context(redis_process(folder))
            measure(kind, url, folder, options, report)


if __name__ == "__main__":
    main()
