"""What follows from an opened round for everybody alike: the graph, the committee, the context of every seed.

Everyone who was told the same derives the same; nobody is asked to believe it. The hash of the terms goes into the
context too. If a server told two clients different terms, they would derive unrelated seeds, and their shares would
fail to cancel: less accuracy, never less privacy.

**Packing.** The vector of an upload holds residues modulo 2^32 or 2^64 (`Grid.check_fits` knows no others), as a plain
little-endian array.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.errors import RemoteProtocolError
from niss.graph import ShareGraph
from niss.graph.shares import BeaconStream
from niss.mechanism.grid import MAX_BITS, Grid
from niss.protocol.messages import MODULI, Participant, PreviousRound, RoundOpen, Terms
from niss.protocol.wire import length_prefixed, uint64
from niss.randomness.secret import LARGEST_DEVIATION

IntArray = NDArray[np.int64]
# So many grid steps of each of 2^31 records still add up in 64 bits.
_LARGEST_RECORD = 2.0**32


@dataclass(frozen=True, slots=True)
class Context:
    """What keys and seeds are bound to: one attempt at a round, or what is carried from a round to the next.

    Made by `round_context` or `carried_context`. Two are equal only if they agree to the last field, in their order.
    Nothing in it is secret.
    """

    tag: bytes
    seed_tag: bytes
    purpose: bytes
    fields: tuple[bytes, ...]

    def digest(self) -> bytes:
        """SHA-256 of all fields, unambiguously encoded: what messages name a round by."""
        return hashlib.sha256(length_prefixed(self.tag, *self.fields)).digest()


def round_context(
    *, run: bytes, round: int, attempt: int, beacon: bytes, participants_hash: bytes, graph_hash: bytes
) -> Context:
    """Of one attempt at one round.

    run                 name of the run
    round, attempt      counted from 0
    beacon              the beacon's value
    participants_hash   `participants_hash` of the list of participants
    graph_hash          hash of the share graph and of the terms
    """
    numbers = uint64(round), uint64(attempt)
    fields = (run, *numbers, beacon, participants_hash, graph_hash)
    return Context(b"niss.round-context.v1", b"niss.seed.v1", b"share", fields)


def carried_context(
    *, run: bytes, plan: bytes, round: int, beacon: bytes, terms: bytes, senders: bytes, receivers: bytes
) -> Context:
    """Of all shares carried from round t to the next.

    run                 name of the run
    plan                hash of its schedule
    round               t, of those who add the shares; those who subtract them are of round t + 1
    beacon, terms       the beacon's value in round t, and the hash of that round's terms
    senders, receivers  hashes of both lists of participants
    """
    fields = (run, plan, uint64(round), uint64(round + 1), beacon, terms, senders, receivers)
    return Context(b"niss.carried-context.v1", b"niss.carried-seed.v1", b"carried", fields)


@dataclass(frozen=True)
class CarriedLink:
    """What is carried from one round to the next: a share from everyone there to everyone here.

    senders, receivers  the participants of both rounds; seats are places in these lists
    unit_variance       of a share; 0: there are none
    context             what every seed is bound to
    """

    senders: tuple[Participant, ...]
    receivers: tuple[Participant, ...]
    unit_variance: float
    context: Context

    def left(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[int, float]:
        """Shares of which only one end was uploaded, and the variance that they leave in each coordinate."""
        added, taken = len(senders), len(receivers)
        count = added * (len(self.receivers) - taken) + (len(self.senders) - added) * taken
        return (count if self.unit_variance else 0), count * self.unit_variance

    def added(self, senders: tuple[int, ...]) -> float:
        """Variance that these seats of the first round carry on."""
        return len(senders) * len(self.receivers) * self.unit_variance

    def taken(self, receivers: tuple[int, ...]) -> float:
        """Variance of all that these seats of the second round subtract."""
        return len(receivers) * len(self.senders) * self.unit_variance


@dataclass(frozen=True)
class Edge:
    """A share that is in the upload of a client, as that client sees it.

    own, other  identities of the client and of the other end
    place       of the other end, in `Agreed.everyone`
    sign        1: the client adds it; -1: it subtracts it
    variance    an entry
    context     what key and seed are bound to: the round's, or that of what is carried between two
    """

    own: bytes
    other: bytes
    place: int
    sign: int
    variance: float
    context: Context

    @property
    def ends(self) -> tuple[bytes, bytes]:
        """Who adds it, and who subtracts it."""
        return (self.own, self.other) if self.sign > 0 else (self.other, self.own)


@dataclass(frozen=True)
class Agreed:
    """A round as every participant sees it; made by `agree`. A seat is a place in the list of participants.

    opened      the message that opened the round
    graph       who shares noise with whom, by seat
    context     what every seed of the round is bound to
    before      what was carried to this round; None where nothing was
    after       what it carries to the next; None where nothing is
    """

    opened: RoundOpen
    graph: ShareGraph
    context: Context
    before: CarriedLink | None = None
    after: CarriedLink | None = None

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

    def edges(self, seat: int, places: Collection[int] | None = None) -> list[Edge]:
        """Every share in the upload of this seat: those within the round, and those carried to it and on from it.

        Of these places in `everyone` alone, where they are given.
        """
        graph, people, own = self.graph, self.participants, self.participants[seat].identity
        edges, found = graph.edges_of(seat), []
        if places is not None:
            others = graph.senders[edges] + graph.receivers[edges] - seat
            edges = edges[np.isin(others, list(places))]
        ends = zip(graph.senders[edges].tolist(), graph.receivers[edges].tolist(), strict=True)
        variances = (self.terms.unit_variance * graph.weights[edges]).tolist()
        for (sender, receiver), variance in zip(ends, variances, strict=True):
            place, sign = (receiver, 1) if sender == seat else (sender, -1)
            found.append(Edge(own, people[place].identity, place, sign, variance, self.context))
        for place in self._carried_places:
            if places is not None and place not in places:
                continue
            link = self._link(place)
            sign = 1 if link is self.after else -1
            other = self.everyone[place].identity
            found.append(Edge(own, other, place, sign, link.unit_variance, link.context))
        return found

    def left(self, survivors: Collection[int]) -> tuple[int, float]:
        """Shares within the round of which only one end was uploaded, and the variance that they leave in an entry."""
        seats = list(survivors)
        apart = np.isin(self.graph.senders, seats) != np.isin(self.graph.receivers, seats)
        return int(apart.sum()), float(self.graph.weights[apart].sum()) * self.terms.unit_variance

    @cached_property
    def committee(self) -> tuple[int, ...]:
        """The seats whose clients repair the round, in an order of their own; none in mode `tolerate`.

        Drawn by the beacon, and so by nobody: colluders are in it as if drawn with the others.
        """
        terms = self.terms
        return draw_committee(self.opened.beacon.value, self.participants, terms_hash(terms), terms.committee)

    @cached_property
    def everyone(self) -> tuple[Participant, ...]:
        """Those of this round, of the one before that carried noise to it, and of the one that it carries noise to."""
        before, after = self.before, self.after
        return (
            *self.participants,
            *(() if before is None else before.senders),
            *(() if after is None else after.receivers),
        )

    @property
    def _carried_places(self) -> range:
        """The places of all who are not of this round, with whom everyone of it shares what is carried."""
        carrying, size = self.terms.carrying, len(self.participants)
        return range(size, len(self.everyone) if carrying is not None and carrying.unit_variance else size)

    def _link(self, place: int) -> CarriedLink:
        """What is carried to or from the client at a place beyond those of this round."""
        link = self.before if place < self.first_after else self.after
        assert link is not None
        return link

    @property
    def first_after(self) -> int:
        """The place of the first participant of the next round."""
        return len(self.participants) + (0 if self.before is None else len(self.before.senders))

    def edge_places(self, seat: int) -> list[int]:
        """The places in `everyone` of all who share an edge with the client in this seat, ascending.

        Its neighbours, those of the round before who carried noise to it, and those of the next to whom it carries.
        """
        return [*self.neighbours(seat), *self._carried_places]

    def relied_on(self, seat: int) -> list[Participant]:
        """Whose prekeys the upload of this seat rests on: its own, those at its edges, and those of the committee.

        A client has to check no others. Say that the server made up the prekey of an honest client, and so knows what
        that client shares. Whoever has an edge to it refuses the round, and so does the client itself: nothing that it
        shares is in any upload. What the server sees is a part of what it would see if the prekey were true, with some
        uploads missing; and that much the round is charged for.
        """
        return [self.everyone[place] for place in sorted({seat, *self.edge_places(seat), *self.committee})]

    def edge_context(self, place: int) -> Context:
        """What the key of an edge to the client at this place in `everyone` is bound to."""
        return self.context if place < len(self.participants) else self._link(place).context

    def check_fits(self) -> float:
        """Refuse (`ConfigError`) a grid on which the final sum could wrap, whatever was left uncancelled in it.

        Returns the most, in steps, that an entry of it can be.
        """
        terms, size = self.terms, len(self.participants)
        each = terms.residual_variance + terms.self_variance + 2.0 * terms.unit_variance * terms.neighbours
        # Each client's residual noise, self-mask and shares, sent and received, are rounded one by one.
        rounded = 2 + 2 * math.ceil(terms.neighbours)
        if (carrying := terms.carrying) is not None:
            each += 2.0 * carrying.unit_variance * size
            rounded += 2 * size
        return self.grid.check_fits(
            clip_sum=terms.bound * (size / terms.divisor(size)),
            deviation_sum=math.sqrt(size * each),
            coordinates=terms.coordinates,
            clients=size * rounded,
            modulus_bits=terms.modulus_bits,
        )


def agree(opened: RoundOpen) -> Agreed:
    """Derive the graph and the context of a round; the same for everyone who was told the same.

    Signatures, prekeys and the beacon are not checked here but by the client. Terms that cannot be carried out (a grid
    too fine, noise too strong for it, a committee without a majority) are a `RemoteProtocolError`.
    """
    terms = opened.terms
    _check_numbers(terms)
    listed, agreed_terms = participants_hash(opened.participants), terms_hash(terms)
    graph = draw_graph(
        len(opened.participants),
        terms.neighbours,
        opened.beacon.value,
        listed + agreed_terms,
    )
    _check_terms(terms, graph)
    before, after = _links(opened)
    carried = b"".join(link.context.digest() for link in (before, after) if link is not None)
    context = round_context(
        run=terms.run,
        round=terms.round,
        attempt=terms.attempt,
        beacon=opened.beacon.value,
        participants_hash=listed,
        graph_hash=hashlib.sha256(graph.digest() + agreed_terms + carried).digest(),
    )
    return Agreed(opened, graph, context, before, after)


def previous_of(opened: RoundOpen) -> PreviousRound:
    """What the next round's clients are shown of this one."""
    return PreviousRound(opened.participants, terms_hash(opened.terms), opened.beacon)


