"""A hash chain as beacon: committed to before the first round, each attempt at a round has its own link.

The anchor is the end of the chain, `H^n(seed)`. Link i hashes to the anchor in i steps, so nobody can choose it
later, and nobody but the holder of the seed can know it earlier. The holder (the tracker) signs each link together
with the participants it was drawn for; the assumption is that it does not collude with the server. Which link belongs
to which attempt is fixed (`link_of`) and each is released once: a server cannot ask for links until it likes a graph.
Hash chains for one-time values are Lamport's (1981).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.keys import Identity, verify
from niss.protocol.messages import Beacon

LINKS_PER_ROUND = 4
"""How many attempts at one round there can be."""
_LONGEST = 1_000_000


def link_of(round_number: int, attempt: int) -> int:
    """The number of the link that belongs to an attempt at a round; both count from 0, links from 1.

    `round_number * LINKS_PER_ROUND + attempt + 1`; an attempt beyond the last one is a `RemoteProtocolError`.
    """
    if not 0 <= attempt < LINKS_PER_ROUND:
        raise RemoteProtocolError(f"attempt {attempt}: a round can be tried {LINKS_PER_ROUND} times")
    return round_number * LINKS_PER_ROUND + attempt + 1


def _link(value: bytes) -> bytes:
    return hashlib.sha256(b"niss.beacon.v1" + value).digest()


class BeaconChain:
    """The holder's side of the beacon: a chain, and how far it has been released.

    rounds      links are made for all attempts at rounds 0 to `rounds` - 1
    holder      the identity that signs each link
    entropy     32 bytes of it are the seed of the chain
    """

    def __init__(self, rounds: int, *, holder: Identity, entropy: Callable[[int], bytes]) -> None:
        most = _LONGEST // LINKS_PER_ROUND
        if not 1 <= rounds <= most:
            raise LocalProtocolError(f"a chain can serve 1 to {most} rounds, not {rounds}")
        links = [entropy(32)]
        for _ in range(rounds * LINKS_PER_ROUND):
            links.append(_link(links[-1]))
        # links[0] is the seed and the last link to be released; the anchor is public from the start.
        self._links = links[::-1]
        self._holder = holder
        self._released = 0

    @property
    def anchor(self) -> bytes:
        """The end of the chain: what clients are told before the first round."""
        return self._links[0]

    def release(self, round_number: int, attempt: int, commitment: bytes) -> Beacon:
        """The signed link of an attempt whose participants and terms are committed to: once, and in order."""
        index = link_of(round_number, attempt)
        if index <= self._released:
            raise RemoteProtocolError(
                f"the link of round {round_number}, attempt {attempt} or a later one was released before",
                hint="open a later attempt or round",
            )
        if index >= len(self._links):
            raise LocalProtocolError(
                "the beacon chain is used up", hint="start a new run with a longer chain"
            )
        self._released, value = index, self._links[index]
        return Beacon(index, value, self._holder.sign("beacon", _signed(index, value, commitment)))


def verify_beacon(
    beacon: Beacon, commitment: bytes, *, expected: int, anchor: bytes, holder: bytes, after: int
) -> None:
    """Refuse (`RemoteProtocolError`) a link that is not the right one.

    expected        the number it must have: `link_of` this attempt
    commitment      what it must have been released for: hash of the participants, then of the terms
    anchor, holder  the end of the chain, and the identity that must have signed
    after           the last link seen before: an older one is a replay
    """
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
        raise RemoteProtocolError("the beacon is not a link of the chain that was committed to")


def _signed(index: int, value: bytes, commitment: bytes) -> bytes:
    return struct.pack("<Q", index) + value + commitment
