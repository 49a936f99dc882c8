"""What a run with carried shares commits to before its first round, what that promises, and what its rounds cost.

The promise is mu-GDP for every client over the whole committed run, whatever allowed pattern it takes part in, against
a server that sees everything and holds the assumed colluders. A participation is charged what it adds to `1' K[P, P] 1`
before the upload, K that of the whole run at its worst; with the budget fixed in advance this is a filter (Smith and
Thakurta, 2022), and valid whatever the server does within the rules. Charging by an endless run instead would
undercharge the ends, where less noise is carried. All in units of the squared sensitivity of one upload.

The noise in the model after round t is that of all rounds so far and what is still under way, `r (t + 1) + w`. With a
share d of dropouts `2 d (1 - d) w` of every round stays for good, unless it is repaired. Of models that are averaged
each has its own w under way, so that the mean of k models up to round t has about `r (t + 1) + w / k`.

A round of training takes out a part of what is in the model. Where it keeps a share a, noise of s rounds ago counts
`a^(2 s)`, and of what is carried `(1 - a)^2 w` stays, since it is taken out as it was added.

Trusted servers, at mu = 1 and sensitivity 1, are what that is compared with. They may correlate their noise over the
rounds (the matrix mechanism): with `Gamma` the covariance of the noise of T rounds and `X = Gamma^-1`, a client with
participations P has mu^2 = max over unit vectors g_t of `sum_{s,t in P} X_st <g_s, g_t>`, which is `1' X[P, P] 1` where
X has no negative entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from niss.checks import BOOKS
from niss.errors import PrivacyError
from niss.mechanism.noise import Noise, correlated_noise
from niss.views import CompleteRun
from niss.views.numerics import binomial_tail

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# More labels than this at one round are merged, which can only raise the bound.
_MOST_LABELS = 2_000


@dataclass(frozen=True)
class WorstPattern:
    """The costliest allowed participations: `cost` = max 1' K[P, P] 1, reached by `rounds` where `exact`."""

    cost: float
    exact: bool
    rounds: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A run whose clients all share with all, within a round and with the next.

    noise                of every round; the last carries nothing on
    horizon              T: rounds in which clients take part
    separation, pattern  a client comes back after exactly (`cyclic`) or at least (`any`) that many rounds
    closing              one more round without data takes out what the last round carried
    """

    noise: Noise
    horizon: int
    separation: int
    pattern: str = "cyclic"
    closing: bool = False

    def __post_init__(self) -> None:
        if self.noise.known >= self.noise.participants:
            raise PrivacyError(
                "no honest client is left to protect", hint="assume fewer colluders, or fewer that drop out"
            )

    @property
    def rounds(self) -> int:
        """All rounds, the closing one included."""
        return self.horizon + self.closing

    @property
    def private(self) -> bool:
        """Whether anything is promised: without fresh noise nothing is."""
        return self.noise.residual > 0.0

    @property
    def ratio(self) -> float:
        """w / r: what is carried on from a round, over its fresh noise."""
        return self.noise.carried / self.noise.residual

    @cached_property
    def view(self) -> CompleteRun:
        """The run at a fresh noise of 1 in each sum, with the ratio of what is carried."""
        if not self.private:
            raise PrivacyError("without fresh noise nothing is promised", hint="leave tau2 calibrated")
        return CompleteRun(self.noise.participants, self.noise.known, np.full(self.rounds - 1, self.ratio))

    @cached_property
    def matrix(self) -> FloatArray:
        """K (horizon x horizon): a client that takes part in P spends `1' K[P, P] 1` of mu^2.

        In the rounds D in which it is called dropped a client has its own noise alone: it spends `1' K[P - D, P - D] 1`
        and `1 / own` for each of D. No entry of K is negative, so that this is at most `1' K[P, P] 1` if each entry on
        the diagonal is at least `1 / own`: where rounds are repaired it is raised to that.
        """
        whole = self._unmasked
        if not self.noise.committee:
            return whole
        own = self.noise.residual + self.noise.self_mask
        return np.asarray(whole + np.diag(np.maximum(1.0 / own - np.diag(whole), 0.0)))

    @cached_property
    def _unmasked(self) -> FloatArray:
        matrix = self.view.matrix(self.noise.participants * self.noise.residual, self.noise.spatial)
        return matrix[: self.horizon, : self.horizon]

    @property
    def needed_self_mask(self) -> float:
        """The least that a self-mask must have, in all rounds, for whoever is called dropped to lose nothing by it."""
        return float(max(np.max(1.0 / np.diag(self._unmasked)) - self.noise.residual, 0.0))

    @cached_property
    def worst(self) -> WorstPattern:
        """The costliest participations that are allowed."""
        return worst_pattern(self.matrix, self.separation, self.pattern)

    @property
    def mu(self) -> float:
        """The promise: mu-GDP for every client over the whole run."""
        return math.sqrt(self.worst.cost)

    def cost(self, number: int, earlier: Sequence[int] | None) -> float:
        """What a participation in round `number` (from 0) adds to mu^2, after those in the rounds `earlier`.

        None: after the dearest allowed ones.
        """
        if not 0 <= number < self.horizon:
            raise PrivacyError(
                f"round {number + 1} lies past the committed end of {self.horizon} rounds",
                hint="going on is a new run, with its own budget",
            )
        if earlier is None:
            row = self.matrix[number]
            past = heaviest(row[: max(number - self.separation + 1, 0)], self.separation)
            return float(row[number] + 2.0 * past)
        return spent_in(self.matrix, [*earlier, number]) - spent_in(self.matrix, earlier)

    def charge(self, number: int, earlier: Sequence[int], budget: float | None = None) -> float:
        """The same, but refused where the plan does not allow that participation, or it would overspend.

        budget  of mu^2 over the whole run; None: what its dearest allowed participations cost
        """
        cost = self.cost(number, earlier)
        if earlier:
            gap = number - earlier[-1]
            if gap < self.separation or (self.pattern == "cyclic" and gap % self.separation):
                wanted = "a multiple of" if self.pattern == "cyclic" else "at least"
                raise PrivacyError(
                    f"round {number} comes {gap} after round {earlier[-1]}, but the plan promises {wanted} "
                    f"{self.separation}",
                    hint="leave this round out",
                )
        most, spent = self.worst.cost if budget is None else budget, spent_in(self.matrix, earlier)
        if spent + cost > most * (1.0 + BOOKS):
            raise PrivacyError(
                f"round {number} would cost {cost:.4g} of mu^2, and {most - spent:.4g} are left",
                hint="the plan's budget covers its worst pattern; this client was charged more",
            )
        return cost

    def sharing(self, *, ratio: float, spatial: float) -> Committed:
        """The same run with `ratio` times its fresh noise carried on, and shares of that variance in an upload."""
        noise = self.noise
        carried, unit = ratio * noise.residual, spatial / (2.0 * noise.neighbours)
        return replace(self, noise=replace(noise, carried=carried, unit=unit))

    def with_residual(self, residual: float) -> Committed:
        """The same run with that much fresh noise in each sum, and what is carried in proportion."""
        each = residual / self.noise.participants
        return replace(self, noise=replace(self.noise, residual=each, carried=self.ratio * each))

    def noise_in_model(self, dropout: float = 0.0, *, repaired: bool = True, kept: float = 1.0) -> FloatArray:
        """Noise variance in the model after each round, on average over what drops out.

        dropout   probability with which a client vanishes after the graphs were fixed, each on its own
        repaired  whether shares within the round are taken out again when a client drops out; carried ones are too
                  where clients may be called dropped. A round that loses more clients than that is not repaired.
        kept      the part of the noise in the model that a round of training leaves in it
        """
        stays, under_way = self._added(dropout, repaired=repaired)
        stays[1:] += (1.0 - kept) ** 2 * under_way[:-1]
        return _summed(stays, kept**2) + under_way

    def noise_in_mean(
        self, models: int, number: int, dropout: float = 0.0, *, repaired: bool = True
    ) -> float:
        """The same in the mean of so many models, the last of them after round `number` (from 0)."""
        stays, under_way = self._added(dropout, repaired=repaired)
        some = slice(number + 1 - models, number + 1)
        # What is under way is in one of the models alone; what stays, in all later ones.
        later = 2.0 * np.arange(models)[::-1] + 1.0
        return float(later @ _summed(stays, 1.0)[some] + under_way[some].sum()) / models**2

    def _added(self, dropout: float, *, repaired: bool) -> tuple[FloatArray, FloatArray]:
        """Of each round: what it adds for good, and what it carries on and the next takes out."""
        noise, size = self.noise, self.noise.participants
        steps = np.full(self.rounds, (1.0 - dropout) * size * noise.residual)
        crossing = dropout * (1.0 - dropout) * size * noise.spatial
        if not repaired:
            steps += crossing
        elif noise.dropped:
            steps += self._beyond_repair(dropout, others=2) * crossing
        # The clients that are lost for good, with what they had carried and should have taken out.
        lost = dropout * (self._beyond_repair(dropout, others=1) if repaired else 1.0)
        left = (1.0 - dropout) * lost + lost * (1.0 - lost)
        steps[1:] += left * size * noise.carried
        under_way = np.full(self.rounds, (1.0 - dropout) * size * noise.carried)
        under_way[-1] = 0.0
        return steps, under_way

    def _beyond_repair(self, dropout: float, *, others: int) -> float:
        """How likely it is that a round loses too many, given that `others` of its clients have their part in it.

        With N of m lost, `E[N; N > d] = m q P(B(m - 1, q) >= d)` and
        `E[N (m - N); N > d] = m (m - 1) q (1 - q) P(B(m - 2, q) >= d)`: beside one client, and beside a pair.
        """
        return binomial_tail(self.noise.dropped - 1, max(self.noise.participants - others, 0), dropout)


def _summed(steps: FloatArray, kept: float) -> FloatArray:
    """All steps so far, of which each further one leaves a part."""
    if kept == 1.0:
        return np.cumsum(steps)
    return np.fromiter(accumulate(steps.tolist(), lambda before, step: kept * before + step), float)


def spent_in(matrix: FloatArray, rounds: Sequence[int]) -> float:
    """1' K[P, P] 1."""
    places = np.asarray(rounds, dtype=np.int64)
    return float(matrix[np.ix_(places, places)].sum())