def _links(opened: RoundOpen) -> tuple[CarriedLink | None, CarriedLink | None]:
    """What is carried to a round, and from it."""
    terms, cohorts = opened.terms, opened.cohorts
    if (terms.carrying is None) != (cohorts is None):
        raise RemoteProtocolError("a round says how noise is carried but not between whom, or the reverse")
    if cohorts is None:
        return None, None
    before = after = None
    if cohorts.previous is not None:
        if terms.round == 0:
            raise RemoteProtocolError("the first round has none before it")
        before = _link(terms, terms.round - 1, cohorts.previous, opened.participants)
    if cohorts.following:
        after = _link(terms, terms.round, previous_of(opened), cohorts.following)
    return before, after


def _link(terms: Terms, number: int, sent: PreviousRound, receivers: tuple[Participant, ...]) -> CarriedLink:
    """What is carried from round `number` to those of the next, in a run with these terms."""
    assert terms.carrying is not None
    context = carried_context(
        run=terms.run,
        plan=terms.carrying.plan,
        round=number,
        beacon=sent.beacon.value,
        terms=sent.terms,
        senders=participants_hash(sent.participants),
        receivers=participants_hash(receivers),
    )
    return CarriedLink(sent.participants, receivers, terms.carrying.unit_variance, context)


def draw_graph(size: int, neighbours: float, beacon: bytes, commitment: bytes) -> ShareGraph:
    """The share graph of a round: it follows from the beacon's value and what it was released for.

    `neighbours` is the number of unit shares a client sends; from `size - 1` on the graph is complete. `commitment` is
    the hash of the participants, then that of the terms.
    """
    if size < 2:
        raise RemoteProtocolError("a round needs at least two participants")
    if neighbours >= size - 1:
        return ShareGraph.complete(size, weight=neighbours / (size - 1))
    return ShareGraph.regular(size, degree=neighbours, beacon=_round_seed(beacon, commitment))


