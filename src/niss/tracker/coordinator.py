"""A tracker in a session: to the server it is the `Coordinator` of a run, to each node its `Directory`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from niss.errors import NissError, RemoteProtocolError
from niss.protocol.keys import Identity
from niss.protocol.messages import Beacon, Participant, Prekey
from niss.session.ports import USELESS, CoordinatorAway, SeatsRefused
from niss.session.proposal import Proposal
from niss.tracker.api import Attempt
from niss.tracker.client import TrackerClient, TrackerRefused, TrackerUnavailable

# Seconds after which a tracker that is away is asked again; it was asked several times before that.
_PAUSE = 2.0

T = TypeVar("T")


def patiently(what: str, begin: Callable[[], T], patience: float, *, say: Callable[[str], None]) -> T:
    """What `begin` gives; while the coordinator is away it is tried again, for up to `patience` seconds.

    what  is to begin, in words; then `CoordinatorAway` says so
    say   told whenever it waits
    """
    ends = time.monotonic() + patience
    while True:
        try:
            return begin()
        except CoordinatorAway as error:
            why, left = getattr(error, "detail", error.message), ends - time.monotonic()
        if left <= 0.0:
            raise CoordinatorAway(f"{what} could not begin for {patience:g} seconds: {why}")
        say(f"{what} waits, for at most {left:.0f} seconds more: {why}")
        time.sleep(min(_PAUSE, left))


class Tracked:
    """A tracker keeps the keys and holds the chain; this is the server's connection to it.

    How many keys a client has left is counted here, so that the tracker need not be asked about each of them.
    """

    def __init__(self, url: str, identity: Identity, *, ca: str | Path | None) -> None:
        """`identity` is the server's, `ca` the certificate of the authority that signed the tracker's."""
        self.address = url
        self._client = TrackerClient(url, identity, ca=None if ca is None else Path(ca))
        self._run = b""
        self._left: dict[bytes, int] = {}

    @property
    def holder(self) -> bytes:
        return self._client.describe().holder

    def start_run(self, run: bytes, rounds: int, saved: dict[str, Any] | None = None) -> bytes:
        del saved  # Asked again, the tracker answers with the same chain.
        self._run = run
        self._left.clear()
        return self._client.start_run(run, rounds)

    def away(self) -> bool:
        try:
            self._client.describe(anew=True)
        except TrackerUnavailable:
            return True
        return False

    def secrets(self) -> dict[str, Any]:
        return {}  # The tracker has them.

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
        where = Attempt(self._run, number, attempt)
        return self._counted(self._client.seat(where, identities, at_least=at_least))

    def announce(self, number: int, identities: tuple[bytes, ...]) -> tuple[Participant, ...]:
        where, everyone = Attempt(self._run, number, 0), len(identities)
        try:
            seated = self._client.seat(where, identities, at_least=everyone, absent=True)
        except TrackerRefused as error:
            raise SeatsRefused(error.detail, hint=error.advice) from None
        return self._counted(seated)

    def _counted(self, seated: tuple[Participant, ...]) -> tuple[Participant, ...]:
        for participant in seated:
            # Asked again after a restart, the tracker seats some whose keys were not counted since.
            self._left[participant.identity] = max(self._left.get(participant.identity, 0) - 1, 0)
        return seated

    def release(self, number: int, attempt: int, commitment: bytes) -> Beacon:
        return self._client.beacon(Attempt(self._run, number, attempt), commitment)


class NodesTracker:
    """The tracker that a proposal names, as a node with this identity speaks to it.

    Whatever goes wrong with it is one constant `RemoteProtocolError`: the server chose the address, and must not learn
    from a reason what is there. `log` is told, for the node's owner.
    """

    def __init__(self, identity: Identity, ca: Path | None, log: Callable[[NissError], None]) -> None:
        self._identity, self._ca, self._log = identity, ca, log

    def rounds(self, proposal: Proposal) -> int:
        with self._client(proposal) as tracker:
            run = tracker.run(proposal.run)
            if (tracker.describe().holder, run.anchor) != (proposal.holder, proposal.anchor):
                raise RemoteProtocolError("the tracker has another holder or another chain for this run")
            most = proposal.plan.possible_rounds
            if run.rounds > most:
                raise RemoteProtocolError(f"the chain is for {run.rounds} rounds, the plan for {most}")
            return run.rounds

    def register(self, proposal: Proposal, prekeys: tuple[Prekey, ...]) -> None:
        with self._client(proposal) as tracker:
            tracker.leave()
            tracker.register(prekeys)

    def stay_live(self, proposal: Proposal) -> None:
        # The upload stands; whether this client is seated next time is the tracker's business.
        with suppress(RemoteProtocolError), self._client(proposal, retries=1) as tracker:
            tracker.heartbeat()

    @contextmanager
    def _client(self, proposal: Proposal, *, retries: int = 6) -> Iterator[TrackerClient]:
        try:
            with TrackerClient(proposal.tracker, self._identity, ca=self._ca, retries=retries) as tracker:
                yield tracker
        except NissError as error:
            self._log(error)
            raise RemoteProtocolError(USELESS) from None
