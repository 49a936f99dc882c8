"""A hash chain as beacon: committed to before the first round, each attempt at a round has its own link.

The anchor is the end of the chain, `H^n(seed)`. Link i hashes to the anchor in i steps, so nobody can choose it
later, and nobody but the holder of the seed can know it earlier. The holder (the tracker) signs each link together
with the participants it was drawn for; the assumption is that it does not collude with the server. Which link belongs
to which attempt is fixed (`link_of`) and each is let out once, so a server cannot ask for links until it likes a graph.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.keys import Identity, verify
from niss.protocol.messages import Beacon

LINKS_PER_ROUND = 4
"""A round can be tried that often."""
_LONGEST = 1_000_000


def link_of(round_number: int, attempt: int) -> int:
    """The number of the link that belongs to an attempt at a round; both count from 0, links from 1."""
    if not 0 <= attempt < LINKS_PER_ROUND:
        raise RemoteProtocolError(f"attempt {attempt}: a round can be tried {LINKS_PER_ROUND} times")
    return round_number * LINKS_PER_ROUND + attempt + 1


def _link(value: bytes) -> bytes:
    return hashlib.sha256(b"niss.beacon.v1" + value).digest()


class BeaconChain:
    """The holder's side: links for all attempts at rounds 0 to `rounds` - 1, from fresh entropy."""

    def __init__(self, rounds: int, *, holder: Identity, entropy: Callable[[int], bytes]) -> None:
        most = _LONGEST // LINKS_PER_ROUND
        if not 1 <= rounds <= most:
            raise LocalProtocolError(f"a chain is for 1 to {most} rounds, not {rounds}")
        links = [entropy(32)]
        for _ in range(rounds * LINKS_PER_ROUND):
            links.append(_link(links[-1]))
        # links[0] is the seed and the last link to be let out; the anchor is public from the start.
        self._links = links[::-1]
        self._holder = holder
        self._let_out = 0

    @property
    def anchor(self) -> bytes:
        return self._links[0]

    def release(self, round_number: int, attempt: int, commitment: bytes) -> Beacon:
        """Let out the link of an attempt whose participants and terms are committed to: once, and in order."""
        index = link_of(round_number, attempt)
        if index <= self._let_out:
            raise RemoteProtocolError(
                f"the link of round {round_number}, attempt {attempt} or a later one was let out before",
                hint="open a later attempt or round",
            )
        if index >= len(self._links):
            raise LocalProtocolError(
                "the beacon chain is used up", hint="start a new run with a longer chain"
            )
        self._let_out, value = index, self._links[index]
        return Beacon(index, value, self._holder.sign("beacon", _signed(index, value, commitment)))


def verify_beacon(
    beacon: Beacon, commitment: bytes, *, expected: int, anchor: bytes, holder: bytes, after: int
) -> None:
    """Refuse a link that is not the `expected` one of this chain, was seen before, or has another commitment."""
    if beacon.index != expected:
        raise RemoteProtocolError(f"beacon link {beacon.index}, but this attempt has link {expected}")
    if not after < beacon.index <= _LONGEST:
        raise RemoteProtocolError(f"beacon link {beacon.index} does not come after link {after}")
    # First the signature: a server alone cannot make clients walk a long chain.
    verify(holder, "beacon", _signed(beacon.index, beacon.value, commitment), beacon.signature)
    value = beacon.value
    for _ in range(beacon.index):
        value = _link(value)
    if value != anchor:
        raise RemoteProtocolError("the beacon is not a link of the chain committed to")


def _signed(index: int, value: bytes, commitment: bytes) -> bytes:
    return struct.pack("<Q", index) + value + commitment
