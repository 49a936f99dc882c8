"""What follows from an opened round for everybody alike: the graph, and the context of every seed.

Everyone who was told the same derives the same; nobody is asked to believe it. The hash of the terms goes into the
context too. If a server told two clients different terms, they would derive unrelated seeds, and their shares would
fail to cancel: less accuracy, never less privacy.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import astuple, dataclass
from functools import cached_property

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.graph import ShareGraph
from niss.mechanism.grid import MAX_BITS, Grid
from niss.protocol.messages import Participant, RoundOpen, Terms
from niss.protocol.secret import is_uint64, length_prefixed, uint64
from niss.randomness.secret import LARGEST_DEVIATION

HASH_BYTES = 32
LONGEST_FIELD = 255


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What one attempt at one round is, to the last detail that keys depend on. Nothing in it is secret.

    run                 name of the run, 1 to 255 bytes
    round, attempt      counted from 0, below 2^64
    beacon              the beacon's value, 1 to 255 bytes
    participants_hash   `participants_hash` of the list of participants
    graph_hash          hash of the share graph and of the terms

    A value that does not fit is a `LocalProtocolError`.
    """

    run: bytes
    round: int
    attempt: int
    beacon: bytes
    participants_hash: bytes
    graph_hash: bytes

    def __post_init__(self) -> None:
        for name in ("run", "beacon"):
            value = getattr(self, name)
            if not isinstance(value, bytes) or not 0 < len(value) <= LONGEST_FIELD:
                raise LocalProtocolError(f"{name}: must be 1 to {LONGEST_FIELD} bytes")
        for name in ("round", "attempt"):
            if not is_uint64(getattr(self, name)):
                raise LocalProtocolError(f"{name}: must be a whole number that fits into 64 bits")
        for name in ("participants_hash", "graph_hash"):
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != HASH_BYTES:
                raise LocalProtocolError(f"{name}: must be a hash of {HASH_BYTES} bytes")

    def fields(self) -> tuple[bytes, ...]:
        """All fields as bytes, in order."""
        numbers = uint64(self.round), uint64(self.attempt)
        return (self.run, *numbers, self.beacon, self.participants_hash, self.graph_hash)

    def encode(self) -> bytes:
        """All fields, unambiguously: two contexts encode alike only if they are equal."""
        return length_prefixed(b"niss.round-context.v1", *self.fields())

    def digest(self) -> bytes:
        """SHA-256 of the encoding: what messages name a round by."""
        return hashlib.sha256(self.encode()).digest()


@dataclass(frozen=True)
class Agreed:
    """A round as every participant sees it; made by `agree`. A seat is a place in the list of participants."""

    opened: RoundOpen
    graph: ShareGraph
    context: RoundContext

    @property
    def terms(self) -> Terms:
        return self.opened.terms

    @property
    def participants(self) -> tuple[Participant, ...]:
        return self.opened.participants

    @cached_property
    def digest(self) -> bytes:
        """The digest of the context."""
        return self.context.digest()

    @property
    def grid(self) -> Grid:
        return Grid(self.terms.grid_bits)

    def neighbours(self, seat: int) -> list[int]:
        """The seats that share an edge with this one, in either direction, ascending."""
        seats: list[int] = self.graph.neighbours(seat).tolist()
        return seats

    def edges_of(self, seat: int) -> list[tuple[int, int, float]]:
        """(sender, receiver, deviation in grid steps) of every share that touches this seat."""
        graph, touching = self.graph, self.graph.edges_of(seat)
        columns = (column[touching].tolist() for column in (graph.senders, graph.receivers, graph.weights))
        grid, unit = self.grid, self.terms.unit_variance
        return [(*ends, grid.deviation_steps(weight * unit)) for *ends, weight in zip(*columns, strict=True)]

    def steps_between(self, sender: int, receiver: int) -> float:
        """The deviation, in grid steps, of the share from one seat to the other; 0 where there is none."""
        for one, other, steps in self.edges_of(sender):
            if (one, other) == (sender, receiver):
                return steps
        return 0.0

    def threshold(self, seat: int) -> int:
        """How many pieces rebuild the self-mask of the client in this seat: more than colluders could hold.

        `max(threshold_share * d, c + 1, 2)` of its d neighbours, c of whom may collude; never more than d.
        """
        degree = self.graph.neighbours(seat).size
        shared = math.ceil(min(self.terms.threshold_share, 1.0) * degree)
        return min(max(shared, self.terms.colluding_neighbours + 1, 2), degree)

    def quorum(self, seat: int) -> int:
        """Verdicts needed from the neighbours of a seat: more than (d + c) / 2 of d, c of whom may collude.

        Two contradictory verdicts cannot both gather it, since an honest neighbour signs only one.
        """
        degree = self.graph.neighbours(seat).size
        return (degree + min(degree, self.terms.colluding_neighbours)) // 2 + 1

    def mask_context(self, seat: int) -> bytes:
        """What the commitment to a self-mask is bound to: the round and its owner."""
        return self.digest + self.participants[seat].identity

    def check_fits(self) -> None:
        """Refuse (`ConfigError`) a grid on which the final sum could wrap, whatever was left uncancelled in it."""
        terms, size = self.terms, len(self.participants)
        each = terms.residual_variance + terms.self_variance + 2.0 * terms.unit_variance * terms.neighbours
        # Each client's residual noise, its self-mask and its shares, sent and received, are rounded one by one.
        rounded = 2 + 2 * math.ceil(terms.neighbours)
        self.grid.check_fits(
            clip_sum=terms.clip,
            deviation_sum=math.sqrt(size * each),
            coordinates=terms.coordinates,
            clients=size * rounded,
            modulus_bits=terms.modulus_bits,
        )


