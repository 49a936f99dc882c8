"""Public pseudo-random numbers from a beacon, and the permutations that graphs are made of."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from niss.errors import ConfigError

IntArray = NDArray[np.int64]


class BeaconStream:
    """Public pseudo-random integers: SHAKE-256 over (beacon, purpose, size, counter)."""

    _BLOCK = 1024

    def __init__(self, beacon: bytes, purpose: str, size: int) -> None:
        if not isinstance(beacon, bytes):
            raise ConfigError(f"must be bytes, not {type(beacon).__name__}", field="beacon")
        seed = hashlib.sha256(beacon).digest() + size.to_bytes(8, "little") + purpose.encode()
        self._seed = b"niss.graph.v1" + seed
        self._counter = 0
        self._words = np.empty(0, dtype=np.uint64)

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` uniform 64-bit words."""
        while self._words.size < count:
            block = hashlib.shake_256(self._seed + self._counter.to_bytes(8, "little")).digest(
                8 * self._BLOCK
            )
            self._counter += 1
            self._words = np.concatenate([self._words, np.frombuffer(block, dtype="<u8").astype(np.uint64)])
        taken, self._words = self._words[:count], self._words[count:]
        return taken

    def permutation(self, count: int) -> IntArray:
        """A random permutation: the order of `count` 64-bit keys (ties: probability < count^2 / 2^65)."""
        return np.argsort(self.words(count), kind="stable").astype(np.int64)

    def below(self, limit: int) -> int:
        """A uniform integer in [0, limit), by rejection."""
        usable = 2**64 - 2**64 % limit
        while True:
            word = int(self.words(1)[0])
            if word < usable:
                return word % limit


def disjoint_derangements(size: int, degree: int, stream: BeaconStream) -> tuple[IntArray, IntArray]:
    """Numbers and images of `degree` permutations without fixed points that share no pair."""
    if degree > (size - 1) // 2:
        # The complement of a simple regular graph is one too, and sparse graphs are quick to draw.
        absent = np.eye(size, dtype=bool)
        absent[disjoint_derangements(size, size - 1 - degree, stream)] = True
        senders, receivers = np.nonzero(~absent)
        return senders.astype(np.int64), receivers.astype(np.int64)
    forbidden = {client * size + client for client in range(size)}
    permutations = []
    for _ in range(degree):
        images = _permutation_avoiding(forbidden, size, stream)
        forbidden.update((np.arange(size) * size + images).tolist())
        permutations.append(images)
    if not permutations:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    return np.tile(np.arange(size, dtype=np.int64), degree), np.concatenate(permutations)


def _permutation_avoiding(forbidden: set[int], size: int, stream: BeaconStream) -> IntArray:
    """A random permutation that uses no forbidden (client, image) pair: random swaps mend a random start.

    One exists whenever the pairs left form a regular bipartite graph (Koenig), which they do here.
    """
    while True:
        images = stream.permutation(size).tolist()
        pending = [client for client in range(size) if client * size + images[client] in forbidden]
        # In a random order: relabelling the clients must not change the law of the graph, on which claims about
        # colluders among a client's neighbours rest (`niss.views.collusion`).
        pending = [pending[place] for place in stream.permutation(len(pending)).tolist()]
        tries = 0
        while pending and tries < 64 * size:
            tries += 1
            client, other = pending[-1], stream.below(size)
            mine, theirs = images[client], images[other]
            if client * size + theirs in forbidden or other * size + mine in forbidden:
                continue
            images[client], images[other] = theirs, mine
            pending = [left for left in pending[:-1] if left * size + images[left] in forbidden]
        if not pending:
            return np.asarray(images, dtype=np.int64)
