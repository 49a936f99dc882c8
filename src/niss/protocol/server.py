"""The server's side of a round: open, collect, repair, sum. It holds no secret and can be restarted freely.

Whatever happens, a round ends with the exact sum of the survivors' uploads or with a noisy one that says so; the server
never waits for anyone, the driver decides when a stage is over. A message that is forged, malformed or out of turn is a
`RemoteProtocolError` and changes nothing; a lie that only shows later is noted in `Outcome.problems`.

**Liars in a repair.** Each upload commits to its self-mask and, before anyone knows who drops out, to every piece of
its secret. What a member of the committee makes of its piece carries a proof; of those members whose proofs hold, as
many as the threshold are combined (`niss.protocol.repair`). Named in `Outcome.liars`, and an honest client never, is

- a member whose partials do not fit the pieces that their owners committed to, or that it was not asked for;
- a client whose pieces do not fit together, or that committed to another self-mask than they give.

Not named, since owner or member may have lied: a piece that a member leaves out. *Not detected* is a client that was
false from the start and consistently: another update than it should send, other shares, false keys under its seals, or
another self-mask than it committed to. Each of these is a false update, which no server that may not look into uploads
can see.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.mechanism.grid import centred
from niss.protocol import committee
from niss.protocol.agreement import Agreed, Context, Edge, Words, add_packed, agree, check_packed
from niss.protocol.keys import Identity, check_prekey, verify
from niss.protocol.messages import (
    Beacon,
    Participant,
    PreviousRound,
    Reveal,
    RevealRequest,
    RoundCohorts,
    RoundOpen,
    Terms,
    Upload,
    Verdict,
    Vote,
    signed_part,
    signed_parts,
)
from niss.protocol.repair import (
    Recovered,
    check_vote,
    dropped_before,
    make_verdict,
    recover,
    take_out_masks,
    take_out_shares,
)
from niss.protocol.shares import AT_ONCE


class ServerStage(Enum):
    """Where the server stands in its current round.

    IDLE        has not opened a round yet
    COLLECTING  takes uploads
    REPAIRING   has asked the committee for reveals, and takes them
    CLOSED      has summed; the next round may be opened
    """

    IDLE = "idle"
    COLLECTING = "collecting"
    REPAIRING = "repairing"
    CLOSED = "closed"


# What the driver asks for is in lower case, what arrives from clients in upper.
SERVER_TABLE: dict[tuple[ServerStage, str], ServerStage] = {
    (ServerStage.IDLE, "open round"): ServerStage.COLLECTING,
    (ServerStage.CLOSED, "open round"): ServerStage.COLLECTING,
    (ServerStage.COLLECTING, "Upload"): ServerStage.COLLECTING,
    (ServerStage.COLLECTING, "request reveals"): ServerStage.REPAIRING,
    (ServerStage.REPAIRING, "Reveal"): ServerStage.REPAIRING,
    (ServerStage.REPAIRING, "request carried reveals"): ServerStage.REPAIRING,
    (ServerStage.COLLECTING, "finish"): ServerStage.CLOSED,
    (ServerStage.REPAIRING, "finish"): ServerStage.CLOSED,
}


def server_step(state: ServerStage, event: str) -> ServerStage:
    """The server's state after `event`: a message's class name, or in lower case what the driver asks for.

    Out of turn, a message is a `RemoteProtocolError` and a call of the driver a `LocalProtocolError`.
    """
    following = SERVER_TABLE.get((state, event))
    if following is None:
        kind = RemoteProtocolError if event[0].isupper() else LocalProtocolError
        raise kind(f"{event!r} is not allowed while the server is in state {state.value!r}")
    return following


@dataclass(frozen=True)
class Outcome:
    """The end of a round.

    total           sum of the survivors' parts `p_k x_k` and residual noises, as floats
    survivors       seats whose uploads are in it
    dropped         all other seats
    uncancelled     shares, sent to or by dropped clients, that were not taken out; of those carried to this round, the
                    ones of which only one end was uploaded
    masked          survivors whose self-masks could not be rebuilt, and are still in it
    extra_variance  what the last two leave in each coordinate beyond the intended noise
    under_way       variance that the sum carries to the next round, which takes it out again
    repaired        variance of carried shares that were taken out of the sum: of senders that had dropped out of the
                    round before, and to receivers that dropped out of this one
    problems        in words, what went wrong and with whom
    liars           seats that are proven to have lied in the repair; what they said falsely was left out
    """

    total: NDArray[np.float64]
    survivors: tuple[int, ...]
    dropped: tuple[int, ...]
    uncancelled: int
    masked: tuple[int, ...]
    extra_variance: float
    problems: tuple[str, ...]
    liars: tuple[int, ...]
    under_way: float = 0.0
    repaired: tuple[float, float] = (0.0, 0.0)

    @property
    def exact(self) -> bool:
        """Whether nothing but the intended noise is left."""
        return self.uncancelled == 0 and not self.masked


@dataclass(frozen=True)
class EndedRound:
    """A round that is over. Nothing in it is secret: pieces are under their pads.

    survivors   the seats whose uploads were summed
    uploads     of the survivors, without their vectors
    verdict     of its committee; None: too few of it answered
    """

    agreed: Agreed
    survivors: tuple[int, ...]
    uploads: Mapping[int, Upload]
    verdict: Verdict | None

    @property
    def carried(self) -> bytes:
        """What messages about the shares that it carried on name it by; empty where it carried none."""
        return b"" if self.agreed.after is None else self.agreed.after.context.digest()


@dataclass
class _Round:
    """What has arrived in the round under way, by seat; `survivors` is what the committee was told, once it was.

    `total` is the sum of the vectors of all `uploads`, which are kept without them: each is as large as a model.

    `survived` are the seats of the round before whose uploads were summed, where that round carried noise to this one,
    `ended` what else is known of it, and `carried` what its committee reveals, by seat there, once it was asked.
    """

    agreed: Agreed
    survived: tuple[int, ...] = ()
    ended: EndedRound | None = None
    carried: dict[int, Reveal] = field(default_factory=dict)
    uploads: dict[int, Upload] = field(default_factory=dict)
    total: Words | None = None
    survivors: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    asked_late: tuple[int, ...] = ()
    reveals: dict[int, Reveal] = field(default_factory=dict)
    problems: dict[str, None] = field(default_factory=dict)
    liars: set[int] = field(default_factory=set)

    def note(self, problem: str) -> None:
        """Once, however often it is said."""
        self.problems[problem] = None

    @property
    def votes(self) -> Verdict | None:
        """The verdict of the round, once enough members answered."""
        votes = (Vote(seat, one.vote) for seat, one in self.reveals.items() if one.vote is not None)
        return make_verdict(self.agreed, self.survivors, votes)

    @property
    def lost(self) -> dict[int, list[int]]:
        """What the committee is asked for; of the round before only where its verdict can be shown."""
        before = () if self.ended is None else dropped_before(self.agreed, self.ended.verdict)
        return committee.lost_edges(self.agreed, self.survivors, before=before)

    def lie(self, seat: int, what: str) -> None:
        """Note what only a liar does. `what` is one of a few texts: a liar cannot make this list long."""
        self.liars.add(seat)
        self.note(f"seat {seat} {what}; left out")


# Fewer uploads than that are no sum.
_LEAST_SUMMED = 2


class Server:
    """The server of a run, round after round; `identity` signs what it sends.

    The driver calls `open_round`, hands in uploads, then either `finish` (mode `tolerate`), or `request_reveals`,
    reveals, `finish`. It may finish at any stage: with whatever has arrived by then. With carried shares it may call
    `request_carried_reveals` before, and hand in what the committee of the round before reveals. What that needs of the
    round before is `ended`, from each `finish` on; a server that was started again has none.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._round: _Round | None = None
        self.ended: EndedRound | None = None
        self.state = ServerStage.IDLE

    @property
    def public(self) -> bytes:
        """The public half of the identity."""
        return self._identity.public

    def open_round(
        self,
        terms: Terms,
        participants: tuple[Participant, ...],
        beacon: Beacon,
        *,
        following: tuple[Participant, ...] = (),
        previous: PreviousRound | None = None,
        survived: tuple[int, ...] = (),
    ) -> RoundOpen:
        """Open a round; the message goes to every participant.

        beacon      the link that the holder released for the round's `commitment_of`
        following   with carried shares: the participants of the next round, none in the last
        previous    `previous_of` the round before, None in the first
        survived    the seats of that round whose uploads were summed, from its `Outcome`

        Without what `ended` says of the round before, the sum keeps what clients lost in either round should have added
        or taken out, and the outcome says so.

        Terms on whose grid the sum could wrap are a `ConfigError`.
        """
        state = server_step(self.state, "open round")
        for one in (*participants, *following):
            check_prekey(one.prekey, one.identity)
        cohorts = None if terms.carrying is None else RoundCohorts(following, previous)
        opened = RoundOpen(terms, participants, beacon, cohorts=cohorts)
        opened = replace(opened, signature=self._identity.sign("open", signed_part(opened)))
        agreed = agree(opened)
        agreed.check_fits()
        ended, before = self.ended, agreed.before
        if ended is not None and (
            before is None or ended.survivors != survived or ended.carried != before.context.digest()
        ):
            ended = None
        self._round, self.state = _Round(agreed, survived, ended), state
        return opened

    def take_upload(self, upload: Upload) -> None:
        """Add a client's upload to the sum, and keep the rest of it; of two from one seat the first counts.

        Refused are vectors of the wrong length, prekeys not signed by the sender and, in mode `repair`, anything but a
        commitment and pieces for the committee. Whether they are true shows only later.
        """
        current = self._opened()
        agreed, terms = current.agreed, current.agreed.terms
        following = self._receive(upload, "upload", agreed)
        rest = replace(upload, vector=b"")
        if upload.seat in current.uploads:
            # Under one signature there is one vector.
            if current.uploads[upload.seat] != rest:
                current.note(f"seat {upload.seat} uploaded twice; the first upload counts")
            return
        check_packed(upload.vector, terms.coordinates, terms.modulus_bits)
        for prekey in upload.fresh_prekeys:
            check_prekey(prekey, agreed.participants[upload.seat].identity)
        wanted = committee.pieces_size(agreed, upload.seat) if terms.mode == "repair" else 0
        if len(upload.pieces) != wanted or bool(upload.commitment) != bool(wanted):
            raise RemoteProtocolError(
                f"seat {upload.seat} did not send a commitment to its self-mask and pieces for the committee"
            )
        current.total = add_packed(current.total, upload.vector, terms.coordinates, terms.modulus_bits)
        current.uploads[upload.seat] = rest
        self.state = following

    def request_reveals(self) -> dict[int, RevealRequest]:
        """End the uploads; by seat, a request for each member of the committee that survived.

        Nobody is asked where too few of them did. A `tolerate` round has no such stage.
        """
        current, following = self._step("request reveals")
        agreed = current.agreed
        if agreed.terms.mode != "repair":
            raise LocalProtocolError("a round that tolerates dropouts is not repaired", hint="finish it")
        current.survivors = tuple(sorted(current.uploads))
        members = tuple(seat for seat in agreed.committee if seat in current.uploads)
        if len(members) < agreed.terms.threshold:
            current.note(f"{len(members)} of the committee uploaded, {agreed.terms.threshold} are needed")
            members = ()
        current.asked, self.state = members, following
        verdict = None if current.ended is None else current.ended.verdict
        request = RevealRequest(agreed.digest, current.survivors, b"", verdict=verdict)
        return self._requests(agreed, request, members, current.uploads, current.survivors)

    def request_carried_reveals(self) -> dict[int, RevealRequest]:
        """After the reveals of a round: by seat *in the round before*, a request for each member of its committee.

        They are asked to take out what was carried to clients that dropped out of this round. Nobody is asked where
        nothing of the kind is in the sum, or where either round has no verdict.
        """
        current, following = self._step("request carried reveals")
        ended, verdict, lost = current.ended, current.votes, _lost_receivers(current)
        self.state = following
        if ended is None or ended.verdict is None or verdict is None or not lost:
            return {}
        request = RevealRequest(ended.carried, ended.survivors, b"", verdict=verdict)
        current.asked_late = tuple(seat for seat in ended.agreed.committee if seat in ended.survivors)
        return self._requests(ended.agreed, request, current.asked_late, ended.uploads, list(lost))

    def _requests(
        self,
        agreed: Agreed,
        request: RevealRequest,
        members: Iterable[int],
        uploads: Mapping[int, Upload],
        owners: Sequence[int],
    ) -> dict[int, RevealRequest]:
        """By member, the request with its pieces of these owners, signed."""
        requests = {}
        for seat in members:
            dealt = (uploads[owner].pieces for owner in owners)
            own = replace(request, pieces=b"".join(committee.piece_for(agreed, seat, one) for one in dealt))
            requests[seat] = replace(own, signature=self._identity.sign("request", signed_part(own)))
        return requests

    def take_reveal(self, reveal: Reveal) -> None:
        """Keep what a member of the committee reveals, or one of the round before that was asked once more.

        Of two different ones from one seat the first counts.
        """
        current, ended = self._opened(), self._opened().ended
        late = ended is not None and reveal.context == ended.carried
        agreed = ended.agreed if ended is not None and late else current.agreed
        following = self._receive(reveal, "reveal", agreed, late)
        asked, kept = (current.asked_late, current.carried) if late else (current.asked, current.reveals)
        if reveal.seat not in asked:
            raise RemoteProtocolError(f"seat {reveal.seat} reveals though it was not asked")
        if not late:
            check_vote(agreed, current.survivors, reveal.seat, reveal.vote)
        if kept.setdefault(reveal.seat, reveal) != reveal:
            where = " of the round before" if late else ""
            current.note(f"seat {reveal.seat}{where} revealed twice; the first reveal counts")
        self.state = following

    def finish(self) -> Outcome:
        """Sum what arrived, take out what was revealed, and say what is left.

        The sum of the survivors' vectors, modulo 2^modulus_bits, less the shares between survivors and dropped
        clients whose seeds were revealed, less the self-masks that could be rebuilt; then nearest to zero, as floats.

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
        total, current.total = current.total, None
        if total is None or not survivors:
            total = np.zeros(terms.coordinates, dtype=np.uint64)
        dropped = tuple(sorted(set(range(len(agreed.participants))) - set(survivors)))
        recovered = _recover(current) if current.reveals else {}
        taken = take_out_shares(agreed, total, recovered) if recovered and survivors else []
        masked: tuple[int, ...] = ()
        if terms.mode == "repair":
            masked = take_out_masks(agreed, total, survivors, recovered)
        uncancelled, extra = _still_in(agreed.left(survivors), taken, agreed.context)
        extra += len(masked) * terms.self_variance
        repaired = 0.0, 0.0
        if (before := agreed.before) is not None:
            late = _recover_carried(current) if survivors else {}
            gone = [one for one in taken if one.context == before.context]
            lost = take_out_shares(current.ended.agreed, total, late) if current.ended and late else []
            count, left = _still_in(before.left(current.survived, survivors), gone + lost, before.context)
            uncancelled, extra = uncancelled + count, extra + left
            repaired = math.fsum(edge.variance for edge in gone), math.fsum(edge.variance for edge in lost)
        self.state = following
        self.ended = None
        if agreed.after is not None and survivors == current.survivors:
            self.ended = EndedRound(agreed, survivors, dict(current.uploads), current.votes)
        current.uploads.clear()
        return Outcome(
            _as_floats(agreed, total),
            survivors,
            dropped,
            uncancelled,
            masked,
            extra,
            tuple(current.problems),
            tuple(sorted(current.liars)),
            0.0 if agreed.after is None else agreed.after.added(survivors),
            repaired,
        )

    def _opened(self) -> _Round:
        if self._round is None:
            raise LocalProtocolError("no round was opened")
        return self._round

    def _step(self, event: str) -> tuple[_Round, ServerStage]:
        """The round under way, and the state that follows once what the driver asks for is done."""
        return self._opened(), server_step(self.state, event)

    def _receive(
        self, message: Upload | Reveal, purpose: str, agreed: Agreed, late: bool = False
    ) -> ServerStage:
        """The state that follows a message of that round which its seat has signed."""
        if not late and message.context != agreed.digest:
            raise RemoteProtocolError("the message belongs to another round")
        following = server_step(self.state, type(message).__name__)
        if not 0 <= message.seat < len(agreed.participants):
            raise RemoteProtocolError("the message comes from a seat that this round does not have")
        verify(agreed.participants[message.seat].identity, purpose, signed_parts(message), message.signature)
        return following


def _as_floats(agreed: Agreed, total: Words) -> NDArray[np.float64]:
    floats = np.empty(total.size)
    for start in range(0, total.size, AT_ONCE):
        steps = centred(total[start : start + AT_ONCE])
        floats[start : start + AT_ONCE] = agreed.grid.to_float(steps)
    return floats


def _still_in(left: tuple[int, float], taken: list[Edge], context: Context) -> tuple[int, float]:
    """Shares of one context with one end in the sum, and their variance, less what was taken out of it."""
    out = [edge for edge in taken if edge.context == context]
    count, variance = left[0] - len(out), left[1] - math.fsum(edge.variance for edge in out)
    return count, max(variance, 0.0) if count else 0.0


def _recover(current: _Round) -> dict[int, Recovered]:
    """By survivor, what the committee gave; lies and gaps are noted."""
    recovered, lies = recover(current.agreed, current.lost, current.uploads, current.reveals)
    for liar, what in lies:
        current.lie(liar, what)
    short = [seat for seat, one in recovered.items() if one.short]
    if short:
        current.note(f"too few true partials to take out the self-mask and lost shares of {_named(short)}")
    return recovered


def _recover_carried(current: _Round) -> dict[int, Recovered]:
    """By survivor of the round before, what its committee gave, asked once more; lies are noted."""
    if current.ended is None or not current.carried:
        return {}
    ended = current.ended
    recovered, lies = recover(
        ended.agreed, _lost_receivers(current), ended.uploads, current.carried, masks=False
    )
    for seat, what in lies:
        current.note(f"seat {seat} of the round before {what}; left out")
    return recovered


def _lost_receivers(current: _Round) -> dict[int, list[int]]:
    """By survivor of the round before, those it carried noise to that dropped out of this one, as it sees them."""
    if current.ended is None:
        return {}
    gone = set(range(len(current.agreed.participants))) - set(current.survivors)
    return committee.lost_edges(current.ended.agreed, current.ended.survivors, after=gone)


def _named(seats: list[int]) -> str:
    """The first ten of them in words."""
    listed = ", ".join(str(seat) for seat in seats[:10])
    more = f" and {len(seats) - 10} more" if len(seats) > 10 else ""
    return f"seat{'s' if len(seats) > 1 else ''} {listed}{more}"
