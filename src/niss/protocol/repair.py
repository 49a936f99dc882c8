"""The server's half of a repair: what a committee's answers give, and taking it out of the sum.

Of a survivor that is the seed of its self-mask, and the keys of its edges to the lost.

For each survivor the partials of as many members as the threshold are combined. Where it lost no neighbour, its own
commitment to its self-mask says whether the result is right, and no proof is looked at. Where it did, or where that
fails, proofs are checked one member after another until enough of them hold, and with them that the points S_c of these
members give the survivor's R. What is not needed is not looked at: a member beyond those may have lied unnoticed, and
without effect.

Work: for a survivor that lost d neighbours `t (2 d + 6)` multiplications of points at most, `t` where it lost none; 50
to 90 microseconds each, without Python's lock, on all cores.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from niss.errors import RemoteProtocolError
from niss.protocol import committee, curve
from niss.protocol.agreement import Agreed
from niss.protocol.committee import MemberStatement
from niss.protocol.keys import Secret, SecretBytes
from niss.protocol.messages import Reveal, Upload
from niss.protocol.shares import carried_seed, derive_seed
from niss.randomness import SecretStream, add_gaussians


@dataclass(repr=False)
class Recovered(Secret):
    """What came out for one survivor.

    mask     the seed of its self-mask; None: it stays
    keys     by lost neighbour of its own round, the key of the edge to it
    carried  by seat in a round next to it, the key of the edge to a client that was lost there
    lies     (seat, what it did) of whoever is proven to have lied about it
    short    whether too few members gave true partials
    """

    mask: SecretBytes | None = None
    keys: dict[int, SecretBytes] = field(default_factory=dict)
    carried: dict[int, SecretBytes] = field(default_factory=dict)
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

    `lost` and `masks` are what the members were asked for, as in `committee.answer`.
    """
    answers, lies = _wanted(agreed, lost, reveals, masks)
    seats = list(lost)

    def one(seat: int) -> Recovered:
        return _recover_one(agreed, seat, lost[seat], uploads[seat], answers, masks)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        recovered = dict(zip(seats, pool.map(one, seats), strict=True))
    return recovered, [*lies, *(lie for one in recovered.values() for lie in one.lies)]


@dataclass(frozen=True)
class _Answer:
    """What one member said, in a form whose proofs can be checked."""

    number: int
    statement: MemberStatement
    proofs: Mapping[int, bytes]


def _wanted(
    agreed: Agreed, lost: Mapping[int, Sequence[int]], reveals: Mapping[int, Reveal], masks: bool
) -> tuple[dict[int, _Answer], list[tuple[int, str]]]:
    """By member, in the committee's order, what it was asked for; and who said anything else."""
    answers: dict[int, _Answer] = {}
    lies = []
    for number, member in enumerate(agreed.committee, start=1):
        if member not in reveals:
            continue
        partials = reveals[member].partials
        fitting = all(
            one.seat in lost and len(one.points) == curve.POINT_BYTES * (masks + len(lost[one.seat]))
            for one in partials
        )
        if not fitting:
            lies.append((member, "revealed what it was not asked for"))
            continue
        statement = MemberStatement(
            agreed, member, {one.seat: one.points for one in partials}, lost, masks=masks
        )
        answers[member] = _Answer(number, statement, {one.seat: one.proof for one in partials})
    return answers, lies


def _recover_one(
    agreed: Agreed,
    seat: int,
    lost: Sequence[int],
    upload: Upload,
    answers: Mapping[int, _Answer],
    masks: bool,
) -> Recovered:
    found = Recovered()
    threshold = agreed.terms.threshold
    given = {member: answer for member, answer in answers.items() if seat in answer.proofs}
    if not lost and len(given) >= threshold:
        first = list(given.values())[:threshold]
        found.mask = _mask(agreed, seat, upload, {one.number: one.statement.points[seat] for one in first})
        if found.mask is not None:
            return found
    points = committee.commitments(agreed, upload.pieces)
    true: dict[int, _Answer] = {}
    for member, answer in given.items():
        if answer.statement.is_proven(seat, points[answer.number], answer.proofs[seat]):
            true[answer.number] = answer
        else:
            found.lies.append((member, "revealed partials that it cannot prove"))
        if len(true) == threshold:
            break
    if len(true) < threshold:
        found.short = True
        return found
    if _combined({number: points[number] for number in true}) != points[0]:
        found.lies.append((seat, "made pieces that do not fit together"))
        return found
    parts = {number: committee.cut(answer.statement.points[seat]) for number, answer in true.items()}
    if masks:
        found.mask = _mask(agreed, seat, upload, {number: one[0] for number, one in parts.items()})
        if found.mask is None:
            found.lies.append((seat, "committed to another self-mask than its pieces give"))
    for place, other in enumerate(lost, start=int(masks)):
        point = _combined({number: one[place] for number, one in parts.items()})
        if point is None:
            continue
        key, size = committee.open_seal(agreed, seat, other, point, upload.pieces), len(agreed.participants)
        if other < size:
            found.keys[other] = key
        else:
            # Asked once more, it is about the next round; else about the one before, whose clients come first.
            after = () if masks or agreed.after is None else agreed.after.receivers
            found.carried[other - (len(agreed.everyone) - len(after) if after else size)] = key
    return found


