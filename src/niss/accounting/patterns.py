"""The most that any allowed pattern of participations in a committed run can cost.

`K` (T x T, no negative entry) belongs to the whole run (`niss.views.CompleteRun`): a client that took part in the
rounds P has spent `1' K[P, P] 1`, in units of the squared sensitivity of an upload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from niss.errors import ConfigError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

PATTERNS = ("cyclic", "any")
# More labels than this at one round are merged, which can only raise the bound.
_MOST_LABELS = 2_000


@dataclass(frozen=True)
class WorstPattern:
    """The costliest allowed participations: `cost` = max 1' K[P, P] 1, reached by `rounds` where `exact`."""

    cost: float
    exact: bool
    rounds: tuple[int, ...] = ()


def spent_in(matrix: FloatArray, rounds: Sequence[int]) -> float:
    """1' K[P, P] 1."""
    places = np.asarray(rounds, dtype=np.int64)
    return float(matrix[np.ix_(places, places)].sum())


def worst_pattern(matrix: FloatArray, separation: int, pattern: str) -> WorstPattern:
    """The most that the allowed participations of one client can cost.

    `cyclic` (every `separation` rounds, from any first round): the worst offset. `any` (at least `separation` apart):
    by dynamic programming.
    """
    if pattern not in PATTERNS:
        raise ConfigError(
            f"unknown value {pattern!r}", field="pattern", hint="use one of: " + ", ".join(PATTERNS)
        )
    if separation < 1:
        raise ConfigError(f"must be at least 1, not {separation}", field="separation")
    rounds = len(matrix)
    if pattern == "cyclic" or separation == 1:
        cohort = np.arange(rounds) % separation
        within = np.where(cohort[:, None] == cohort, matrix, 0.0).sum(axis=1)
        offset = int(np.argmax(np.bincount(cohort, weights=within)))
        worst = tuple(range(offset, rounds, separation))
        return WorstPattern(spent_in(matrix, worst), True, worst)
    return _by_labels(matrix, separation)


def heaviest(weights: FloatArray, separation: int) -> float:
    """The largest sum of weights (not negative) over places at least `separation` apart."""
    best = [0.0]
    for place, weight in enumerate(weights.tolist()):
        best.append(max(best[-1], best[max(place + 1 - separation, 0)] + weight))
    return best[-1]


def _by_labels(costs: FloatArray, separation: int) -> WorstPattern:
    """Exact, since noise is carried to the next round only.

    `Gamma` is then tridiagonal, and off the diagonal its inverse is `K_st = p_s q_t` (s < t): of the past only
    `z_t = sum_{s in P} K_st` matters. Labels (cost so far, z) grow from round to round; a label that cannot catch up
    with another, whatever follows, is dropped. Gaps of 2b or more need not be tried: another participation fits in,
    and no entry of K is negative.
    """
    rounds = len(costs)
    separation = min(separation, rounds)
    decay = _decay(costs, min(2 * separation - 1, rounds))
    reach = _reach(decay, separation)
    diagonal = np.diag(costs)
    # Of every label, by rounds: cost, z, the round it ends in and the label that it continues; `begin`: of each round.
    cost, past = np.zeros(2 * rounds), np.zeros(2 * rounds)
    ends, parent = np.zeros(2 * rounds, dtype=np.int64), np.full(2 * rounds, -1)
    begin, exact = [0], True
    for place in range(rounds):
        if place < separation:
            here = (diagonal[place : place + 1], np.zeros(1), np.full(1, -1))
        else:
            first = begin[max(place - 2 * separation + 1, 0)]
            earlier = slice(first, begin[place - separation + 1])
            last = ends[earlier]
            # What the participations so far have in common with this one.
            common = past[earlier] * decay[last, place - 1 - last] + costs[last, place]
            total = cost[earlier] + diagonal[place] + 2.0 * common
            kept = _undominated(total, common, reach[place])
            here = (total[kept], common[kept], first + kept)
            if kept.size > _MOST_LABELS:
                here, exact = _merged(*here), False
        start, stop = begin[-1], begin[-1] + here[0].size
        if stop > cost.size:
            cost, past, ends, parent = (np.resize(array, 2 * stop) for array in (cost, past, ends, parent))
        cost[start:stop], past[start:stop], parent[start:stop] = here
        ends[start:stop] = place
        begin.append(stop)
    final = begin[max(rounds - separation, 0)]
    label = final + int(np.argmax(cost[final : begin[-1]]))
    best = float(cost[label])
    if not exact:
        return WorstPattern(best, False)
    chosen = []
    while label >= 0:
        chosen.append(int(ends[label]))
        label = int(parent[label])
    return WorstPattern(best, True, tuple(reversed(chosen)))


def _decay(costs: FloatArray, most: int) -> FloatArray:
    """q_(s+g) / q_s in row s and column g - 1, for gaps g up to `most`: what an entry of column s shrinks to, by steps.

    0 past the last round, and for the first round, which nothing precedes.
    """
    rounds = len(costs)
    steps = np.zeros(rounds + most)
    # The entries of round t - 2 in the columns t - 1 and t, both off the diagonal.
    above, beside = np.diagonal(costs, 1)[:-1], np.diagonal(costs, 2)
    np.divide(beside, above, out=steps[2:rounds], where=above > 0.0)
    decay = np.cumprod(np.lib.stride_tricks.sliding_window_view(steps[1:], most), axis=1)
    decay[0] = 0.0
    return np.asarray(decay)


def _reach(decay: FloatArray, separation: int) -> list[float]:
    """For each round: the most that z of that round can count for, sum of decays over what may follow.

    Decays multiply along the way, so with F_t the most from round t on, in units of round t,
    `F_t = max(1 + decay(t, t + b) F_(t+b), decay(t, t + 1) F_(t+1))`.
    """
    rounds = len(decay)
    to_next, to_following = decay[:, 0].tolist(), decay[:, separation - 1].tolist()
    reach, most = [0.0] * rounds, [0.0] * (rounds + separation)
    for place in reversed(range(rounds)):
        reach[place] = to_following[place] * most[place + separation]
        most[place] = max(1.0 + reach[place], to_next[place] * most[place + 1])
    return reach


def _undominated(cost: FloatArray, past: FloatArray, reach: float) -> IntArray:
    """The labels that no other one beats whatever follows.

    What follows adds between 0 and `2 z reach`, so j beats i where `cost_j >= cost_i` and
    `cost_j + 2 z_j reach >= cost_i + 2 z_i reach`: by falling cost, the records of the second are left.
    """
    order = np.lexsort((-past, -cost))
    most = np.maximum.accumulate((cost + 2.0 * reach * past)[order])
    return np.asarray(order[np.concatenate([[True], most[1:] > most[:-1]])])


def _merged(cost: FloatArray, past: FloatArray, parent: IntArray) -> tuple[FloatArray, FloatArray, IntArray]:
    """Half as many labels, each at least as costly as the two that it stands for."""
    return cost[::2], np.append(past, past[-1:])[1::2], parent[::2]
