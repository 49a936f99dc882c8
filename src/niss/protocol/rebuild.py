"""What the server makes of verdicts and pieces: who must sign, and the self-masks that come back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from niss.errors import RemoteProtocolError
from niss.protocol.agreement import Agreed
from niss.protocol.messages import Reveal
from niss.protocol.secret import SecretBytes
from niss.protocol.shamir import Piece, check_commitment, combine

Note = Callable[[str], None]
Given = Mapping[int, Mapping[int, Piece]]


def signers_for(agreed: Agreed, seat: int, verdicts: Collection[int]) -> list[int]:
    """Seats whose verdicts make a quorum, where there is one, among the neighbours of each neighbour of `seat`."""
    chosen: set[int] = set()
    for other in agreed.neighbours(seat):
        willing = {one for one in agreed.neighbours(other) if one in verdicts}
        missing = agreed.quorum(other) - len(willing & chosen)
        chosen.update(sorted(willing - chosen)[: max(missing, 0)])
    return sorted(chosen)


def pieces_by_owner(reveals: Mapping[int, Reveal], note: Note) -> Given:
    """The well-formed pieces that each client gave, by the seat whose self-mask they are of."""
    given: dict[int, dict[int, Piece]] = {giver: {} for giver in reveals}
    for giver, reveal in reveals.items():
        for piece in reveal.pieces:
            try:
                given[giver][piece.seat] = Piece(piece.index, SecretBytes(piece.value))
            except RemoteProtocolError:
                note(f"seat {giver} revealed what is no piece of its own")
    return given


def pieces_of(agreed: Agreed, seat: int, given: Given, note: Note) -> list[Piece]:
    """The pieces of a survivor's self-mask, each from the neighbour it was made for."""
    pieces = []
    for index, giver in enumerate(agreed.neighbours(seat), start=1):
        piece = given.get(giver, {}).get(seat)
        if piece is None:
            continue
        if piece.index != index:
            note(f"seat {giver} revealed what is no piece of its own")
        else:
            pieces.append(piece)
    return pieces


def rebuild(pieces: list[Piece], threshold: int, commitment: bytes, context: bytes) -> SecretBytes | None:
    """The seed that fits its commitment, from the first `threshold` pieces or, if some lie, from others."""
    for chosen in _choices(pieces, threshold):
        try:
            seed = combine(chosen, threshold)
            check_commitment(commitment, seed, context)
        except RemoteProtocolError:
            continue
        return seed
    return None


def _choices(pieces: list[Piece], threshold: int) -> Iterator[list[Piece]]:
    """Runs of neighbouring pieces, then the first ones with any one of them left out: a few, not all."""
    spare = len(pieces) - threshold
    for start in range(spare + 1):
        yield pieces[start : start + threshold]
    for left_out in range(1, threshold if spare > 0 else 0):
        yield pieces[:left_out] + pieces[left_out + 1 : threshold + 1]
