"""Who hands out keys and holds the beacon: the ServerApp itself (`Relay`) or a tracker apart from it (`Tracked`).

With a relay the server knows every link of the beacon chain in advance and could choose participants until it likes the
graph; signed keys it cannot forge. With a tracker it would need the tracker's help, which is what the paper assumes it
does not get.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from niss.errors import ProtocolError, RemoteProtocolError
from niss.protocol import (
    Beacon,
    BeaconChain,
    Identity,
    Participant,
    Prekey,
    SecretBytes,
    SignedPrekey,
    participants_hash,
)
from niss.tracker.client import TrackerClient
from niss.tracker.store import pack_participants, unpack_participants

# Most that are kept of one client, as many as a client itself keeps.
_STOCK = 256


class Relay:
    """The server itself keeps the keys and holds the chain. `Tracked` has the same methods.

    independent  whether the server would need somebody's help to know a link in advance
    address      where clients register; empty, as the server relays their keys
    """

    independent = False
    address = ""

    def __init__(self) -> None:
        self._holder, self._seed = Identity.generate(os.urandom), SecretBytes(b"")
        self._chain: BeaconChain | None = None
        self._prekeys: dict[bytes, list[Prekey]] = {}
        self._publics: set[bytes] = set()
        self._seated: dict[int, tuple[Participant, ...]] = {}
        self._ahead = False

    @property
    def holder(self) -> bytes:
        """The public key that the links are signed with."""
        return self._holder.public

    def start_run(self, run: bytes, rounds: int) -> bytes:
        """The anchor of a new chain for this run, long enough for so many rounds."""
        del run
        self._seed = SecretBytes(os.urandom(32))
        self._prekeys.clear()
        self._publics.clear()
        self._seated.clear()
        self._ahead = False
        return self._make_chain(rounds)

    def secrets(self) -> dict[str, Any]:
        """What `resume_run` needs to go on with the chain, as JSON; secret."""
        values: dict[str, Any] = {
            "holder": bytes(self._holder.secret_bytes()).hex(),
            "seed": bytes(self._seed).hex(),
        }
        if self._ahead:
            # Those who were announced for a round keep their keys for it.
            values["seated"] = {str(number): packed(seated).hex() for number, seated in self._seated.items()}
        return values

    def resume_run(self, run: bytes, rounds: int, secrets: dict[str, Any]) -> bytes:
        """The anchor of the chain that a server before this one began; its clients hand over new one-time keys."""
        del run
        self._holder = Identity(bytes.fromhex(secrets["holder"]))
        self._seed = SecretBytes(bytes.fromhex(secrets["seed"]))
        for number, seated in secrets.get("seated", {}).items():
            self._seated[int(number)], self._ahead = unpack_participants(bytes.fromhex(seated)), True
        return self._make_chain(rounds)

    def _make_chain(self, rounds: int) -> bytes:
        self._chain = BeaconChain(rounds, holder=self._holder, entropy=lambda _size: self._seed)
        return self._chain.anchor

    def enrolled(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        """A client joined with these one-time keys; of many the newest are kept.

        A key that somebody handed over before is left out: whoever sat beside a copy of its own would have to decline.
        """
        stock = self._prekeys.setdefault(identity, [])
        for one in prekeys:
            if one.public not in self._publics:
                self._publics.add(one.public)
                stock.append(one)
        for dropped in stock[:-_STOCK]:
            self._publics.discard(dropped.public)
        del stock[:-_STOCK]

    def replenish(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        """One-time keys came with a client's upload."""
        self.enrolled(identity, prekeys)

    def ready(self, identity: bytes) -> bool:
        """Whether the client has a key left for another round, as far as is known."""
        return bool(self._prekeys.get(identity))

    def seat(
        self, number: int, attempt: int, identities: tuple[bytes, ...], at_least: int
    ) -> tuple[Participant, ...]:
        """Those of these clients that can be seated, each with a key it will use up; too few are an error."""
        del at_least  # Here all of them can.
        if attempt == 0 or number not in self._seated:
            self._forget_seats(before=number + 1)
            self._seated[number] = self._take_keys(identities)
        # Nobody was told of the attempt before, so the keys are still unused.
        return self._seated[number]

    def announce(self, number: int, identities: tuple[bytes, ...]) -> tuple[Participant, ...]:
        """Seat a round ahead of its time, with all of these clients, whether they are there or not; once.

        For runs that carry noise from each round to the next, which have one attempt at each.
        """
        self._ahead = True
        if number not in self._seated:
            self._forget_seats(before=number - 1)  # The round before is still to be opened, with this list.
            self._seated[number] = self._take_keys(identities)
        return self._seated[number]

    def _take_keys(self, identities: tuple[bytes, ...]) -> tuple[Participant, ...]:
        return tuple(Participant(one, self._prekeys[one].pop(0)) for one in identities)

    def _forget_seats(self, *, before: int) -> None:
        for number in [number for number in self._seated if number < before]:
            self._publics.difference_update(one.prekey.public for one in self._seated.pop(number))

    def beacon(self, number: int, attempt: int, commitment: bytes) -> Beacon:
        """The link of this attempt at a round, once, for terms and those participants that were seated."""
        if self._chain is None:
            raise ProtocolError("no run has been started")
        if not commitment.startswith(participants_hash(self._seated.get(number, ()))):
            raise ProtocolError("a link is let out for the participants that were seated in the round alone")
        if self._ahead and not commitment.endswith(participants_hash(self._seated.get(number + 1, ()))):
            raise ProtocolError(
                "a link is let out for the participants that were seated in the next round alone"
            )
        return self._chain.release(number, attempt, commitment)


