"""What binds a round of a run with carried shares to those next to it: what a client checks, and verdicts.

The noise of a run with carried shares is one chain over all rounds. What a server could do to it, and what comes of it:

- other terms, a longer run, another next cohort, a skipped or repeated round, a client asked back too soon: refused;
- no next round, or a cohort that never answers: those uploads are missing, which shows less than all of them would;
- two versions of a round for two clients: the beacon's holder lets out one link for one commitment, so one of the two
  is refused. With a holder that obeys the server shares between versions do not cancel: of the inverse of the
  covariance no entry grows (its entries off the diagonal only rise to 0), so nobody's mu does;
- a second attempt at a round: refused. It has another link and so another committee, under the same context of what is
  carried: one could be told that a client survived whom the other called dropped;
- a next cohort of strangers: refused by whoever trusts listed identities alone, else they count among the colluders.

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
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from niss.errors import RemoteProtocolError
from niss.protocol.agreement import (
    Agreed,
    commitment_of,
    draw_committee,
    link_of,
    participants_hash,
    survivors_hash,
    terms_hash,
    verify_beacon,
)
from niss.protocol.carried import Schedule
from niss.protocol.keys import Identity, check_prekey, verify
from niss.protocol.messages import Beacon, Participant, PreviousRound, RoundOpen, Terms, Verdict, Vote


def previous_of(opened: RoundOpen) -> PreviousRound:
    """What the next round's clients are shown of this one."""
    return PreviousRound(opened.participants, terms_hash(opened.terms), opened.beacon)


def check_schedule(opened: RoundOpen, schedule: Schedule | None, last: int | None) -> tuple[Participant, ...]:
    """Refuse a round that is not the next which this schedule allows a client to answer; returns the next cohort.

    last    the round of this run that it answered last; None: it has answered none

    Terms and sizes must be those that the schedule fixes; nothing is computed for a list of another length. A run
    without a schedule has rounds that carry nothing.
    """
    carrying, cohorts = opened.terms.carrying, opened.cohorts
    if schedule is None:
        if carrying is not None or cohorts is not None:
            raise RemoteProtocolError(
                "the round carries noise, but this client has agreed to no schedule for it"
            )
        return ()
    if carrying is None or cohorts is None:
        raise RemoteProtocolError("the round carries no noise, but the schedule of this run says it does")
    schedule.check_terms(opened.terms)
    number, size = opened.terms.round, schedule.participants
    if (cohorts.previous is None) != (number == 0):
        raise RemoteProtocolError("a round needs the one before it, and the first has none")
    sizes = {
        "this round": (len(opened.participants), size),
        "the next round": (len(cohorts.following), 0 if number == schedule.rounds - 1 else size),
        "the round before": (size if cohorts.previous is None else len(cohorts.previous.participants), size),
    }
    for name, (found, wanted) in sizes.items():
        if found != wanted:
            raise RemoteProtocolError(f"{name} has {found} participants, but the schedule says {wanted}")
    schedule.check_return(number, last)
    return cohorts.following


def check_cohorts(
    opened: RoundOpen,
    trusted: frozenset[bytes] | None,
    *,
    anchor: bytes,
    holder: bytes,
) -> None:
    """Refuse neighbouring rounds with strangers, doubles or false prekeys, and a round that was not announced.

    This round must be the one that the beacon of the round before was let out for; the rest is as in the client's
    `Policy`.
    """
    if (cohorts := opened.cohorts) is None:
        return
    here = {one.identity for one in opened.participants}
    _check_list(cohorts.following, here, trusted)
    if (previous := cohorts.previous) is None:
        return
    _check_list(previous.participants, here, trusted)
    verify_beacon(
        previous.beacon,
        participants_hash(previous.participants) + previous.terms + participants_hash(opened.participants),
        expected=link_of(opened.terms.round - 1, 0),
        anchor=anchor,
        holder=holder,
        after=0,
    )


def _check_list(
    participants: tuple[Participant, ...], here: set[bytes], trusted: frozenset[bytes] | None
) -> None:
    identities = {one.identity for one in participants}
    if len(identities) != len(participants):
        raise RemoteProtocolError("a participant of a neighbouring round is listed twice")
    if identities & here:
        raise RemoteProtocolError("a participant is listed in two rounds that follow one another")
    if trusted is not None and not identities <= trusted:
        raise RemoteProtocolError(
            "a participant of a neighbouring round is not among the identities this client trusts"
        )
    for one in participants:
        check_prekey(one.prekey, one.identity)


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


def dropped_after(
    agreed: Agreed, verdict: Verdict | None, schedule: Schedule, *, anchor: bytes, holder: bytes
) -> tuple[int, ...]:
    """The seats that the verdict of the next round calls dropped; else as in `dropped_before`.

    Of that round this one knows the participants and the terms; that its beacon is the next link, let out for them, is
    checked here.
    """
    after, terms = agreed.after, agreed.terms
    if verdict is None or after is None:
        raise RemoteProtocolError("there is no verdict of the next round, or no next round")
    following = terms_hash(schedule.terms(terms.run, terms.round + 1))
    verify_beacon(
        verdict.beacon,
        participants_hash(after.receivers) + following + verdict.following,
        expected=link_of(terms.round + 1, 0),
        anchor=anchor,
        holder=holder,
        after=agreed.opened.beacon.index,
    )
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
