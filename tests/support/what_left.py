"""What a server holds of one opened round, and what that is worth: recomputed without the package's accountant.

Everything that leaves a client is an upload, or a member's partials: of masks, and of the secrets of edges. Whatever
noise of an upload does not follow from these, and from what the colluders know, is Gaussian to the server.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from niss.protocol import committee
from niss.protocol.agreement import Agreed, agree
from niss.protocol.messages import Reveal, RoundOpen, Upload
from support.hostile import rounded_variance

Square = NDArray[np.float64]


class Held:
    """Uploads and partials of one round; `colluders` are seats that keep nothing to themselves.

    partials   by owner of a key and dropped neighbour (None: its mask), the members that gave theirs
    """

    def __init__(self, opened: RoundOpen, colluders: Collection[int], agreed: Agreed | None = None) -> None:
        self.opened, self.agreed = opened, agreed or agree(opened)
        self.colluders = frozenset(colluders)
        self.uploads: dict[int, Upload] = {}
        self.partials: dict[tuple[int, int | None], set[int]] = defaultdict(set)

    def take_upload(self, upload: Upload) -> None:
        assert upload.seat not in self.uploads, "an attempt was answered twice"
        self.uploads[upload.seat] = upload

    def take_reveal(self, reveal: Reveal, survivors: tuple[int, ...]) -> None:
        lost = committee.lost_neighbours(self.agreed, survivors)
        for one in reveal.partials:
            for other in (None, *lost[one.seat]):
                self.partials[one.seat, other].add(reveal.seat)

    def known(self, owner: int, other: int | None) -> bool:
        """Whether enough members gave their part, with what colluding members make of their pieces."""
        colluding = (
            self.colluders.intersection(self.agreed.committee) if owner in self.uploads else frozenset()
        )
        return len(self.partials[owner, other] | colluding) >= self.agreed.terms.threshold > 0

    @property
    def edges(self) -> set[frozenset[int]]:
        """Pairs whose secret is known to the server, from the pieces of either end."""
        pairs = [(one, other) for one in self.uploads for other in self.agreed.neighbours(one)]
        return {frozenset(pair) for pair in pairs if self.known(*pair)}

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
        graph, known = agreed.graph, self.edges if terms.mode == "repair" else set()
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
            if terms.mode == "repair" and not self.known(seat, None):
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