class Tracked:
    """A tracker keeps the keys and holds the chain; this is the server's connection to it.

    How many keys a client has left is counted here, so that the tracker need not be asked about each of them.
    """

    independent = True

    def __init__(self, url: str, identity: Identity, *, ca: str | Path | None) -> None:
        """`identity` is the server's, `ca` the certificate of the authority that signed the tracker's."""
        self.address = url
        self._client = TrackerClient(url, identity, ca=None if ca is None else Path(ca))
        self._run = b""
        self._left: dict[bytes, int] = {}

    @property
    def holder(self) -> bytes:
        return self._client.describe().holder

    def start_run(self, run: bytes, rounds: int) -> bytes:
        self._run = run
        self._left.clear()
        return self._client.start_run(run, rounds)

    def secrets(self) -> dict[str, Any]:
        return {}  # The tracker has them.

    def resume_run(self, run: bytes, rounds: int, secrets: dict[str, Any]) -> bytes:
        del secrets
        return self.start_run(run, rounds)  # Asked again, the tracker answers with the same chain.

    def enrolled(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        # The client registered them itself, before it answered.
        self._left[identity] = self._left.get(identity, 0) + len(prekeys)

    def replenish(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        try:
            self._client.deposit(identity, prekeys)
        except RemoteProtocolError:
            return  # It has others; when they are used up it is asked to register anew.
        self.enrolled(identity, prekeys)

    def ready(self, identity: bytes) -> bool:
        return self._left.get(identity, 0) > 0

    def seat(
        self, number: int, attempt: int, identities: tuple[bytes, ...], at_least: int
    ) -> tuple[Participant, ...]:
        seated = self._client.seat(self._run, number, attempt, identities, at_least=at_least)
        return self._counted(seated)

    def announce(self, number: int, identities: tuple[bytes, ...]) -> tuple[Participant, ...]:
        return self._counted(
            self._client.seat(self._run, number, 0, identities, at_least=len(identities), absent=True)
        )

    def _counted(self, seated: tuple[Participant, ...]) -> tuple[Participant, ...]:
        for one in seated:
            # Asked again after a restart, the tracker seats some whose keys were not counted since.
            self._left[one.identity] = max(self._left.get(one.identity, 0) - 1, 0)
        return seated

    def beacon(self, number: int, attempt: int, commitment: bytes) -> Beacon:
        return self._client.beacon(self._run, number, attempt, commitment)


Coordinator = Relay | Tracked


def packed(participants: tuple[Participant, ...]) -> bytes:
    """A list of participants in bytes; `unpack_participants` of the tracker's store reads it."""
    keys = ((one.identity, one.prekey) for one in participants)
    return pack_participants(
        [(identity, SignedPrekey(key.number, key.public, key.signature).encode()) for identity, key in keys]
    )
