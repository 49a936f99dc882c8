"""Who hands out keys and holds the beacon: the server itself (`Relay`), or a tracker apart from it (`niss.tracker`).

With a relay the server knows every link of the beacon chain in advance and could choose participants until it likes the
graph; signed keys it cannot forge. With a tracker it would need the tracker's help, which is what the paper assumes it
does not get.

`Coordinator` is what a session asks, `Directory` what a node asks of the same tracker. Both block, and both can be
asked the same again after a crash.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

from niss.errors import ProtocolError, RemoteProtocolError
from niss.protocol import (
    Beacon,
    BeaconChain,
    Entropy,
    Identity,
    Participant,
    Prekey,
    SecretBytes,
    participants_hash,
)
from niss.session.proposal import Proposal

Participants = tuple[Participant, ...]
# Most that are kept of one client, as many as a client itself keeps.
_STOCK = 256


class SeatsRefused(RemoteProtocolError):
    """The coordinator will not seat these clients, however often it is asked; others it may."""


class Coordinator(Protocol):
    """Hands out one-time keys and lets links of the beacon chain out.

    independent  whether the server would need somebody's help to know a link in advance
    address      where clients register; empty where the server relays their keys
    """

    independent: bool
    address: str

    @property
    def holder(self) -> bytes:
        """The public key that the links are signed with."""

    def start_run(self, run: bytes, rounds: int) -> bytes:
        """The anchor of a new chain for this run, long enough for so many rounds."""

    def secrets(self) -> dict[str, Any]:
        """What `resume_run` needs to go on with the chain, as JSON; secret."""

    def resume_run(self, run: bytes, rounds: int, secrets: dict[str, Any]) -> bytes:
        """The anchor of the chain that a server before this one began; its clients hand over new one-time keys."""

    def enrolled(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        """A client joined with these one-time keys."""

    def replenish(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        """One-time keys came with a client's upload."""

    def ready(self, identity: bytes) -> bool:
        """Whether the client has a key left for another round, as far as is known."""

    def seat(self, number: int, attempt: int, identities: tuple[bytes, ...], at_least: int) -> Participants:
        """Those of these clients that can be seated, each with a key it will use up; too few are an error."""

    def announce(self, number: int, identities: tuple[bytes, ...]) -> Participants:
        """Seat a round ahead of its time, with all of these clients, whether they are there or not; once.

        For runs that carry noise from each round to the next, which have one attempt at each. Raises `SeatsRefused`
        where it never will.
        """

    def release(self, number: int, attempt: int, commitment: bytes) -> Beacon:
        """The link of this attempt at a round, once, for terms and those participants that were seated."""


class Directory(Protocol):
    """The tracker of a run, as one of its nodes speaks to it; whatever goes wrong is a `RemoteProtocolError`."""

    def rounds(self, proposal: Proposal) -> int:
        """How many rounds the chain of the run has; it must be the chain of the proposal."""

    def register(self, proposal: Proposal, prekeys: tuple[Prekey, ...]) -> None:
        """Leave these keys there, and none that were left before."""

    def stay_live(self, proposal: Proposal) -> None:
        """Say that this client is still there; nothing is raised."""


class Relay:
    """The server itself keeps the keys and holds the chain.

    address  not empty in one process, where the holder is a party of its own that every node can ask (`Parties`)
    """

    def __init__(self, *, address: str = "", entropy: Entropy = os.urandom) -> None:
        self.address, self.independent, self._entropy = address, bool(address), entropy
        self._holder, self._seed = Identity.generate(entropy), SecretBytes(b"")
        self._chain: BeaconChain | None = None
        self._prekeys: dict[bytes, list[Prekey]] = {}
        self._publics: set[bytes] = set()
        self._seated: dict[int, Participants] = {}
        self._ahead = False

    @property
    def holder(self) -> bytes:
        return self._holder.public

    def start_run(self, run: bytes, rounds: int) -> bytes:
        del run
        self._seed = SecretBytes(self._entropy(32))
        self._prekeys.clear()
        self._publics.clear()
        self._seated.clear()
        self._ahead = False
        return self._make_chain(rounds)

    def secrets(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "holder": bytes(self._holder.secret_bytes()).hex(),
            "seed": bytes(self._seed).hex(),
        }
        if self._ahead:
            # Those who were announced for a round keep their keys for it.
            values["seated"] = {str(number): _to_json(seated) for number, seated in self._seated.items()}
        return values

    def resume_run(self, run: bytes, rounds: int, secrets: dict[str, Any]) -> bytes:
        del run
        self._holder = Identity(bytes.fromhex(secrets["holder"]))
        self._seed = SecretBytes(bytes.fromhex(secrets["seed"]))
        for number, seated in secrets.get("seated", {}).items():
            self._seated[int(number)], self._ahead = _from_json(seated), True
        return self._make_chain(rounds)

    def _make_chain(self, rounds: int) -> bytes:
        self._chain = BeaconChain(rounds, holder=self._holder, entropy=lambda _size: bytes(self._seed))
        return self._chain.anchor

    def enrolled(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        """Of many keys the newest are kept.

        A key that somebody handed over before is left out: whoever sat beside a copy of its own would have to decline.
        """
        stock = self._prekeys.setdefault(identity, [])
        for prekey in prekeys:
            if prekey.public not in self._publics:
                self._publics.add(prekey.public)
                stock.append(prekey)
        for dropped in stock[:-_STOCK]:
            self._publics.discard(dropped.public)
        del stock[:-_STOCK]

    def replenish(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        self.enrolled(identity, prekeys)

    def ready(self, identity: bytes) -> bool:
        return bool(self._prekeys.get(identity))

    def seat(self, number: int, attempt: int, identities: tuple[bytes, ...], at_least: int) -> Participants:
        del at_least  # Here all of them can.
        if attempt == 0 or number not in self._seated:
            self._forget_seats(before=number + 1)
            self._seated[number] = self._take_keys(identities)
        # Nobody was told of the attempt before, so the keys are still unused.
        return self._seated[number]

    def announce(self, number: int, identities: tuple[bytes, ...]) -> Participants:
        self._ahead = True
        if number not in self._seated:
            self._forget_seats(before=number - 1)  # The round before is still to be opened, with this list.
            self._seated[number] = self._take_keys(identities)
        return self._seated[number]

    def _take_keys(self, identities: tuple[bytes, ...]) -> Participants:
        return tuple(Participant(identity, self._prekeys[identity].pop(0)) for identity in identities)

    def _forget_seats(self, *, before: int) -> None:
        for number in [number for number in self._seated if number < before]:
            self._publics.difference_update(one.prekey.public for one in self._seated.pop(number))

    def release(self, number: int, attempt: int, commitment: bytes) -> Beacon:
        if self._chain is None:
            raise ProtocolError("no run has been started")
        if not commitment.startswith(participants_hash(self._seated.get(number, ()))):
            raise ProtocolError("a link is let out for the participants that were seated in the round alone")
        if self._ahead and not commitment.endswith(participants_hash(self._seated.get(number + 1, ()))):
            raise ProtocolError(
                "a link is let out for the participants that were seated in the next round alone"
            )
        return self._chain.release(number, attempt, commitment)


def _to_json(participants: Participants) -> list[list[Any]]:
    return [
        [one.identity.hex(), one.prekey.number, one.prekey.public.hex(), one.prekey.signature.hex()]
        for one in participants
    ]


def _from_json(values: list[list[Any]]) -> Participants:
    return tuple(
        Participant(bytes.fromhex(one), Prekey(int(number), bytes.fromhex(public), bytes.fromhex(signature)))
        for one, number, public, signature in values
    )
