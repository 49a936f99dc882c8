"""The tracker without HTTP: who asks, which clients are registered and live, and the runs.

A client speaks for itself alone: every `caller` here has signed its request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from niss.errors import RemoteProtocolError
from niss.protocol.coalition_file import Coalition
from niss.protocol.keys import Identity, SignedPrekey, fingerprint
from niss.protocol.secret import Entropy
from niss.tracker.auth import Refusal, Signed, check_request, require_server
from niss.tracker.beacons import BeaconHolder, OwnChains
from niss.tracker.limits import Buckets, Settings
from niss.tracker.rounds import Openings
from niss.tracker.store import Stock, Store, bind_identity

_SECONDS_BETWEEN_COUNTS = 5.0


class Membership:
    """The clients of a tracker. Every `caller` has signed its request.

    admitted     the closed list of those who may register; None: anyone
    coalitions   closed lists by name; a coalition without one is open to all
    clock        wall time in seconds: who is live
    monotonic    seconds that never go back: how long a count stays valid
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        server: bytes,
        admitted: Coalition | None,
        coalitions: Mapping[str, Coalition],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._store, self._settings, self._server = store, settings, server
        self._admitted, self._coalitions = admitted, dict(coalitions)
        self._clock, self._monotonic = clock, monotonic
        self._room_until = float("-inf")

    def register(self, caller: bytes, prekeys: Sequence[SignedPrekey], coalition: str | None) -> Stock:
        """Make a client live with these one-time keys, each of which it must have signed."""
        if self._admitted is not None and caller not in self._admitted:
            raise Refusal(
                403,
                f"identity {fingerprint(caller)} is not admitted here",
                field="niss-identity",
                hint="ask the tracker's owner to add it to the file given with --admit",
            )
        self._check_room()
        self._check_batch(caller, prekeys)
        if coalition is not None:
            self._check_coalition(caller, coalition)
        stock = self._store.register(caller, prekeys, expires=self._expiry(), largest=self._settings.stock)
        if coalition is not None:
            self._store.set_coalition(caller, coalition)
        return stock

    def deposit(self, caller: bytes, identity: bytes, prekeys: Sequence[SignedPrekey]) -> Stock:
        """The server passes on fresh prekeys that a client sent along with its upload."""
        require_server(caller, self._server)
        self._check_batch(identity, prekeys)
        stock = self._store.deposit(identity, prekeys, expires=self._expiry(), largest=self._settings.stock)
        return _registered(stock, "identity")

    def heartbeat(self, caller: bytes) -> Stock:
        """Stay live for another `ttl` seconds; the answer says how many prekeys are left."""
        return _registered(self._store.beat(caller, expires=self._expiry()), "niss-identity")

    def leave(self, caller: bytes) -> None:
        """Forget the caller and its prekeys; 404 where it was not registered."""
        if not self._store.leave(caller, now=self._clock()):
            raise _not_registered("niss-identity")

    def join(self, caller: bytes, coalition: str | None) -> None:
        """Belong to this coalition and no other, or to none."""
        if coalition is not None:
            self._check_coalition(caller, coalition)
        if not self._store.set_coalition(caller, coalition):
            raise _not_registered("niss-identity")

    def wanted(self, stock: Stock) -> int:
        """How many prekeys a client should send, which is none until it runs low."""
        return self._settings.wanted - stock.held if stock.held < self._settings.low else 0

    def _expiry(self) -> float:
        return self._clock() + self._settings.ttl

    def _check_room(self) -> None:
        """Refuse newcomers once `max_clients` are registered; counted every few seconds."""
        # Counting is slow where there are many; a few too many do no harm.
        if self._monotonic() < self._room_until:
            return
        if self._store.counts(now=self._clock()).registered >= self._settings.max_clients:
            raise Refusal(
                503, "no more clients can be registered", hint="raise --max-clients", retry_after=60.0
            )
        self._room_until = self._monotonic() + _SECONDS_BETWEEN_COUNTS

    @staticmethod
    def _check_batch(identity: bytes, prekeys: Sequence[SignedPrekey]) -> None:
        """Refuse a batch with a prekey that its owner did not sign; the field names which."""
        for place, prekey in enumerate(prekeys):
            try:
                prekey.verify(identity)
            except RemoteProtocolError as error:
                raise Refusal(
                    422,
                    error.message,
                    field=f"prekeys.{place}.signature",
                    hint="a prekey is signed by the identity it belongs to",
                ) from None

    def _check_coalition(self, caller: bytes, name: str) -> None:
        """Refuse whoever is not on the closed list of a coalition, where it has one."""
        closed = self._coalitions.get(name)
        if closed is not None and caller not in closed:
            raise Refusal(
                403,
                f"identity {fingerprint(caller)} is not in the coalition {name!r}",
                field="coalition",
                hint="compare fingerprints with its members, who can add it to the coalition file",
            )


def _registered(stock: Stock | None, field: str) -> Stock:
    if stock is None:
        raise _not_registered(field)
    return stock


def _not_registered(field: str) -> Refusal:
    return Refusal(404, "no client with this identity is registered", field=field, hint="register first")


class Tracker:
    """One tracker process; several may share a store and an identity."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        server: bytes,
        settings: Settings | None = None,
        holder: BeaconHolder | None = None,
        admitted: Coalition | None = None,
        coalitions: Mapping[str, Coalition] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        entropy: Entropy = os.urandom,
    ) -> None:
        """`admitted` and `coalitions` are closed lists: of those who may register, and of those who may join."""
        bind_identity(store, identity.public)
        self.store, self.server, self.public = store, server, identity.public
        self.settings = Settings() if settings is None else settings
        self.holder = OwnChains(identity) if holder is None else holder
        self.members = Membership(
            store,
            self.settings,
            server=server,
            admitted=admitted,
            coalitions=coalitions or {},
            clock=clock,
            monotonic=monotonic,
        )
        self.rounds = Openings(store, identity, self.holder, server=server, clock=clock, entropy=entropy)
        self._clock, self._monotonic = clock, monotonic
        self._buckets = Buckets(self.settings.identity_rate)

    def now(self) -> float:
        return self._clock()

    def check(self, headers: Mapping[str, str], *, method: str, target: bytes, body: bytes) -> Signed:
        """Whose request this is, for reading."""
        return check_request(
            headers,
            tracker=self.public,
            method=method,
            target=target,
            body=body,
            now=self._clock(),
            tolerance=self.settings.tolerance,
        )

    def admit(self, signed: Signed) -> bytes:
        """Who may change something with this request: whoever signed it, once and not too often."""
        if signed.identity != self.server:
            wait = self._buckets.take(signed.identity, self._monotonic())
            if wait:
                raise Refusal(
                    429, "too many requests of this identity", hint=f"wait {wait:.1f} s", retry_after=wait
                )
        # Twice, for the clocks of several trackers on one store may differ too.
        expires = signed.time + 2 * self.settings.tolerance
        if not self.store.first_use(signed.identity, signed.nonce, now=self._clock(), expires=expires):
            raise Refusal(
                401,
                "this request was made before",
                field="niss-nonce",
                hint="sign every request anew, with a fresh nonce",
            )
        return signed.identity

    def sweep(self) -> int:
        """Erase clients that have been away for long; how many."""
        return self.store.forget(before=self._clock() - self.settings.forget_after)