def draw_committee(
    beacon: bytes, participants: tuple[Participant, ...], terms: bytes, size: int
) -> tuple[int, ...]:
    """`size` seats of a round, in an order of their own; they follow from the beacon's value, list and terms' hash."""
    seed, people = _round_seed(beacon, participants_hash(participants) + terms), len(participants)
    order = BeaconStream(seed, "committee", people).permutation(people)
    return tuple(order[:size].tolist())


def _round_seed(beacon: bytes, commitment: bytes) -> bytes:
    """What graph and committee of a round are drawn with."""
    return hashlib.sha256(b"niss.round-beacon.v1" + beacon + commitment).digest()


def _check_numbers(terms: Terms) -> None:
    """Refuse numbers that mean nothing, so that no comparison further on can be passed by one that is no number."""
    for name, value in vars(terms).items():
        if isinstance(value, float) and not 0.0 <= value < math.inf:
            raise RemoteProtocolError(f"{name} must be finite and not negative")
        if isinstance(value, int) and value < 0:
            raise RemoteProtocolError(f"{name} must not be negative")
    if terms.carrying is not None and not 0.0 <= terms.carrying.unit_variance < math.inf:
        raise RemoteProtocolError("the variance of carried shares must be finite and not negative")
    if (records := terms.records) is None:
        return
    if not (0.0 < records.batch <= 1.0 and 0.0 < records.divisor < math.inf):
        raise RemoteProtocolError(
            "a record is in a batch with a probability above 0, and sums are divided by more than 0"
        )
    if terms.carrying is not None:
        raise RemoteProtocolError("a round that hides records carries no noise to the next")


