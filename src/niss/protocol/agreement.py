"""What follows from an opened round for everybody alike: the beacon's link, the graph, the context of every seed.

Everyone who was told the same derives the same; nobody is asked to believe it. The hash of the terms goes into the
context too. If a server told two clients different terms, they would derive unrelated seeds, and their shares would
fail to cancel: less accuracy, never less privacy.

The beacon is a hash chain, committed to before the first round; each attempt at a round has its own link. The anchor is
the end of the chain, `H^n(seed)`. Link i hashes to the anchor in i steps, so nobody can choose it later, and nobody
but the holder of the seed can know it earlier. The holder (the tracker) signs each link together with the
participants it was drawn for; the assumption is that it does not collude with the server. Which link belongs to which
attempt is fixed (`link_of`) and each is released once: a server cannot ask for links until it likes a graph. Hash
chains for one-time values are Lamport's (1981).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.graph import ShareGraph
from niss.graph.beacon import BeaconStream
from niss.mechanism.grid import MAX_BITS, Grid
from niss.protocol.carried import CarriedContext, CarriedLink
from niss.protocol.keys import Identity, is_uint64, length_prefixed, uint64, verify
from niss.protocol.messages import Beacon, Participant, RoundOpen, Terms
from niss.randomness.secret import LARGEST_DEVIATION

IntArray = NDArray[np.int64]

HASH_BYTES = 32
_AMOUNTS = ("clip", "neighbours", "unit_variance", "residual_variance", "self_variance")
_COUNTS = (
    "round",
    "attempt",
    "coordinates",
    "grid_bits",
    "modulus_bits",
    "revealed",
    "dropped",
    "committee",
    "threshold",
)
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
    """A round as every participant sees it; made by `agree`. A seat is a place in the list of participants.

    opened      the message that opened the round
    graph       who shares noise with whom, by seat
    context     what every seed of the round is bound to
    before      what was carried to this round; None where nothing was
    after       what it carries to the next; None where nothing is
    """

    opened: RoundOpen
    graph: ShareGraph
    context: RoundContext
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

    def edges_of(self, seat: int) -> list[tuple[int, int, float]]:
        """(sender, receiver, deviation in grid steps) of every share that touches this seat."""
        return [
            (sender, receiver, self.grid.deviation_steps(variance))
            for sender, receiver, variance in self.shares(self.graph.edges_of(seat))
        ]

    def shares(self, among: IntArray | None = None) -> list[tuple[int, int, float]]:
        """(sender, receiver, variance) of every share, or of those on edges of the graph with these numbers."""
        graph = self.graph
        edges = np.arange(graph.senders.size) if among is None else among
        variances = self.terms.unit_variance * graph.weights[edges]
        columns = (graph.senders[edges], graph.receivers[edges], variances)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def steps_between(self, sender: int, receiver: int) -> float:
        """The deviation, in grid steps, of the share from one seat to the other; 0 where there is none."""
        for one, other, steps in self.edges_of(sender):
            if (one, other) == (sender, receiver):
                return steps
        return 0.0

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

    def edge_places(self, seat: int) -> list[int]:
        """The places in `everyone` of all who share an edge with the client in this seat, ascending.

        Its neighbours, those of the round before who carried noise to it, and those of the next to whom it carries.
        """
        size, first = len(self.participants), len(self.everyone)
        places = self.neighbours(seat)
        if self.before is not None:
            places += [size + sender for sender, _ in self.before.edges_to(seat)]
        if self.after is not None:
            first -= len(self.after.receivers)
            places += [first + receiver for receiver, _ in self.after.edges_from(seat)]
        return places

    def edge_context(self, place: int) -> RoundContext | CarriedContext:
        """What the key of an edge to the client at this place in `everyone` is bound to."""
        size = len(self.participants)
        if place < size:
            return self.context
        gap = (
            self.before if self.before is not None and place < size + len(self.before.senders) else self.after
        )
        assert gap is not None
        return gap.context

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
            clip_sum=terms.clip,
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
    before, after = _gaps(opened, listed, agreed_terms)
    carried = b"".join(gap.context.digest() for gap in (before, after) if gap is not None)
    context = RoundContext(
        run=terms.run,
        round=terms.round,
        attempt=terms.attempt,
        beacon=opened.beacon.value,
        participants_hash=listed,
        graph_hash=hashlib.sha256(graph.digest() + agreed_terms + carried).digest(),
    )
    return Agreed(opened, graph, context, before, after)


def _gaps(
    opened: RoundOpen, listed: bytes, agreed_terms: bytes
) -> tuple[CarriedLink | None, CarriedLink | None]:
    """What is carried to a round and from it, given the hashes of its participants and of its terms."""
    carrying, cohorts, terms = opened.terms.carrying, opened.cohorts, opened.terms
    if (carrying is None) != (cohorts is None):
        raise RemoteProtocolError("a round says how noise is carried but not between whom, or the reverse")
    if carrying is None or cohorts is None:
        return None, None
    before = after = None
    if (previous := cohorts.previous) is not None:
        if terms.round == 0:
            raise RemoteProtocolError("the first round has none before it")
        context = CarriedContext(
            terms.run,
            carrying.plan,
            terms.round - 1,
            previous.beacon.value,
            previous.terms,
            participants_hash(previous.participants),
            listed,
        )
        before = CarriedLink.between(previous.participants, opened.participants, carrying, context)
    if cohorts.following:
        context = CarriedContext(
            terms.run,
            carrying.plan,
            terms.round,
            opened.beacon.value,
            agreed_terms,
            listed,
            participants_hash(cohorts.following),
        )
        after = CarriedLink.between(opened.participants, cohorts.following, carrying, context)
    return before, after


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
    for name in _AMOUNTS:
        value = getattr(terms, name)
        if not 0.0 <= value < math.inf:
            raise RemoteProtocolError(f"{name} must be finite and not negative")
    for name in _COUNTS:
        if getattr(terms, name) < 0:
            raise RemoteProtocolError(f"{name} must not be negative")
    if terms.carrying is not None and not 0.0 <= terms.carrying.unit_variance < math.inf:
        raise RemoteProtocolError("the variance of carried shares must be finite and not negative")


def _check_terms(terms: Terms, graph: ShareGraph) -> None:
    """Refuse what cannot be carried out, before anyone is charged for it."""
    if terms.grid_bits > MAX_BITS:
        raise RemoteProtocolError(f"the grid has {terms.grid_bits} bits; at most {MAX_BITS} are possible")
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
    """Commits to every term, field by field, each after a letter for its type; what is not carried leaves no trace."""
    state = hashlib.sha256(b"niss.terms.v1")
    *plain, carrying = astuple(terms)
    for value in (*plain, *(carrying or ())):
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


# How many attempts at one round there can be.
LINKS_PER_ROUND = 4
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
        """The signed link of an attempt, for its `commitment_of`: once, and in order."""
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
    commitment      what it must have been released for: `commitment_of` the round
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
