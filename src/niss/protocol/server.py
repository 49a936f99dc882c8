"""The server's side of a round: open, collect, repair, sum. It holds no secret and can be restarted freely.

Whatever happens, a round ends with the exact sum of the survivors' uploads, with a noisy one that says so or, where
shares are uniform, without any; the server never waits for anyone, the driver decides when a stage is over. A message
that is forged, malformed or out of turn is a `RemoteProtocolError` and changes nothing; a lie that only shows later is
noted in `Outcome.problems`.

**Liars in a repair.** Uploads commit to the pieces of self-masks and to the seeds of shares, before anyone knows who
drops out. What is revealed counts only if it fits; each piece and each edge is checked alone, so the work grows with
their number, whoever lies. Named in `Outcome.liars`, and an honest client never, is whoever revealed

- a piece other than the one its owner committed to (an honest holder checks that before it passes the piece on);
- for a dropped neighbour other seeds than its own upload committed to, or only some of them;
- anything it was not asked for;

and whoever committed to pieces that do not give the self-mask it committed to. Not named, since either of two may
have lied, but left in the sum as noise and counted: a piece that is withheld, and shares to whose seeds two survivors
committed differently. *Not detected* is a client that was false from the start and consistently: another update than
it should send, another self-mask than it committed to, or a false seed, committed to and revealed, for a neighbour
that happens to drop out. Each of these is a false update, which no server that may not look into uploads can see.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.mechanism.grid import centred, residues
from niss.protocol.agreement import Agreed, agree, survivors_hash
from niss.protocol.keys import Identity, SecretBytes, check_prekey, verify
from niss.protocol.messages import (
    SHORT_BYTES,
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
from niss.protocol.shares import add_noises, edge_commitment, piece_commitment
from niss.protocol.states import ServerState, server_step
from niss.protocol.wire import check_packed, signed_part, signed_parts, sum_packed
from niss.randomness import SecretStream


@dataclass(frozen=True)
class Outcome:
    """The end of a round.

    total           sum of the survivors' parts `p_k x_k` and residual noises, as floats
    survivors       seats whose uploads are in it
    dropped         all other seats; of a void round, those whose uploads never arrived
    uncancelled     shares, sent to or by dropped clients, that were not taken out, and shares between survivors
                    who did not commit to the same seeds
    masked          survivors whose self-masks could not be rebuilt, and are still in it
    extra_variance  what the last two leave in each coordinate beyond the intended noise
    problems        in words, what went wrong and with whom
    liars           seats that are proven to have lied in the repair; what they said falsely was left out
    void            uniform masks could not all be taken out: there is no sum, and nobody's upload counts as summed
    """

    total: NDArray[np.float64]
    survivors: tuple[int, ...]
    dropped: tuple[int, ...]
    uncancelled: int
    masked: tuple[int, ...]
    extra_variance: float
    problems: tuple[str, ...]
    liars: tuple[int, ...]
    void: bool = False

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
    problems: dict[str, None] = field(default_factory=dict)
    liars: set[int] = field(default_factory=set)

    def note(self, problem: str) -> None:
        """Once, however often it is said."""
        self.problems[problem] = None

    def lie(self, seat: int, what: str) -> None:
        """Note what only a liar does. `what` is one of a few texts: a liar cannot make this list long."""
        self.liars.add(seat)
        self.note(f"seat {seat} {what}; left out")


# Fewer uploads than that are no sum.
_LEAST_SUMMED = 2


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
        commitment, and one piece with its commitments for each neighbour, in order of seats. Whether they are true
        shows only later.
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
        if any(len(piece.ciphertext) <= 2 * SHORT_BYTES for piece in upload.pieces):
            raise RemoteProtocolError(
                f"seat {upload.seat} did not commit to its pieces and shares",
                hint="run the same release of niss on both sides",
            )
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

        Each carries all verdicts: how many make a quorum depends on how many colluders a client assumes.
        """
        current, following = self._step("request reveals")
        agreed = current.agreed
        sealed: dict[int, list[SealedPiece]] = {seat: [] for seat in current.verdicts}
        for owner in sorted(current.uploads):
            for piece in current.uploads[owner].pieces:
                if piece.seat in sealed:
                    sealed[piece.seat].append(replace(piece, seat=owner))
        verdicts = tuple(verdict for _, verdict in sorted(current.verdicts.items()))
        requests = [
            RevealRequest(agreed.digest, current.survivors, verdicts, tuple(sealed[seat]))
            for seat in current.verdicts
        ]
        # All of them hold all verdicts, which are encoded once.
        signatures = [self._identity.sign("request", part) for part in signed_parts(requests)]
        self.state = following
        return {
            seat: replace(request, signature=signature)
            for seat, request, signature in zip(current.verdicts, requests, signatures, strict=True)
        }

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

        Where shares are uniform and one of them, or a self-mask, cannot be taken out, the round is void: total is zero.

        A single upload is not summed: its survivors are none. Its noise would protect it as before, but what is
        promised to be a sum would be one client's update, passed on to whoever is given the model.
        """
        current, following = self._step("finish")
        agreed, terms = current.agreed, current.agreed.terms
        survivors = current.survivors or tuple(sorted(current.uploads))
        if len(survivors) < _LEAST_SUMMED:
            if survivors:
                current.note(f"{_named(list(survivors))} alone uploaded; the sum would have been that upload")
            survivors = ()
        vectors = (current.uploads[seat].vector for seat in survivors)
        total = sum_packed(vectors, terms.coordinates, terms.modulus_bits)
        dropped = tuple(sorted(set(range(len(agreed.participants))) - set(survivors)))
        uncancelled, extra = _take_out_edges(current, total, set(survivors))
        masked: tuple[int, ...] = ()
        if terms.mode == "repair":
            masked = _take_out_masks(current, total, survivors)
            extra += len(masked) * terms.self_variance
        void = terms.uniform and bool(uncancelled or masked)
        if void:
            current.note(f"the round is void: {uncancelled + len(masked)} uniform masks hide the whole sum")
            total[:], survivors = 0, ()
        if terms.uniform:
            extra = 0.0  # All or nothing.
        self.state = following
        current.uploads.clear()  # As large as so many models, and of no more use.
        return Outcome(
            agreed.grid.to_float(centred(residues(total.view(np.int64), terms.modulus_bits))),
            survivors,
            dropped,
            uncancelled,
            masked,
            extra,
            tuple(current.problems),
            tuple(sorted(current.liars)),
            void,
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


def _take_out_edges(current: _Round, total: NDArray[np.uint64], survivors: set[int]) -> tuple[int, float]:
    """Subtract the revealed shares of dropped clients; count those that stay, and their variance.

    A survivor that sent a share has `+n` in the sum and one that received it `-n`, with nobody left to cancel it.
    Shares between survivors who disagree on their seeds count as staying, both ends' noise of them.
    """
    agreed = current.agreed
    seeds = {
        pair: seed
        for seat in sorted(current.reveals)
        for pair, seed in _true_seeds(current, seat, survivors).items()
    }
    disputed = _disputed(current, survivors)
    uncancelled, extra, noises = 0, 0.0, []
    for sender, receiver, variance in agreed.shares():
        pair = sender, receiver
        ends = (sender in survivors) + (receiver in survivors)
        if ends == 1 and pair in seeds:
            sign = -1 if sender in survivors else 1
            noises.append((SecretStream(seeds[pair]), agreed.grid.deviation_steps(variance), sign))
        elif ends == 1 or (ends == 2 and (min(pair), max(pair)) in disputed):
            uncancelled += 1
            extra += ends * variance
    add_noises(total, noises, agreed.terms.modulus_bits)
    return uncancelled, extra


def _true_seeds(current: _Round, seat: int, survivors: set[int]) -> dict[tuple[int, int], bytes]:
    """The seeds revealed by `seat`, as far as they are those of a dropped neighbour that its upload committed to."""
    agreed = current.agreed
    promised = {piece.seat: piece.edges for piece in current.uploads[seat].pieces}
    shares: dict[int, set[tuple[int, int]]] = {}
    for sender, receiver, _ in agreed.edges_of(seat):
        shares.setdefault(receiver if sender == seat else sender, set()).add((sender, receiver))
    given: dict[int, dict[tuple[int, int], bytes]] = {}
    for edge in current.reveals[seat].edges:
        other = edge.receiver if edge.sender == seat else edge.sender
        given.setdefault(other, {})[edge.sender, edge.receiver] = edge.seed
    true: dict[tuple[int, int], bytes] = {}
    for other, seeds in given.items():
        if other in survivors or seeds.keys() != shares.get(other):
            current.lie(seat, "revealed seeds of shares that it was not asked for, or only some of them")
        elif edge_commitment(agreed, seat, other, seeds) != promised[other]:
            current.lie(seat, "revealed seeds that are not those it committed to")
        else:
            true |= seeds
    return true


def _disputed(current: _Round, survivors: set[int]) -> set[tuple[int, int]]:
    """Pairs of survivors, lower seat first, that did not commit to the same seeds; one of each pair lies."""
    if current.agreed.terms.mode != "repair":
        return set()
    promised = {
        seat: {piece.seat: piece.edges for piece in current.uploads[seat].pieces}
        for seat in sorted(survivors)
    }
    pairs: set[tuple[int, int]] = set()
    for seat, edges in promised.items():
        against = [
            other
            for other, commitment in edges.items()
            if other > seat and other in promised and promised[other][seat] != commitment
        ]
        pairs.update((seat, other) for other in against)
        if against:
            current.note(f"seat {seat} did not commit to the same shares as {_named(against)}; one end lies")
    return pairs


def _take_out_masks(
    current: _Round, total: NDArray[np.uint64], survivors: tuple[int, ...]
) -> tuple[int, ...]:
    """Rebuild and subtract the self-masks of the survivors; returns those that could not be rebuilt.

    One rebuilding for each, of pieces that fit their owner's commitments: if those fail, the owner lied.
    """
    agreed = current.agreed
    steps = agreed.grid.deviation_steps(agreed.terms.self_variance)
    pieces = _true_pieces(current, survivors)
    left, short, masks = [], [], []
    for seat in survivors:
        threshold = agreed.threshold(seat)
        if len(pieces[seat]) < threshold:
            short.append(seat)
            left.append(seat)
            continue
        seed = rebuild(pieces[seat], threshold, current.uploads[seat].commitment, agreed.mask_context(seat))
        if seed is None:
            current.lie(seat, "made pieces that do not give its self-mask")
            left.append(seat)
        else:
            masks.append((SecretStream(seed), steps, -1))
    add_noises(total, masks, agreed.terms.modulus_bits)
    if short:
        current.note(f"too few true pieces to take out the self-mask of {_named(short)}")
    return tuple(left)


def _true_pieces(current: _Round, survivors: tuple[int, ...]) -> dict[int, list[Piece]]:
    """By the survivor whose self-mask they are of, the pieces that are what that survivor committed to."""
    true: dict[int, list[Piece]] = {seat: [] for seat in survivors}
    promised = {
        (seat, sealed.seat): sealed.commitment
        for seat in survivors
        for sealed in current.uploads[seat].pieces
    }
    for giver in sorted(current.reveals):
        for revealed in current.reveals[giver].pieces:
            try:
                piece = Piece(revealed.index, SecretBytes(revealed.value))
            except RemoteProtocolError:
                current.lie(giver, "revealed a malformed piece")
                continue
            commitment = promised.get((revealed.seat, giver))
            if commitment is None:
                current.lie(giver, "revealed a piece that it was not asked for")
            elif piece_commitment(current.agreed, revealed.seat, giver, piece) != commitment:
                current.lie(giver, "revealed a piece that is not the one its owner committed to")
            else:
                true[revealed.seat].append(piece)
    return true


def rebuild(pieces: list[Piece], threshold: int, commitment: bytes, context: bytes) -> SecretBytes | None:
    """The seed that the first `threshold` pieces give; None if it does not fit its commitment or they are too few."""
    if len(pieces) < threshold:
        return None
    try:
        seed = combine(pieces[:threshold], threshold)
        check_commitment(commitment, seed, context)
    except RemoteProtocolError:
        return None
    return seed


def _named(seats: list[int]) -> str:
    """The first ten of them in words."""
    listed = ", ".join(str(seat) for seat in seats[:10])
    more = f" and {len(seats) - 10} more" if len(seats) > 10 else ""
    return f"seat{'s' if len(seats) > 1 else ''} {listed}{more}"
