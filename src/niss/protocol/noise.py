"""What a client adds to its update, once rounded: shares derived from keys, fresh residual noise, its self-mask.

All of it is on the grid and modulo 2^64, so that what both ends of an edge add cancels to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from niss.mechanism.rounding import round_randomly
from niss.protocol.agreement import Agreed
from niss.protocol.derive import derive_seed, pair_secret
from niss.protocol.messages import SealedPiece
from niss.protocol.seal import open_sealed, seal
from niss.protocol.secret import Secret, SecretBytes, draw
from niss.protocol.shamir import Piece, commit, split
from niss.randomness import SecretStream

Entropy = Callable[[int], bytes]
Steps = NDArray[np.int64]


class Ties(Secret):
    """What the client in one seat of a round shares with each other client, agreed on once."""

    __slots__ = ("_private", "_secrets", "agreed", "seat")

    def __init__(self, agreed: Agreed, seat: int, private: SecretBytes) -> None:
        self.agreed, self.seat, self._private = agreed, seat, private
        self._secrets: dict[int, SecretBytes] = {}

    def secret(self, other: int) -> SecretBytes:
        """Refuses a prekey with which no secret can be shared."""
        if other not in self._secrets:
            self._secrets[other] = pair_secret(self._private, self.agreed.participants[other].prekey.public)
        return self._secrets[other]

    def check_neighbours(self) -> None:
        """Refuse a neighbour's prekey with which no secret can be shared, before anything is charged."""
        for other in self.agreed.neighbours(self.seat):
            self.secret(other)

    def edge_seed(self, sender: int, receiver: int) -> SecretBytes:
        """The seed of the share from `sender` to `receiver`, this client being one of the two."""
        shared = self.secret(receiver if self.seat == sender else sender)
        return derive_seed(shared, self.agreed.context, *self.ends(sender, receiver), "share")

    def ends(self, sender: int, receiver: int) -> tuple[bytes, bytes]:
        people = self.agreed.participants
        return people[sender].identity, people[receiver].identity


def round_update(agreed: Agreed, weighted: NDArray[np.float64], entropy: Entropy) -> Steps:
    """`p_k x_k` in grid steps, rounded at random, of norm at most `clip / participants`.

    The coins are fresh and for this upload alone: no noise is drawn from their stream.
    """
    bound = Fraction(agreed.terms.clip) / len(agreed.participants)
    return round_randomly(agreed.grid, weighted, bound, SecretStream.fresh(entropy))


def masked_upload(ties: Ties, steps: Steps, mask: SecretBytes | None, entropy: Entropy) -> NDArray[np.uint64]:
    """`p_k x_k + shares sent - shares received + residual (+ self-mask)`, in grid steps modulo 2^64."""
    agreed = ties.agreed
    vector = steps.astype(np.int64).view(np.uint64)
    seeds = {
        (sender, receiver): ties.edge_seed(sender, receiver)
        for sender, receiver, _ in agreed.edges_of(ties.seat)
    }
    add_shares_from(agreed, ties.seat, seeds, vector)
    terms = agreed.terms
    if terms.residual_variance:
        # Never from a seed anyone else could replay.
        SecretStream.fresh(entropy).add_gaussian(vector, agreed.grid.deviation_steps(terms.residual_variance))
    if mask is not None:
        SecretStream(mask).add_gaussian(vector, agreed.grid.deviation_steps(terms.self_variance))
    return vector


def add_shares_from(
    agreed: Agreed, seat: int, seeds: Mapping[tuple[int, int], SecretBytes], vector: NDArray[np.uint64]
) -> None:
    """Add the shares this client sends and subtract those it receives, in place, from the seeds of its edges."""
    for sender, receiver, deviation in agreed.edges_of(seat):
        sign = 1 if sender == seat else -1
        SecretStream(seeds[sender, receiver]).add_gaussian(vector, deviation, sign=sign)


def self_mask_pieces(ties: Ties, entropy: Entropy) -> tuple[bytes, tuple[SealedPiece, ...], SecretBytes]:
    """A fresh self-mask seed: its commitment, its pieces sealed to the neighbours, and the seed itself."""
    agreed, seat = ties.agreed, ties.seat
    mask = draw(entropy, 32)
    neighbours = agreed.neighbours(seat)
    pieces = split(mask, agreed.threshold(seat), len(neighbours), entropy)
    sealed = tuple(
        SealedPiece(other, _seal(ties, piece, other, entropy))
        for other, piece in zip(neighbours, pieces, strict=True)
    )
    return commit(mask, agreed.mask_context(seat)), sealed, mask


def open_piece(ties: Ties, sealed: SealedPiece, owner: int) -> Piece:
    """The piece of the self-mask of `owner` that was sealed to this client."""
    shared, ends = ties.secret(owner), ties.ends(owner, ties.seat)
    return Piece.decode(open_sealed(shared, ties.agreed.context, *ends, "piece", sealed.ciphertext))


def _seal(ties: Ties, piece: Piece, other: int, entropy: Entropy) -> bytes:
    shared, ends = ties.secret(other), ties.ends(ties.seat, other)
    return seal(shared, ties.agreed.context, *ends, "piece", piece.encode(), entropy=entropy)
