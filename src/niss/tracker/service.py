"""The tracker without HTTP: who asks, which clients are registered and live, whose chains the links are of.

A client speaks for itself alone: every `caller` here has signed its request.
"""

from __future__ import annotations

import copy
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from niss.errors import RemoteProtocolError
from niss.protocol.curve import Entropy, SecretBytes, length_prefixed, uint64
from niss.protocol.keyfile import Coalition
from niss.protocol.keys import BeaconChain, Identity, check_prekey, fingerprint
from niss.protocol.messages import Beacon
from niss.tracker.auth import (
    ANCHOR_PURPOSE,
    Buckets,
    Refused,
    Signed,
    anchor_message,
    require_server,
)
from niss.tracker.client import TrackerClient, TrackerRefused, TrackerUnavailable
from niss.tracker.options import TrackerSettings
from niss.tracker.rounds import BeaconHolder, Rounds
from niss.tracker.store import TrackerStore, bind_identity
from niss.tracker.values import Attempt, Batch, Counts, Run, Stock

_CHAINS_IN_MEMORY = 8
_SECONDS_BETWEEN_COUNTS = 5.0
_SECONDS_BETWEEN_GAUGES = 1.0
T = TypeVar("T")


@dataclass(eq=False)
class Membership:
    """The clients of a tracker. Every `caller` has signed its request; what is wrong is a `Refused`.

    store        where clients and their prekeys are
    settings     how long a client stays live, and how many clients and prekeys there may be
    server       the public key of the one identity that may deposit prekeys for others
    admitted     the closed list of those who may register; None: anyone
    coalitions   closed lists by name; a coalition without one is open to all
    clock        wall time in seconds: who is live
    monotonic    seconds that never go back: how long a count stays valid
    """

    store: TrackerStore
    settings: TrackerSettings
    server: bytes
    admitted: Coalition | None
    coalitions: Mapping[str, Coalition]
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    _room_until: float = float("-inf")

    def register(self, caller: bytes, prekeys: Batch, coalition: str | None) -> Stock:
        """Make a client live with these one-time keys; returns what became of them.

        Refused: an identity that is not on the closed lists (403), a prekey that the caller did not sign (422), a
        tracker that is full (503), and what `TrackerStore.register` refuses.
        """
        self._check_admitted(caller)
        self._check_room()
        self._check_batch(caller, prekeys)
        if coalition is not None:
            self._check_coalition(caller, coalition)
        stock = self.store.register(caller, prekeys, expires=self._expiry(), largest=self.settings.stock)
        if coalition is not None:
            self.store.set_coalition(caller, coalition)
        return stock

    def deposit(self, caller: bytes, identity: bytes, prekeys: Batch) -> Stock:
        """Take fresh prekeys of a client from the server, which got them along with an upload.

        Refused: a caller that is not the server (403), a client that is not registered (404), and as in `register`.
        """
        require_server(caller, self.server)
        self._check_admitted(identity)
        self._check_batch(identity, prekeys)
        stock = self.store.deposit(identity, prekeys, expires=self._expiry(), largest=self.settings.stock)
        return _known(stock, "identity")

    def heartbeat(self, caller: bytes) -> Stock:
        """Stay live for another `ttl` seconds; returns how many prekeys are left, 404 where it is not registered."""
        self._check_admitted(caller)
        return _known(self.store.beat(caller, expires=self._expiry()))

    def leave(self, caller: bytes) -> None:
        """Forget the caller and its prekeys; 404 where it was not registered."""
        _known(self.store.leave(caller, now=self.clock()))

    def join(self, caller: bytes, coalition: str | None) -> None:
        """Put the caller into this coalition and no other, or into none; refused as `register` says, or 404."""
        self._check_admitted(caller)
        if coalition is not None:
            self._check_coalition(caller, coalition)
        _known(self.store.set_coalition(caller, coalition))

    def replace_lists(self, admitted: Coalition | None, coalitions: Mapping[str, Coalition]) -> int:
        """Go on with other closed lists; whoever is no longer on them is not seated again. Returns how many left.

        One that is no longer in the file of a coalition belongs to none, and may join another.
        """
        before, before_closed = self.admitted, self.coalitions
        self.admitted, self.coalitions = admitted, coalitions
        for name, closed in before_closed.items():
            for identity in _gone(closed, coalitions.get(name)):
                self.store.set_coalition(identity, None)
        gone = () if before is None else _gone(before, admitted)
        return sum(self.store.leave(identity, now=self.clock()) for identity in gone)

    def wanted(self, stock: Stock) -> int:
        """How many prekeys a client should send, which is none until it runs low."""
        return self.settings.wanted - stock.held if stock.held < self.settings.low else 0

    def _expiry(self) -> float:
        return self.clock() + self.settings.ttl

    def _check_admitted(self, identity: bytes) -> None:
        """Refuse whoever is not on the closed list, and forget it, should it be registered from before."""
        if self.admitted is None or identity in self.admitted:
            return
        self.store.leave(identity, now=self.clock())
        raise Refused(
            403,
            f"identity {fingerprint(identity)} is not admitted here",
            field="niss-identity",
            hint="ask the tracker's owner to add it to the file given with --admit",
        )

    def _check_room(self) -> None:
        """Refuse newcomers once `max_clients` are registered; counted every few seconds."""
        # Counting is slow where there are many; a few too many do no harm.
        if self.monotonic() < self._room_until:
            return
        if self.store.counts(now=self.clock()).registered >= self.settings.max_clients:
            raise Refused(
                503, "no more clients can be registered", hint="raise --max-clients", retry_after=60.0
            )
        self._room_until = self.monotonic() + _SECONDS_BETWEEN_COUNTS

    @staticmethod
    def _check_batch(identity: bytes, prekeys: Batch) -> None:
        """Refuse a batch with a prekey that its owner did not sign; the field names which."""
        for place, prekey in enumerate(prekeys):
            try:
                check_prekey(prekey, identity)
            except RemoteProtocolError as error:
                raise Refused(
                    422,
                    error.message,
                    field=f"prekeys.{place}.signature",
                    hint="a prekey is signed by the identity it belongs to",
                ) from None

    def _check_coalition(self, caller: bytes, name: str) -> None:
        """Refuse whoever is not on the closed list of a coalition, where it has one."""
        closed = self.coalitions.get(name)
        if closed is not None and caller not in closed:
            raise Refused(
                403,
                f"identity {fingerprint(caller)} is not in the coalition {name!r}",
                field="coalition",
                hint="compare fingerprints with its members, who can add it to the coalition file",
            )


