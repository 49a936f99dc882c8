"""The server's side of a round: open, collect, repair, sum. It holds no secret and can be restarted freely.

Whatever happens, a round ends with the exact sum of the survivors' uploads or with a noisy one that says so; the
server never waits for anyone, the driver decides when a stage is over. A message that is forged, malformed or out of
turn is a `RemoteProtocolError` and changes nothing; a lie that only shows later is noted in `Outcome.problems`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.mechanism.grid import centred, residues
from niss.protocol.agreement import Agreed, agree, survivors_hash
from niss.protocol.keys import Identity, SecretBytes, check_prekey, verify
from niss.protocol.messages import (
    Beacon,
    Participant,
    Reveal,
    RevealRequest,
    RoundOpen,
    SealedPiece,
    SurvivorClaim,
    Terms,
    Upload,
    Verdict,
)
from niss.protocol.shamir import Piece, check_commitment, combine
from niss.protocol.states import ServerState, server_step
from niss.protocol.wire import check_packed, signed_part, sum_packed
from niss.randomness import SecretStream


@dataclass(frozen=True)
class Outcome:
    """The end of a round.

    total           sum of the survivors' parts `p_k x_k` and residual noises, as floats
    survivors       seats whose uploads are in it
    dropped         all other seats
    uncancelled     shares, sent to or by dropped clients, that were not taken out
    masked          survivors whose self-masks could not be rebuilt, and are still in it
    extra_variance  what the last two leave in each coordinate beyond the intended noise
    problems        in words, what went wrong and with whom
    """

    total: NDArray[np.float64]
    survivors: tuple[int, ...]
    dropped: tuple[int, ...]
    uncancelled: int
    masked: tuple[int, ...]
    extra_variance: float
    problems: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether nothing but the intended noise is left."""
        return self.uncancelled == 0 and not self.masked


@dataclass
class _Round:
    """What has arrived in the round under way, by seat; `survivors` is what was claimed, once it was."""

    agreed: Agreed
    uploads: dict[int, Upload] = field(default_factory=dict)
    survivors: tuple[int, ...] = ()
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    reveals: dict[int, Reveal] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


