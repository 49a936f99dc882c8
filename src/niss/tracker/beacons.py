"""Where links come from: this tracker's own chains, or another tracker that holds them.

A chain's seed is never stored. It follows from the tracker's identity and a random salt of the run: a signature that
only the identity can make and that never leaves this file, hashed. So a restart finds every chain again, and whoever
reads the store learns no link.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from functools import lru_cache

from niss.protocol.beacon import BeaconChain
from niss.protocol.encoding import length_prefixed, uint64
from niss.protocol.keys import Identity, verify
from niss.protocol.messages import Beacon
from niss.protocol.secret import SecretBytes
from niss.tracker.records import Run

ANCHOR_PURPOSE = "anchor"
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


def anchor_message(run: bytes, rounds: int, anchor: bytes) -> bytes:
    return length_prefixed(run, uint64(rounds), anchor)


def check_anchor(holder: bytes, run: bytes, rounds: int, anchor: bytes, signature: bytes) -> None:
    """Refuse an anchor that the holder did not commit to for this run."""
    verify(holder, ANCHOR_PURPOSE, anchor_message(run, rounds, anchor), signature)
