"""What the parties of a round say to each other: frozen, without behaviour.

A round, in order (`tolerate` ends after the uploads, `repair` goes on):

    server -> client   RoundOpen      who takes part, on which terms, with which beacon
    client -> server   Upload         the noisy update; in repair also sealed pieces of its self-mask seed
    server -> client   SurvivorClaim  whose uploads arrived
    client -> server   Verdict        a signature under that claim: one for each client and round, ever
    server -> client   RevealRequest  the quorum of verdicts, and the pieces meant for this client
    client -> server   Reveal         for each neighbour either the seeds of the shared edge or its piece

Every message of a client is signed by its identity, every message of the server by the server's; `signature` is empty
until it is. `context` is the digest of the round's context, `seat` a place in the list of participants. Nothing here
checks anything: `wire` checks sizes and bounds, the machines check what a message means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# What happens to the shares of clients that drop out: they stay as noise, or are taken out again.
MODES = ("tolerate", "repair")


SHORT_BYTES = 16
"""Length of the hashes with which uploads commit to pieces and seeds; see `niss.protocol.shares`."""


@dataclass(frozen=True)
class Prekey:
    """A one-time X25519 key, signed by the identity it belongs to."""

    number: int
    public: bytes
    signature: bytes


@dataclass(frozen=True)
class Participant:
    """A seat in the round: an identity and the prekey it will use up."""

    identity: bytes
    prekey: Prekey


@dataclass(frozen=True)
class Terms:
    """What all participants of a round must agree on; bound into every seed.

    run                     name of the run
    round, attempt          counted from 0
    mode                    one of `MODES`
    coordinates             length of an update
    grid_bits               updates and noise are multiples of 2^-grid_bits
    modulus_bits            and are added modulo 2^modulus_bits
    clip                    largest L2 norm of an update
    neighbours              unit shares that each client sends
    unit_variance           variance of a unit share, an entry; infinite: shares and self-masks are uniform
    residual_variance       of the noise that stays in the sum, a client
    self_variance           of a self-mask, which a repair takes out; infinite where it is uniform
    colluding_neighbours    how many neighbours of a client may collude: behind the threshold
    revealed, dropped       most edges a client may have to reveal, most clients that may drop out
    threshold_share         share of the neighbours whose pieces rebuild a self-mask's seed

    Variances are those of an upload `p_k x_k` with `p_k = 1 / participants`, in its own units.
    """

    run: bytes
    round: int
    attempt: int
    mode: str
    coordinates: int
    grid_bits: int
    modulus_bits: int
    clip: float
    neighbours: float
    unit_variance: float
    residual_variance: float
    self_variance: float
    colluding_neighbours: int
    revealed: int
    dropped: int
    threshold_share: float

    @property
    def uniform(self) -> bool:
        """Whether what the clients share is uniform modulo 2^modulus_bits, the limit of ever stronger Gaussians."""
        return self.unit_variance == math.inf


@dataclass(frozen=True)
class Beacon:
    """One link of a hash chain: `value` hashed `index` times gives the anchor committed to at the start.

    The tracker signs it together with the participants, so it has seen the list before it released the value.
    """

    index: int
    value: bytes
    signature: bytes


@dataclass(frozen=True)
class RoundOpen:
    """The server opens a round: who takes part, on which terms, with which beacon."""

    terms: Terms
    participants: tuple[Participant, ...]
    beacon: Beacon
    signature: bytes = b""


@dataclass(frozen=True)
class SealedPiece:
    """A piece of a self-mask's seed for the neighbour in that seat.

    `ciphertext` is the piece, sealed to the neighbour, and behind it two hashes of 16 bytes with which the owner
    commits itself: to the piece, and to the seeds of its shares with that neighbour. They travel with the sealed bytes,
    so that a message is laid out as it was before there were any.
    """

    seat: int
    ciphertext: bytes

    @property
    def sealed(self) -> bytes:
        """What only the neighbour can open."""
        return self.ciphertext[: -2 * SHORT_BYTES]

    @property
    def commitment(self) -> bytes:
        """To the piece."""
        return self.ciphertext[-2 * SHORT_BYTES : -SHORT_BYTES]

    @property
    def edges(self) -> bytes:
        """To the seeds of the shares with the neighbour, both directions."""
        return self.ciphertext[-SHORT_BYTES:]


@dataclass(frozen=True)
class Upload:
    """One client's contribution.

    vector          grid steps modulo 2^modulus_bits, packed
    fresh_prekeys   to be used in later rounds
    commitment      to the seed of its self-mask; empty in mode `tolerate`
    pieces          of that seed, one sealed to each neighbour, in order of seats
    """

    context: bytes
    seat: int
    vector: bytes
    fresh_prekeys: tuple[Prekey, ...]
    commitment: bytes
    pieces: tuple[SealedPiece, ...]
    signature: bytes = b""


@dataclass(frozen=True)
class SurvivorClaim:
    """The server says whose uploads arrived; everyone else counts as dropped."""

    context: bytes
    survivors: tuple[int, ...]
    signature: bytes = b""


@dataclass(frozen=True)
class Verdict:
    """A client agrees to a survivor set, once a round."""

    context: bytes
    seat: int
    survivors_hash: bytes
    signature: bytes = b""


@dataclass(frozen=True)
class RevealRequest:
    """What a client needs to see before it reveals anything: verdicts, and the pieces it is to open.

    `pieces[i].seat` is here the owner of the piece, not its receiver.
    """

    context: bytes
    survivors: tuple[int, ...]
    verdicts: tuple[Verdict, ...]
    pieces: tuple[SealedPiece, ...]
    signature: bytes = b""


@dataclass(frozen=True)
class RevealedEdge:
    """The seed of the share that `sender` gave `receiver` in this round; one of them dropped out."""

    sender: int
    receiver: int
    seed: bytes


@dataclass(frozen=True)
class RevealedPiece:
    """A piece of the self-mask seed of the client in `seat`, who survived."""

    seat: int
    index: int
    value: bytes


@dataclass(frozen=True)
class Reveal:
    """For each neighbour of the client in `seat`: the edge, or the piece, never both."""

    context: bytes
    seat: int
    edges: tuple[RevealedEdge, ...]
    pieces: tuple[RevealedPiece, ...]
    signature: bytes = b""


@dataclass(frozen=True)
class Refusal:
    """A client will not go on, and says why in words that hold no secret."""

    context: bytes
    reason: str
    signature: bytes = b""


Message = RoundOpen | Upload | SurvivorClaim | Verdict | RevealRequest | Reveal | Refusal
