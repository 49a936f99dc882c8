"""Running the tracker: from settings to a listening process that ends in good order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Collection, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from niss.errors import ConfigError, NissError
from niss.protocol.keyfile import create_keyfile, load_coalition, load_identity
from niss.protocol.keys import Identity
from niss.tracker.app import make_app
from niss.tracker.databases import open_store, sqlite_path
from niss.tracker.gate import log, start_logging
from niss.tracker.options import TrackerOptions
from niss.tracker.rounds import ExternalChains
from niss.tracker.service import Tracker

_GRACE_SECONDS = 10
_SWEEP_SECONDS = 3600.0
_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 30
# Without a whole request for so long, or with one that is not answered, a connection only takes a place away.
_SILENT_SECONDS, _UNANSWERED_SECONDS, _LOOK_SECONDS = 45.0, 120.0, 5.0
# What asks for lists and certificate to be read again; there is no such signal on Windows.
_RELOAD = getattr(signal, "SIGHUP", None)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(options: TrackerOptions) -> None:
    """Run until SIGTERM or SIGINT; requests under way are answered first, for at most ten seconds.

    On SIGHUP the lists of those who may take part, and the certificate, are read again; where that fails, everything
    stays as it was, and the log says why.

    Once connections are accepted, one line of JSON on stdout tells the address and the keys. What cannot work (a store,
    a key file, a certificate, a taken port) is a `NissError` before that.
    """
    server, _ = options.server, options.coalitions
    _check_tls(options)
    start_logging(options.log_level)
    identity = find_identity(options)
    store = open_store(options.store)
    try:
        holder = None
        if options.external_beacon is not None:
            holder = ExternalChains(options.external_beacon, identity, ca=options.external_ca)
        lists = {"lists": not options.holder_only, **_lists(options)}
        tracker = Tracker(store, identity, server=server, settings=options, holder=holder, **lists)
        running = _Server(tracker, options)
        listening = listen(options.host, options.port)
        # What is there now stays; the collector need not look through it again and again.
        gc.freeze()
        # uvicorn raises the signal again when it is done; it has been obeyed by then.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        running.run([listening])
    finally:
        store.close()
    log("stopped")


def find_identity(options: TrackerOptions) -> Identity:
    """The identity given, or that in the file beside the SQLite store, which is made at the first start.

    Raises `ConfigError` for a Redis store without one, since there is no file beside it.
    """
    if options.identity is not None:
        return load_identity(options.identity)
    database = sqlite_path(options.store)
    if database is None:
        hint = "make one with `niss keys new --out tracker.key` and give that file to each of them"
        raise ConfigError(
            "is needed: all trackers on one Redis must have the same", field="--identity", hint=hint
        )
    path = Path(database).with_suffix(".key")
    if path.exists():
        return load_identity(path)
    return create_keyfile(path, Identity.generate(os.urandom))


def _lists(options: TrackerOptions) -> dict[str, Any]:
    """The closed lists in the files that were given; an error where one of them cannot be used."""
    return {
        "admitted": None if options.admit is None else load_coalition(options.admit),
        "coalitions": {name: load_coalition(path) for name, path in options.coalitions.items()},
    }


def _check_tls(options: TrackerOptions) -> None:
    """`ConfigError` unless certificate and key are given together, and both are files, or neither is given."""
    if (options.tls_cert is None) != (options.tls_key is None):
        missing = "--tls-cert" if options.tls_cert is None else "--tls-key"
        raise ConfigError("is missing", field=missing, hint="TLS needs a certificate and its key")
    for name, path in (("--tls-cert", options.tls_cert), ("--tls-key", options.tls_key)):
        if path is not None and not path.is_file():
            raise ConfigError(f"the file {path} does not exist", field=name, hint="give a file in PEM format")


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections already: a taken port is a `ConfigError` before anything is started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        hint = "another process may have it; --port 0 takes a free one"
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error}", field="--port", hint=hint
        ) from None


def address(listening: socket.socket, *, secure: bool = False) -> str:
    """The address of a server that listens there, as a browser takes it."""
    host, port = listening.getsockname()[:2]
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class TidyServer(uvicorn.Server):
    """A server without websockets, access log and headers that tell its version.

    It drops half-open connections: uvicorn waits for the rest of a request for ever.
    """

    def __init__(self, app: ASGIApp, *, unanswered: float = _UNANSWERED_SECONDS, **settings: Any) -> None:
        """`unanswered` are the seconds that an answer may take; `settings` those of uvicorn."""
        settings |= {"ws": "none", "lifespan": "off", "log_config": None, "access_log": False}
        super().__init__(uvicorn.Config(app, server_header=False, proxy_headers=False, **settings))
        self._unanswered = unanswered
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and whatever goes on beside the requests."""
        await super().startup(sockets)
        if self.started:
            self._tasks = [asyncio.create_task(task) for task in self._beside()]

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        """What goes on beside the requests, until the server ends."""
        return [self._drop_half_open()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what goes on beside, then answer the requests under way."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await super().shutdown(sockets)

    async def _drop_half_open(self) -> None:
        """Close connections on which nothing moves."""
        seen: dict[Any, tuple[Any, bool, float]] = {}
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            seen = drop_half_open(self.server_state.connections, seen, time.monotonic(), self._unanswered)


class _Server(TidyServer):
    """A server that says when it is ready and erases clients that are long gone."""

    def __init__(self, tracker: Tracker, options: TrackerOptions) -> None:
        """`ConfigError` where the certificate cannot be used."""
        super().__init__(
            make_app(tracker),
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            limit_concurrency=2000,
            backlog=_BACKLOG,
        )
        self._tracker, self._options = tracker, options
        self._asked = asyncio.Event()
        with _usable_certificate():
            self.config.load()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then print the one line of JSON that says where and under which keys."""
        await super().startup(sockets)
        if not self.started:
            return
        # Only the main thread is told of signals.
        if _RELOAD is not None and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(_RELOAD, self._asked.set)
        listening: Any = self.servers[0].sockets[0]
        secure = self._options.tls_cert is not None
        url = address(listening, secure=secure)
        if not secure and listening.getsockname()[0] not in _LOOPBACK:
            hint = "give --tls-cert and --tls-key, or let a proxy do TLS"
            log("listening without TLS beyond this machine", hint=hint)
        keys = {"tracker": self._tracker.public.hex(), "holder": self._tracker.holder.public.hex()}
        log("ready", url=url)
        sys.stdout.write(json.dumps({"url": url, **keys}) + "\n")
        sys.stdout.flush()

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._beside(), self._sweep(), self._reload()]

    async def _reload(self) -> None:
        """Read lists and certificate again as often as the signal asks for it."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                lists = await asyncio.to_thread(_lists, self._options)
                left = await asyncio.to_thread(self._tracker.replace_lists, **lists)
                log("lists read again", left=left)
                if self.config.ssl is not None:
                    _reload_certificate(self.config.ssl, self._options)
                    log("certificate read again")
            except NissError as error:
                hint = error.hint or "mend the file and send the signal again"
                log("reload failed", level=logging.ERROR, why=error.message, hint=hint)
            except Exception as error:
                log("reload failed", level=logging.ERROR, error=error, hint="see the traceback")

    async def _sweep(self) -> None:
        """Erase clients that are long gone, once an hour; a failure is logged and tried again the next hour."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                log("swept", erased=await asyncio.to_thread(self._tracker.sweep))
            except Exception as error:
                log("sweep failed", error=error)


def _reload_certificate(context: ssl.SSLContext, options: TrackerOptions) -> None:
    """Use the certificate as it is on disk for connections from now on; `ConfigError` if it does not fit its key."""
    assert options.tls_cert is not None
    with _usable_certificate():
        # One that fails would spoil the context.
        for tried in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
            tried.load_cert_chain(options.tls_cert, options.tls_key)


@contextlib.contextmanager
def _usable_certificate() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        unusable = f"the certificate or its key cannot be used: {error}"
        raise ConfigError(unusable, field="--tls-cert", hint="give PEM files") from None


def drop_half_open(
    connections: Collection[Any],
    seen: Mapping[Any, tuple[Any, bool, float]],
    now: float,
    unanswered: float = _UNANSWERED_SECONDS,
) -> dict[Any, tuple[Any, bool, float]]:
    """Close each connection that has stood still for too long; returns what `seen` is to be the next time.

    connections   uvicorn's, each with the `cycle` of its latest request, if there was one
    seen          by connection: that cycle, whether it was being answered, and since when both are so
    now           in seconds
    unanswered    seconds that an answer may take

    One that brought neither a first nor another request in 45 seconds is closed, however many parts of one it brings;
    so is one that does not take its answer in time.
    """
    standing = {}
    for connection in list(connections):
        cycle = connection.cycle
        answering = cycle is not None and not cycle.response_complete
        before = seen.get(connection)
        if before is None or before[0] is not cycle or before[1] != answering:
            standing[connection] = (cycle, answering, now)
        elif now - before[2] > (unanswered if answering else _SILENT_SECONDS):
            connection.transport.abort()
        else:
            standing[connection] = before
    return standing
