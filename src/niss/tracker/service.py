"""The tracker without HTTP: who asks, and which clients are registered and live.

A client speaks for itself alone: every `caller` here has signed its request. What is wrong is a `Refused`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from niss.errors import RemoteProtocolError
from niss.protocol.keyfile import Coalition
from niss.protocol.keys import Identity, check_prekey, fingerprint
from niss.tracker.api import Counts, Stock
from niss.tracker.auth import IDENTITY, NONCE, Buckets, Refused, Signed, require_server
from niss.tracker.options import TrackerSettings
from niss.tracker.rounds import BeaconHolder, OwnChains, Rounds
from niss.tracker.store import Batch, TrackerStore

_SECONDS_BETWEEN_COUNTS = 1.0
T = TypeVar("T")


class Tracker:
    """One tracker process, which answers for its clients; several may share a store and an identity.

    `rounds` answers for runs and rounds; who may change something is said by `admit`.
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
    ) -> None:
        """store        what must not be forgotten; `ConfigError` where it belongs to another identity
        identity     signs participant lists; requests are signed for its public key
        server       the public key of the one identity that may open rounds and deposit prekeys for others
        settings     what the person who runs the tracker decides
        holder       who commits to chains and lets links out; None: this tracker
        admitted     the closed list of those who may register; None: anyone
        coalitions   closed lists of those who may join a coalition, by its name; one without is open to all
        lists        whether attempts are seated here; False: the server is another tracker, which seats them
        clock        wall time in seconds: who is live; `monotonic`: seconds that never go back
        """
        store.bind_identity(identity.public)
        self.store, self.server, self.public = store, server, identity.public
        self.settings, self.holder = settings or TrackerSettings(), holder or OwnChains(identity)
        self.rounds = Rounds(store, identity, self.holder, server, clock, lists)
        self.admitted, self.coalitions = admitted, coalitions or {}
        self.now, self._monotonic = clock, monotonic
        self._buckets = Buckets(self.settings.identity_rate)
        self._counting = threading.Lock()
        self._counted: tuple[float, Counts] | None = None

    def admit(self, signed: Signed) -> bytes:
        """Who may change something with this request: whoever signed it, once and not too often.

        Refused: a copy of an earlier request (401), and an identity that asks too often (429).
        """
        if signed.identity != self.server:
            self._buckets.check(signed.identity, self._monotonic(), "requests of this identity")
        # Twice, for the clocks of several trackers on one store may differ too.
        expires = signed.time + 2 * self.settings.tolerance
        if not self.store.first_use(signed.identity, signed.nonce, now=self.now(), expires=expires):
            raise Refused(401, NONCE, "this request was made before", "sign every request with a fresh nonce")
        return signed.identity

    def register(self, caller: bytes, prekeys: Batch, coalition: str | None) -> Stock:
        """Make a client live with these one-time keys; returns what became of them.

        Refused: an identity that is not on the closed lists (403), a prekey that the caller did not sign (422), a
        tracker that is full (503), and what `TrackerStore.register` refuses.
        """
        self._check_admitted(caller)
        # A few too many, registered since the last count, do no harm.
        if self.counts().registered >= self.settings.max_clients:
            raise Refused(
                503, None, "no more clients can be registered", "raise --max-clients", retry_after=60.0
            )
        _check_batch(caller, prekeys)
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
        _check_batch(identity, prekeys)
        stock = self.store.deposit(identity, prekeys, expires=self._expiry(), largest=self.settings.stock)
        return _known(stock, "identity")

    def heartbeat(self, caller: bytes) -> Stock:
        """Stay live for another `ttl` seconds; returns how many prekeys are left, 404 where it is not registered."""
        self._check_admitted(caller)
        return _known(self.store.beat(caller, expires=self._expiry()))

    def leave(self, caller: bytes) -> None:
        """Forget the caller and its prekeys; 404 where it was not registered."""
        _known(self.store.leave(caller, now=self.now()) or None)

    def join(self, caller: bytes, coalition: str | None) -> None:
        """Put the caller into this coalition and no other, or into none; refused as `register` says, or 404."""
        self._check_admitted(caller)
        self._check_coalition(caller, coalition)
        _known(self.store.set_coalition(caller, coalition) or None)

    def replace_lists(self, admitted: Coalition | None, coalitions: Mapping[str, Coalition]) -> int:
        """Go on with other closed lists; whoever is no longer on them is not seated again. Returns how many left.

        One that is no longer in the file of a coalition belongs to none, and may join another.
        """
        before, before_closed = self.admitted, self.coalitions
        self.admitted, self.coalitions = admitted, coalitions
        for name, closed in before_closed.items():
            for identity in _gone(closed, coalitions.get(name)):
                self.store.set_coalition(identity, None)
        return sum(self.store.leave(identity, now=self.now()) for identity in _gone(before, admitted))

    def wanted(self, stock: Stock) -> int:
        """How many prekeys a client should send, which is none until it runs low."""
        return self.settings.wanted - stock.held if stock.held < self.settings.low else 0

    def counts(self) -> Counts:
        """How many clients, prekeys and runs there are, at most a second old, or as old as a count takes.

        Anyone may ask, as often as they like: one thread counts, and nobody waits for it who can have the last count.
        """
        last = self._counted
        if last is not None:
            age = self._monotonic() - last[0]
            if 0 <= age < _SECONDS_BETWEEN_COUNTS or self._counting.locked():
                return last[1]
        with self._counting:
            if self._counted is None or self._counted is last:
                self._counted = (self._monotonic(), self.store.counts(now=self.now()))
            return self._counted[1]

    def sweep(self) -> int:
        """Erase clients that have been away for `forget_after` seconds; returns how many."""
        return self.store.forget(before=self.now() - self.settings.forget_after)

    def _expiry(self) -> float:
        return self.now() + self.settings.ttl

    def _check_admitted(self, identity: bytes) -> None:
        """Refuse whoever is not on the closed list, and forget it, should it be registered from before."""
        if self.admitted is not None and identity not in self.admitted:
            self.store.leave(identity, now=self.now())
            words = f"identity {fingerprint(identity)} is not admitted here"
            raise Refused(403, IDENTITY, words, "ask the tracker's owner to add it to the file of --admit")

    def _check_coalition(self, caller: bytes, name: str | None) -> None:
        """Refuse whoever is not on the closed list of a coalition, where it has one."""
        closed = None if name is None else self.coalitions.get(name)
        if closed is not None and caller not in closed:
            words = f"identity {fingerprint(caller)} is not in the coalition {name!r}"
            hint = "compare fingerprints with its members, who can add it to the coalition file"
            raise Refused(403, "coalition", words, hint)


def _check_batch(identity: bytes, prekeys: Batch) -> None:
    """Refuse a batch with a prekey that its owner did not sign; the field names which."""
    for place, prekey in enumerate(prekeys):
        try:
            check_prekey(prekey, identity)
        except RemoteProtocolError as error:
            hint = "a prekey is signed by the identity it belongs to"
            raise Refused(422, f"prekeys.{place}.signature", error.message, hint) from None


def _gone(before: Coalition | None, after: Coalition | None) -> list[bytes]:
    """Who was on a closed list and no longer is; nobody where it was or is open to all."""
    if before is None or after is None:
        return []
    return [identity for identity in before.members.values() if identity not in after]


def _known(outcome: T | None, field: str = IDENTITY) -> T:
    """What a store answered about a client; refused (404) where that is None: it is not registered."""
    if outcome is None:
        raise Refused(404, field, "no client with this identity is registered", "register first")
    return outcome