def _gone(before: Coalition, after: Coalition | None) -> list[bytes]:
    """Who was on a closed list and no longer is; nobody where it was opened to all."""
    return [] if after is None else [one for one in before.members.values() if one not in after]


def _known(outcome: T | None, field: str = "niss-identity") -> T:
    """What a store answered about a client; refused (404) where that is None or False: it is not registered."""
    if outcome is None or outcome is False:
        raise Refused(404, "no client with this identity is registered", field=field, hint="register first")
    return outcome


class OwnChains(BeaconHolder):
    """Chains that follow from this tracker's identity; the last few are kept in memory, since deriving one is slow.

    A chain's seed is never stored: a restart finds every chain again, and whoever reads the store learns no link.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.public = identity.public
        self._chain = lru_cache(_CHAINS_IN_MEMORY)(self._derive)

    def _derive(self, run: bytes, rounds: int, salt: bytes) -> BeaconChain:
        """The chain of a run: its seed is SHA-256 of a deterministic Ed25519 signature under run, length and salt.

        The signature is never sent or stored, so the seed is known only to whoever holds the identity.
        """
        signature = self._identity.sign("beacon-seed", length_prefixed(run, uint64(rounds), salt))
        seed = SecretBytes(hashlib.sha256(b"niss.beacon-seed.v1" + signature).digest())
        return BeaconChain(rounds, holder=self._identity, entropy=lambda _count: seed)

    def commit(self, run: bytes, rounds: int, salt: bytes) -> tuple[bytes, bytes]:
        anchor = self._chain(run, rounds, salt).anchor
        return anchor, self._identity.sign(ANCHOR_PURPOSE, anchor_message(run, rounds, anchor))

    def link(self, attempt: Attempt, run: Run, commitment: bytes) -> Beacon:
        # A copy: the chain's own memory of what was let out ends with the process; the store's does not.
        fresh = copy.copy(self._chain(attempt.run, run.rounds, run.salt))
        return fresh.release(attempt.round, attempt.number, commitment)


class ExternalChains(BeaconHolder):
    """Asks the tracker at `url` for anchors and links; it writes down what it lets out, as this one does.

    The two can be run by different people: then whoever draws up the lists, here, cannot know a link beforehand. The
    other one is started with this one's key as its --server-key, and with --holder-only.
    """

    def __init__(self, url: str, identity: Identity, *, ca: Path | None = None) -> None:
        """`identity` is this tracker's, which the other one takes for its server; `ca` verifies its certificate.

        Asks for its public key at once, so that a wrong address shows at the start (`TrackerUnavailable`).
        """
        self._client = TrackerClient(url, identity, ca=ca, retries=3)
        self.public = self._client.describe().holder

    def commit(self, run: bytes, rounds: int, salt: bytes) -> tuple[bytes, bytes]:  # noqa: ARG002
        """The other tracker's anchor and signature, verified; the salt is not needed, since that one draws its own."""
        with _passed_on():
            self._client.start_run(run, rounds)
            about = self._client.run(run)
        return about.anchor, about.signature

    def link(self, attempt: Attempt, run: Run, commitment: bytes) -> Beacon:  # noqa: ARG002
        with _passed_on():
            return self._client.beacon(*attempt, commitment)


