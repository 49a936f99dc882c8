"""Who is registered, live and in which coalition: a client speaks for itself alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from niss.errors import RemoteProtocolError
from niss.protocol.coalition_file import Coalition
from niss.protocol.keys import fingerprint
from niss.protocol.prekeys import SignedPrekey
from niss.tracker.limits import Settings
from niss.tracker.records import Stock
from niss.tracker.refusal import Refusal, require_server
from niss.tracker.store import Store

_SECONDS_BETWEEN_COUNTS = 5.0


class Membership:
    """The clients of a tracker. Every `caller` has signed its request."""

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
        return _registered(self._store.beat(caller, expires=self._expiry()), "niss-identity")

    def leave(self, caller: bytes) -> None:
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
