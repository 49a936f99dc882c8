"""Where links come from: this tracker's own chains (`OwnChains`), or another tracker that holds them.

A chain's seed is never stored. It follows from the tracker's identity and a random salt of the run: a signature that
only the identity can make and that never leaves this file, hashed. So a restart finds every chain again, and whoever
reads the store learns no link.

With `ExternalChains` this tracker only keeps the lists. The two can then be run by different people, and whoever draws
up the lists cannot know a link beforehand. The other tracker is started with this one's key as its --server-key, and
with --holder-only: the lists are kept here.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from niss.protocol.agreement import BeaconChain
from niss.protocol.keys import Identity, SecretBytes, length_prefixed, uint64
from niss.protocol.messages import Beacon
from niss.tracker.auth import ANCHOR_PURPOSE, Refusal, anchor_message
from niss.tracker.client import TrackerClient, TrackerRefused, TrackerUnavailable
from niss.tracker.store import Attempt, Run

_CHAINS_IN_MEMORY = 8


class BeaconHolder(ABC):
    """Who commits to a chain and lets its links out; `public` is the key its signatures verify under.

    Both methods have the same answer for the same arguments, before and after a restart. They raise a `Refusal` where
    the holder is elsewhere and cannot be reached (503) or will not answer (409).
    """

    public: bytes

    @abstractmethod
    def commit(self, run: bytes, rounds: int, salt: bytes) -> tuple[bytes, bytes]:
        """The anchor of a chain for that many rounds, and the holder's signature under run, rounds and anchor.

        `salt` are 32 random bytes, drawn once for each run; the same salt gives the same chain.
        """

    @abstractmethod
    def link(self, attempt: Attempt, run: Run, commitment: bytes) -> Beacon:
        """The signed link of an attempt at `run`, for this commitment.

        The caller has written down before, durably, that the link is let out for it and nothing else.
        """


class OwnChains(BeaconHolder):
    """Chains that follow from this tracker's identity; the last few are kept in memory, since deriving one is slow."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.public = identity.public
        self._chain = lru_cache(_CHAINS_IN_MEMORY)(self._derive)

    def _derive(self, run: bytes, rounds: int, salt: bytes) -> BeaconChain:
        """The chain of a run: its seed is SHA-256 of a deterministic Ed25519 signature under run, length and salt.

        The signature is never sent or stored, so the seed is known only to whoever holds the identity.
        """
        signature = self._identity.sign("beacon-seed", length_prefixed(run, uint64(rounds), salt))
        seed = SecretBytes(hashlib.sha256(b"niss.beacon-seed.v1" + signature).digest())
        return BeaconChain(rounds, holder=self._identity, entropy=lambda _count: seed)

    def commit(self, run: bytes, rounds: int, salt: bytes) -> tuple[bytes, bytes]:
        anchor = self._chain(run, rounds, salt).anchor
        return anchor, self._identity.sign(ANCHOR_PURPOSE, anchor_message(run, rounds, anchor))

    def link(self, attempt: Attempt, run: Run, commitment: bytes) -> Beacon:
        # A copy: the chain's own memory of what was let out ends with the process; the store's does not.
        fresh = copy.copy(self._chain(attempt.run, run.rounds, run.salt))
        return fresh.release(attempt.round, attempt.number, commitment)


class ExternalChains(BeaconHolder):
    """Asks the tracker at `url` for anchors and links; it writes down what it lets out, as this one does."""

    def __init__(self, url: str, identity: Identity, *, ca: Path | None = None) -> None:
        """`identity` is this tracker's, which the other one takes for its server; `ca` verifies its certificate.

        Asks for its public key at once, so that a wrong address shows at the start (`TrackerUnavailable`).
        """
        self._client = TrackerClient(url, identity, ca=ca, retries=3)
        self.public = self._client.describe().holder

    def commit(self, run: bytes, rounds: int, salt: bytes) -> tuple[bytes, bytes]:  # noqa: ARG002
        """The other tracker's anchor and signature, verified; the salt is not needed, since that one draws its own."""
        with _passed_on():
            self._client.start_run(run, rounds)
            about = self._client.describe(run)
        assert about.anchor is not None
        assert about.signature is not None
        return about.anchor, about.signature

    def link(self, attempt: Attempt, run: Run, commitment: bytes) -> Beacon:  # noqa: ARG002
        with _passed_on():
            return self._client.beacon(*attempt, commitment)


@contextmanager
def _passed_on() -> Iterator[None]:
    """Trouble with the holder, as this tracker's own answer."""
    try:
        yield
    except TrackerUnavailable as error:
        raise Refusal(
            503, f"the beacon's holder: {error.detail}", hint=error.advice, retry_after=5.0
        ) from None
    except TrackerRefused as error:
        raise Refusal(409, f"the beacon's holder: {error.detail}", hint=error.advice) from None