def worst_pattern(matrix: FloatArray, separation: int, pattern: str) -> WorstPattern:
    """The most that the allowed participations of one client can cost.

    `cyclic` (every `separation` rounds, from any first round): the worst offset. `any` (at least `separation` apart):
    by dynamic programming.
    """
    rounds = len(matrix)
    if pattern == "cyclic" or separation == 1:
        cohort = np.arange(rounds) % separation
        within = np.where(cohort[:, None] == cohort, matrix, 0.0).sum(axis=1)
        costs = np.bincount(cohort, weights=within)
        # A run looks the same from both its ends: of cohorts that differ by rounding alone it is the first.
        first = int(np.argmax(costs >= costs.max() * (1.0 - BOOKS)))
        worst = tuple(range(first, rounds, separation))
        return WorstPattern(max(spent_in(matrix, worst), float(costs.max())), True, worst)
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


def independent_noise(rounds: int, separation: int) -> FloatArray:
    """Noise variance in the model after each round: independent noise, equal in every round."""
    return np.asarray(math.ceil(rounds / separation) * np.arange(1.0, rounds + 1.0))


def banded_noise(rounds: int, separation: int) -> FloatArray:
    """The same with optimised bands (BandMF, `mechanism.noise.CorrelatedNoise`), as many as the separation allows."""
    law = correlated_noise(rounds, separation)
    return law.worst_client * law.model_variance


