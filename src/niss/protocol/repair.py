"""A repair: verdicts on who survived, what a committee's answers give the server, and taking it out of the sum.

**Verdicts** say who survived a round, in a form that binds the rounds next to it: a threshold of its committee's
signatures. A share that client k of round t carries to client j of round t + 1 has an end in each. If k is called
dropped in round t, the committee of round t + 1 takes it out of what j subtracts; if j is called dropped in round
t + 1, the committee of round t takes it out of what k added. Each does so against evidence of what the *other* round's
committee was told: every member signs the one survivor set that it gives its part for (`vote`), and a `Verdict` has
these signatures of a threshold of them.

Two verdicts of one round cannot both be had. An honest member votes for one set a round, durably; with c colluders of n
members two sets would need `2 t <= n + c` votes, and the threshold t is above half of that. So whoever is called
dropped is so in its own round, in the one before and in the one after: everywhere its shares come out, or nowhere, and
its mask only where they do not. Per round that is at most the number of clients that the schedule charges for.

**Recovery.** Of a survivor come out the seed of its self-mask, and the keys of its edges to the lost.

For each survivor the partials of as many members as the threshold are combined. Where it lost no neighbour, its own
commitment to its self-mask says whether the result is right, and no proof is looked at. Where it did, or where that
fails, proofs are checked one member after another until enough of them hold, and with them that the points S_c of these
members give the survivor's R. What is not needed is not looked at: a member beyond those may have lied unnoticed, and
without effect.

Work: for a survivor that lost d neighbours `t (2 d + 6)` terms of sums of points (`niss.protocol.points`), `t` where it
lost none, without Python's lock, on all cores.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from niss.errors import RemoteProtocolError
from niss.protocol.agreement import (
    Agreed,
    Edge,
    Words,
    commitment_of,
    draw_committee,
    participants_hash,
    survivors_hash,
    terms_hash,
)
from niss.protocol.committee import (
    MemberStatement,
    combine,
    commit_mask,
    commitments,
    mask_seed,
    open_seals,
)
from niss.protocol.keys import POINT_BYTES, Identity, verify
from niss.protocol.messages import Beacon, Participant, Reveal, Terms, Upload, Verdict, Vote
from niss.protocol.schedule import Policy
from niss.protocol.shares import add_noises, derive_seed
from niss.randomness import SecretStream
from niss.redaction import Secret, SecretBytes

LOG = logging.getLogger(__name__)
_PURPOSE = "verdict"


def _ballot(beacon: Beacon, commitment: bytes, survivors: tuple[int, ...]) -> bytes:
    """What a vote signs: the set, and the round as its beacon was let out for it, which both neighbours know."""
    return survivors_hash(hashlib.sha256(b"niss.verdict.v1" + beacon.value + commitment).digest(), survivors)


def _ballot_of(agreed: Agreed, survivors: tuple[int, ...]) -> bytes:
    opened = agreed.opened
    following = () if opened.cohorts is None else opened.cohorts.following
    return _ballot(opened.beacon, commitment_of(opened.terms, opened.participants, following), survivors)


def vote(agreed: Agreed, survivors: tuple[int, ...], identity: Identity) -> bytes | None:
    """A member's vote for the set that it gives its part for; None where no noise is carried over."""
    return None if agreed.terms.carrying is None else identity.sign(_PURPOSE, _ballot_of(agreed, survivors))


def check_vote(agreed: Agreed, survivors: tuple[int, ...], seat: int, given: bytes | None) -> None:
    """Refuse (`RemoteProtocolError`) what is not that seat's vote for this set."""
    if (given is None) != (agreed.terms.carrying is None):
        raise RemoteProtocolError("a member votes in rounds that carry noise over, and in no others")
    if given is not None:
        verify(agreed.participants[seat].identity, _PURPOSE, _ballot_of(agreed, survivors), given)


def make_verdict(agreed: Agreed, survivors: tuple[int, ...], votes: Iterable[Vote]) -> Verdict | None:
    """The verdict of a round from votes that were checked; None where they are too few, or nothing is carried over."""
    opened, listed = agreed.opened, sorted(votes, key=lambda one: one.seat)
    if opened.cohorts is None or not 0 < opened.terms.threshold <= len(listed):
        return None
    following = participants_hash(opened.cohorts.following)
    return Verdict(opened.beacon, following, survivors, tuple(listed[: opened.terms.threshold]))