class Server:
    """The server of a run, round after round; `identity` signs what it sends.

    The driver calls `open_round`, hands in uploads, then either `finish` (mode `tolerate`), or `claim_survivors`,
    verdicts, `request_reveals`, reveals, `finish`. It may finish at any stage: with whatever has arrived by then.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._round: _Round | None = None
        self.state = ServerState.IDLE

    @property
    def public(self) -> bytes:
        """The public half of the identity."""
        return self._identity.public

    def open_round(self, terms: Terms, participants: tuple[Participant, ...], beacon: Beacon) -> RoundOpen:
        """Open a round; the message goes to every participant.

        `beacon` is the link that the holder released for these participants and terms. Terms on whose grid the sum
        could wrap are a `ConfigError`.
        """
        following = server_step(self.state, "open round")
        for one in participants:
            check_prekey(one.prekey, one.identity)
        opened = RoundOpen(terms, participants, beacon)
        opened = replace(opened, signature=self._identity.sign("open", signed_part(opened)))
        agreed = agree(opened)
        agreed.check_fits()
        self._round, self.state = _Round(agreed), following
        return opened

    def take_upload(self, upload: Upload) -> None:
        """Keep a client's upload; of two different ones from one seat the first counts.

        Refused are vectors of the wrong length, prekeys not signed by the sender and, in mode `repair`, anything but a
        commitment and one piece for each neighbour, in order of seats. Whether the pieces are true shows only later.
        """
        current, following = self._receive(upload, "upload")
        agreed, terms = current.agreed, current.agreed.terms
        if upload.seat in current.uploads:
            if current.uploads[upload.seat] != upload:
                current.note(f"seat {upload.seat} uploaded twice; the first upload counts")
            return
        check_packed(upload.vector, terms.coordinates, terms.modulus_bits)
        for prekey in upload.fresh_prekeys:
            check_prekey(prekey, agreed.participants[upload.seat].identity)
        neighbours = agreed.neighbours(upload.seat) if terms.mode == "repair" else []
        if [piece.seat for piece in upload.pieces] != neighbours:
            raise RemoteProtocolError(f"seat {upload.seat} did not send one piece for each neighbour")
        if bool(upload.commitment) != bool(neighbours):
            raise RemoteProtocolError(f"seat {upload.seat} did not commit to its self-mask")
        current.uploads[upload.seat] = upload
        self.state = following

    def claim_survivors(self) -> SurvivorClaim:
        """End the uploads and ask everyone to agree on who survived; a `tolerate` round has no such stage."""
        current, following = self._step("claim survivors")
        if current.agreed.terms.mode != "repair":
            raise LocalProtocolError("a round that tolerates dropouts is not repaired", hint="finish it")
        current.survivors = tuple(sorted(current.uploads))
        claim = SurvivorClaim(current.agreed.digest, current.survivors)
        self.state = following
        return replace(claim, signature=self._identity.sign("claim", signed_part(claim)))

    def take_verdict(self, verdict: Verdict) -> None:
        """Keep a client's agreement to the survivor set that was claimed."""
        current, following = self._receive(verdict, "verdict")
        if verdict.survivors_hash != survivors_hash(current.agreed.digest, current.survivors):
            raise RemoteProtocolError(f"seat {verdict.seat} agreed to another survivor set")
        current.verdicts[verdict.seat] = verdict
        self.state = following

    def request_reveals(self) -> dict[int, RevealRequest]:
        """By seat, one request for each survivor that gave its verdict, with the pieces it is to open.

        Each carries as few verdicts as make a quorum for all neighbours of that seat, not all of them.
        """
        current, following = self._step("request reveals")
        agreed = current.agreed
        sealed: dict[int, list[SealedPiece]] = {seat: [] for seat in current.verdicts}
        for owner in sorted(current.uploads):
            for piece in current.uploads[owner].pieces:
                if piece.seat in sealed:
                    sealed[piece.seat].append(SealedPiece(owner, piece.ciphertext))
        requests = {}
        for seat in current.verdicts:
            verdicts = tuple(current.verdicts[one] for one in _signers_for(agreed, seat, current.verdicts))
            request = RevealRequest(agreed.digest, current.survivors, verdicts, tuple(sealed[seat]))
            requests[seat] = replace(request, signature=self._identity.sign("request", signed_part(request)))
        self.state = following
        return requests

    def take_reveal(self, reveal: Reveal) -> None:
        """Keep what a client reveals; of two different ones from one seat the first counts."""
        current, following = self._receive(reveal, "reveal")
        if reveal.seat not in current.verdicts or reveal.seat not in current.survivors:
            raise RemoteProtocolError(f"seat {reveal.seat} reveals though it was not asked")
        if current.reveals.setdefault(reveal.seat, reveal) != reveal:
            current.note(f"seat {reveal.seat} revealed twice; the first reveal counts")
        self.state = following

    def finish(self) -> Outcome:
        """Sum what arrived, take out what was revealed, and say what is left.

        The sum of the survivors' vectors, modulo 2^modulus_bits, less the shares between survivors and dropped
        clients whose seeds were revealed, less the self-masks that could be rebuilt; then nearest to zero, as floats.
        """
        current, following = self._step("finish")
        agreed, terms = current.agreed, current.agreed.terms
        survivors = current.survivors or tuple(sorted(current.uploads))
        vectors = (current.uploads[seat].vector for seat in survivors)
        total = sum_packed(vectors, terms.coordinates, terms.modulus_bits)
        dropped = tuple(sorted(set(range(len(agreed.participants))) - set(survivors)))
        uncancelled, extra = _take_out_edges(current, total, set(survivors))
        masked: tuple[int, ...] = ()
        if terms.mode == "repair":
            masked = _take_out_masks(current, total, survivors)
            extra += len(masked) * terms.self_variance
        self.state = following
        return Outcome(
            agreed.grid.to_float(centred(residues(total.view(np.int64), terms.modulus_bits))),
            survivors,
            dropped,
            uncancelled,
            masked,
            extra,
            tuple(current.problems),
        )

    def _step(self, event: str) -> tuple[_Round, ServerState]:
        """The round under way, and the state that follows once what the driver asks for is done."""
        if self._round is None:
            raise LocalProtocolError("no round was opened")
        return self._round, server_step(self.state, event)

    def _receive(self, message: Upload | Verdict | Reveal, purpose: str) -> tuple[_Round, ServerState]:
        """The round under way, and the state that follows, for a message of it that its seat has signed."""
        current = self._round
        if current is None:
            raise LocalProtocolError("no round was opened")
        if message.context != current.agreed.digest:
            raise RemoteProtocolError("the message belongs to another round")
        following = server_step(self.state, type(message).__name__)
        participants = current.agreed.participants
        if not 0 <= message.seat < len(participants):
            raise RemoteProtocolError("the message comes from a seat that this round does not have")
        verify(participants[message.seat].identity, purpose, signed_part(message), message.signature)
        return current, following


