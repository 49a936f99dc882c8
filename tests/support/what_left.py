"""What a server holds of all the rounds it opened, and what that is worth: recomputed without the package's accountant.

Everything that leaves a client is an upload, or a member's partials: of masks, and of what seals the keys of edges.
Whatever comes out of them, in whatever round, run or version, lies in one `Pool`, and is tried on every edge of every
list. Whatever noise of an upload does not follow from it, and from what the colluders know, is Gaussian to the server.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import DrawnAccount, Plan, make_terms
from niss.errors import NissError
from niss.protocol import committee
from niss.protocol.agreement import Agreed, agree
from niss.protocol.keys import link_of
from niss.protocol.messages import (
    Beacon,
    CarryTerms,
    Participant,
    RecordTerms,
    Reveal,
    RoundOpen,
    Terms,
    Upload,
    encode,
)
from niss.protocol.points import cut
from niss.protocol.repair import recover
from niss.protocol.shares import EdgeKeys, derive_seed
from niss.redaction import SecretBytes
from support.protocol_round import Federation, resigned

Square = NDArray[np.float64]


class Pool:
    """All that ever came out: `edges`, what belongs to an edge, and `masks`, the seeds of self-masks; by age."""

    def __init__(self) -> None:
        self.edges: dict[bytes, None] = {}
        self.masks: dict[bytes, None] = {}

    def take_round(self, current: Any) -> None:
        """What an honest server can make of the repair of its round."""
        found, lies = recover(current.agreed, current.lost, current.uploads, current.reveals)
        assert not lies
        for one in found.values():
            self.edges |= dict.fromkeys(bytes(key) for key in one.keys.values())
            self.masks |= {} if one.mask is None else {bytes(one.mask): None}

    def take_client(self, agreed: Agreed, seat: int, privates: Mapping[int, SecretBytes]) -> None:
        """The keys of all edges of a client."""
        keys = EdgeKeys(agreed, seat, privates[agreed.participants[seat].prekey.number])
        self.edges |= dict.fromkeys(bytes(key) for key in keys.agree_with_all())


def share_seed(agreed: Agreed, key: bytes, one: int, other: int) -> bytes:
    """Of the share from one seat to the other, if that is the key of their edge."""
    people = agreed.participants
    return derive_seed(key, agreed.context, people[one].identity, people[other].identity)


def known_edges(
    pool: Pool, agreed: Agreed, privates: Mapping[int, SecretBytes], seat: int, since: int = 0
) -> set[int]:
    """The neighbours of a seat whose shares with it follow from something in the pool, by trying all of it.

    `privates` are those of the prekeys of the client in that seat; the first `since` of the pool were tried before.
    """
    keys = EdgeKeys(agreed, seat, privates[agreed.participants[seat].prekey.number])
    known, tried = set(), list(pool.edges)[since:]
    for other in agreed.neighbours(seat):
        true = share_seed(agreed, keys.key(other), seat, other)
        if any(share_seed(agreed, key, seat, other) == true for key in tried):
            known.add(other)
    return known


class Held:
    """Uploads and partials of one list; `colluders` are seats that keep nothing to themselves.

    pool       what came out of this list goes there, and what came out of all others is tried here
    privates   (seat) -> the private halves of all prekeys of the client that sits there
    points     by owner of an upload and dropped neighbour (None: its mask), partials by the member's number
    """

    def __init__(
        self,
        opened: RoundOpen,
        colluders: Collection[int],
        agreed: Agreed | None = None,
        *,
        pool: Pool | None = None,
        privates: Callable[[int], Mapping[int, SecretBytes]] = lambda _: {},
    ) -> None:
        self.opened, self.agreed = opened, agreed or agree(opened)
        self.colluders = frozenset(colluders)
        self.pool, self.privates = pool or Pool(), privates
        self.uploads: dict[int, Upload] = {}
        self.points: dict[tuple[int, int | None], dict[int, bytes]] = defaultdict(dict)
        # What is taken to be known besides.
        self.told: set[frozenset[int]] = set()
        self.unmasked: set[int] = set()
        # What enough members gave their part of.
        self.combined: set[tuple[int, int | None]] = set()
        self._edges: set[frozenset[int]] = set()
        self._tried = 0

    def take_upload(self, upload: Upload) -> None:
        assert upload.seat not in self.uploads, "an attempt was answered twice"
        self.uploads[upload.seat] = upload
        everything = {upload.seat: self.agreed.neighbours(upload.seat)}
        for member in self.colluders.intersection(self.agreed.committee):
            private = self.privates(member)[self.agreed.participants[member].prekey.number]
            given = {upload.seat: committee.piece_for(self.agreed, member, upload.pieces)}
            self._keep(member, everything, committee.answer(self.agreed, member, private, everything, given))

    def take_reveal(self, reveal: Reveal, survivors: tuple[int, ...]) -> None:
        self._keep(reveal.seat, committee.lost_edges(self.agreed, survivors), reveal.partials)

    def _keep(self, member: int, lost: Mapping[int, Collection[int]], partials: Any) -> None:
        number = self.agreed.committee.index(member) + 1
        for one in partials:
            for other, point in zip((None, *lost[one.seat]), cut(one.points), strict=True):
                self.points[one.seat, other][number] = point
        self._combine()

    def _combine(self) -> None:
        """Everything that enough members gave their part of goes into the pool."""
        enough = self.agreed.terms.threshold
        for what, given in self.points.items():
            if what in self.combined or len(given) < enough:
                continue
            self.combined.add(what)
            (owner, other), (point,) = what, committee.combine(dict(list(given.items())[:enough]))
            if other is None:
                self.pool.masks[bytes(committee.mask_seed(self.agreed, owner, point))] = None
            else:
                pieces = self.uploads[owner].pieces
                (key,) = committee.open_seals(self.agreed, owner, {other: point}, pieces).values()
                self.pool.edges[bytes(key)] = None

    @property
    def edges(self) -> set[frozenset[int]]:
        """Pairs whose shares are known: they follow from something in the pool."""
        since, self._tried = self._tried, len(self.pool.edges)
        if since < self._tried:
            for seat in range(len(self.opened.participants)):
                found = known_edges(self.pool, self.agreed, self.privates(seat), seat, since)
                self._edges |= {frozenset((seat, other)) for other in found}
        return self._edges | self.told

    def is_bare(self, seat: int) -> bool:
        """Whether the self-mask of an upload is in the pool."""
        return seat in self.unmasked or any(
            committee.commit_mask(self.agreed, seat, seed) == self.uploads[seat].commitment
            for seed in self.pool.masks
        )

    def pieces_for(self, seat: int, survivors: tuple[int, ...]) -> bytes:
        """What a member needs of each survivor; nothing of those who did not upload."""
        dealt = (self.uploads[owner].pieces for owner in survivors if owner in self.uploads)
        return b"".join(committee.piece_for(self.agreed, seat, one) for one in dealt)

    def true_mu(self) -> dict[int, float]:
        """For each honest upload its mu."""
        return {seat: self.mu_of(seat) for seat in sorted(set(self.uploads) - self.colluders)}

    def mu_of(self, seat: int) -> float:
        """`Delta / sqrt(1 / (Sigma^-1)_kk)` of an upload, Sigma the covariance of what is unknown in all of them."""
        terms, step = self.opened.terms, 2.0**-self.opened.terms.grid_bits
        seen, shared, own = self.unknown()
        left = effective_variance(shared, own, seen.index(seat))
        moved = terms.clip / len(self.opened.participants) / step
        return moved / math.sqrt(left) if left > 0.0 else math.inf

    def unknown(self) -> tuple[list[int], Square, Square]:
        """The honest seats that uploaded, the variance that each two of them share, and what each has for itself.

        In grid steps. A share whose other end did not upload is noise of its own to the one that did. Shares and masks
        count as what is left of them on the grid. Residual noise counts in full: the rest of an upload is whole
        steps, so rounding it is rounding the upload.
        """
        agreed, terms = self.agreed, self.opened.terms
        step = 2.0**-terms.grid_bits
        seen = sorted(set(self.uploads) - self.colluders)
        place = {seat: row for row, seat in enumerate(seen)}
        shared, own = np.zeros((len(seen), len(seen))), np.zeros(len(seen))
        graph, known = agreed.graph, self.edges
        columns = graph.senders.tolist(), graph.receivers.tolist(), graph.weights.tolist()
        for one, other, weight in zip(*columns, strict=True):
            if frozenset((one, other)) in known or self.colluders & {one, other}:
                continue
            variance = rounded_variance(math.sqrt(weight * terms.unit_variance) / step)
            if one in place and other in place:
                shared[place[one], place[other]] += variance
                shared[place[other], place[one]] += variance
            else:
                for end in {one, other} & place.keys():
                    own[place[end]] += variance
        for seat, row in place.items():
            own[row] += terms.residual_variance / step**2
            if terms.mode == "repair" and not self.is_bare(seat):
                own[row] += rounded_variance(math.sqrt(terms.self_variance) / step)
        return seen, shared, own


def effective_variance(shared: Square, own: Square, row: int) -> float:
    """`1 / (Sigma^-1)_kk` for `Sigma = diag(own + shared 1) - shared`, the other rows eliminated one by one.

    Eliminating a row of such a matrix leaves one of the same kind (star to mesh, as in a network of resistors), so
    nothing is ever subtracted and the result is good to a few bits, however far apart the variances are.
    """
    shared, own = shared.copy(), own.copy()
    for gone in range(own.size):
        total = float(shared[gone].sum() + own[gone])
        if gone == row or total == 0.0:
            continue
        ties = shared[gone].copy()
        shared[gone], shared[:, gone] = 0.0, 0.0
        share = ties / total
        shared += np.outer(ties, share)
        own += share * own[gone]
        np.fill_diagonal(shared, 0.0)
        own[gone] = 0.0
    return float(own[row])


# Terms of a hostile server's making.

SIZE, COORDINATES, COLLUDERS = 7, 16, 1


def assessing(size: int, label: str, **policy: Any) -> Federation:
    """A federation for a round or two, whose clients compute for themselves what a round costs."""
    federation = Federation(size, label, prekeys=2, **policy)
    for seat in federation.seats:
        seat.assess = DrawnAccount()
        seat.restart()
    return federation


def honest_terms(mode: str) -> Terms:
    """Of a round that tolerates dropouts, or of one that is repaired."""
    plan = Plan(
        clip=1.0,
        epsilon=3.0,
        kappa=2.0,
        neighbours=float(SIZE - 1),
        graph="complete",
        collusion=COLLUDERS / SIZE,
        # So rarely that in a million rounds none loses two.
        dropout=1e-4,
        mode=mode,
    )
    terms = make_terms(plan, participants=SIZE, coordinates=COORDINATES, run=b"run", number=1)
    return replace(terms, attempt=1)


def spoilt(terms: Terms, name: str) -> list[Any]:
    """0, tiny, huge, negative, not a number, and what the other fields say."""
    value = getattr(terms, name)
    if isinstance(value, bytes):
        return [b"", b"\0", bytes(16), bytes(255), bytes(256)]
    if isinstance(value, str):
        return ["", "none", "tolerate", "repair"]
    if name == "records":
        numbers = (0.0, 1e-300, 0.5, 1.0, float(SIZE), 1e300, math.nan)
        return [RecordTerms(*pair) for pair in itertools.product(numbers, repeat=2)]
    if value is None:
        return [CarryTerms(bytes(32), amount) for amount in (0.0, 1.0, 1e300)]
    others = [getattr(terms, field.name) for field in fields(terms)]
    numbers = [other for other in others if isinstance(other, int | float)]
    if isinstance(value, int):
        ends = [0, 1, 2, value - 1, value + 1, 62, 63, 64, 2**20, 2**31, 2**32, 2**63, 2**64, -1]
        return [*ends, *(int(number) for number in numbers if math.isfinite(number))]
    scales = [value * 2.0**power for power in (-200, -60, -30, -16, -4, -1, 1, 4, 16, 30, 60, 200)]
    extremes = [0.0, -0.0, 5e-324, 1e-300, 1e-150, 1e150, 1e300, -1.0, -value, math.nan, math.inf, -math.inf]
    return [*extremes, *scales, *map(float, numbers)]


def rounded_variance(steps: float) -> float:
    """Of `rint(N(0, steps^2))`, in steps: what noise is left once it is on the grid; never counted above `steps^2`."""
    if steps > 1.0:
        return steps**2
    reach = np.arange(1, 12) - 0.5
    tails = np.array([math.erfc(one / (steps * math.sqrt(2.0))) if steps > 0.0 else 0.0 for one in reach])
    return min(steps**2, float(np.sum((2 * np.arange(1, 12) - 1) * tails)))


def true_mu(agreed: Agreed) -> float:
    """The worst client, colluders and repair: `Delta / sqrt(1 / (Sigma^-1)_kk)`, everything in grid steps."""
    terms, graph, step = agreed.terms, agreed.graph, 2.0**-agreed.terms.grid_bits
    size = len(agreed.participants)
    residual = rounded_variance(math.sqrt(terms.residual_variance) / step)
    own = rounded_variance(math.sqrt(terms.self_variance) / step)
    shared = np.zeros((size, size))
    for one, other, weight in zip(graph.senders, graph.receivers, graph.weights, strict=True):
        variance = rounded_variance(math.sqrt(float(weight) * terms.unit_variance) / step)
        shared[one, other] += variance
        shared[other, one] += variance
    repair = terms.mode == "repair"
    lost = min(terms.revealed, terms.dropped, size) if repair else 0
    least = math.inf
    for bad in itertools.combinations(range(size), min(size - 1, COLLUDERS + lost)):
        honest = [seat for seat in range(size) if seat not in bad]
        known = shared[np.ix_(honest, honest)]
        if residual == 0.0:
            return math.inf
        own_noise = np.full(len(honest), residual)
        least = min(least, *(effective_variance(known, own_noise, row) for row in range(len(honest))))
    if repair:
        # A client that is said to have dropped out: its edges are bared, its self-mask is not.
        least = min(least, residual + own)
    # The rounded update is no longer than the clip.
    return terms.clip / size / step / math.sqrt(least) if least > 0.0 else math.inf


def opened_with(federation: Federation, terms: Terms) -> RoundOpen | None:
    """The round with these terms, signed by a server that checks nothing; None where the wire cannot carry them.

    None also where the beacon's chain has no link for them.
    """
    try:
        encode(RoundOpen(terms, (), Beacon(1, bytes(32), bytes(64)), bytes(64)))
        index = link_of(terms.round, terms.attempt)
    except NissError:
        return None
    if index >= len(federation.chain._links):
        return None
    participants = tuple(
        Participant(seat.client.public, keys[0])
        for seat, keys in zip(federation.seats, federation.prekeys, strict=True)
    )
    bare = RoundOpen(terms, participants, federation.beacon(participants, terms))
    opened: RoundOpen = resigned(federation.server, bare, "open")
    return opened
