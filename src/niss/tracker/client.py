"""The tracker, as clients and the server of a federation use it.

One connection, signed requests, patient retries: all that is asked can be asked twice, so a lost answer is asked for
again. What the tracker says is checked against its keys: the anchor of a run, participant lists and every prekey in
them. Whether a beacon is the right link is checked where it is used, by `niss.protocol.client`.
"""

from __future__ import annotations

import http.client
import json
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from niss.errors import ConfigError, RemoteProtocolError
from niss.protocol.agreement import participants_hash
from niss.protocol.keys import Identity, check_prekey, fingerprint, verify
from niss.protocol.messages import Beacon, Participant, Prekey
from niss.redaction import printable
from niss.session.ports import USELESS, CoordinatorAway
from niss.tracker import api
from niss.tracker.api import Attempt
from niss.tracker.auth import LIST_PURPOSE, check_anchor, list_message, sign_request

_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 8.0
_LARGEST_ANSWER = 1 << 24
_AGAIN = (429, 502, 503, 504)
M = TypeVar("M", bound=BaseModel)


class TrackerTrouble(RemoteProtocolError):
    """The tracker was of no use. The message is always the same; `detail` says what happened, `advice` what to do.

    A client declines a run with the message alone. The server chose the address, and must not learn from the reason
    what listens there, if anything does: it could have its clients look around in their own networks.
    """

    def __init__(self, detail: str, *, hint: str | None) -> None:
        self.detail, self.advice = printable(detail), hint
        super().__init__(USELESS, hint=self.detail if hint is None else f"{self.detail}; {hint}")


class TrackerUnavailable(TrackerTrouble, CoordinatorAway):
    """The tracker cannot be reached, or says that it cannot answer now."""


class TrackerRefused(TrackerTrouble):
    """The tracker answered that it will not do this; `status` and `field` say more. Not worth repeating as it is."""

    def __init__(self, status: int, message: str, *, field: str | None, hint: str | None) -> None:
        super().__init__(
            f"the tracker refused: {message if field is None else f'{field}: {message}'}", hint=hint
        )
        self.status, self.field = status, field