@contextmanager
def _passed_on() -> Iterator[None]:
    """Trouble with the holder, as this tracker's own answer."""
    try:
        yield
    except TrackerUnavailable as error:
        raise Refused(
            503, f"the beacon's holder: {error.detail}", hint=error.advice, retry_after=5.0
        ) from None
    except TrackerRefused as error:
        raise Refused(409, f"the beacon's holder: {error.detail}", hint=error.advice) from None


class Tracker:
    """One tracker process; several may share a store and an identity.

    `members` answers for clients, `rounds` for runs and rounds; who may change something is said by `admit`.
    """

    def __init__(
        self,
        store: TrackerStore,
        identity: Identity,
        *,
        server: bytes,
        settings: TrackerSettings | None = None,
        holder: BeaconHolder | None = None,
        admitted: Coalition | None = None,
        coalitions: Mapping[str, Coalition] | None = None,
        lists: bool = True,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        entropy: Entropy = os.urandom,
    ) -> None:
        """store        what must not be forgotten; `ConfigError` where it belongs to another identity
        identity     signs participant lists; requests are signed for its public key
        server       the public key of the one identity that may open rounds
        settings     what the person who runs the tracker decides
        holder       who commits to chains and lets links out; None: this tracker
        admitted     the closed list of those who may register; None: anyone
        coalitions   closed lists of those who may join a coalition, by its name
        lists        whether attempts are seated here; False: the server is another tracker, which seats them
        clock        wall time in seconds; `monotonic`: seconds that never go back
        entropy      a source of random bytes
        """
        bind_identity(store, identity.public)
        self.store, self.server, self.public = store, server, identity.public
        self.settings, self.holder = settings or TrackerSettings(), holder or OwnChains(identity)
        self.members = Membership(store, self.settings, server, admitted, coalitions or {}, clock, monotonic)
        self.rounds = Rounds(store, identity, self.holder, server, clock, entropy, lists)
        self._clock, self._monotonic = clock, monotonic
        self._buckets = Buckets(self.settings.identity_rate)
        self._gauging = threading.Lock()
        self._gauges: tuple[float, Counts] | None = None

    def gauges(self) -> Counts:
        """How many clients, prekeys and runs there are, at most a second old, or as old as a count takes.

        Anyone may ask, as often as they like: one thread counts, and nobody waits for it who can have the last count.
        """
        last = self._gauges
        if last is not None:
            age = self._monotonic() - last[0]
            if 0 <= age < _SECONDS_BETWEEN_GAUGES or self._gauging.locked():
                return last[1]
        with self._gauging:
            if self._gauges is None or self._gauges is last:
                self._gauges = (self._monotonic(), self.store.counts(now=self._clock()))
            return self._gauges[1]

    def now(self) -> float:
        return self._clock()

    def admit(self, signed: Signed) -> bytes:
        """Who may change something with this request: whoever signed it, once and not too often.

        Refused: a copy of an earlier request (401), and an identity that asks too often (429).
        """
        if signed.identity != self.server:
            wait = self._buckets.take(signed.identity, self._monotonic())
            if wait:
                raise Refused(
                    429, "too many requests of this identity", hint=f"wait {wait:.1f} s", retry_after=wait
                )
        # Twice, for the clocks of several trackers on one store may differ too.
        expires = signed.time + 2 * self.settings.tolerance
        if not self.store.first_use(signed.identity, signed.nonce, now=self._clock(), expires=expires):
            raise Refused(
                401,
                "this request was made before",
                field="niss-nonce",
                hint="sign every request anew, with a fresh nonce",
            )
        return signed.identity

    def sweep(self) -> int:
        """Erase clients that have been away for `forget_after` seconds; returns how many."""
        return self.store.forget(before=self._clock() - self.settings.forget_after)