def agree(opened: RoundOpen) -> Agreed:
    """Derive the graph and the context of a round; the same for everyone who was told the same.

    Signatures, prekeys and the beacon are not checked here but by the client. Terms that cannot be carried out (a grid
    too fine, noise too strong for it, a repair with single neighbours) are a `RemoteProtocolError`.
    """
    terms = opened.terms
    listed, agreed_terms = participants_hash(opened.participants), terms_hash(terms)
    graph = draw_graph(len(opened.participants), terms.neighbours, opened.beacon.value, listed + agreed_terms)
    _check_terms(terms, graph)
    context = RoundContext(
        run=terms.run,
        round=terms.round,
        attempt=terms.attempt,
        beacon=opened.beacon.value,
        participants_hash=listed,
        graph_hash=hashlib.sha256(graph.digest() + agreed_terms).digest(),
    )
    return Agreed(opened, graph, context)


def draw_graph(size: int, neighbours: float, beacon: bytes, commitment: bytes) -> ShareGraph:
    """The share graph of a round: it follows from the beacon's value and what it was released for.

    `neighbours` is the number of unit shares a client sends; from `size - 1` on the graph is complete. `commitment` is
    the hash of the participants, then that of the terms.
    """
    if size < 2:
        raise RemoteProtocolError("a round needs at least two participants")
    if neighbours >= size - 1:
        return ShareGraph.complete(size, weight=neighbours / (size - 1))
    seed = hashlib.sha256(b"niss.round-beacon.v1" + beacon + commitment).digest()
    return ShareGraph.regular(size, degree=neighbours, beacon=seed)


def _check_terms(terms: Terms, graph: ShareGraph) -> None:
    """Refuse what cannot be carried out, before anyone is charged for it."""
    if terms.grid_bits > MAX_BITS:
        raise RemoteProtocolError(f"the grid has {terms.grid_bits} bits; at most {MAX_BITS} are possible")
    shares = float(graph.weights.max()) * terms.unit_variance
    largest = max(shares, terms.residual_variance, terms.self_variance)
    if not math.sqrt(largest) * 2.0**terms.grid_bits <= LARGEST_DEVIATION:
        raise RemoteProtocolError("the noise is too strong for the grid", hint="use fewer grid bits")
    if terms.mode == "repair" and graph.degrees.min() < 2:
        raise RemoteProtocolError(
            "a client has a single neighbour, which alone would hold its self-mask",
            hint="use more neighbours, or mode 'tolerate'",
        )


def participants_hash(participants: tuple[Participant, ...]) -> bytes:
    """Commits to who sits where, with which prekey."""
    state = hashlib.sha256(b"niss.participants.v1" + struct.pack("<Q", len(participants)))
    for one in participants:
        state.update(
            one.identity + struct.pack("<Q", one.prekey.number) + one.prekey.public + one.prekey.signature
        )
    return state.digest()


def terms_hash(terms: Terms) -> bytes:
    """Commits to every term, field by field, each after a letter for its type."""
    state = hashlib.sha256(b"niss.terms.v1")
    for value in astuple(terms):
        if isinstance(value, bytes | str):
            raw = value if isinstance(value, bytes) else value.encode()
            state.update(b"b" + struct.pack("<Q", len(raw)) + raw)
        elif isinstance(value, float):
            state.update(b"f" + struct.pack("<d", value))
        else:
            state.update(b"i" + struct.pack("<q", value))
    return state.digest()


def survivors_hash(context: bytes, survivors: tuple[int, ...]) -> bytes:
    """Commits to a survivor set of one round."""
    seats = struct.pack(f"<{len(survivors)}Q", *survivors)
    return hashlib.sha256(b"niss.survivors.v1" + context + seats).digest()