def best_noise(rounds: int, separation: int) -> FloatArray:
    """No correlated noise of a trusted server leaves less than this, on average over the rounds (fixed cyclic cohorts).

    The least `tr(S X^-1)` over X with sensitivity at most 1, `S = A'A / T` and A the sums over rounds. By duality it is
    at least

        (tr (S^1/2 U S^1/2)^1/2)^2 / sum_o lambda_o,       U = blocks lambda_o R_o, R_o a correlation matrix,

    one block for each cohort's rounds, and equal at the best U, since the problem is convex. Every U gives a bound, so
    the mean of what is returned is never above the truth; it is found by ascent over `R_o = F F'` with unit rows. The
    noise that belongs to U is `X^-1 = S^-1/2 (S^1/2 U S^1/2)^1/2 S^-1/2`.
    """
    from scipy.optimize import minimize

    sums = np.tril(np.ones((rounds, rounds)))
    values, vectors = np.linalg.eigh(sums.T @ sums / rounds)
    root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    # A = turn S^1/2, with orthogonal columns.
    turn = sums @ (vectors / np.sqrt(values) @ vectors.T)
    cohort = np.arange(rounds) % separation
    same = cohort[:, None] == cohort
    width = math.ceil(rounds / separation)

    def spectrum_at(point: FloatArray) -> tuple[FloatArray, ...]:
        logs, rows = point[:separation], point[separation:].reshape(rounds, width)
        lengths = np.linalg.norm(rows, axis=1)
        unit = rows / lengths[:, None]
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
        blocks = np.where(same, unit @ unit.T, 0.0)
        spectrum, basis = np.linalg.eigh(root @ (shares[cohort][:, None] * blocks) @ root)
        return np.sqrt(np.maximum(spectrum, 1e-26 * spectrum[-1])), basis, shares, blocks, unit, lengths

    def dual(point: FloatArray) -> tuple[float, FloatArray]:
        spectrum, basis, shares, blocks, unit, lengths = spectrum_at(point)
        weights = shares[cohort]
        total = float(spectrum.sum())
        # Half the gradient of the trace in U; weights are constant within a block.
        slope = root @ (basis / spectrum @ basis.T) @ root / 2.0 * same
        by_row = weights[:, None] * 2.0 * (slope @ unit)
        by_row -= np.sum(by_row * unit, axis=1)[:, None] * unit
        by_cohort = np.bincount(cohort, weights=np.sum(slope * blocks, axis=1), minlength=separation)
        by_log = shares * (by_cohort - float(shares @ by_cohort))
        gradient = np.concatenate([by_log, (by_row / lengths[:, None]).reshape(-1)])
        return -math.log(total), -gradient / total

    start = np.eye(width)[np.arange(rounds) // separation] + 0.3 / math.sqrt(width)
    found = minimize(
        dual,
        np.concatenate([np.zeros(separation), start.reshape(-1)]),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 400, "ftol": 1e-9, "gtol": 1e-7},
    )
    spectrum, basis, *_ = spectrum_at(found.x)
    return np.asarray(spectrum.sum() * ((turn @ basis) ** 2 @ spectrum))
