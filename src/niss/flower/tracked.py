"""Keys and beacon from a tracker: the server asks, clients register, and neither can play the other's part."""

from __future__ import annotations

from pathlib import Path

from niss.errors import RemoteProtocolError
from niss.flower.proposal import Proposal
from niss.protocol.keys import Identity
from niss.protocol.messages import Beacon, Participant, Prekey
from niss.tracker.client import TrackerClient, TrackerRefused, TrackerUnavailable


class Tracked:
    """The tracker as a coordinator, for the server."""

    independent = True

    def __init__(self, url: str, identity: Identity, *, ca: str | Path | None) -> None:
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
        self._left[identity] = self._left.get(identity, 0) + len(prekeys)

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


def register(proposal: Proposal, identity: Identity, prekeys: tuple[Prekey, ...], *, ca: Path | None) -> None:
    """Register a client's keys, if the tracker says of the run what the server says of it."""
    with TrackerClient(proposal.tracker, identity, ca=ca) as tracker:
        described = tracker.describe(proposal.run)
        if (described.holder, described.anchor) != (proposal.holder, proposal.anchor):
            raise RemoteProtocolError("the tracker knows another holder or another chain for this run")
        tracker.register(prekeys)


def stay_live(proposal: Proposal, identity: Identity, *, ca: Path | None) -> None:
    """Tell the tracker that this client is still there."""
    with TrackerClient(proposal.tracker, identity, ca=ca, retries=1) as tracker:
        tracker.heartbeat()