def _signers_for(agreed: Agreed, seat: int, verdicts: Collection[int]) -> list[int]:
    """Seats whose verdicts make a quorum, where there is one, among the neighbours of each neighbour of `seat`.

    Greedy, lowest seats first, counting those already chosen for another neighbour: few, not the fewest.
    """
    chosen: set[int] = set()
    for other in agreed.neighbours(seat):
        willing = {one for one in agreed.neighbours(other) if one in verdicts}
        missing = agreed.quorum(other) - len(willing & chosen)
        chosen.update(sorted(willing - chosen)[: max(missing, 0)])
    return sorted(chosen)


def _take_out_edges(current: _Round, total: NDArray[np.uint64], survivors: set[int]) -> tuple[int, float]:
    """Subtract the revealed shares of dropped clients; count those that stay, and their variance.

    A survivor that sent a share has `+n` in the sum and one that received it `-n`, with nobody left to cancel it. Only
    seeds revealed by one end of their edge count; a false one adds noise of the same strength, and no more.
    """
    agreed, graph = current.agreed, current.agreed.graph
    seeds = {
        (edge.sender, edge.receiver): edge.seed
        for seat in sorted(current.reveals)
        for edge in current.reveals[seat].edges
        if seat in (edge.sender, edge.receiver)
    }
    uncancelled, extra = 0, 0.0
    edges = zip(graph.senders.tolist(), graph.receivers.tolist(), graph.weights.tolist(), strict=True)
    for sender, receiver, weight in edges:
        if (sender in survivors) == (receiver in survivors):
            continue
        seed = seeds.get((sender, receiver))
        if seed is None:
            uncancelled += 1
            extra += weight * agreed.terms.unit_variance
            continue
        sign = -1 if sender in survivors else 1
        SecretStream(seed).add_gaussian(total, agreed.steps_between(sender, receiver), sign=sign)
    return uncancelled, extra


def _take_out_masks(
    current: _Round, total: NDArray[np.uint64], survivors: tuple[int, ...]
) -> tuple[int, ...]:
    """Rebuild and subtract the self-masks of the survivors; returns those that could not be rebuilt."""
    agreed = current.agreed
    steps = agreed.grid.deviation_steps(agreed.terms.self_variance)
    pieces = _pieces_by_giver(current)
    left = []
    for seat in survivors:
        seed = rebuild(
            _pieces_of(current, seat, pieces),
            agreed.threshold(seat),
            current.uploads[seat].commitment,
            agreed.mask_context(seat),
        )
        if seed is None:
            left.append(seat)
        else:
            SecretStream(seed).add_gaussian(total, steps, sign=-1)
    return tuple(left)


def _pieces_by_giver(current: _Round) -> dict[int, dict[int, Piece]]:
    """The well-formed pieces that each client revealed, by the seat whose self-mask they are of."""
    pieces: dict[int, dict[int, Piece]] = {giver: {} for giver in current.reveals}
    for giver, reveal in current.reveals.items():
        for piece in reveal.pieces:
            try:
                pieces[giver][piece.seat] = Piece(piece.index, SecretBytes(piece.value))
            except RemoteProtocolError:
                current.note(f"seat {giver} revealed a malformed piece")
    return pieces


def _pieces_of(current: _Round, seat: int, pieces: Mapping[int, Mapping[int, Piece]]) -> list[Piece]:
    """The pieces of a survivor's self-mask, each from the neighbour it was made for."""
    own = []
    for index, giver in enumerate(current.agreed.neighbours(seat), start=1):
        piece = pieces.get(giver, {}).get(seat)
        if piece is None:
            continue
        if piece.index != index:
            current.note(f"seat {giver} revealed a piece that was not made for it")
        else:
            own.append(piece)
    return own


def rebuild(pieces: list[Piece], threshold: int, commitment: bytes, context: bytes) -> SecretBytes | None:
    """The seed that fits its commitment, from the first `threshold` pieces or, if some lie, from others.

    Only a few choices are tried, so that liars cannot make the server work: None where they all fail.
    """
    for choice in _choices(pieces, threshold):
        try:
            seed = combine(choice, threshold)
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