class TrackerClient:
    """What one identity asks of a tracker: as a client of a federation, or as its server.

    A run has a name of 1 to 64 bytes.

    Every method may raise `TrackerUnavailable`, `TrackerRefused`, or `RemoteProtocolError` where the answer is not
    what the tracker's, the holder's or a client's key signed. A context manager; `close` ends the connection.
    """

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
        """url        http or https, host and port, without a path; anything else is a `ConfigError`
        identity   signs all requests
        ca         for https alone: a PEM file that verifies the tracker's certificate, if no authority of this
                   machine does
        tracker    the public key the tracker must have; None: whichever it names
        timeout    seconds for connecting and for each wait for data
        retries    how often a request is repeated after trouble, with growing pauses up to 8 seconds: with 6 of them
                   a tracker may be away for about a quarter of a minute
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or parts.hostname is None or parts.path.strip("/"):
            hint = "for example https://tracker.example:8443"
            raise ConfigError(f"{url!r} is not the address of a tracker", field="tracker", hint=hint)
        self._connect: Callable[[], http.client.HTTPConnection]
        self._connect = partial(http.client.HTTPConnection, parts.hostname, port, timeout=timeout)
        if parts.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=ca)
            except OSError as error:
                hint = f"give a PEM file; {ca}: {error}"
                raise ConfigError("the file of the authority cannot be used", field="ca", hint=hint) from None
            secure = http.client.HTTPSConnection
            self._connect = partial(secure, parts.hostname, port, timeout=timeout, context=context)
        elif ca is not None:
            hint = "without TLS nothing shows who answers; use https, or leave the authority out"
            raise ConfigError("must be https, since an authority is set", field="tracker", hint=hint)
        self._url, self._identity, self._pinned, self._retries = url, identity, tracker, retries
        self._lock = threading.RLock()
        self._open: http.client.HTTPConnection | None = None
        self._described: api.TrackerAnswer | None = None

    def describe(self, *, anew: bool = False) -> api.TrackerAnswer:
        """Whose signatures to expect: the tracker's, the holder's and the server's keys; asked for once, or `anew`."""
        if anew or self._described is None:
            described = _read(api.TrackerAnswer, self._ask("GET", "/v1/tracker", signed=False))
            if self._pinned not in (None, described.tracker):
                other = f"this tracker is {fingerprint(described.tracker)}, not the one expected"
                raise RemoteProtocolError(other, hint="compare its key with its owner")
            self._described = described
        return self._described

    def run(self, run: bytes) -> api.RunAnswer:
        """What the holder committed to for a run: its chain's anchor, and for how many rounds; verified."""
        return self._verified(run, self._ask("GET", f"/v1/runs/{run.hex()}", signed=False))

    # As a client.

    def register(self, prekeys: Sequence[Prekey], coalition: str | None = None) -> api.StockAnswer:
        """Become live with these prekeys; again to send more. Save their private halves first.

        With a coalition, belong to it from then on.
        """
        body = {"prekeys": _prekey_entries(prekeys), "coalition": coalition}
        return _read(api.StockAnswer, self._ask("PUT", "/v1/clients/me", body))

    def heartbeat(self) -> api.StockAnswer:
        """Stay live; send `wanted` prekeys with `register` if that is not 0."""
        return _read(api.StockAnswer, self._ask("POST", "/v1/clients/me/heartbeat"))

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

    def participants(self, attempt: Attempt) -> tuple[Participant, ...]:
        """Everyone in an attempt, in order: the list and every prekey in it are verified."""
        return self._list("GET", attempt, "participants")

    def neighbours(self, attempt: Attempt) -> dict[int, Participant]:
        """Those who share noise with this client, by seat; their prekeys are verified.

        That these are the right ones follows only from the whole list, the terms and the beacon.
        """
        answer = self._ask("GET", _path(attempt, "neighbours"))
        return {entry.seat: _participant(entry) for entry in _read(api.NeighboursAnswer, answer).neighbours}

    # As the server.

    def start_run(self, run: bytes, rounds: int) -> bytes:
        """The anchor of a chain for that many rounds, each of which can be tried four times; verified."""
        return self._verified(run, self._ask("PUT", f"/v1/runs/{run.hex()}", {"rounds": rounds})).anchor

    def seat(
        self, attempt: Attempt, members: Sequence[bytes] | None = None, **more: object
    ) -> tuple[Participant, ...]:
        """Who takes part in an attempt, for good, each with a prekey of its own.

        Of `members`, those who are live and have a prekey left, in that order; or a `count` of live clients at random.
        Where they are too few, that is refused, and nothing is used up. `more` is what `api.SeatsWanted` has besides.
        """
        named = None if members is None else [member.hex() for member in members]
        return self._list("PUT", attempt, "seats", {"members": named, **more})

    def beacon(self, attempt: Attempt, commitment: bytes, *, neighbours: float | None = None) -> Beacon:
        """The link of an attempt, for `participants_hash + terms_hash`: given out for one commitment only.

        Where noise is carried over, the `participants_hash` of the next round, which is seated first, is added.
        With `neighbours` (as in the terms) the tracker can also tell each client who its neighbours are.
        """
        body = {"commitment": commitment.hex(), "neighbours": neighbours}
        beacon = _read(api.BeaconAnswer, self._ask("PUT", _path(attempt, "beacon"), body))
        if beacon.index != attempt.link:
            raise RemoteProtocolError("the tracker gave the link of another attempt")
        return Beacon(beacon.index, beacon.value, beacon.signature)

    def deposit(self, identity: bytes, prekeys: Sequence[Prekey]) -> api.StockAnswer:
        """Pass on fresh prekeys that a registered client sent along with its upload."""
        body = {"prekeys": _prekey_entries(prekeys)}
        return _read(api.StockAnswer, self._ask("POST", f"/v1/clients/{identity.hex()}/prekeys", body))

    # Both.

    def close(self) -> None:
        """Close the connection, if one is open; the next request opens another."""
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _ask(self, method: str, target: str, body: object = None, *, signed: bool = True) -> Any:
        """The JSON of the answer, None where it has no body.

        method, target   of the request; the target is a path without a query
        body             what is sent as JSON; None: nothing
        signed           for the tracker that was described, by this identity

        Raises `TrackerRefused` with the tracker's own words, `TrackerUnavailable` once all retries are used up or at
        once where the certificate does not verify, and `TrackerTrouble` where the answer is not JSON.
        """
        tracker = self.describe().tracker if signed else None
        sent = b"" if body is None else json.dumps(body).encode()
        pause, left = _FIRST_PAUSE, self._retries
        while True:
            reused = self._open is not None
            try:
                status, headers, answer = self._once(method, target, sent, tracker)
            except ssl.SSLCertVerificationError as error:
                unknown = f"the certificate of {self._url} does not verify: {error.verify_message}"
                hint = "give the certificate of its authority as `ca`"
                raise TrackerUnavailable(unknown, hint=hint) from None
            except (OSError, http.client.HTTPException) as error:
                if reused:
                    continue  # The connection had grown old; a fresh one says whether the tracker is there.
                trouble, wait = f"{type(error).__name__}: {error}", 0.0
            else:
                if status not in _AGAIN:
                    return _content(status, answer)
                trouble, wait = f"status {status}", _seconds(headers.get("retry-after", ""))
            if not left:
                break
            left -= 1
            # Somewhat at random, so that all clients of a tracker that restarts do not come at once.
            share = 0.5 + secrets.randbelow(1000) / 2000
            time.sleep(min(max(pause * share, wait), _LONGEST_PAUSE))
            pause = min(2 * pause, _LONGEST_PAUSE)
        hint = "is it running, and reachable from here?"
        raise TrackerUnavailable(f"the tracker at {self._url} does not answer ({trouble})", hint=hint)

    def _once(
        self, method: str, target: str, body: bytes, tracker: bytes | None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one request, signed anew each time for this tracker, and read the whole answer, at most 16 MiB of it."""
        headers = {"accept": "application/json"}
        if body:
            headers["content-type"] = "application/json"
        if tracker is not None:
            headers |= sign_request(self._identity, tracker=tracker, method=method, target=target, body=body)
        with self._lock:
            try:
                self._open = self._open or self._connect()
                self._open.request(method, target, body=body or None, headers=headers)
                response = self._open.getresponse()
                answer = response.read(_LARGEST_ANSWER + 1)
                if len(answer) > _LARGEST_ANSWER:
                    raise http.client.HTTPException("the answer is too large")
                return response.status, {k.lower(): v for k, v in response.getheaders()}, answer
            except BaseException:
                self.close()
                raise

    def _verified(self, run: bytes, answer: Any) -> api.RunAnswer:
        """A run, once the holder's signature under its name, its length and its anchor is verified."""
        shown, holder = _read(api.RunAnswer, answer), self.describe().holder
        if shown.holder != holder:
            raise RemoteProtocolError("the tracker names another holder for this run than for itself")
        check_anchor(holder, run, shown.rounds, shown.anchor, shown.signature)
        return shown

    def _list(self, method: str, attempt: Attempt, what: str, body: object = None) -> tuple[Participant, ...]:
        """The participants in an answer, once the tracker's signature under this list, run and link is verified."""
        answer = _read(api.ParticipantsAnswer, self._ask(method, _path(attempt, what), body))
        participants = tuple(map(_participant, answer.participants))
        message = list_message(attempt.run, attempt.link, participants_hash(participants))
        verify(self.describe().tracker, LIST_PURPOSE, message, answer.signature)
        return participants


def _path(attempt: Attempt, what: str) -> str:
    return f"/v1/runs/{attempt.run.hex()}/rounds/{attempt.round}/attempts/{attempt.number}/{what}"


def _prekey_entries(prekeys: Sequence[Prekey]) -> list[dict[str, object]]:
    """Prekeys as the API takes them."""
    return [api.PrekeyBody(**asdict(prekey)).model_dump(mode="json") for prekey in prekeys]


def _participant(entry: api.SeatAnswer) -> Participant:
    """A participant from an answer; its prekey must be signed by its identity."""
    participant = entry.participant()
    check_prekey(participant.prekey, participant.identity)
    return participant


def _read(kind: type[M], answer: Any) -> M:
    """An answer, in which nothing is of another type than it should be; anything else is an error of the tracker."""
    try:
        return kind.model_validate(answer, strict=True)
    except ValidationError as error:
        name = ".".join(map(str, error.errors()[0]["loc"]))
        hint = "is this the address of a tracker of this version?"
        raise TrackerTrouble(f"the tracker's answer has no valid {name!r}", hint=hint) from None


def _content(status: int, answer: bytes) -> Any:
    """The content of an answer; `TrackerRefused` with the tracker's own words where the status is not 2xx."""
    try:
        content = json.loads(answer) if answer else None
    except (ValueError, RecursionError):
        raise TrackerTrouble(
            f"the tracker's answer (status {status}) is not JSON", hint="is this the address of a tracker?"
        ) from None
    if 200 <= status < 300:
        return content
    error = content.get("error") if isinstance(content, dict) else None
    error = error if isinstance(error, dict) else {}
    said = {
        name: printable(str(error[name]))
        for name in ("message", "field", "hint")
        if error.get(name) is not None
    }
    message = said.get("message", f"status {status}")
    raise TrackerRefused(status, message, field=said.get("field"), hint=said.get("hint"))


def _seconds(text: str) -> float:
    """A Retry-After in seconds; one that is a date, or nonsense, counts for nothing."""
    return float(text) if text.isascii() and text.isdigit() else 0.0
