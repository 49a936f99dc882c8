"""The tracker, as clients and the server of a federation use it, with nothing but the standard library.

`Connection` is HTTP: one connection, signed requests, patient retries. `TrackerClient` is what can be asked. What the
tracker says is checked against its keys: the anchor of a run, participant lists and every prekey in them. Whether a
beacon is the right link is checked where it is used, by `niss.protocol.client`. Every call may be repeated.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from niss.errors import ConfigError, RemoteProtocolError
from niss.protocol.agreement import participants_hash
from niss.protocol.beacon import link_of
from niss.protocol.keys import Identity, SignedPrekey, check_prekey, fingerprint, verify
from niss.protocol.messages import Beacon, Participant, Prekey
from niss.tracker.auth import LIST_PURPOSE, NONCE_BYTES, check_anchor, list_message, sign_request
from niss.tracker.store import Stock

_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 8.0
_LARGEST_ANSWER = 1 << 24
_AGAIN = (429, 502, 503, 504)


class TrackerUnavailable(RemoteProtocolError):
    """The tracker cannot be reached, or says that it cannot answer now."""


class TrackerRefused(RemoteProtocolError):
    """The tracker answered that it will not do this; `status` and `field` say more. Not worth repeating as it is."""

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
        """url              http or https, host and port, without a path
        ca               a PEM file with the authority of the tracker's certificate; None: those of this machine
        timeout          seconds for connecting and for each wait for data
        retries          how often a request is repeated after trouble, with growing pauses up to 8 seconds
        sleep, clock     stand-ins for tests
        """
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
        """Send one request, signed anew each time, and read the whole answer, at most 16 MiB of it."""
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
        """The open connection, or a new one where there is none."""
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
        """The content of an answer, or what it means that there is none: `TrackerRefused` with the tracker's own
        words.
        """
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


__all__ = ["Description", "Supply", "TrackerClient", "TrackerRefused", "TrackerUnavailable"]


@dataclass(frozen=True)
class Description:
    """Whose signatures to expect, and what the chain of a run ends in.

    tracker     signs participant lists; requests are signed for it
    holder      signs beacons: for `Policy.holder`
    server      the one who may open rounds here
    anchor      of the run asked about, for `Policy.anchor`; None where no run was named
    rounds      for how many rounds its chain is
    signature   the holder's, under the two
    """

    tracker: bytes
    holder: bytes
    server: bytes
    anchor: bytes | None = None
    rounds: int | None = None
    signature: bytes | None = None


@dataclass(frozen=True)
class Supply(Stock):
    """The stock of this client's prekeys; `wanted` says how many more to send, 0 if there are enough."""

    wanted: int = 0
    ttl_seconds: float = 0.0


