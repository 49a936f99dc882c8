"""The server's side of a round: open, collect, repair, sum. It holds no secret and can be restarted freely.

Whatever happens, a round ends with the exact sum of the survivors' uploads or with a noisy one that says so; the
server never waits for anyone, the driver decides when a stage is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.mechanism.grid import centred, residues
from niss.protocol.agreement import Agreed, agree, survivors_hash
from niss.protocol.directory import check_prekey
from niss.protocol.keys import Identity, verify
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
from niss.protocol.packing import check_packed, sum_packed
from niss.protocol.rebuild import pieces_by_owner, pieces_of, rebuild, signers_for
from niss.protocol.table import ServerState, server_step
from niss.protocol.wire import signed_part
from niss.randomness import SecretStream


@dataclass(frozen=True)
class Outcome:
    """The end of a round: `total` is the sum of the survivors' parts `p_k x_k` and residual noises, as floats.

    `uncancelled` shares, sent to or by dropped clients, and `masked` clients, whose self-masks could not be
    rebuilt, leave `extra_variance` more noise in it.
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
    """The server of a run, round after round."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._round: _Round | None = None
        self.state = ServerState.IDLE

    @property
    def public(self) -> bytes:
        return self._identity.public

    def open_round(self, terms: Terms, participants: tuple[Participant, ...], beacon: Beacon) -> RoundOpen:
        """Open a round; the message goes to every participant."""
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
        """Keep a client's upload; forged, malformed and second uploads are refused, late ones discarded."""
        current = self._current(upload.context)
        following = server_step(self.state, "Upload")
        self._check_sender(current, upload.seat, "upload", signed_part(upload), upload.signature)
        agreed, terms = current.agreed, current.agreed.terms
        if upload.seat in current.uploads:
            if current.uploads[upload.seat] != upload:
                current.note(f"seat {upload.seat} uploaded twice; the first upload counts")
            return
        check_packed(upload.vector, terms.coordinates, terms.modulus_bits)
        for prekey in upload.fresh_prekeys:
            check_prekey(prekey, agreed.participants[upload.seat].identity)
        wanted = agreed.neighbours(upload.seat) if terms.mode == "repair" else []
        if [piece.seat for piece in upload.pieces] != wanted:
            raise RemoteProtocolError(f"seat {upload.seat} did not send one piece for each neighbour")
        if bool(upload.commitment) != bool(wanted):
            raise RemoteProtocolError(f"seat {upload.seat} did not commit to its self-mask")
        current.uploads[upload.seat] = upload
        self.state = following

    def claim_survivors(self) -> SurvivorClaim:
        """End the uploads and ask everyone to agree on who survived."""
        current = self._current()
        following = server_step(self.state, "claim survivors")
        if current.agreed.terms.mode != "repair":
            raise LocalProtocolError("a round that tolerates dropouts is not repaired", hint="finish it")
        current.survivors = tuple(sorted(current.uploads))
        claim = SurvivorClaim(current.agreed.digest, current.survivors)
        self.state = following
        return replace(claim, signature=self._identity.sign("claim", signed_part(claim)))

    def take_verdict(self, verdict: Verdict) -> None:
        """Keep a client's agreement."""
        current = self._current(verdict.context)
        following = server_step(self.state, "Verdict")
        self._check_sender(current, verdict.seat, "verdict", signed_part(verdict), verdict.signature)
        if verdict.survivors_hash != survivors_hash(current.agreed.digest, current.survivors):
            raise RemoteProtocolError(f"seat {verdict.seat} agreed to another survivor set")
        current.verdicts[verdict.seat] = verdict
        self.state = following

    def request_reveals(self) -> dict[int, RevealRequest]:
        """One request for each survivor that gave its verdict, with the pieces it is to open."""
        current = self._current()
        following = server_step(self.state, "request reveals")
        agreed = current.agreed
        sealed: dict[int, list[SealedPiece]] = {seat: [] for seat in current.verdicts}
        for owner in sorted(current.uploads):
            for piece in current.uploads[owner].pieces:
                if piece.seat in sealed:
                    sealed[piece.seat].append(SealedPiece(owner, piece.ciphertext))
        requests = {}
        for seat in current.verdicts:
            verdicts = tuple(current.verdicts[one] for one in signers_for(agreed, seat, current.verdicts))
            request = RevealRequest(agreed.digest, current.survivors, verdicts, tuple(sealed[seat]))
            requests[seat] = replace(request, signature=self._identity.sign("request", signed_part(request)))
        self.state = following
        return requests

    def take_reveal(self, reveal: Reveal) -> None:
        """Keep what a client reveals."""
        current = self._current(reveal.context)
        following = server_step(self.state, "Reveal")
        self._check_sender(current, reveal.seat, "reveal", signed_part(reveal), reveal.signature)
        if reveal.seat not in current.verdicts or reveal.seat not in current.survivors:
            raise RemoteProtocolError(f"seat {reveal.seat} reveals though it was not asked")
        if current.reveals.setdefault(reveal.seat, reveal) != reveal:
            current.note(f"seat {reveal.seat} revealed twice; the first reveal counts")
        self.state = following

    def finish(self) -> Outcome:
        """Sum what arrived, take out what was revealed, and say what is left."""
        current = self._current()
        following = server_step(self.state, "finish")
        agreed, terms = current.agreed, current.agreed.terms
        survivors = current.survivors or tuple(sorted(current.uploads))
        vectors = (current.uploads[seat].vector for seat in survivors)
        total = sum_packed(vectors, terms.coordinates, terms.modulus_bits)
        dropped = tuple(seat for seat in range(len(agreed.participants)) if seat not in set(survivors))
        uncancelled, extra = self._take_out_edges(current, total, set(survivors), set(dropped))
        masked: tuple[int, ...] = ()
        if terms.mode == "repair":
            masked = self._take_out_masks(current, total, survivors)
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

    def _take_out_edges(
        self, current: _Round, total: NDArray[np.uint64], survivors: set[int], dropped: set[int]
    ) -> tuple[int, float]:
        """Subtract the revealed shares of dropped clients; count those that stay, and their variance."""
        agreed = current.agreed
        known = {
            (edge.sender, edge.receiver): edge.seed
            for seat in sorted(current.reveals)
            for edge in current.reveals[seat].edges
            if seat in (edge.sender, edge.receiver)
        }
        uncancelled, extra = 0, 0.0
        for sender, receiver, weight in zip(
            agreed.graph.senders.tolist(),
            agreed.graph.receivers.tolist(),
            agreed.graph.weights.tolist(),
            strict=True,
        ):
            if not (
                (sender in survivors and receiver in dropped) or (sender in dropped and receiver in survivors)
            ):
                continue
            seed = known.get((sender, receiver))
            if seed is None:
                uncancelled += 1
                extra += weight * agreed.terms.unit_variance
                continue
            sign = -1 if sender in survivors else 1
            SecretStream(seed).add_gaussian(total, agreed.steps_between(sender, receiver), sign=sign)
        return uncancelled, extra

    def _take_out_masks(
        self, current: _Round, total: NDArray[np.uint64], survivors: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Rebuild and subtract the self-masks of the survivors; returns those that could not be rebuilt."""
        agreed = current.agreed
        steps = agreed.grid.deviation_steps(agreed.terms.self_variance)
        given = pieces_by_owner(current.reveals, current.note)
        left = []
        for seat in survivors:
            pieces = pieces_of(agreed, seat, given, current.note)
            seed = rebuild(
                pieces, agreed.threshold(seat), current.uploads[seat].commitment, agreed.mask_context(seat)
            )
            if seed is None:
                left.append(seat)
                continue
            SecretStream(seed).add_gaussian(total, steps, sign=-1)
        return tuple(left)

    def _check_sender(
        self, current: _Round, seat: int, purpose: str, signed: bytes, signature: bytes
    ) -> None:
        if not 0 <= seat < len(current.agreed.participants):
            raise RemoteProtocolError("a message from no seat of this round")
        verify(current.agreed.participants[seat].identity, purpose, signed, signature)

    def _current(self, context: bytes | None = None) -> _Round:
        if self._round is None:
            raise LocalProtocolError("no round was opened")
        if context is not None and context != self._round.agreed.digest:
            raise RemoteProtocolError("a message of another round")
        return self._round
