"""A hash chain as beacon: committed to before the first round, let out one link a round.

The anchor is the end of the chain, `H^n(seed)`. Link i hashes to the anchor in i steps, so nobody can choose it
later, and nobody but the holder of the seed can know it earlier. The holder (the tracker) signs each link together
with the participants it was drawn for; the assumption is that it does not collude with the server.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.keys import Identity, verify
from niss.protocol.messages import Beacon

_LONGEST = 1_000_000


def _link(value: bytes) -> bytes:
    return hashlib.sha256(b"niss.beacon.v1" + value).digest()


class BeaconChain:
    """The holder's side: a chain of `length` links from fresh entropy."""

    def __init__(self, length: int, *, holder: Identity, entropy: Callable[[int], bytes]) -> None:
        if not 1 <= length <= _LONGEST:
            raise LocalProtocolError(f"a chain has 1 to {_LONGEST} links, not {length}")
        links = [entropy(32)]
        for _ in range(length):
            links.append(_link(links[-1]))
        # links[0] is the seed and the last link to be let out; the anchor is public from the start.
        self._links = links[::-1]
        self._holder = holder
        self._next = 1

    @property
    def anchor(self) -> bytes:
        return self._links[0]

    def release(self, commitment: bytes) -> Beacon:
        """Let out the next link for a round whose participants and terms are committed to."""
        if self._next >= len(self._links):
            raise LocalProtocolError(
                "the beacon chain is used up", hint="start a new run with a longer chain"
            )
        index, value = self._next, self._links[self._next]
        self._next += 1
        return Beacon(index, value, self._holder.sign("beacon", _signed(index, value, commitment)))


def verify_beacon(beacon: Beacon, commitment: bytes, *, anchor: bytes, holder: bytes, after: int) -> None:
    """Refuse a link that is not of this chain, was let out before, or belongs to another commitment."""
    if not after < beacon.index <= _LONGEST:
        raise RemoteProtocolError(f"beacon link {beacon.index} does not come after link {after}")
    value = beacon.value
    for _ in range(beacon.index):
        value = _link(value)
    if value != anchor:
        raise RemoteProtocolError("the beacon is not a link of the chain committed to")
    verify(holder, "beacon", _signed(beacon.index, beacon.value, commitment), beacon.signature)


def _signed(index: int, value: bytes, commitment: bytes) -> bytes:
    return struct.pack("<Q", index) + value + commitment