class TrackerClient:
    """One identity's line to a tracker."""

    def __init__(
        self,
        url: str,
        identity: Identity,
        *,
        ca: Path | None = None,
        tracker: bytes | None = None,
        timeout: float = 10.0,
        retries: int = 6,
    ) -> None:
        """`ca` verifies the tracker's certificate, if no authority of this machine does; `tracker` pins its key.

        With 6 retries a tracker may be away for about a quarter of a minute.
        """
        self._identity, self._pinned = identity, tracker
        self._connection = Connection(url, ca=ca, timeout=timeout, retries=retries)
        self._described: Description | None = None

    def describe(self, run: bytes | None = None) -> Description:
        """The tracker's keys and, for a run, the anchor its holder committed to."""
        if self._described is None:
            shown = self._connection.ask("GET", "/v1/tracker")
            tracker, holder, server = (_hex(shown, name, 32) for name in ("tracker", "holder", "server"))
            found = Description(tracker, holder, server)
            if self._pinned not in (None, found.tracker):
                raise RemoteProtocolError(
                    f"this tracker is {fingerprint(found.tracker)}, not the one expected",
                    hint="compare its key with its owner",
                )
            self._described = found
        known = self._described
        if run is None:
            return known
        shown = self._connection.ask("GET", f"/v1/runs/{run.hex()}")
        anchor = self._anchor(run, shown)
        return replace(
            known, anchor=anchor, rounds=_whole(shown, "rounds"), signature=_hex(shown, "signature", 64)
        )

    # As a client.

    def register(self, prekeys: Sequence[Prekey | SignedPrekey], coalition: str | None = None) -> Supply:
        """Become live with these prekeys; again to send more. Save their private halves first."""
        body: dict[str, object] = {"prekeys": [_shown_prekey(one) for one in prekeys]}
        if coalition is not None:
            body["coalition"] = coalition
        return _supply(self._ask("PUT", "/v1/clients/me", body))

    def heartbeat(self) -> Supply:
        """Stay live; send `wanted` prekeys with `register` if that is not 0."""
        return _supply(self._ask("POST", "/v1/clients/me/heartbeat"))

    def leave(self) -> None:
        """Be forgotten. Leaving twice is no error."""
        try:
            self._ask("DELETE", "/v1/clients/me")
        except TrackerRefused as refused:
            if refused.status != 404:
                raise

    def join(self, coalition: str | None) -> None:
        """Belong to this coalition, or to none."""
        self._ask("PUT", "/v1/clients/me/coalition", {"coalition": coalition})

    def participants(self, run: bytes, round: int, attempt: int) -> tuple[Participant, ...]:
        """Everyone in an attempt, in order; verified."""
        return self._list(
            run, round, attempt, self._ask("GET", _attempt(run, round, attempt) + "/participants")
        )

    def neighbours(self, run: bytes, round: int, attempt: int) -> dict[int, Participant]:
        """Those who share noise with this client, by seat; their prekeys are verified.

        That these are the right ones follows only from the whole list, the terms and the beacon.
        """
        shown = self._ask("GET", _attempt(run, round, attempt) + "/neighbours")
        return {int(one["seat"]): _participant(one) for one in _entries(shown, "neighbours")}

    # As the server.

    def start_run(self, run: bytes, rounds: int) -> bytes:
        """The anchor of a chain for that many rounds, each of which can be tried four times."""
        return self._anchor(run, self._ask("PUT", f"/v1/runs/{run.hex()}", {"rounds": rounds}))

    def seat(
        self,
        run: bytes,
        round: int,
        attempt: int,
        members: Sequence[bytes] | None = None,
        *,
        count: int | None = None,
        coalition: str | None = None,
        at_least: int = 2,
    ) -> tuple[Participant, ...]:
        """Who takes part in an attempt, for good, each with a prekey of its own.

        Of `members`, those who are live and have a prekey left, in that order; or `count` live clients at random, of
        one coalition if it is named. Fewer than `at_least` are refused, and nothing is used up.
        """
        body: dict[str, object] = {"at_least": at_least}
        if members is not None:
            body["members"] = [one.hex() for one in members]
        if count is not None:
            body["count"] = count
        if coalition is not None:
            body["coalition"] = coalition
        return self._list(
            run, round, attempt, self._ask("PUT", _attempt(run, round, attempt) + "/seats", body)
        )

    def beacon(
        self, run: bytes, round: int, attempt: int, commitment: bytes, *, neighbours: float | None = None
    ) -> Beacon:
        """The link of an attempt, for `participants_hash + terms_hash`: given out for one commitment only.

        With `neighbours` (as in the terms) the tracker can also tell each client who its neighbours are.
        """
        body = {"commitment": commitment.hex(), "neighbours": neighbours}
        shown = self._ask("PUT", _attempt(run, round, attempt) + "/beacon", body)
        beacon = Beacon(_whole(shown, "index"), _hex(shown, "value", 32), _hex(shown, "signature", 64))
        if beacon.index != link_of(round, attempt):
            raise RemoteProtocolError("the tracker gave the link of another attempt")
        return beacon

    def deposit(self, identity: bytes, prekeys: Sequence[Prekey | SignedPrekey]) -> Supply:
        """Pass on fresh prekeys that a registered client sent along with its upload."""
        body = {"prekeys": [_shown_prekey(one) for one in prekeys]}
        return _supply(self._ask("POST", f"/v1/clients/{identity.hex()}/prekeys", body))

    # Both.

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: str, target: str, body: object = None) -> Any:
        return self._connection.ask(method, target, body, signer=(self._identity, self.describe().tracker))

    def _anchor(self, run: bytes, shown: Any) -> bytes:
        """The anchor in an answer, once the holder's signature under it, the run and its length is verified."""
        anchor, rounds = _hex(shown, "anchor", 32), _whole(shown, "rounds")
        check_anchor(self.describe().holder, run, rounds, anchor, _hex(shown, "signature", 64))
        return anchor

    def _list(self, run: bytes, round: int, attempt: int, shown: Any) -> tuple[Participant, ...]:
        """The participants in an answer, once the tracker's signature under exactly this list, run and link is
        verified.
        """
        found = tuple(_participant(one) for one in _entries(shown, "participants"))
        message = list_message(run, link_of(round, attempt), participants_hash(found))
        verify(self.describe().tracker, LIST_PURPOSE, message, _hex(shown, "signature", 64))
        return found


def _attempt(run: bytes, round_number: int, attempt: int) -> str:
    return f"/v1/runs/{run.hex()}/rounds/{round_number}/attempts/{attempt}"


def _shown_prekey(prekey: Prekey | SignedPrekey) -> dict[str, object]:
    number = prekey.number if isinstance(prekey, Prekey) else prekey.id
    return {"number": number, "public": prekey.public.hex(), "signature": prekey.signature.hex()}


def _participant(shown: Any) -> Participant:
    """A participant from JSON; its prekey must be signed by its identity."""
    inner = shown.get("prekey") if isinstance(shown, dict) else None
    prekey = Prekey(_whole(inner, "number"), _hex(inner, "public", 32), _hex(inner, "signature", 64))
    identity = _hex(shown, "identity", 32)
    check_prekey(prekey, identity)
    return Participant(identity, prekey)


def _supply(shown: Any) -> Supply:
    numbers = {name: _whole(shown, name) for name in ("held", "accepted", "known", "stale", "wanted")}
    return Supply(**numbers, ttl_seconds=float(shown.get("ttl_seconds", 0.0)))


def _entries(shown: Any, name: str) -> list[Any]:
    found = shown.get(name) if isinstance(shown, dict) else None
    if not isinstance(found, list):
        raise _odd(name)
    return found


def _whole(shown: Any, name: str) -> int:
    found = shown.get(name) if isinstance(shown, dict) else None
    if type(found) is not int:
        raise _odd(name)
    return found


def _hex(shown: Any, name: str, length: int) -> bytes:
    """Bytes of a known length from hex; anything else in their place is an error of the tracker."""
    found = shown.get(name) if isinstance(shown, dict) else None
    try:
        value = bytes.fromhex(found) if isinstance(found, str) else b""
    except ValueError:
        value = b""
    if len(value) != length:
        raise _odd(name)
    return value


def _odd(name: str) -> RemoteProtocolError:
    """The error for an answer without a valid entry of that name."""
    return RemoteProtocolError(
        f"the tracker's answer has no valid {name!r}",
        hint="is this the address of a tracker of this version?",
    )
