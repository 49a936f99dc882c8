"""Where links come from: this tracker's own chains (`OwnChains`), or another tracker that holds them.

A chain's seed is never stored. It follows from the tracker's identity and a random salt of the run: a signature that
only the identity can make and that never leaves this file, hashed. So a restart finds every chain again, and whoever
reads the store learns no link.

With `ExternalChains` this tracker only keeps the lists. The two can then be run by different people, and whoever draws
up the lists cannot know a link beforehand. The other tracker is started with this one's key as its --server-key.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from niss.protocol.beacon import BeaconChain
from niss.protocol.keys import Identity
from niss.protocol.messages import Beacon
from niss.protocol.secret import SecretBytes, length_prefixed, uint64
from niss.tracker.auth import ANCHOR_PURPOSE, Refusal, anchor_message
from niss.tracker.client import TrackerClient, TrackerRefused, TrackerUnavailable
from niss.tracker.store import Run

_CHAINS_IN_MEMORY = 8


class BeaconHolder(ABC):
    """Who commits to a chain and lets its links out; `public` is the key its signatures verify under."""

    public: bytes

    @abstractmethod
    def commit(self, run: bytes, rounds: int, salt: bytes) -> tuple[bytes, bytes]:
        """The anchor of a run's chain, and the holder's signature under it."""

    @abstractmethod
    def link(self, run: bytes, begun: Run, round_number: int, attempt: int, commitment: bytes) -> Beacon:
        """The signed link of an attempt. The caller has written down, durably, that it is let out for this."""


class OwnChains(BeaconHolder):
    """Chains that follow from this tracker's identity."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.public = identity.public
        self._chain = lru_cache(_CHAINS_IN_MEMORY)(self._derive)

    def _derive(self, run: bytes, rounds: int, salt: bytes) -> BeaconChain:
        """The chain of a run: its seed is SHA-256 of a deterministic Ed25519 signature under run, length and salt.

        The signature is never sent or stored, so the seed is known only to whoever holds the identity.
        """
        made = self._identity.sign("beacon-seed", length_prefixed(run, uint64(rounds), salt))
        seed = SecretBytes(hashlib.sha256(b"niss.beacon-seed.v1" + made).digest())
        return BeaconChain(rounds, holder=self._identity, entropy=lambda _count: seed)

    def commit(self, run: bytes, rounds: int, salt: bytes) -> tuple[bytes, bytes]:
        anchor = self._chain(run, rounds, salt).anchor
        return anchor, self._identity.sign(ANCHOR_PURPOSE, anchor_message(run, rounds, anchor))

    def link(self, run: bytes, begun: Run, round_number: int, attempt: int, commitment: bytes) -> Beacon:
        # A copy: the chain's own memory of what was let out ends with the process; the store's does not.
        fresh = copy.copy(self._chain(run, begun.rounds, begun.salt))
        return fresh.release(round_number, attempt, commitment)


class ExternalChains(BeaconHolder):
    """Asks the tracker at `url` for anchors and links; it writes down what it lets out, as this one does."""

    def __init__(self, url: str, identity: Identity, *, ca: Path | None = None) -> None:
        self._client = TrackerClient(url, identity, ca=ca, retries=3)
        self.public = self._client.describe().holder

    def commit(self, run: bytes, rounds: int, salt: bytes) -> tuple[bytes, bytes]:  # noqa: ARG002
        """The anchor and signature of the other tracker; the salt is not needed, since that one draws its own."""
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
