"""Who sends how many unit shares to whom, within a round or from one round to the next.

Graphs are derived from a public beacon by integer arithmetic on SHAKE-256 output, so every party that
knows the beacon and the number of participants draws the same graph on every platform and can check
what it is told. The beacon is public: it must be unpredictable before the participants are fixed, and
needs no secrecy afterwards. (Weights of unequal clients are floats: two parties on unlike machines may
differ there in the last bits. The protocol's own graphs have equal weights.)
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.errors import ConfigError

# Weights balance to this relative precision; two parties on unlike machines may differ in the last bits.
BALANCE_TOLERANCE = 1e-9
_BALANCING_TRIES = 4

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Sizes = int | tuple[int, int]
Columns = tuple[IntArray, IntArray, FloatArray]


class BeaconStream:
    """Public pseudo-random integers: SHAKE-256 over (beacon, purpose, size, counter)."""

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
            counter = self._counter.to_bytes(8, "little")
            block = hashlib.shake_256(self._seed + counter).digest(8 * 1024)
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


class ShareGraph:
    """A weighted directed graph; edge (a, b, c): `a` sends `c` unit shares to `b`.

    Within a round of `size` clients nobody sends a share to itself. With two sizes it leads from the clients of one
    round to those of the next: `a` adds shares to its upload that `b` takes out of its own, one round later.

    Parallel edges are merged into one share of the summed weight, edges are kept sorted, and the object never changes.
    The constructors `regular`, `complete`, `random` and `coalition` make the graphs the mechanism uses; any other is
    given edge by edge. Two graphs are equal if their edges are. A complete graph has its edges written out on demand.

    size, sizes, kind           number of clients at which edges begin; and also at which they end; the constructor
    between                     whether it leads to the next round
    weight                      of a complete graph: that of every edge
    senders, receivers, weights parallel arrays, one entry per merged edge, read-only
    """

    sizes: tuple[int, int]
    size: int
    kind: str
    between: bool
    weight: float

    def __init__(self, size: Sizes, edges: Iterable[tuple[int, int, float]]) -> None:
        rows = list(edges)
        try:
            ends = [(operator.index(sender), operator.index(receiver)) for sender, receiver, _ in rows]
        except TypeError:
            raise ConfigError("clients are named by whole numbers", field="edges") from None
        self._shape(size, "given")
        weights = np.array([weight for _, _, weight in rows], dtype=np.float64)
        senders, receivers = np.array(ends, dtype=np.int64).reshape(-1, 2).T
        self._merge(senders, receivers, weights)

    @classmethod
    def from_arrays(
        cls, size: Sizes, senders: IntArray, receivers: IntArray, weights: FloatArray, kind: str
    ) -> ShareGraph:
        """The same from parallel arrays."""
        graph = object.__new__(cls)
        graph._shape(size, kind)
        graph._merge(senders, receivers, weights)
        return graph

    def _shape(self, size: Sizes, kind: str) -> None:
        self.sizes = (size, size) if isinstance(size, int) else size
        self.between = not isinstance(size, int)
        self.size, self.kind = self.sizes[0], kind
        if min(self.sizes) < 1:
            raise ConfigError(f"a graph needs at least one client, not {min(self.sizes)}", field="size")

    def _merge(self, senders: IntArray, receivers: IntArray, weights: FloatArray) -> None:
        first, second = self.sizes
        if senders.size:
            low = min(senders.min(), receivers.min())
            if low < 0 or senders.max() >= first or receivers.max() >= second:
                last, found = max(first, second) - 1, f"{low} to {max(senders.max(), receivers.max())}"
                raise ConfigError(f"clients are numbered 0 to {last}, not {found}", field="edges")
            if not self.between and np.any(senders == receivers):
                raise ConfigError("a client cannot send a share to itself", field="edges")
            if not np.all(np.isfinite(weights)) or weights.min() <= 0.0:
                raise ConfigError("every weight must be a finite number above 0", field="edges")
        # Sorted by weight too, so that the sum of parallel edges does not depend on their order.
        order = np.lexsort((weights, senders * second + receivers))
        codes, where = np.unique((senders * second + receivers)[order], return_inverse=True)
        merged = np.bincount(where, weights=weights[order], minlength=codes.size).astype(np.float64)
        self._edges = _read_only(codes // second, codes % second, merged)

    @classmethod
    def complete(cls, size: Sizes, *, weight: float = 1.0) -> ShareGraph:
        """Everyone sends a share of that weight to everyone else; with two sizes, to everyone of the next round."""
        if isinstance(size, int):
            _require_clients(size)
        if not (math.isfinite(weight) and weight > 0.0):
            raise ConfigError("every weight must be a finite number above 0", field="edges")
        graph = object.__new__(cls)
        graph._shape(size, "complete")
        graph.weight = weight
        return graph

    @cached_property
    def _edges(self) -> Columns:
        """Those of a complete graph; of any other they are there from the beginning."""
        absent = np.zeros(self.sizes, dtype=bool) if self.between else np.eye(self.size, dtype=bool)
        senders, receivers = _edges_except(absent)
        return _read_only(senders, receivers, np.full(senders.size, self.weight))

    @property
    def senders(self) -> IntArray:
        return self._edges[0]

    @property
    def receivers(self) -> IntArray:
        return self._edges[1]

    @property
    def weights(self) -> FloatArray:
        return self._edges[2]

    @classmethod
    def regular(
        cls, size: int, *, degree: float, beacon: bytes, shares: ArrayLike | None = None
    ) -> ShareGraph:
        """The union of `degree` random derangements without common edges: an expander.

        Every client sends to and receives from the same number of clients, which the paper's Theorem 2
        needs and a plain random list does not give. A fractional degree spreads that many unit shares
        over the next whole number of neighbours; `degree = size - 1` is the complete graph, and above it
        shares to the same neighbour merge. With `shares` (one v_k per client) the number of neighbours
        grows with v_k, from `degree` upwards, and in-weight = out-weight = v_k for every client.
        """
        neighbours = _neighbours(size, degree)
        stream = BeaconStream(beacon, "regular.v2", size)
        if shares is None:
            if neighbours == size - 1:
                return cls.complete(size, weight=float(degree) / neighbours)
            senders, receivers = _disjoint_derangements(size, neighbours, stream)
            weights = np.full(senders.size, float(degree) / neighbours)
        else:
            senders, receivers, weights = _balanced_edges(neighbours, _share_vector(shares, size), stream)
        return cls.from_arrays(size, senders, receivers, weights, "regular")

    @classmethod
    def random(
        cls, size: int, *, degree: float, beacon: bytes, shares: ArrayLike | None = None
    ) -> ShareGraph:
        """The paper's plain list: each client picks its receivers at random, so in-degrees vary.

        With `shares` client k sends v_k unit shares; what it receives is left to chance.
        """
        neighbours = _neighbours(size, degree)
        stream = BeaconStream(beacon, "random", size)
        chosen = np.stack([stream.permutation(size - 1)[:neighbours] for _ in range(size)])
        senders = np.repeat(np.arange(size, dtype=np.int64), neighbours)
        # Numbers 0..size-2 stand for "the others", skipping the sender itself.
        receivers = chosen.reshape(-1) + (chosen.reshape(-1) >= senders)
        sent = np.full(size, float(degree)) if shares is None else _share_vector(shares, size)
        return cls.from_arrays(size, senders, receivers, sent[senders] / neighbours, "random")

    @classmethod
    def coalition(
        cls,
        size: int,
        *,
        groups: Sequence[Sequence[int]],
        degree: float | None = None,
        beacon: bytes = b"",
        shares: ArrayLike | None = None,
    ) -> ShareGraph:
        """Shares stay within named groups: each a regular graph, complete where no degree is given.

        `groups` are lists of clients; whoever is in none neither sends nor receives. `degree`, `beacon` and `shares`
        are those of `regular`, for each group.
        """
        _require_clients(size)
        members = [client for group in groups for client in group]
        if len(set(members)) != len(members):
            raise ConfigError("a client may belong to one group only", field="groups")
        if any(not 0 <= client < size for client in members):
            raise ConfigError(f"clients are numbered 0 to {size - 1}", field="groups")
        parts = []
        for number, group in enumerate(groups):
            if len(group) < 2:
                few = f"group {number} has {len(group)} clients"
                raise ConfigError(few, field="groups", hint="a group needs two or more")
            names = np.asarray(group, dtype=np.int64)
            inner = cls.regular(
                len(group),
                degree=len(group) - 1 if degree is None else degree,
                beacon=beacon + b"/group/" + str(number).encode(),
                shares=None if shares is None else _share_vector(shares, size)[names],
            )
            parts.append((names[inner.senders], names[inner.receivers], inner.weights))
        if not parts:
            raise ConfigError("must name at least one group", field="groups", hint="give lists of clients")
        senders, receivers, weights = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls.from_arrays(size, senders, receivers, weights, "coalition")

    @cached_property
    def out_weight(self) -> FloatArray:
        """Unit shares each client sends."""
        return self._sum_by(0)

    @cached_property
    def in_weight(self) -> FloatArray:
        """Unit shares each client receives."""
        return self._sum_by(1)

    def _sum_by(self, end: int) -> FloatArray:
        """Weights at each client of one end; on complete graphs added up in the same order, so to the same bits."""
        if self.kind == "complete":
            each = np.cumsum(np.full(self.sizes[1 - end] - (not self.between), self.weight))[-1]
            sums = np.full(self.sizes[end], each)
        else:
            ends, size = self._edges[end], self.sizes[end]
            sums = np.bincount(ends, weights=self.weights, minlength=size).astype(np.float64)
        sums.setflags(write=False)
        return sums

    @property
    def balanced(self) -> bool:
        """Whether every client receives as many unit shares as it sends (Theorem 2 needs it)."""
        return bool(np.allclose(self.in_weight, self.out_weight, rtol=BALANCE_TOLERANCE, atol=0.0))

    @property
    def degrees(self) -> IntArray:
        """How many neighbours each client has, in either direction."""
        whole = self.kind == "complete"
        return np.full(self.size, self.size - 1) if whole else np.diff(self._adjacency[0])

    def neighbours(self, client: int) -> IntArray:
        """Everyone who shares an edge with `client`, in either direction."""
        if self.kind == "complete":
            return np.delete(np.arange(self.size), client)
        starts, linked = self._adjacency
        return linked[starts[client] : starts[client + 1]]

    def edges_of(self, client: int) -> IntArray:
        """The numbers of the edges that touch `client`, ascending."""
        if self.kind == "complete":
            others = self.neighbours(client)
            first, last = np.minimum(others, client), np.maximum(others, client)
            numbers = first * (self.size - 1) + last - 1, last * (self.size - 1) + first
            return np.sort(np.concatenate(numbers))
        starts, edges = self._incidence
        return edges[starts[client] : starts[client + 1]]

    @cached_property
    def _adjacency(self) -> tuple[IntArray, IntArray]:
        """All neighbours, client after client, and where those of each begin."""
        ends = np.concatenate([self.senders, self.receivers]) * self.size
        codes = np.unique(ends + np.concatenate([self.receivers, self.senders]))
        return np.searchsorted(codes, np.arange(self.size + 1) * self.size), codes % self.size

    @cached_property
    def _incidence(self) -> tuple[IntArray, IntArray]:
        """All edges that touch a client, client after client, and where those of each begin."""
        ends = np.concatenate([self.senders, self.receivers])
        order = np.lexsort((np.tile(np.arange(self.senders.size), 2), ends))
        starts = np.searchsorted(ends[order], np.arange(self.size + 1))
        return starts, order % max(self.senders.size, 1)

    def laplacian(self) -> FloatArray:
        """The weighted Laplacian of the graph, both directions added up (dense, size x size).

        With unit variance sigma^2 the shares in the uploads have the covariance `sigma^2 L`.
        """
        matrix = np.zeros((self.size, self.size))
        np.add.at(matrix, (self.senders, self.receivers), -self.weights)
        matrix += matrix.T
        np.fill_diagonal(matrix, self.in_weight + self.out_weight)
        return matrix

    def digest(self) -> bytes:
        """SHA-256 of the size and the sorted edges: two parties compare it to agree on a graph."""
        name = b"niss.carried-graph.v1" if self.between else b"niss.share-graph.v1"
        sizes = self.sizes[: 1 + self.between]
        state = hashlib.sha256(name + b"".join(size.to_bytes(8, "little") for size in sizes))
        for array, kind in ((self.senders, "<i8"), (self.receivers, "<i8"), (self.weights, "<f8")):
            state.update(array.astype(kind).tobytes())
        return state.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShareGraph) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        size = self.sizes if self.between else self.size
        return f"ShareGraph(kind={self.kind!r}, size={size}, edges={self.senders.size})"


def _read_only(senders: IntArray, receivers: IntArray, weights: FloatArray) -> Columns:
    for array in (senders, receivers, weights):
        array.setflags(write=False)
    return senders, receivers, weights


def _share_vector(shares: ArrayLike, size: int) -> FloatArray:
    vector = np.asarray(shares, dtype=np.float64)
    if vector.shape != (size,):
        raise ConfigError(f"needs one number per client ({size}), not shape {vector.shape}", field="shares")
    if not np.all(np.isfinite(vector)) or vector.min() < 1.0 - 1e-12:
        raise ConfigError("every client must send at least one unit share", field="shares")
    return vector


def _require_clients(size: int) -> None:
    if size < 2:
        raise ConfigError(
            f"{size} client cannot share noise", field="size", hint="a round needs at least two participants"
        )


def _neighbours(size: int, degree: float) -> int:
    """Over how many neighbours a client spreads its `degree` unit shares."""
    _require_clients(size)
    if not math.isfinite(degree) or degree < 1.0:
        raise ConfigError(
            f"each client must send at least one unit share, not {degree!r}",
            field="degree",
            hint="lower the unit noise or raise the number of neighbours",
        )
    return min(math.ceil(degree), size - 1)


def _edges_except(absent: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """Senders and receivers of all edges that are not `absent` (size x size)."""
    senders, receivers = np.nonzero(~absent)
    return senders.astype(np.int64), receivers.astype(np.int64)


def _disjoint_derangements(size: int, degree: int, stream: BeaconStream) -> tuple[IntArray, IntArray]:
    """Numbers and images of `degree` permutations without fixed points that share no pair."""
    if degree > (size - 1) // 2:
        # The complement of a simple regular graph is one too, and sparse graphs are quick to draw.
        absent = np.eye(size, dtype=bool)
        absent[_disjoint_derangements(size, size - 1 - degree, stream)] = True
        return _edges_except(absent)
    forbidden = {client * size + client for client in range(size)}
    permutations = []
    for _ in range(degree):
        images = _permutation_avoiding(forbidden, size, stream)
        forbidden.update((np.arange(size) * size + images).tolist())
        permutations.append(images)
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


def _balanced_edges(fewest: int, shares: FloatArray, stream: BeaconStream) -> Columns:
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
    needed = np.ceil(fewest * shares / shares.min() - 1e-9)
    # Near the complete graph everything that can be balanced can be balanced there: it is tried last.
    for extra in range(_BALANCING_TRIES + 1):
        if extra < _BALANCING_TRIES:
            degrees = np.minimum(needed + extra, size - 1).astype(np.int64)
            senders, receivers = _edges_of_degrees(degrees, stream)
        else:
            senders, receivers = _edges_except(np.eye(size, dtype=bool))
        weights = _balanced_weights(senders, receivers, shares)
        if weights is not None:
            return senders, receivers, weights
    raise ConfigError(
        "no weights let every client receive as much as it sends",
        field="shares",
        hint="make the share counts less unequal",
    )


def _edges_of_degrees(degrees: IntArray, stream: BeaconStream) -> tuple[IntArray, IntArray]:
    """A random simple graph in which client k has `degrees[k]` edges out and about as many in.

    Stubs are matched at random (the configuration model); a self-loop or a repeated edge is swapped away where a few
    tries manage it and left out where they do not, which the weights then make up for.
    """
    size = degrees.size
    senders = np.repeat(np.arange(size, dtype=np.int64), degrees)
    receivers = senders[stream.permutation(senders.size)]
    codes = (senders * size + receivers).tolist()
    counts = Counter(codes)

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
            if swapped[0] == swapped[1] or any(c // size == c % size or counts[c] for c in swapped):
                continue
            counts.subtract((codes[place], codes[other]))
            counts.update(swapped)
            codes[place], codes[other] = swapped
    edges = np.array(sorted({code for code in codes if code // size != code % size}), dtype=np.int64)
    return edges // size, edges % size


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
