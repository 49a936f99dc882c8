"""Drawing graphs from a public beacon: permutations, derangements, balanced weights."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from niss.errors import ConfigError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

# Weights balance to this relative precision; two parties on unlike machines may differ in the last bits.
BALANCE_TOLERANCE = 1e-9
_BALANCING_TRIES = 4


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
    """Senders and receivers of `degree` derangements that share no edge."""
    if degree > (size - 1) // 2:
        # The complement of a simple regular graph is one too, and sparse graphs are quick to draw.
        rest = disjoint_derangements(size, size - 1 - degree, stream)
        absent = np.eye(size, dtype=bool)
        absent[rest] = True
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


def balanced_edges(
    fewest: int, shares: FloatArray, stream: BeaconStream
) -> tuple[IntArray, IntArray, FloatArray]:
    """Edges and weights with in-weight = out-weight = shares; the client with the least has `fewest` each way.

    The number of neighbours grows in proportion to the shares, so that nearly equal weights nearly balance
    and Sinkhorn scaling finds the rest. No client can send more than all others together receive.
    """
    size = shares.size
    if np.any(2.0 * shares > shares.sum() * (1.0 + BALANCE_TOLERANCE)):
        raise ConfigError(
            f"client {int(shares.argmax())} sends more unit shares than all others together can receive",
            field="shares",
            hint="make the share counts less unequal, or let more clients take part",
        )
    wanted = np.ceil(fewest * shares / shares.min() - 1e-9)
    # Near the complete graph everything that can be balanced can be balanced there.
    degrees = np.minimum(wanted, size - 1).astype(np.int64)
    for _ in range(_BALANCING_TRIES):
        senders, receivers = _edges_of_degrees(degrees, stream)
        weights = _balanced_weights(senders, receivers, shares)
        if weights is not None:
            return senders, receivers, weights
        degrees = np.minimum(degrees + 1, size - 1)
    everyone = np.nonzero(~np.eye(size, dtype=bool))
    senders, receivers = everyone[0].astype(np.int64), everyone[1].astype(np.int64)
    weights = _balanced_weights(senders, receivers, shares)
    if weights is None:
        raise ConfigError(
            "no weights let every client receive as much as it sends",
            field="shares",
            hint="make the share counts less unequal",
        )
    return senders, receivers, weights


def _edges_of_degrees(degrees: IntArray, stream: BeaconStream) -> tuple[IntArray, IntArray]:
    """A random simple graph in which client k has `degrees[k]` edges out and about as many in.

    Stubs are matched at random; a self-loop or a repeated edge is swapped away where a few tries
    manage it and left out where they do not, which the weights then make up for.
    """
    size = degrees.size
    senders = np.repeat(np.arange(size, dtype=np.int64), degrees)
    receivers = senders[stream.permutation(senders.size)]
    codes = (senders * size + receivers).tolist()
    counts: dict[int, int] = {}
    for code in codes:
        counts[code] = counts.get(code, 0) + 1

    def faulty(code: int) -> bool:
        return code // size == code % size or counts[code] > 1

    for place in range(len(codes)):
        for _ in range(16):
            if not faulty(codes[place]):
                break
            other = stream.below(len(codes))
            swapped = (
                codes[place] // size * size + codes[other] % size,
                codes[other] // size * size + codes[place] % size,
            )
            if swapped[0] == swapped[1] or any(c // size == c % size or counts.get(c, 0) for c in swapped):
                continue
            for old, new in zip((codes[place], codes[other]), swapped, strict=True):
                counts[old] -= 1
                counts[new] = counts.get(new, 0) + 1
            codes[place], codes[other] = swapped
    kept = np.array(sorted({code for code in codes if code // size != code % size}), dtype=np.int64)
    return kept // size, kept % size


def _balanced_weights(senders: IntArray, receivers: IntArray, shares: FloatArray) -> FloatArray | None:
    """Weights on the given edges with in-weight = out-weight = shares, by Sinkhorn scaling; None if stuck."""
    size = shares.size
    weights = shares[senders] * shares[receivers] / shares.sum()
    for _ in range(2_000):
        sent = np.bincount(senders, weights=weights, minlength=size)
        if np.any(sent == 0.0):
            return None
        weights *= (shares / sent)[senders]
        received = np.bincount(receivers, weights=weights, minlength=size)
        if np.any(received == 0.0):
            return None
        if np.allclose(received, shares, rtol=0.1 * BALANCE_TOLERANCE, atol=0.0):
            return np.asarray(weights)
        weights *= (shares / received)[receivers]
    return None
