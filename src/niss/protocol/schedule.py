"""A run whose rounds carry noise from one to the next: what it commits to, and what a client checks of each round.

A client of round t adds a share that a client of round t + 1 subtracts; in the model that noise lives for one round.
What this hides depends on the whole run, so the whole run is fixed before its first round: a `Schedule`, whose hash is
part of every round's terms and of every seed's context. Whoever was told of another schedule derives other seeds.

Everyone shares with everyone, within a round and with the next cohort, which is committed to before the beacon of a
round is let out (`agreement.commitment_of`). A client has one prekey for all shares of an upload.

The noise of such a run is one chain over all rounds. What a server could do to it, and what comes of it:

- other terms, a longer run, another next cohort, a skipped or repeated round, a client asked back too soon: refused;
- no next round, or a cohort that never answers: those uploads are missing, which shows less than all of them would;
- two versions of a round for two clients: the beacon's holder lets out one link for one commitment, so one of the two
  is refused. With a holder that obeys the server shares between versions do not cancel: of the inverse of the
  covariance no entry grows (its entries off the diagonal only rise to 0), so nobody's mu does;
- a second attempt at a round: refused. It has another link and so another committee, under the same context of what is
  carried: one could be told that a client survived whom the other called dropped;
- a next cohort of strangers: refused by whoever trusts listed identities alone, else they count among the colluders.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from sys import float_info

from niss.checks import PLANNED
from niss.errors import ConfigError, RemoteProtocolError
from niss.mechanism.grid import MAX_BITS
from niss.mechanism.noise import Noise, colluders_among
from niss.protocol.agreement import participants_hash
from niss.protocol.keys import link_of, verify_beacon
from niss.protocol.messages import (
    MODES,
    MODULI,
    Beacon,
    CarryTerms,
    Participant,
    RoundCohorts,
    RoundOpen,
    Terms,
)

MOST_ROUNDS = 2_000
"""What a run costs is computed from a matrix of its rounds: longer ones are refused before that."""
MOST_PARTICIPANTS = 2_000
"""Everyone shares with everyone, so that a round has their square of shares, and there are as many to the next."""
_LAYOUT = struct.Struct("<QQQ??QQQdddd")
_REPAIR_LAYOUT = struct.Struct("<QQQd")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a run with carried shares commits to before its first round.

    rounds              T, the closing one included; the last one carries nothing on
    separation, cyclic  from one participation of a client to the next: at least that many rounds, or multiples of it
    closing             the last round takes no updates: it takes out what the one before carried
    coordinates, grid_bits, modulus_bits, clip
                        as in `Terms`, in all rounds alike: on another grid a share would not cancel to the last bit
    noise               of every round; variances are those of uploads, an entry, instead of in units of Delta^2. Whom
                        to suspect is for each client to say: it has no colluders

    Numbers that cannot be a run are a `ConfigError`. They come from the server: a client believes none of them, but
    computes what they are worth (`niss.accounting.CommittedAccount`), with work that these bounds keep small.
    """

    rounds: int
    separation: int
    cyclic: bool
    closing: bool
    coordinates: int
    grid_bits: int
    modulus_bits: int
    clip: float
    noise: Noise

    def __post_init__(self) -> None:
        noise, members = self.noise, self.noise.committee
        bounds: dict[str, tuple[float, float, float]] = {
            "participants": (noise.participants, 2, MOST_PARTICIPANTS),
            "neighbours": (noise.neighbours, noise.participants - 1, noise.participants - 1),
            "rounds": (self.rounds, 1 + self.closing, MOST_ROUNDS),
            "separation": (self.separation, 2, MOST_ROUNDS),
            "coordinates": (self.coordinates, 1, 2**32),
            "grid_bits": (self.grid_bits, 0, MAX_BITS),
            "clip": (self.clip, 0.0, float_info.max),
            "dropped": (noise.dropped, 0, noise.participants - 2 if members else 0),
            "revealed": (noise.revealed, noise.dropped, noise.dropped),
            "colluders": (noise.colluders, 0, 0),
            "committee": (members, 0, noise.participants),
            "threshold": (noise.threshold, max(2, members // 2 + 1) if members else 0, members),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise ConfigError(f"must lie between {low:g} and {high:g}", field=name)
        if self.modulus_bits not in MODULI:
            raise ConfigError("must be 32 or 64", field="modulus_bits")
        if noise.self_mask and not members:
            raise ConfigError("is for rounds that are repaired", field="self_mask")

    @property
    def participants(self) -> int:
        """Of every round."""
        return self.noise.participants

    @property
    def carried_variance(self) -> float:
        """Of the share that a client carries to each client of the next round."""
        return self.noise.carried / self.participants

    @property
    def mode(self) -> str:
        """What happens after dropouts, as in `Terms`."""
        return "repair" if self.noise.committee else "tolerate"

    @property
    def horizon(self) -> int:
        """Rounds that take updates."""
        return self.rounds - self.closing

    @cached_property
    def digest(self) -> bytes:
        """What the terms of every round name the schedule by: SHA-256 of all its numbers."""
        noise, grid = self.noise, (self.coordinates, self.grid_bits, self.modulus_bits, self.clip)
        run = self.participants, self.rounds, self.separation, self.cyclic, self.closing
        packed = _LAYOUT.pack(*run, *grid, noise.unit, self.carried_variance, noise.residual)
        if noise.committee:
            packed += _REPAIR_LAYOUT.pack(noise.dropped, noise.committee, noise.threshold, noise.self_mask)
        return hashlib.sha256(b"niss.schedule.v1" + packed).digest()

    def terms(self, run: bytes, number: int) -> Terms:
        """The terms of round `number`, from 0: there is no choice in them, and one attempt."""
        return Terms.of_noise(
            self.noise,
            run=run,
            round=number,
            attempt=0,
            coordinates=self.coordinates,
            grid_bits=self.grid_bits,
            modulus_bits=self.modulus_bits,
            clip=self.clip,
            carrying=CarryTerms(self.digest, self.carried_variance),
        )

    def check_terms(self, terms: Terms) -> None:
        """Refuse (`RemoteProtocolError`) a round past the end, a second attempt, and terms that are not the round's."""
        if not 0 <= terms.round < self.rounds:
            raise RemoteProtocolError(
                f"round {terms.round} lies past the committed end of {self.rounds} rounds",
                hint="going on is a new run, with its own budget",
            )
        if terms.attempt:
            raise RemoteProtocolError(
                "a round of a run with carried shares has one attempt",
                hint="what is carried to it would be known from the other",
            )
        if terms != self.terms(terms.run, terms.round):
            raise RemoteProtocolError("the terms are not those of the schedule that was committed to")

    def check_return(self, number: int, last: int | None) -> None:
        """Refuse a participation in round `number` that comes too soon after the last one, or out of turn."""
        if last is None:
            return
        gap = number - last
        if gap < self.separation or (self.cyclic and gap % self.separation):
            wanted = "a multiple of" if self.cyclic else "at least"
            raise RemoteProtocolError(
                f"round {number} comes {gap} after round {last}, but the schedule promises {wanted} {self.separation}",
                hint="leave this round out",
            )

    def check_round(self, opened: RoundOpen, last: int | None) -> RoundCohorts:
        """Refuse a round that is not the next which this schedule allows a client to answer; returns its cohorts.

        last    the round of this run that it answered last; None: it has answered none

        Terms and sizes must be those that the schedule fixes; nothing is computed for a list of another length.
        """
        cohorts = opened.cohorts
        if opened.terms.carrying is None or cohorts is None:
            raise RemoteProtocolError("the round carries no noise, but the schedule of this run says it does")
        self.check_terms(opened.terms)
        number, size = opened.terms.round, self.participants
        if (cohorts.previous is None) != (number == 0):
            raise RemoteProtocolError("a round needs the one before it, and the first has none")
        before = size if cohorts.previous is None else len(cohorts.previous.participants)
        sizes = {
            "this round": (len(opened.participants), size),
            "the next round": (len(cohorts.following), 0 if number == self.rounds - 1 else size),
            "the round before": (before, size),
        }
        for name, (found, wanted) in sizes.items():
            if found != wanted:
                raise RemoteProtocolError(f"{name} has {found} participants, but the schedule says {wanted}")
        self.check_return(number, last)
        return cohorts


@dataclass(frozen=True)
class Policy:
    """What a client insists on, whatever the server proposes.

    participants    fewest participants of a round
    collusion       what share of them it assumes to help the server
    rounds          rounds of the beacon chain: none from this number on is answered; None: as many as a chain has
    attempts        how often a round may be tried
    mu              most it spends on one round
    clip            largest clip it accepts
    batch           largest probability with which a record is in a batch; None: rounds hide whole clients alone
    strength        what the shares of a client must amount to, `neighbours * unit_variance * (divisor / clip)^2`,
                    where a plan fixes it (its kappa, in units of the update); None: any, for the charge says what
    modes           how dropouts may be handled
    run             the only one whose rounds are answered
    server, holder  identities of its server and of its beacon's holder
    anchor          the end of its beacon chain
    trusted         identities it shares noise with; None: anyone with a valid signature
    schedule        of a run with carried shares, which it has agreed to: no other round of it is answered; None: no
                    noise is carried
    """

    participants: int
    collusion: float
    mu: float
    clip: float
    run: bytes
    server: bytes
    holder: bytes
    anchor: bytes
    attempts: int = 1
    modes: tuple[str, ...] = MODES
    trusted: frozenset[bytes] | None = None
    strength: float | None = None
    rounds: int | None = None
    batch: float | None = None
    schedule: Schedule | None = None

    def check_terms(self, terms: Terms) -> None:
        """Refuse (`RemoteProtocolError`) too many rounds or attempts, and a mode, clip or batch that is not allowed."""
        if self.rounds is not None and terms.round >= self.rounds:
            raise RemoteProtocolError(
                f"round {terms.round} of a run that has {self.rounds}, counted from 0",
                hint="start a new run",
            )
        if terms.attempt >= self.attempts:
            raise RemoteProtocolError(
                f"attempt {terms.attempt} of a round; this client allows only {self.attempts}, counted from 0"
            )
        if terms.mode not in self.modes:
            raise RemoteProtocolError(f"mode {terms.mode!r} is not accepted by this client")
        if not 0.0 < terms.clip <= self.clip:
            raise RemoteProtocolError(
                f"the clip of {terms.clip:g} is not above 0, or exceeds the {self.clip:g} this client accepts"
            )
        if (terms.records is None) != (self.batch is None):
            hidden = "whole clients, not single records" if terms.records is None else "single records"
            raise RemoteProtocolError(
                f"the round hides {hidden}, and this client has agreed to something else"
            )
        if terms.records is not None and not terms.records.batch <= (self.batch or 0.0):
            raise RemoteProtocolError(
                f"records are in a batch with probability {terms.records.batch:g}; this client allows {self.batch:g}"
            )

    def check_shares(self, terms: Terms, size: int) -> None:
        """Refuse a round without shares, which is not this protocol, and shares other than those of the plan."""
        if not terms.unit_variance > 0.0:
            raise RemoteProtocolError("the terms have no noise shares", hint="set unit_variance above 0")
        wanted = self.strength
        if wanted is None:
            return
        # The square root first, so that no terms overflow.
        divisor = terms.divisor(size)
        found = math.sqrt(terms.unit_variance) * divisor / terms.clip * math.sqrt(terms.neighbours)
        if not math.isclose(found, math.sqrt(wanted), rel_tol=PLANNED):
            raise RemoteProtocolError(
                "the noise shares are not as strong as the plan says", hint="use the kappa of the plan"
            )

    def check_link(
        self, beacon: Beacon, commitment: bytes, round_number: int, attempt: int = 0, *, after: int = 0
    ) -> None:
        """Refuse what is not this attempt's link, let out by the run's holder for just that; `verify_beacon`."""
        expected, holder = link_of(round_number, attempt), self.holder
        verify_beacon(beacon, commitment, expected=expected, anchor=self.anchor, holder=holder, after=after)

    def check_list(self, participants: tuple[Participant, ...], where: str = "") -> set[bytes]:
        """Refuse doubles, and strangers if it trusts listed identities alone; returns the identities."""
        identities = {one.identity for one in participants}
        if len(identities) != len(participants):
            raise RemoteProtocolError(f"a participant{where} is listed twice")
        if self.trusted is not None and not identities <= self.trusted:
            raise RemoteProtocolError(f"a participant{where} is not among the identities this client trusts")
        return identities

    def check_cohorts(self, opened: RoundOpen, cohorts: RoundCohorts) -> None:
        """Refuse neighbouring rounds with strangers or doubles, and a round that was not announced.

        This round must be the one that the beacon of the round before was let out for.
        """
        here, previous = {one.identity for one in opened.participants}, cohorts.previous
        for listed in (cohorts.following, () if previous is None else previous.participants):
            if here & self.check_list(listed, " of a neighbouring round"):
                raise RemoteProtocolError("a participant is listed in two rounds that follow one another")
        if previous is not None:
            announced = participants_hash(previous.participants) + previous.terms
            announced += participants_hash(opened.participants)
            self.check_link(previous.beacon, announced, opened.terms.round - 1)

    def colluders(self, participants: int) -> int:
        """How many of a round's participants it assumes to help the server."""
        return colluders_among(self.collusion, participants)
