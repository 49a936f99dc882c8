"""The tracker without HTTP: who asks, and the two things it keeps, its clients and its runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from niss.protocol.coalition_file import Coalition
from niss.protocol.keys import Identity
from niss.protocol.secret import Entropy
from niss.tracker.auth import Signed, check_request
from niss.tracker.beacons import BeaconHolder, OwnChains
from niss.tracker.limits import Buckets, Settings
from niss.tracker.membership import Membership
from niss.tracker.openings import Openings
from niss.tracker.refusal import Refusal
from niss.tracker.store import Store, bind_identity


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