def _check_terms(terms: Terms, graph: ShareGraph) -> None:
    """Refuse what cannot be carried out, before anyone is charged for it."""
    if terms.grid_bits > MAX_BITS:
        raise RemoteProtocolError(f"the grid has {terms.grid_bits} bits; at most {MAX_BITS} are possible")
    if terms.modulus_bits not in MODULI:
        raise RemoteProtocolError(f"numbers are packed in 32 or 64 bits, not in {terms.modulus_bits}")
    if (
        terms.records is not None
        and not terms.clip / terms.records.divisor * 2.0**terms.grid_bits <= _LARGEST_RECORD
    ):
        raise RemoteProtocolError(
            f"a record may be more than {_LARGEST_RECORD:g} grid steps long", hint="use fewer grid bits"
        )
    carried = 0.0 if terms.carrying is None else terms.carrying.unit_variance
    share = float(graph.weights.max()) * terms.unit_variance
    largest = max(terms.residual_variance, terms.self_variance, share, carried)
    if not math.sqrt(largest) * 2.0**terms.grid_bits <= LARGEST_DEVIATION:
        raise RemoteProtocolError("the noise is too strong for the grid", hint="use fewer grid bits")
    if terms.mode != "repair":
        if terms.committee or terms.threshold:
            raise RemoteProtocolError(f"a round of mode {terms.mode!r} has no committee")
        return
    if not 2 <= terms.threshold <= terms.committee <= graph.size or 2 * terms.threshold <= terms.committee:
        raise RemoteProtocolError(
            f"{terms.threshold} of a committee of {terms.committee} are no majority, or the round is smaller than it",
            hint="more than half of a committee must agree, and its members take part in the round",
        )


