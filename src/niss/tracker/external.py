"""Links that another tracker holds: this one only keeps the lists.

The two can then be run by different people, and whoever draws up the lists cannot know a link beforehand. The other
tracker is started with this one's key as its --server-key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from niss.protocol.keys import Identity
from niss.protocol.messages import Beacon
from niss.tracker.beacons import BeaconHolder
from niss.tracker.client import TrackerClient, TrackerRefused, TrackerUnavailable
from niss.tracker.records import Run
from niss.tracker.refusal import Refusal


class ExternalChains(BeaconHolder):
    """Asks the tracker at `url` for anchors and links; it writes down what it lets out, as this one does."""

    def __init__(self, url: str, identity: Identity, *, ca: Path | None = None) -> None:
        self._client = TrackerClient(url, identity, ca=ca, retries=3)
        self.public = self._client.describe().holder

    def commit(self, run: bytes, rounds: int, salt: bytes) -> tuple[bytes, bytes]:  # noqa: ARG002
        with _passed_on():
            self._client.start_run(run, rounds)
            told = self._client.describe(run)
        assert told.anchor is not None
        assert told.signature is not None
        return told.anchor, told.signature

    def link(self, run: bytes, begun: Run, round_number: int, attempt: int, commitment: bytes) -> Beacon:  # noqa: ARG002
        with _passed_on():
            return self._client.beacon(run, round_number, attempt, commitment)


@contextmanager
def _passed_on() -> Iterator[None]:
    """Trouble with the holder, as this tracker's own answer."""
    try:
        yield
    except TrackerUnavailable as error:
        raise Refusal(
            503, f"the beacon's holder: {error.message}", hint=error.hint, retry_after=5.0
        ) from None
    except TrackerRefused as error:
        raise Refusal(409, f"the beacon's holder: {error.message}", hint=error.hint) from None
