"""Who hands out keys and holds the beacon: the ServerApp itself, or a tracker apart from it.

With a relay the server knows every link of the chain in advance and could choose the participants until it likes the
graph. Signed keys it cannot forge. With a tracker it would need the tracker's help, which is what the paper assumes.
"""

from __future__ import annotations

import os
from typing import Protocol

from niss.errors import ProtocolError
from niss.protocol.beacon import BeaconChain
from niss.protocol.keys import Identity
from niss.protocol.messages import Beacon, Participant, Prekey


class Coordinator(Protocol):
    """Seats clients and lets the beacon's links out, once each."""

    @property
    def holder(self) -> bytes:
        """The identity that signs the links."""

    @property
    def independent(self) -> bool:
        """Whether the server would need somebody's help to know a link in advance."""

    @property
    def address(self) -> str:
        """Where clients register; empty where the server relays their keys."""

    def start_run(self, run: bytes, rounds: int) -> bytes:
        """The anchor of a new chain for this run."""

    def enrolled(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        """A client joined with these one-time keys."""

    def replenish(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        """One-time keys that came with an upload."""

    def ready(self, identity: bytes) -> bool:
        """Whether the client has a key left for another round, as far as is known."""

    def seat(
        self, number: int, attempt: int, identities: tuple[bytes, ...], at_least: int
    ) -> tuple[Participant, ...]:
        """Those of these clients that can be seated, each with a key it will use up; too few are an error."""

    def beacon(self, number: int, attempt: int, commitment: bytes) -> Beacon:
        """The link of this attempt, for participants and terms that are committed to."""


class Relay:
    """The server keeps the keys and holds the chain."""

    independent = False
    address = ""

    def __init__(self) -> None:
        self._holder = Identity.generate(os.urandom)
        self._chain: BeaconChain | None = None
        self._prekeys: dict[bytes, list[Prekey]] = {}
        self._seated: dict[int, tuple[Participant, ...]] = {}

    @property
    def holder(self) -> bytes:
        return self._holder.public

    def start_run(self, run: bytes, rounds: int) -> bytes:
        del run
        self._chain = BeaconChain(rounds, holder=self._holder, entropy=os.urandom)
        self._prekeys.clear()
        return self._chain.anchor

    def enrolled(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        self._prekeys.setdefault(identity, []).extend(prekeys)

    replenish = enrolled

    def ready(self, identity: bytes) -> bool:
        return bool(self._prekeys.get(identity))

    def seat(
        self, number: int, attempt: int, identities: tuple[bytes, ...], at_least: int
    ) -> tuple[Participant, ...]:
        del at_least
        if attempt == 0 or number not in self._seated:
            seated = tuple(Participant(one, self._prekeys[one].pop(0)) for one in identities)
            self._seated = {number: seated}
        # Nobody was told of the attempt before, so the keys are still unused.
        return self._seated[number]

    def beacon(self, number: int, attempt: int, commitment: bytes) -> Beacon:
        if self._chain is None:
            raise ProtocolError("no run was started")
        return self._chain.release(number, attempt, commitment)