def _combined(points: Mapping[int, bytes]) -> bytes | None:
    """What these points make together; None where one of them is none, or they make zero."""
    try:
        return committee.combine(points)
    except RemoteProtocolError:
        return None


def _mask(agreed: Agreed, seat: int, upload: Upload, partials: Mapping[int, bytes]) -> SecretBytes | None:
    """The seed that these partials give, if it is the one that its owner committed to."""
    point = _combined(partials)
    if point is None:
        return None
    seed = committee.mask_seed(agreed, seat, point)
    return seed if committee.is_committed(agreed, seat, seed, upload.commitment) else None


def take_out_edges(
    agreed: Agreed, total: NDArray[np.uint64], survivors: set[int], recovered: dict[int, Recovered]
) -> tuple[int, float]:
    """Subtract the recovered shares of dropped clients; count those that stay, and their variance.

    A survivor that sent a share has `+n` in the sum and one that received it `-n`, with nobody left to cancel it.
    """
    people = agreed.participants
    uncancelled, extra, noises = 0, 0.0, []
    for sender, receiver, variance in agreed.shares():
        if (sender in survivors) == (receiver in survivors):
            continue
        sent = sender in survivors
        here, gone = (sender, receiver) if sent else (receiver, sender)
        key = recovered[here].keys.get(gone) if here in recovered else None
        if key is None:
            uncancelled += 1
            extra += variance
            continue
        ends = people[sender].identity, people[receiver].identity
        seed = derive_seed(key, agreed.context, *ends, "share")
        noises.append((SecretStream(seed), agreed.grid.deviation_steps(variance), -1 if sent else 1))
    add_gaussians(total, noises)
    return uncancelled, extra


def take_out_carried(
    agreed: Agreed,
    total: NDArray[np.uint64],
    survivors: tuple[tuple[int, ...], tuple[int, ...]],
    recovered: tuple[dict[int, Recovered], dict[int, Recovered]],
) -> tuple[int, tuple[float, float]]:
    """Take out what is known of shares with one end in the sum of this round or of the one before.

    survivors, recovered   of the round before, and of this one

    Returns how many they were, and the variance of those that a survivor subtracted though nobody had added them, and
    of those that were added in the round before and that nobody subtracted.
    """
    before = agreed.before
    assert before is not None
    everyone, (there, here) = set(range(len(agreed.participants))), map(set, survivors)
    added, taken = recovered
    noises, variances = [], ([0.0], [0.0])
    halves = (
        (0, before.between_seats(everyone - there, here), 1),
        (1, before.between_seats(there, everyone - here), -1),
    )
    for half, shares, sign in halves:
        for sender, receiver, variance in shares:
            found, lost = (added.get(sender), receiver) if half else (taken.get(receiver), sender)
            key = None if found is None else found.carried.get(lost)
            if key is None:
                continue
            ends = before.senders[sender].identity, before.receivers[receiver].identity
            seed = carried_seed(key, before.context, *ends)
            noises.append((SecretStream(seed), agreed.grid.deviation_steps(variance), sign))
            variances[half].append(variance)
    add_gaussians(total, noises)
    return len(noises), (math.fsum(variances[0]), math.fsum(variances[1]))


def take_out_masks(
    agreed: Agreed, total: NDArray[np.uint64], survivors: tuple[int, ...], recovered: dict[int, Recovered]
) -> tuple[int, ...]:
    """Subtract the recovered self-masks of the survivors; returns those whose mask stays."""
    steps = agreed.grid.deviation_steps(agreed.terms.self_variance)
    masks = {seat: recovered[seat].mask if seat in recovered else None for seat in survivors}
    known = [(SecretStream(seed), steps, -1) for seed in masks.values() if seed is not None]
    add_gaussians(total, known)
    return tuple(seat for seat, seed in masks.items() if seed is None)
