"""Who hands out keys and holds the beacon: the ServerApp itself, or a tracker apart from it.

With a relay the server knows every link of the beacon chain in advance and could choose participants until it likes the
graph; signed keys it cannot forge. With a tracker it would need the tracker's help, which is what the paper assumes it
does not get. The server asks the tracker for seats and links, clients register there; neither can act for the other.
"""

from __future__ import annotations

import os
from pathlib import Path

from niss.errors import ProtocolError, RemoteProtocolError
from niss.flower.proposal import Proposal
from niss.protocol import Beacon, BeaconChain, Identity, Participant, Prekey
from niss.tracker.client import TrackerClient, TrackerRefused, TrackerUnavailable


class Relay:
    """The server itself keeps the keys and holds the chain. `Tracked` has the same methods.

    independent  whether the server would need somebody's help to know a link in advance
    address      where clients register; empty, as the server relays their keys
    """

    independent = False
    address = ""

    def __init__(self) -> None:
        self._holder = Identity.generate(os.urandom)
        self._chain: BeaconChain | None = None
        self._prekeys: dict[bytes, list[Prekey]] = {}
        self._seated: dict[int, tuple[Participant, ...]] = {}

    @property
    def holder(self) -> bytes:
        """The public key that the links are signed with."""
        return self._holder.public

    def start_run(self, run: bytes, rounds: int) -> bytes:
        """The anchor of a new chain for this run, long enough for so many rounds."""
        del run
        self._chain = BeaconChain(rounds, holder=self._holder, entropy=os.urandom)
        self._prekeys.clear()
        return self._chain.anchor

    def enrolled(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        """A client joined with these one-time keys."""
        self._prekeys.setdefault(identity, []).extend(prekeys)

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
            seated = tuple(Participant(one, self._prekeys[one].pop(0)) for one in identities)
            self._seated = {number: seated}
        # Nobody was told of the attempt before, so the keys are still unused.
        return self._seated[number]

    def beacon(self, number: int, attempt: int, commitment: bytes) -> Beacon:
        """The link of this attempt at a round, once, for participants and terms that are committed to."""
        if self._chain is None:
            raise ProtocolError("no run has been started")
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

    def enrolled(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        # The client registered them itself, before it answered.
        self._left[identity] = self._left.get(identity, 0) + len(prekeys)

    def replenish(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        try:
            self._client.deposit(identity, prekeys)
        except (TrackerRefused, TrackerUnavailable):
            return  # It has others; when they are used up it is asked to register anew.
        self.enrolled(identity, prekeys)

    def ready(self, identity: bytes) -> bool:
        return self._left.get(identity, 0) > 0

    def seat(
        self, number: int, attempt: int, identities: tuple[bytes, ...], at_least: int
    ) -> tuple[Participant, ...]:
        seated = self._client.seat(self._run, number, attempt, identities, at_least=at_least)
        for one in seated:
            self._left[one.identity] -= 1
        return seated

    def beacon(self, number: int, attempt: int, commitment: bytes) -> Beacon:
        return self._client.beacon(self._run, number, attempt, commitment)


Coordinator = Relay | Tracked


def register(proposal: Proposal, identity: Identity, prekeys: tuple[Prekey, ...], *, ca: Path | None) -> None:
    """Register a client's keys with the tracker of a run, which must say of the run what the server says of it.

    Raises `RemoteProtocolError` where tracker and server disagree on the beacon's holder or the chain's anchor.
    """
    with TrackerClient(proposal.tracker, identity, ca=ca) as tracker:
        described = tracker.describe(proposal.run)
        if (described.holder, described.anchor) != (proposal.holder, proposal.anchor):
            raise RemoteProtocolError("the tracker has another holder or another chain for this run")
        tracker.register(prekeys)


def stay_live(proposal: Proposal, identity: Identity, *, ca: Path | None) -> None:
    """Tell the tracker that this client is still there."""
    with TrackerClient(proposal.tracker, identity, ca=ca, retries=1) as tracker:
        tracker.heartbeat()