def participants_hash(participants: tuple[Participant, ...]) -> bytes:
    """Commits to who sits where, with which prekey: SHA-256 over the list in order, signatures included."""
    state = hashlib.sha256(b"niss.participants.v1" + struct.pack("<Q", len(participants)))
    for one in participants:
        state.update(
            one.identity + struct.pack("<Q", one.prekey.number) + one.prekey.public + one.prekey.signature
        )
    return state.digest()


def terms_hash(terms: Terms) -> bytes:
    """Commits to every term, field by field, each after a letter for its type; what is None leaves no trace."""
    state = hashlib.sha256(b"niss.terms.v1")
    *plain, carrying, records = astuple(terms)
    for value in (*plain, *(carrying or ()), *(records or ())):
        if isinstance(value, bytes | str):
            raw = value if isinstance(value, bytes) else value.encode()
            state.update(b"b" + struct.pack("<Q", len(raw)) + raw)
        elif isinstance(value, float):
            state.update(b"f" + struct.pack("<d", value))
        else:
            state.update(b"i" + struct.pack("<q", value))
    return state.digest()


def commitment_of(
    terms: Terms, participants: tuple[Participant, ...], following: tuple[Participant, ...] = ()
) -> bytes:
    """What the beacon of a round is let out for: the hashes of its participants, of its terms and, where noise is
    carried to the next round, of that round's participants."""
    plain = participants_hash(participants) + terms_hash(terms)
    return plain if terms.carrying is None else plain + participants_hash(following)


def survivors_hash(context: bytes, survivors: tuple[int, ...]) -> bytes:
    """Names a survivor set of one round: what a member binds itself to. `context` is the round's digest."""
    seats = struct.pack(f"<{len(survivors)}Q", *survivors)
    return hashlib.sha256(b"niss.survivors.v1" + context + seats).digest()


Words = NDArray[np.unsignedinteger[Any]]
_WORDS = dict(zip(MODULI, ("<u4", "<u8"), strict=True))


def pack(values: Words, modulus_bits: int) -> bytes:
    """The values modulo 2^modulus_bits, 32 or 64, one after another, lowest byte first."""
    return values.astype(_WORDS[modulus_bits], copy=False).tobytes()  # keeps the low bits


def check_packed(data: bytes, count: int, modulus_bits: int) -> None:
    """Refuse (`RemoteProtocolError`) what `pack` cannot have made of `count` values."""
    size = count * modulus_bits // 8
    if len(data) != size:
        raise RemoteProtocolError(
            f"vector: has {len(data)} bytes, but {count} values of {modulus_bits} bits take {size}"
        )


def add_packed(total: Words | None, data: bytes, count: int, modulus_bits: int) -> Words:
    """The sum so far, in place, and a packed vector of `count` values, modulo 2^modulus_bits; None: there is none yet.

    There is no memory but the sum.
    """
    check_packed(data, count, modulus_bits)
    words: Words = np.frombuffer(data, dtype=_WORDS[modulus_bits])
    return words.astype(f"u{words.itemsize}") if total is None else np.add(total, words, out=total)


def unpack(data: bytes, count: int, modulus_bits: int) -> NDArray[np.uint64]:
    """The `count` values that were packed, in an array of their own; another length is a `RemoteProtocolError`."""
    return add_packed(None, data, count, modulus_bits).astype(np.uint64)
