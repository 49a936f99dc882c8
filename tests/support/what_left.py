"""What a server holds of all the rounds it opened, and what that is worth: recomputed without the package's accountant.

Everything that leaves a client is an upload, or a member's partials: of masks, and of what seals the keys of edges.
Whatever comes out of them, in whatever round, run or version, lies in one `Pool`, and is tried on every edge of every
list. Whatever noise of an upload does not follow from it, and from what the colluders know, is Gaussian to the server.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.protocol import committee
from niss.protocol.agreement import Agreed, EdgeKeys, agree, derive_seed
from niss.protocol.committee import recover
from niss.protocol.curve import SecretBytes
from niss.protocol.messages import Reveal, RoundOpen, Upload
from support.hostile import rounded_variance

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
        self._combined: set[tuple[int, int | None]] = set()
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
            for other, point in zip((None, *lost[one.seat]), committee.cut(one.points), strict=True):
                self.points[one.seat, other][number] = point
        self._combine()

    def _combine(self) -> None:
        """Everything that enough members gave their part of goes into the pool."""
        enough = self.agreed.terms.threshold
        for what, given in self.points.items():
            if what in self._combined or len(given) < enough:
                continue
            self._combined.add(what)
            (owner, other), point = what, committee.combine(dict(list(given.items())[:enough]))
            if other is None:
                self.pool.masks[bytes(committee.mask_seed(self.agreed, owner, point))] = None
            else:
                pieces = self.uploads[owner].pieces
                self.pool.edges[bytes(committee.open_seal(self.agreed, owner, other, point, pieces))] = None

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
            committee.is_committed(self.agreed, seat, seed, self.uploads[seat].commitment)
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
