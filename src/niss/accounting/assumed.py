"""Who is assumed to help the server, or to be lost, in a round of a given size: the shares of a plan become counts.

A plan has shares (`Trust`). What they come to in a round of m participants is worked out here and nowhere else: how
many collude, how many a repair may call dropped and how many edges of a client it may reveal, and who repairs. The
counts stand in `Noise` and in the terms of a round; a client checks those against its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from niss.errors import PrivacyError
from niss.mechanism.noise import colluders_among
from niss.views import Corruption, colluding_neighbours
from niss.views.numerics import binomial_quantile

if TYPE_CHECKING:
    from niss.accounting.plans import Plan

# What committees take of the part of delta that pays for bounds on colluders, where they are drawn from larger rounds.
COMMITTEE_SHARE = 0.5
# A committee has at least so many members, or everyone: one that fell out of use for two dropouts would help nobody.
_LEAST_COMMITTEE = 10
# A repair that nobody is expected to need is planned for this share of lost participants.
USUAL_DROPOUT = 0.05


@dataclass(frozen=True)
class Assumed(Corruption):
    """What is assumed of the participants of a round, and who repairs it.

    committee, threshold  members that repair the round, and how many of them must answer; 0: nothing is repaired
    """

    committee: int = 0
    threshold: int = 0


@lru_cache(maxsize=256)
def assumed_in(plan: Plan, participants: int) -> Assumed:
    """The counts of a round of that size; `PrivacyError` where too few would be left, or nothing could be repaired.

    In mode `repair` one round in a million, at most, loses more than may be called dropped; 5 % are expected to be lost
    where the plan expects nobody to be, and at least one can be. All participants repair a round in which everyone is
    near everyone; else as few as are safe, drawn by the beacon.
    """
    together = participants
    if plan.graph == "coalition":
        together = min(max(map(len, plan.groups)), participants)
    colluders = colluders_among(plan.collusion, together)
    failure, near = plan.failure, plan.everyone_near
    if plan.settled_mode == "tolerate" or not plan.kind.shares_noise:
        assumed = Assumed(colluders=colluders, failure=failure)
        return _with_room(assumed, participants) if plan.kind.shares_noise else assumed
    dropout = plan.dropout or USUAL_DROPOUT
    drawn = None
    if not near:
        drawn = committee_size(participants, colluders, split_failure(failure, drawn=True)[1], dropout)
    failure, outvoted = split_failure(failure, drawn=drawn is not None)
    members = drawn or participants
    threshold = max(2, committee_threshold(participants, members, colluders, outvoted))
    # Where more drop out than a committee of everyone can lose, nothing is repaired, and nothing revealed.
    most = participants - threshold
    if most < 1 or (drawn is None and dropout * participants > most):
        raise PrivacyError(
            f"infeasible: a repair needs {threshold} of {participants} participants, but {dropout:.0%} drop out, and "
            "at least one",
            hint="mode = 'tolerate', more participants, a lower dropout rate, or fewer colluders to be assumed",
        )
    dropped = min(max(most_dropped(participants, dropout, plan.delta), 1), most)
    revealed = dropped
    if not near:
        others = min(math.ceil(2 * plan.neighbours), participants - 1)
        revealed = min(max(most_dropped(others, dropout, plan.delta / participants), 1), dropped)
    return _with_room(Assumed(colluders, revealed, dropped, failure, members, threshold), participants)


def _with_room(assumed: Assumed, participants: int) -> Assumed:
    """The same, if two are left who share noise that the server does not know."""
    if assumed.removed and assumed.removed > participants - 2:
        parts = f"{assumed.colluders} colluders"
        if assumed.dropped:
            parts += f" and {assumed.dropped} dropped clients with revealed edges"
        raise PrivacyError(
            f"infeasible: {parts} of {participants} participants leave nobody to share noise with",
            hint="the collusion (or, in repair, the dropout rate) binds: lower it, or let more clients take part",
        )
    return assumed


def fewest_participants(plan: Plan) -> int:
    """The smallest round that keeps what is assumed: two who are honest, and in mode `repair` one who may be lost.

    Every share below 1 leaves that many in rounds that are large enough; there may be larger ones that do not.
    """
    size = max(2, math.floor(2.0 / (1.0 - plan.collusion)))
    while True:
        try:
            assumed_in(plan, size)
        except PrivacyError:
            size += 1
        else:
            return size


def most_dropped(count: int, dropout: float, delta: float) -> int:
    """The most of `count` clients that drop out, but for one round in a million; beyond it a repair is refused."""
    return binomial_quantile(min(1e-6, delta), count, dropout) if dropout else 0


def split_failure(failure: float, *, drawn: bool) -> tuple[float, float]:
    """What bounds on the neighbours, and what the bound on a committee, may fail with on one graph.

    `drawn`: a committee is drawn from a larger round; else nothing about it can fail.
    """
    part = COMMITTEE_SHARE * failure if drawn else 0.0
    return failure - part, part


def committee_threshold(participants: int, committee: int, colluders: int, failure: float) -> int:
    """The fewest members that must answer: `t = floor((n + c) / 2) + 1`, if at most c of n members collude.

    Of two survivor sets that each gather t members, `2 t - n > c` members answer both: one of them is honest, and an
    honest one answers for one set. c is exceeded with at most the probability `failure` (hypergeometric; 0: all
    colluders may be members). Where the threshold is larger than the committee, it cannot be that safe.
    """
    feared = min(committee, colluders)
    if committee < participants:
        feared = colluding_neighbours(participants, committee, colluders, failure)
    return (committee + feared) // 2 + 1


def committee_size(participants: int, colluders: int, failure: float, dropout: float) -> int | None:
    """The smallest committee that repairs all but one round in a million at this dropout rate; None: everyone, or none.

    failure   with which more members may collude than its threshold allows for, on one graph
    """
    for size in range(min(_LEAST_COMMITTEE, participants), participants):
        threshold = committee_threshold(participants, size, colluders, failure)
        if most_dropped(size, dropout, 1.0) <= size - threshold:
            return size
    return None
