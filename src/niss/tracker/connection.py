"""HTTP to a tracker with nothing but the standard library: one connection, signed requests, patient retries."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from niss.errors import ConfigError, RemoteProtocolError
from niss.protocol.keys import Identity
from niss.tracker.auth import NONCE_BYTES, sign_request

_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 8.0
_LARGEST_ANSWER = 1 << 24
_AGAIN = (429, 502, 503, 504)


class TrackerUnavailable(RemoteProtocolError):
    """The tracker cannot be reached, or says that it cannot answer now."""


class TrackerRefused(RemoteProtocolError):
    """The tracker answered that it will not do this; `status` and `field` say more."""

    def __init__(self, status: int, message: str, *, field: str | None, hint: str | None) -> None:
        super().__init__(
            f"the tracker refused: {message if field is None else f'{field}: {message}'}", hint=hint
        )
        self.status, self.field = status, field


class Connection:
    """Asks a tracker. What it asks can all be asked twice, so a lost answer is asked for again."""

    def __init__(
        self,
        url: str,
        *,
        ca: Path | None,
        timeout: float,
        retries: int,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or parts.hostname is None or parts.path.strip("/"):
            raise ConfigError(
                f"{url!r} is no tracker's address",
                field="tracker",
                hint="for example https://tracker.example:8443",
            )
        self._url = url
        self._host, self._port, self._secure = parts.hostname, port, parts.scheme == "https"
        self._context = self._make_context(ca) if self._secure else None
        self._timeout, self._retries = timeout, retries
        self._sleep, self._clock = sleep, clock
        self._lock = threading.Lock()
        self._open: http.client.HTTPConnection | None = None

    @staticmethod
    def _make_context(ca: Path | None) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=None if ca is None else str(ca))
        except OSError as error:
            raise ConfigError(f"cannot use {ca}: {error}", field="ca", hint="give a PEM file") from None

    def ask(
        self, method: str, target: str, body: object = None, *, signer: tuple[Identity, bytes] | None = None
    ) -> Any:
        """The JSON of the answer. `signer` is who asks, and the public key of the tracker that is asked."""
        sent = b"" if body is None else json.dumps(body).encode()
        pause, left = _FIRST_PAUSE, self._retries
        while True:
            reused = self._open is not None
            try:
                status, headers, answer = self._once(method, target, sent, signer)
            except ssl.SSLCertVerificationError as error:
                raise TrackerUnavailable(
                    f"the certificate of {self._url} does not verify: {error.verify_message}",
                    hint="give the certificate of its authority as `ca`",
                ) from None
            except (OSError, http.client.HTTPException) as error:
                if reused:
                    continue  # The connection had grown old; a fresh one says whether the tracker is there.
                trouble, wait = f"{type(error).__name__}: {error}", 0.0
            else:
                if status not in _AGAIN:
                    return self._answered(status, answer)
                trouble, wait = f"status {status}", _seconds(headers.get("retry-after", ""))
            if not left:
                break
            left -= 1
            # Somewhat at random, so that all clients of a tracker that restarts do not come at once.
            share = 0.5 + secrets.randbelow(1000) / 2000
            self._sleep(min(max(pause * share, wait), _LONGEST_PAUSE))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise TrackerUnavailable(
            f"the tracker at {self._url} does not answer ({trouble})",
            hint="is it running, and reachable from here?",
        )

    def _once(
        self, method: str, target: str, body: bytes, signer: tuple[Identity, bytes] | None
    ) -> tuple[int, dict[str, str], bytes]:
        headers = {"accept": "application/json"}
        if body:
            headers["content-type"] = "application/json"
        if signer is not None:
            identity, tracker = signer
            headers |= sign_request(
                identity,
                tracker=tracker,
                method=method,
                target=target,
                body=body,
                time=int(self._clock()),
                nonce=os.urandom(NONCE_BYTES),
            )
        with self._lock:
            try:
                connection = self._connection()
                connection.request(method, target, body=body or None, headers=headers)
                response = connection.getresponse()
                answer = response.read(_LARGEST_ANSWER + 1)
                if len(answer) > _LARGEST_ANSWER:
                    raise http.client.HTTPException("the answer is too large")
                return response.status, {k.lower(): v for k, v in response.getheaders()}, answer
            except BaseException:
                self._close()
                raise

    def _connection(self) -> http.client.HTTPConnection:
        if self._open is None:
            if self._context is not None:
                self._open = http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout, context=self._context
                )
            else:
                self._open = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        return self._open

    @staticmethod
    def _answered(status: int, answer: bytes) -> Any:
        try:
            content = json.loads(answer) if answer else None
        except ValueError:
            raise RemoteProtocolError(
                f"the tracker answered {status} and no JSON", hint="is this the address of a tracker?"
            ) from None
        if 200 <= status < 300:
            return content
        error = content.get("error") if isinstance(content, dict) else None
        error = error if isinstance(error, dict) else {}
        message = str(error.get("message", f"status {status}"))
        raise TrackerRefused(status, message, field=error.get("field"), hint=error.get("hint"))

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _seconds(text: str) -> float:
    """A Retry-After in seconds; one that is a date, or nonsense, counts for nothing."""
    return float(text) if text.isascii() and text.isdigit() else 0.0
