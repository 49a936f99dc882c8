"""The carried graph: who of one round leaves noise in the model that who of a later round takes out again.

Edge (i, j) of weight c: client `i` of round t adds a share of variance `c sigma^2`, client `j` of round t + lag
subtracts the same share. The graph is drawn by integer arithmetic from the beacon of round t and the hashes of both
participant lists: the later cohort must be fixed before that beacon is known, or the server could seat its own
clients at the far ends of one client's edges.
"""

from __future__ import annotations

import hashlib
import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from niss.errors import ConfigError
from niss.graph.beacon import BeaconStream, disjoint_permutations

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_HASH_BYTES = 32


class CarriedGraph:
    """A weighted bipartite graph from `sizes[0]` clients of one round to `sizes[1]` clients of the round `lag` later.

    Clients are named by their places in the two participant lists. The object never changes; two graphs are equal if
    sizes, lag and edges are.

    senders, receivers, weights  parallel arrays, one entry per edge, sorted, read-only
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        senders: IntArray,
        receivers: IntArray,
        weights: FloatArray,
        *,
        lag: int = 1,
    ) -> None:
        if min(sizes) < 1:
            raise ConfigError(f"both rounds need a client, not {sizes[0]} and {sizes[1]}", field="sizes")
        if lag < 1:
            raise ConfigError(f"noise is carried to a later round, not by {lag}", field="lag")
        if senders.size:
            if (
                min(senders.min(), receivers.min()) < 0
                or np.any(senders >= sizes[0])
                or np.any(receivers >= sizes[1])
            ):
                raise ConfigError(
                    f"clients are numbered 0 to {sizes[0] - 1} and 0 to {sizes[1] - 1}", field="edges"
                )
            if not np.all(np.isfinite(weights)) or weights.min() <= 0.0:
                raise ConfigError("every weight must be a finite number above 0", field="edges")
        codes, where = np.unique(senders * sizes[1] + receivers, return_inverse=True)
        self.sizes = sizes
        self.lag = lag
        self.senders: IntArray = (codes // sizes[1]).astype(np.int64)
        self.receivers: IntArray = (codes % sizes[1]).astype(np.int64)
        self.weights: FloatArray = np.bincount(where, weights=weights, minlength=codes.size).astype(
            np.float64
        )
        for array in (self.senders, self.receivers, self.weights):
            array.setflags(write=False)

    @classmethod
    def complete(cls, sizes: tuple[int, int], *, weight: float = 1.0, lag: int = 1) -> CarriedGraph:
        """Every client of the first round carries a share of that weight to every client of the second."""
        senders, receivers = np.divmod(np.arange(sizes[0] * sizes[1], dtype=np.int64), sizes[1])
        return cls(sizes, senders, receivers, np.full(senders.size, float(weight)), lag=lag)

    @classmethod
    def draw(
        cls, sizes: tuple[int, int], *, degree: float, beacon: bytes, lists: tuple[bytes, bytes], lag: int = 1
    ) -> CarriedGraph:
        """Every sender carries `degree` unit shares, every receiver takes out as many (of equal cohorts).

        Equal cohorts: the union of random permutations without common edges, so that both sides have the same number
        of edges (biregular). Unequal cohorts: each client of the larger side has that many edges, and they are dealt
        to the smaller side in turn, so that its numbers differ by one at most; a pair drawn twice is one edge of twice
        the weight.

        beacon  of the first round, unpredictable until both cohorts were fixed
        lists   the SHA-256 hashes of both participant lists
        """
        if min(sizes) < 1:
            raise ConfigError(f"both rounds need a client, not {sizes[0]} and {sizes[1]}", field="sizes")
        if not math.isfinite(degree) or degree < 1.0:
            raise ConfigError(
                f"each client must carry at least one unit share, not {degree!r}", field="degree"
            )
        if not isinstance(beacon, bytes) or any(len(one) != _HASH_BYTES for one in lists):
            raise ConfigError("needs the beacon and two hashes of 32 bytes", field="lists")
        neighbours = min(math.ceil(degree), *sizes)
        # The hashes have a fixed length, so no two inputs run together.
        stream = BeaconStream(beacon + lists[0] + lists[1], f"carried/{sizes[1]}/{lag}", sizes[0])
        if sizes[0] == sizes[1]:
            senders, receivers = disjoint_permutations(sizes[0], neighbours, stream)
        else:
            senders, receivers = _dealt_edges(sizes, neighbours, stream)
        weights = np.full(senders.size, degree * sizes[0] / senders.size)
        return cls(sizes, senders, receivers, weights, lag=lag)

    @cached_property
    def out_weight(self) -> FloatArray:
        """Unit shares that each client of the first round carries."""
        return np.bincount(self.senders, weights=self.weights, minlength=self.sizes[0]).astype(np.float64)

    @cached_property
    def in_weight(self) -> FloatArray:
        """Unit shares that each client of the second round takes out."""
        return np.bincount(self.receivers, weights=self.weights, minlength=self.sizes[1]).astype(np.float64)

    def matrix(self) -> FloatArray:
        """The weights as a dense matrix, first round x second round."""
        dense = np.zeros(self.sizes)
        dense[self.senders, self.receivers] = self.weights
        return dense

    @cached_property
    def mixing(self) -> float:
        """s_2 of equal cohorts: the second over the first singular value of the matrix; 0 if all carry to all."""
        matrix = self.matrix() / float(self.out_weight.max())
        return float(np.linalg.norm(matrix - 1.0 / self.sizes[1], 2))

    def digest(self) -> bytes:
        """SHA-256 of sizes, lag and sorted edges: two parties compare it to agree on a graph."""
        numbers = b"".join(number.to_bytes(8, "little") for number in (*self.sizes, self.lag))
        state = hashlib.sha256(b"niss.carried-graph.v1" + numbers)
        for array, kind in ((self.senders, "<i8"), (self.receivers, "<i8"), (self.weights, "<f8")):
            state.update(array.astype(kind).tobytes())
        return state.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CarriedGraph) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        return f"CarriedGraph(sizes={self.sizes}, lag={self.lag}, edges={self.senders.size})"


def _dealt_edges(sizes: tuple[int, int], neighbours: int, stream: BeaconStream) -> tuple[IntArray, IntArray]:
    """Each client of the larger side draws `neighbours` times; the smaller side is dealt out in turn."""
    larger, smaller = max(sizes), min(sizes)
    drawn = np.concatenate([stream.permutation(larger) for _ in range(neighbours)])
    dealt = (stream.below(smaller) + np.arange(drawn.size)) % smaller
    return (drawn, dealt) if sizes[0] == larger else (dealt, drawn)
