"""What the parties of a round say to each other: frozen, without behaviour.

A round, in order (`tolerate` ends after the uploads, `repair` goes on):

    server -> client   RoundOpen      who takes part, on which terms, with which beacon
    client -> server   Upload         the noisy update; in repair also a secret in pieces, and what it seals
    server -> member   RevealRequest  whose uploads arrived, and the pieces meant for this member of the committee
    member -> server   Reveal         what takes out the masks of the survivors and their shares with the dropped

Every message of a client is signed by its identity, every message of the server by the server's; `signature` is empty
until it is. `context` is the digest of the round's context, `seat` a place in the list of participants. Nothing here
checks anything: `wire` checks sizes and bounds, the machines check what a message means.
"""

from __future__ import annotations

from dataclasses import dataclass

# What happens to the shares of clients that drop out: they stay as noise, or are taken out again.
MODES = ("tolerate", "repair")


@dataclass(frozen=True)
class Prekey:
    """A one-time X25519 key, signed by the identity it belongs to and by itself."""

    number: int
    public: bytes
    signature: bytes


@dataclass(frozen=True)
class Participant:
    """A seat in the round: an identity and the prekey it will use up."""

    identity: bytes
    prekey: Prekey


@dataclass(frozen=True)
class CarryTerms:
    """How noise is carried from every round of a run to the next; the same in all its rounds.

    plan            hash of the schedule that was committed to before the first round (`niss.protocol.carrying`)
    unit_variance   variance of the share that each client carries to each client of the next round, an entry
    """

    plan: bytes
    unit_variance: float


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
    unit_variance           variance of a unit share, an entry
    residual_variance       of the noise that stays in the sum, a client
    self_variance           of a self-mask, which a repair takes out
    revealed, dropped       most edges of a client that may be revealed, most clients that may drop out
    committee, threshold    how many members repair the round, and how many of them it takes; 0 in mode `tolerate`
    carrying                how noise is carried from round to round; None: it is not

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
    revealed: int
    dropped: int
    committee: int
    threshold: int
    carrying: CarryTerms | None = None


@dataclass(frozen=True)
class Beacon:
    """One link of a hash chain: `value` hashed `index` times gives the anchor committed to at the start.

    The tracker signs it together with the participants, so it has seen the list before it released the value.
    """

    index: int
    value: bytes
    signature: bytes


@dataclass(frozen=True)
class Previous:
    """The round before, as far as its beacon was let out for it: what shows who carried noise to this round.

    terms   the hash of its terms
    """

    participants: tuple[Participant, ...]
    terms: bytes
    beacon: Beacon


@dataclass(frozen=True)
class Cohorts:
    """Who takes part around a round of a run with carried shares.

    following   the participants of the next round, with the prekeys they will use up there; none in the last round
    previous    the round before; None in the first
    """

    following: tuple[Participant, ...]
    previous: Previous | None


@dataclass(frozen=True)
class RoundOpen:
    """The server opens a round: who takes part, on which terms, with which beacon.

    `cohorts` is there exactly if the terms say how noise is carried from round to round.
    """

    terms: Terms
    participants: tuple[Participant, ...]
    beacon: Beacon
    signature: bytes = b""
    cohorts: Cohorts | None = None


@dataclass(frozen=True)
class Upload:
    """One client's contribution.

    vector          grid steps modulo 2^modulus_bits, packed
    fresh_prekeys   to be used in later rounds
    commitment      to the seed of its self-mask; empty in mode `tolerate`
    pieces          of a secret, and the edge keys that it seals (`niss.protocol.committee.deal`); empty likewise
    """

    context: bytes
    seat: int
    vector: bytes
    fresh_prekeys: tuple[Prekey, ...]
    commitment: bytes
    pieces: bytes
    signature: bytes = b""


@dataclass(frozen=True)
class Vote:
    """A member's signature under the survivor set for which it gave its part of a repair (`niss.protocol.verdicts`)."""

    seat: int
    signature: bytes


@dataclass(frozen=True)
class Verdict:
    """Who survived a round with carried shares, by the votes of its committee: binding for the rounds next to it.

    beacon      of that round
    following   hash of the participants of the round after it, for which the beacon was let out too
    """

    beacon: Beacon
    following: bytes
    survivors: tuple[int, ...]
    votes: tuple[Vote, ...]


@dataclass(frozen=True)
class RevealRequest:
    """The server tells a member of the committee whose uploads arrived; everyone else counts as dropped.

    pieces    what this member needs of each survivor's pieces, in order of seats
    verdict   of the round before, whose dropped clients carried nothing to this one; None: nothing is asked about them

    Where `context` is that of the shares carried on to the next round (`CarriedContext`), the member is asked once more
    after that round: `verdict` is that round's, and the shares carried to its dropped clients are to come out.
    """

    context: bytes
    survivors: tuple[int, ...]
    pieces: bytes
    signature: bytes = b""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Partials:
    """What a member makes of its piece of the client in `seat`, who survived.

    points   32 bytes each: for its self-mask, then for its shares with each dropped neighbour, in order of seats, those
             of its own round first; no mask where a member is asked once more
    proof    that they were made with the piece that the client committed to
    """

    seat: int
    points: bytes
    proof: bytes


@dataclass(frozen=True)
class Reveal:
    """The answer of the committee's member in `seat`: for each client its mask, or its shares, never both.

    `vote` is that of a `Vote`, in rounds that carry noise over; None in others, and where a member is asked once more.
    """

    context: bytes
    seat: int
    partials: tuple[Partials, ...]
    signature: bytes = b""
    vote: bytes | None = None


@dataclass(frozen=True)
class Refusal:
    """A client will not go on, and says why in words that hold no secret."""

    context: bytes
    reason: str
    signature: bytes = b""


Message = RoundOpen | Upload | RevealRequest | Reveal | Refusal