def dropped_before(agreed: Agreed, verdict: Verdict | None) -> tuple[int, ...]:
    """The seats that the verdict of the round before calls dropped; none without one.

    A `RemoteProtocolError` unless it is the verdict of just that round: its list, beacon and terms are those that this
    round was opened with, and checked.
    """
    if verdict is None:
        return ()
    opened = agreed.opened
    previous = None if opened.cohorts is None else opened.cohorts.previous
    if previous is None:
        raise RemoteProtocolError("the verdict of a round before the first")
    if verdict.beacon != previous.beacon or verdict.following != participants_hash(opened.participants):
        raise RemoteProtocolError("the verdict is not that of the round before")
    return _dropped(verdict, previous.participants, previous.terms, opened.terms)


def dropped_after(agreed: Agreed, verdict: Verdict | None, policy: Policy) -> tuple[int, ...]:
    """The seats that the verdict of the next round calls dropped; else as in `dropped_before`.

    Of that round this one knows the participants and the terms; that its beacon is the next link, let out for them, is
    checked here.
    """
    after, terms, schedule = agreed.after, agreed.terms, policy.schedule
    if verdict is None or after is None or schedule is None:
        raise RemoteProtocolError("there is no verdict of the next round, or no next round")
    following = terms_hash(schedule.terms(terms.run, terms.round + 1))
    announced = participants_hash(after.receivers) + following + verdict.following
    policy.check_link(verdict.beacon, announced, terms.round + 1, after=agreed.opened.beacon.index)
    return _dropped(verdict, after.receivers, following, terms)


def _dropped(
    verdict: Verdict, participants: tuple[Participant, ...], listed_terms: bytes, terms: Terms
) -> tuple[int, ...]:
    """The seats of that round which are not among the survivors, if a threshold of its committee voted for them.

    Committee, threshold and cap are those of `terms`: a schedule has one of each for all its rounds.
    """
    size, survivors = len(participants), verdict.survivors
    if list(survivors) != sorted(set(survivors)) or not all(0 <= seat < size for seat in survivors):
        raise RemoteProtocolError("the survivor set of the verdict is not a list of seats")
    if size - len(survivors) > terms.dropped:
        raise RemoteProtocolError(
            f"the verdict calls {size - len(survivors)} clients dropped, at most {terms.dropped} can be repaired"
        )
    members = draw_committee(verdict.beacon.value, participants, listed_terms, terms.committee)
    voters = {one.seat for one in verdict.votes}
    if len(voters) != len(verdict.votes) or not voters <= set(members).intersection(survivors):
        raise RemoteProtocolError("a vote is not that of a surviving member of the round's committee")
    if terms.mode != "repair" or len(voters) < terms.threshold:
        raise RemoteProtocolError(f"a verdict needs the votes of {terms.threshold} members")
    ballot = _ballot(
        verdict.beacon, participants_hash(participants) + listed_terms + verdict.following, survivors
    )
    for one in verdict.votes:
        verify(participants[one.seat].identity, _PURPOSE, ballot, one.signature)
    return tuple(sorted(set(range(size)) - set(survivors)))


@dataclass(repr=False)
class Recovered(Secret):
    """What came out for one survivor.

    mask     the seed of its self-mask; None: it stays
    keys     by place in `Agreed.everyone`, the key of the edge to a client that was lost
    lies     (seat, what it did) of whoever is proven to have lied about it
    short    whether too few members gave true partials
    """

    mask: SecretBytes | None = None
    keys: dict[int, SecretBytes] = field(default_factory=dict)
    lies: list[tuple[int, str]] = field(default_factory=list)
    short: bool = False


def recover(
    agreed: Agreed,
    lost: Mapping[int, Sequence[int]],
    uploads: Mapping[int, Upload],
    reveals: Mapping[int, Reveal],
    *,
    masks: bool = True,
) -> tuple[dict[int, Recovered], list[tuple[int, str]]]:
    """By survivor, what the reveals of the committee's members give; and (seat, what it did) of proven liars.

    `lost` and `masks` are what the members were asked for, as in `answer`.
    """
    answers, lies = _wanted(agreed, lost, reveals, masks)
    seats = list(lost)

    def one(seat: int) -> Recovered:
        try:
            return _recover_one(agreed, seat, lost[seat], uploads[seat], answers, masks)
        except Exception as error:  # All that goes in here is from clients: at most this one's noise stays.
            LOG.warning("niss: what was revealed of seat %d is of no use: %s", seat, type(error).__name__)
            return Recovered(short=True)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        if any(lost.values()):
            list(
                pool.map(lambda answer: answer[0].sound, answers.values())
            )  # Of all partials of a member at once.
        recovered = dict(zip(seats, pool.map(one, seats), strict=True))
    return recovered, [*lies, *(lie for one in recovered.values() for lie in one.lies)]


