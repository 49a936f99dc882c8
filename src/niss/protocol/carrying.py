"""What a client checks in a round of a run with carried shares, beyond what it checks in every round.

The noise of a run with carried shares is one chain over all rounds. What a server could do to it, and what comes of it:

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

from niss.errors import RemoteProtocolError
from niss.protocol.agreement import link_of, participants_hash, terms_hash, verify_beacon
from niss.protocol.carried import Schedule
from niss.protocol.keys import check_prekey
from niss.protocol.messages import Participant, Previous, RoundOpen


def previous_of(opened: RoundOpen) -> Previous:
    """What the next round's clients are shown of this one."""
    return Previous(opened.participants, terms_hash(opened.terms), opened.beacon)


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
