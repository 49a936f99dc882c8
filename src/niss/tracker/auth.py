"""Who may ask what: what is signed, how often and how much one may ask, and how the tracker refuses.

In a request are signed the tracker's own key, the method, the path with its query, a hash of the body, the time and a
nonce. A copy of a request is refused as long as its time is within the tolerance, and for its time afterwards. Reading
is signed too, but its nonces are not kept: a copy of a question yields an answer its sender was allowed to see. The
tracker also signs: participant lists, and the anchors of runs.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time as clock
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from niss.errors import RemoteProtocolError
from niss.protocol.keys import Identity, fingerprint, verify
from niss.protocol.wire import length_prefixed, uint64


class Refused(RemoteProtocolError):
    """A request that is turned down: an HTTP status, the field at fault, and a hint that says what to do.

    status       of the answer; 4xx is the sender's fault, 409 what contradicts what was done before, 503 means "later"
    field        the header, path part or entry of the body that is wrong, None where no single one is
    retry_after  seconds after which the same request may succeed, sent as Retry-After
    """

    def __init__(
        self,
        status: int,
        field: str | None,
        message: str,
        hint: str | None,
        *,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.field, self.retry_after = status, field, retry_after


def require_server(caller: bytes, server: bytes) -> None:
    """Refuse (403) whoever is not the server of this federation, whose key the tracker was started with."""
    if caller != server:
        words = f"only the server may do this, not {fingerprint(caller)}"
        raise Refused(403, IDENTITY, words, "the tracker was started with another --server-key")


PURPOSE, LIST_PURPOSE, ANCHOR_PURPOSE = "tracker-request", "participants", "anchor"
IDENTITY, TIME, NONCE, SIGNATURE = "niss-identity", "niss-time", "niss-nonce", "niss-signature"
_NONCE_BYTES = 16
_SHAPES = {
    IDENTITY: re.compile(r"[0-9a-f]{64}"),
    TIME: re.compile(r"[0-9]{1,12}"),
    NONCE: re.compile(r"[0-9a-f]{32}"),
    SIGNATURE: re.compile(r"[0-9a-f]{128}"),
}
PATTERNS = {name: f"^{shape.pattern}$" for name, shape in _SHAPES.items()}


@dataclass(frozen=True)
class Signed:
    """A request whose signature holds: who signed it, the time it names and its nonce."""

    identity: bytes
    time: int
    nonce: bytes


def sign_request(
    identity: Identity,
    *,
    tracker: bytes,
    method: str,
    target: str,
    body: bytes = b"",
    time: int | None = None,
    nonce: bytes | None = None,
) -> dict[str, str]:
    """The headers that make a request this identity's own; see `check_request` for the arguments.

    time     whole seconds since 1970; None: it is sent now
    nonce    16 random bytes that this identity has not used before; None: fresh ones
    """
    time = int(clock.time()) if time is None else time
    nonce = os.urandom(_NONCE_BYTES) if nonce is None else nonce
    message = _message(tracker, method, target.encode(), body, time, nonce)
    return {
        IDENTITY: identity.public.hex(),
        TIME: str(time),
        NONCE: nonce.hex(),
        SIGNATURE: identity.sign(PURPOSE, message).hex(),
    }


def check_request(
    headers: Mapping[str, str],
    *,
    tracker: bytes,
    method: str,
    target: bytes,
    body: bytes,
    now: float,
    tolerance: float,
) -> Signed:
    """Who signed the request; one that is unsigned, too old or changed on its way is refused (401).

    headers            as they arrived, names in lower case
    tracker            this tracker's public key: a request signed for another one does not verify
    method, target     as sent; the target is the raw path with its query
    body               the bytes that were sent, before any parsing
    now, tolerance     seconds; the time in the request may be off by the tolerance either way

    A copy within the tolerance still passes here. `Tracker.admit` refuses it by its nonce where it would change
    anything.
    """
    values = {name: headers.get(name, "") for name in _SHAPES}
    for name, shape in _SHAPES.items():
        if not shape.fullmatch(values[name]):
            wrong = "is malformed" if values[name] else "is missing: this request must be signed"
            hint = "use niss.tracker.client, or sign as docs/guides/deploy.md describes"
            raise Refused(401, name, wrong, hint)
    time, nonce, identity = int(values[TIME]), bytes.fromhex(values[NONCE]), bytes.fromhex(values[IDENTITY])
    if abs(now - time) > tolerance:
        apart = f"the request is from {time}, here it is {now:.0f}: more than {tolerance:.0f} s apart"
        raise Refused(401, TIME, apart, "set this machine's clock")
    message = _message(tracker, method, target, body, time, nonce)
    try:
        verify(identity, PURPOSE, message, bytes.fromhex(values[SIGNATURE]))
    except RemoteProtocolError as error:
        hint = "sign the request as it is sent, for the key that GET /v1/tracker names"
        raise Refused(401, SIGNATURE, error.message, hint) from None
    return Signed(identity, time, nonce)


def _message(tracker: bytes, method: str, target: bytes, body: bytes, time: int, nonce: bytes) -> bytes:
    """What is signed: each part with its length before it, so that no two requests have the same bytes."""
    hashed = hashlib.sha256(body).digest()
    return length_prefixed(tracker, method.encode(), target, hashed, str(time).encode(), nonce)


def list_message(run: bytes, link: int, list_hash: bytes) -> bytes:
    """What the tracker signs under a participant list: run, link and `participants_hash` of the list.

    A list that was signed for one attempt cannot be passed off as that of another.
    """
    return length_prefixed(run, uint64(link), list_hash)


def anchor_message(run: bytes, rounds: int, anchor: bytes) -> bytes:
    """What the holder of a chain signs when it commits to a run: its name, its length and the chain's anchor."""
    return length_prefixed(run, uint64(rounds), anchor)


def check_anchor(holder: bytes, run: bytes, rounds: int, anchor: bytes, signature: bytes) -> None:
    """Raises `RemoteProtocolError` for an anchor that the holder did not commit to for this run and length."""
    verify(holder, ANCHOR_PURPOSE, anchor_message(run, rounds, anchor), signature)


LARGEST_BATCH = 256
"""Most prekeys in one request."""
LARGEST_ROUND = 10_000
"""Most seats in one attempt."""
LONGEST_RUN = 25_000
"""Most rounds of one run, which bounds the time to derive its chain."""


class Buckets:
    """Token buckets by name: `rate` a second on average, twice that at once; a rate of 0 lets everything pass.

    Bounded in memory: of very many names the one not seen for longest is forgotten, and starts anew with a full bucket.
    """

    _MOST = 1 << 16

    def __init__(self, rate: float) -> None:
        self._rate, self._burst = rate, max(1.0, 2.0 * rate)
        self._levels: OrderedDict[object, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, name: object, now: float, what: str) -> None:
        """Refuse (429) what comes too often, and say how long to wait. `now` is a monotonic time."""
        if not self._rate:
            return
        with self._lock:
            level, since = self._levels.pop(name, (self._burst, now))
            level = min(self._burst, level + (now - since) * self._rate)
            passes = level >= 1.0
            self._levels[name] = (level - 1.0 if passes else level, now)
            if len(self._levels) > self._MOST:
                self._levels.popitem(last=False)
        if not passes:
            wait = (1.0 - level) / self._rate
            raise Refused(429, None, f"too many {what}", f"wait {wait:.1f} s", retry_after=wait)