# By number in the committee, what a member said, and its proofs by owner.
_Answers = Mapping[int, tuple[MemberStatement, Mapping[int, bytes]]]


def _wanted(
    agreed: Agreed, lost: Mapping[int, Sequence[int]], reveals: Mapping[int, Reveal], masks: bool
) -> tuple[_Answers, list[tuple[int, str]]]:
    """What each member was asked for, in the committee's order; and who said anything else."""
    answers, lies = {}, []
    for number, member in enumerate(agreed.committee, start=1):
        if member not in reveals:
            continue
        partials = reveals[member].partials
        fitting = all(
            one.seat in lost and len(one.points) == POINT_BYTES * (masks + len(lost[one.seat]))
            for one in partials
        )
        if not fitting:
            lies.append((member, "revealed what it was not asked for"))
            continue
        statement = MemberStatement(
            agreed, member, {one.seat: one.points for one in partials}, lost, masks=masks
        )
        answers[number] = statement, {one.seat: one.proof for one in partials}
    return answers, lies


def _recover_one(
    agreed: Agreed,
    seat: int,
    lost: Sequence[int],
    upload: Upload,
    answers: _Answers,
    masks: bool,
) -> Recovered:
    found = Recovered()
    threshold = agreed.terms.threshold
    given = {number: one for number, one in answers.items() if seat in one[1]}
    said = {number: statement.points[seat] for number, (statement, _) in given.items()}
    if not lost and len(given) >= threshold:
        made = _combined({number: said[number] for number in list(said)[:threshold]}, known=True)
        found.mask = _mask(agreed, seat, upload, made)
        if found.mask is not None:
            return found
    points = commitments(agreed, upload.pieces)
    true: list[int] = []
    for number, (statement, proofs) in given.items():
        if statement.is_proven(seat, points[number], proofs[seat]):
            true.append(number)
        else:
            found.lies.append((statement.member, "revealed partials that it cannot prove"))
        if len(true) == threshold:
            break
    if len(true) < threshold:
        found.short = True
        return found
    if _combined({number: points[number] for number in true}) != points[:1]:
        found.lies.append((seat, "made pieces that do not fit together"))
        return found
    made = _combined({number: said[number] for number in true}, known=True)
    if masks:
        found.mask = _mask(agreed, seat, upload, made)
        if found.mask is None:
            found.lies.append((seat, "committed to another self-mask than its pieces give"))
    found.keys = open_seals(agreed, seat, dict(zip(lost, made[int(masks) :], strict=False)), upload.pieces)
    return found


def _combined(said: Mapping[int, bytes], *, known: bool = False) -> list[bytes]:
    """What these points make together; nothing where one of them is none, or they make zero."""
    try:
        return combine(said, known=known)
    except RemoteProtocolError:
        return []


def _mask(agreed: Agreed, seat: int, upload: Upload, made: Sequence[bytes]) -> SecretBytes | None:
    """The seed that the first of these points gives, if it is the one that its owner committed to."""
    if not made:
        return None
    seed = mask_seed(agreed, seat, made[0])
    return seed if hmac.compare_digest(commit_mask(agreed, seat, seed), upload.commitment) else None


def take_out_shares(agreed: Agreed, total: Words, recovered: Mapping[int, Recovered]) -> list[Edge]:
    """Take out of a sum the shares of survivors whose keys came out, with nobody left to cancel them; returns them.

    A survivor that added a share has `+n` in the sum and one that subtracted it `-n`. What a survivor of the round
    before carried to a client that was lost in this one is taken out of this round's sum.
    """
    found = [
        (edge, one.keys[edge.place])
        for seat, one in recovered.items()
        if one.keys
        for edge in agreed.edges(seat, one.keys)
    ]
    noises = [
        (
            SecretStream(derive_seed(key, edge.context, *edge.ends)),
            agreed.grid.deviation_steps(edge.variance),
            -edge.sign,
        )
        for edge, key in found
    ]
    add_noises(total, noises)
    return [edge for edge, _ in found]


def take_out_masks(
    agreed: Agreed, total: Words, survivors: tuple[int, ...], recovered: dict[int, Recovered]
) -> tuple[int, ...]:
    """Subtract the recovered self-masks of the survivors; returns those whose mask stays."""
    steps = agreed.grid.deviation_steps(agreed.terms.self_variance)
    masks = {seat: recovered[seat].mask if seat in recovered else None for seat in survivors}
    known = [(SecretStream(seed), steps, -1) for seed in masks.values() if seed is not None]
    add_noises(total, known)
    return tuple(seat for seat, seed in masks.items() if seed is None)
