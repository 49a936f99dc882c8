"""What a client adds to its update: shares derived from keys, fresh residual noise, and its self-mask.

All of it is on the grid and modulo 2^64, so that what both ends of an edge add cancels to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from niss.protocol.agreement import Agreed
from niss.protocol.derive import derive_seed, pair_secret
from niss.protocol.messages import SealedPiece
from niss.protocol.seal import open_sealed, seal
from niss.protocol.secret import SecretBytes, draw
from niss.protocol.shamir import Piece, commit, split
from niss.randomness import SecretStream

Entropy = Callable[[int], bytes]
Steps = NDArray[np.int64]


def edge_seed(agreed: Agreed, private: SecretBytes, seat: int, sender: int, receiver: int) -> SecretBytes:
    """The seed of the share from `sender` to `receiver`, as the client in `seat` (one of the two) derives it."""
    other = receiver if seat == sender else sender
    people = agreed.participants
    shared = pair_secret(private, people[other].prekey.public)
    return derive_seed(shared, agreed.context, people[sender].identity, people[receiver].identity, "share")


def check_neighbours(agreed: Agreed, seat: int, private: SecretBytes) -> None:
    """Refuse a neighbour's prekey with which no secret can be shared, before anything is charged."""
    for other in agreed.neighbours(seat):
        pair_secret(private, agreed.participants[other].prekey.public)


def masked_upload(
    agreed: Agreed, seat: int, private: SecretBytes, steps: Steps, mask: SecretBytes | None, entropy: Entropy
) -> NDArray[np.uint64]:
    """`p_k x_k + shares sent - shares received + residual (+ self-mask)`, in grid steps modulo 2^64."""
    vector = steps.astype(np.int64).view(np.uint64).copy()
    seeds = {
        (sender, receiver): edge_seed(agreed, private, seat, sender, receiver)
        for sender, receiver, _ in agreed.edges_of(seat)
    }
    add_shares_from(agreed, seat, seeds, vector)
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


def self_mask_pieces(
    agreed: Agreed, seat: int, private: SecretBytes, entropy: Entropy
) -> tuple[bytes, tuple[SealedPiece, ...], SecretBytes]:
    """A fresh self-mask seed: its commitment, its pieces sealed to the neighbours, and the seed itself."""
    mask = draw(entropy, 32)
    neighbours = agreed.neighbours(seat)
    pieces = split(mask, agreed.threshold(seat), len(neighbours), entropy)
    sealed = tuple(
        SealedPiece(other, _seal(agreed, piece, seat, other, private, entropy))
        for other, piece in zip(neighbours, pieces, strict=True)
    )
    return commit(mask, agreed.mask_context(seat)), sealed, mask


def open_piece(agreed: Agreed, sealed: SealedPiece, owner: int, seat: int, private: SecretBytes) -> Piece:
    """The piece of the self-mask of `owner` that was sealed to the client in `seat`."""
    people = agreed.participants
    shared = pair_secret(private, people[owner].prekey.public)
    ends = people[owner].identity, people[seat].identity
    return Piece.decode(open_sealed(shared, agreed.context, *ends, "piece", sealed.ciphertext))


def _seal(
    agreed: Agreed, piece: Piece, owner: int, seat: int, private: SecretBytes, entropy: Entropy
) -> bytes:
    people = agreed.participants
    shared = pair_secret(private, people[seat].prekey.public)
    ends = people[owner].identity, people[seat].identity
    return seal(shared, agreed.context, *ends, "piece", piece.encode(), entropy=entropy)
