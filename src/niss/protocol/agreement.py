"""What follows from an opened round for everybody alike: the graph, and the context of every seed.

The hash of the terms goes into the context too. If a server told two clients different terms, they would derive
unrelated seeds, and their shares would fail to cancel: less accuracy, never less privacy.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np

from niss.errors import RemoteProtocolError
from niss.graph import ShareGraph
from niss.mechanism.grid import MAX_BITS, Grid
from niss.protocol.derive import RoundContext
from niss.protocol.messages import Participant, RoundOpen, Terms
from niss.randomness.secret import LARGEST_DEVIATION


@dataclass(frozen=True)
class Agreed:
    """A round as every participant sees it."""

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
        return self.context.digest()

    @property
    def grid(self) -> Grid:
        return Grid(self.terms.grid_bits)

    def neighbours(self, seat: int) -> list[int]:
        found: list[int] = self.graph.neighbours(seat).tolist()
        return found

    def edges_of(self, seat: int) -> list[tuple[int, int, float]]:
        """(sender, receiver, deviation in grid steps) of every share that touches this seat."""
        graph, touching = self.graph, self.graph.edges_of(seat)
        ends = zip(graph.senders[touching].tolist(), graph.receivers[touching].tolist(), strict=True)
        weights = graph.weights[touching].tolist()
        return [(*pair, self._steps(weight)) for pair, weight in zip(ends, weights, strict=True)]

    def steps_between(self, sender: int, receiver: int) -> float:
        """The deviation, in grid steps, of the share from one seat to the other; 0 where there is none."""
        for one, other, steps in self.edges_of(sender):
            if (one, other) == (sender, receiver):
                return steps
        return 0.0

    def threshold(self, seat: int) -> int:
        """How many pieces rebuild the self-mask of the client in this seat: more than colluders could hold."""
        degree = self.graph.neighbours(seat).size
        wanted = math.ceil(min(self.terms.threshold_share, 1.0) * degree)
        return min(max(wanted, self.terms.colluding_neighbours + 1, 2), degree)

    def mask_context(self, seat: int) -> bytes:
        """What the commitment to a self-mask is bound to: the round and its owner."""
        return self.digest + self.participants[seat].identity

    def quorum(self, seat: int) -> int:
        """Verdicts needed from the neighbours of a seat: more than (d + c) / 2 of d, c of whom may collude.

        Two contradictory verdicts cannot both gather it, since an honest neighbour signs only one.
        """
        degree = self.graph.neighbours(seat).size
        return (degree + min(degree, self.terms.colluding_neighbours)) // 2 + 1

    def check_fits(self) -> None:
        """Refuse a grid on which the final sum could wrap, whatever was left uncancelled in it."""
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

    def _steps(self, weight: float) -> float:
        return self.grid.deviation_steps(weight * self.terms.unit_variance)


def agree(opened: RoundOpen) -> Agreed:
    """Derive the graph and the context; the same for everyone who was told the same."""
    terms = opened.terms
    listed = participants_hash(opened.participants)
    commitment = listed + terms_hash(terms)
    graph = draw_graph(len(opened.participants), terms.neighbours, opened.beacon.value, commitment)
    _check_terms(terms, graph)
    return Agreed(
        opened,
        graph,
        RoundContext(
            run=terms.run,
            round=terms.round,
            attempt=terms.attempt,
            beacon=opened.beacon.value,
            participants_hash=listed,
            graph_hash=hashlib.sha256(graph.digest() + terms_hash(terms)).digest(),
        ),
    )


def draw_graph(size: int, neighbours: float, beacon: bytes, commitment: bytes) -> ShareGraph:
    """The share graph of a round: it follows from the beacon's value and what it was let out for.

    `commitment` is the hash of the participants, then that of the terms.
    """
    if size < 2:
        raise RemoteProtocolError("a round of fewer than two participants")
    if neighbours >= size - 1:
        return ShareGraph.complete(size, weight=neighbours / (size - 1))
    seed = hashlib.sha256(b"niss.round-beacon.v1" + beacon + commitment).digest()
    return ShareGraph.regular(size, degree=neighbours, beacon=seed)


def _check_terms(terms: Terms, graph: ShareGraph) -> None:
    """Refuse what cannot be carried out, before anyone is charged for it."""
    if terms.grid_bits > MAX_BITS:
        raise RemoteProtocolError(f"a grid of {terms.grid_bits} bits, at most {MAX_BITS} are possible")
    largest = max(
        float(graph.weights.max()) * terms.unit_variance, terms.residual_variance, terms.self_variance
    )
    if not math.sqrt(largest) * 2.0**terms.grid_bits <= LARGEST_DEVIATION:
        raise RemoteProtocolError("noise too strong for the grid", hint="use fewer grid bits")
    if terms.mode == "repair":
        ends = np.unique(
            np.concatenate(
                [graph.senders * graph.size + graph.receivers, graph.receivers * graph.size + graph.senders]
            )
        )
        if np.bincount(ends // graph.size, minlength=graph.size).min() < 2:
            raise RemoteProtocolError(
                "a client with a single neighbour, who alone would hold its self-mask",
                hint="more neighbours, or mode 'tolerate'",
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
    """Commits to every term, field by field."""
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
