"""An audit by canaries: a lower bound on epsilon from what the best attack really achieves.

In every trial the victim of a round sends either nothing or a canary, an update as large as the clip allows. The
adversary estimates the victim's update from all uploads and scores it by its product with the canary; large scores
speak for the canary. If the mechanism is (epsilon, delta)-DP, every such test has

    true-positive rate <= exp(epsilon) * false-positive rate + delta,

so that rates measured over many rounds, with Clopper and Pearson's exact limits, bound epsilon from below. The
threshold is chosen on one half of the rounds and counted on the other, so the bound holds with the stated
confidence whatever the truth is.

The noise is independent between coordinates, so one call of the mechanism with n times d coordinates is n rounds of
d coordinates on the same graph.

Where single records are hidden, the canary is a record of a silo, there or left out, in a round of the real protocol
(`record_scores`). Its silo draws it with probability q, so that what is claimed is a slot (`Claim`).

Of whole runs (`niss.attacks.runs`) what the scores show of mu is measured, beside the exact one (`measure_mu`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta, norm

from niss.accounting import Plan, RoundPlan
from niss.attacks.estimates import FloatArray, Observation, estimate_jointly
from niss.attacks.experiment import Step
from niss.attacks.lying import guess_sum
from niss.attacks.rounds import add_noise
from niss.mechanism import Slots
from niss.randomness import SimStream
from niss.records import LinearRegression, Records

_BLOCK = 5_000
_THRESHOLDS = 400
_RATES = 60
# Canaries of a run that are there, and as many left out; records beside them in each silo; how far they miss their
# labels, in clips.
ABREAST, _OTHERS, _MISSED = 10, 5, 10.0


@dataclass(frozen=True)
class CanaryScores:
    """The adversary's scores in rounds, or runs, without the canary and in those where it is present."""

    without: FloatArray
    present: FloatArray


@dataclass(frozen=True)
class Claim:
    """What is claimed of a round: no test between there and not there is better than for a slot (q, 1 / mu)."""

    mu: float
    batch: float = 1.0

    def epsilon(self, delta: float) -> float:
        """At that delta; infinite where nothing is hidden."""
        return Slots.of((self.batch, 1.0 / self.mu, 1)).epsilon(delta)

    def most(self, alarms: FloatArray) -> FloatArray:
        """The best true-positive rates at these false-positive rates: (1 - q) a + q Phi(Phi^-1(a) + mu)."""
        found = norm.cdf(norm.ppf(alarms) + self.mu) if math.isfinite(self.mu) else np.ones(alarms.size)
        return np.asarray((1.0 - self.batch) * alarms + self.batch * found)


NOTHING = Claim(math.inf)


@dataclass(frozen=True)
class AuditBound:
    """What an audit proves.

    true_positive    part of the rounds with the canary whose score exceeds the threshold
    false_positive   part of the rounds without it whose score does
    proved           the least epsilon that is consistent with both rates
    counted          rounds of each kind that were counted, none of them used to choose the threshold
    excess           by how much the true-positive rate is proved to be above what is claimed; 0 or less: it may be true
    """

    true_positive: float
    false_positive: float
    proved: float
    counted: int
    excess: float


def canary_scores(
    plan: RoundPlan,
    victim: int,
    *,
    dimension: int,
    rounds: int,
    stream: SimStream,
    progress: Step | None = None,
) -> CanaryScores:
    """Play rounds without and with a canary, and attack each with the best linear estimate.

    plan        of every round
    victim      the seat that sends the canary
    dimension   coordinates of the canary, whose L2 norm is the plan's clip
    rounds      as many without and as many with it
    """
    size = plan.participants.size
    share = np.full(size, 1.0 / size)
    direction = stream.child("canary").generator().standard_normal(dimension)
    canary = plan.plan.clip * direction / np.sqrt(np.sum(direction**2))
    guesses: dict[bool, list[FloatArray]] = {False: [], True: []}
    for start in range(0, rounds, _BLOCK):
        count = min(_BLOCK, rounds - start)
        nothing = np.zeros(count * dimension)
        known = {seat: nothing for seat in range(size) if seat != victim}
        for present in (False, True):
            # So many rounds side by side; everyone but the victim sends nothing that is not known.
            uploads = np.zeros((size, nothing.size))
            uploads[victim] = share[victim] * np.tile(canary * present, count)
            add_noise(uploads, plan, stream.child(int(present), start))
            seen = Observation(uploads=uploads, plan=plan, share=share, known_updates=known)
            guess = estimate_jointly(seen, victim).update.reshape(count, dimension)
            guesses[present].append(guess @ canary)
        if progress is not None:
            progress(start + count, rounds, "")
    return CanaryScores(np.concatenate(guesses[False]), np.concatenate(guesses[True]))


def record_scores(
    plan: Plan,
    size: int,
    *,
    dimension: int,
    rounds: int,
    stream: SimStream,
    progress: Step | None = None,
    abreast: int = ABREAST,
) -> tuple[CanaryScores, float]:
    """Play runs of the real protocol, attack each with the best linear estimate; the scores, and the mu of each charge.

    A linear regression with an output for each canary: it misses its label there by far, and all other records fit, so
    that canaries are trials side by side, each with coordinates, coin and noise of its own. Every run has new nodes,
    keys and ledgers.

    plan       for one round that hides records
    size       how many silos, the first with the canaries
    dimension  coordinates of a canary's gradient
    rounds     canaries that are there, and as many that are left out, `abreast` of each in a run
    """
    features = stream.child("canary").generator().standard_normal(dimension - 1)
    model, outputs = LinearRegression(dimension - 1, 2 * abreast), np.arange(2 * abreast)
    direction = plan.clip * np.append(features, 1.0) / math.hypot(1.0, *features)

    def silo(there: NDArray[np.int64]) -> Records:
        labels = np.zeros((there.size + _OTHERS, outputs.size))
        labels[np.arange(there.size), there] = _MISSED * plan.clip
        return Records(model, (np.tile(features, (len(labels), 1)), labels), chunk=len(labels))

    others, runs = [silo(outputs[:0])] * (size - 1), math.ceil(rounds / abreast)
    weights, found, charged = np.zeros(outputs.size * dimension), [], 0.0
    for number in range(runs):
        # The halves take turns.
        halves = np.roll(outputs, number % 2 * abreast).reshape(2, abreast)
        guess, charged = guess_sum(plan, [silo(halves[0]), *others], weights, stream.child("run", number))
        slopes, biases = np.split(guess, [outputs.size * features.size])
        scores = np.column_stack([slopes.reshape(outputs.size, -1), biases]) @ direction
        found.append(scores[halves])
        if progress is not None:
            progress(number + 1, runs, "")
    present, without = np.concatenate(found, axis=1)
    return CanaryScores(without, present), charged


def epsilon_bound(
    scores: CanaryScores, delta: float, confidence: float, claim: Claim = NOTHING
) -> AuditBound:
    """A lower bound on epsilon at `delta` that holds with probability `confidence`; 0 where nothing is proved.

    Half of the rounds choose the threshold with the best bound, the other half are counted there: a bound on the same
    rounds would be the largest of many and hold with less confidence. Each of the two rates may fail its limit (Clopper
    and Pearson's) with probability (1 - confidence) / 2. What exceeds the claim is bounded alike, at a threshold of its
    own.
    """
    failure = (1.0 - confidence) / 2.0
    both = np.concatenate([scores.without[::2], scores.present[::2]])
    levels = np.concatenate([np.linspace(0.0, 1.0, _THRESHOLDS), 1.0 - np.geomspace(0.5, 1e-6, _THRESHOLDS)])
    tried = np.unique(np.quantile(both, levels))
    # Between two neighbouring scores any threshold counts alike; the middle is safest for new rounds.
    tried = (tried[1:] + tried[:-1]) / 2.0 if tried.size > 1 else tried

    def bounds(start: int, thresholds: FloatArray) -> tuple[FloatArray, ...]:
        """Of every second round: both rates at each threshold, the epsilon they prove (-inf: none), the excess."""
        without, present = np.sort(scores.without[start::2]), np.sort(scores.present[start::2])
        hits = present.size - np.searchsorted(present, thresholds, side="right")
        alarms = without.size - np.searchsorted(without, thresholds, side="right")
        low, _ = clopper_pearson(hits, present.size, failure)
        _, high = clopper_pearson(alarms, without.size, failure)
        with np.errstate(divide="ignore"):
            proved = np.log(np.maximum(low - delta, 0.0) / high)
        return hits / present.size, alarms / without.size, np.asarray(proved), low - claim.most(high)

    *_, proved, excess = bounds(0, tried)
    chosen = tried[[int(np.argmax(proved)), int(np.argmax(excess))]]
    hits, alarms, proved, excess = bounds(1, chosen)
    best = max(0.0, float(proved[0]))
    return AuditBound(float(hits[0]), float(alarms[0]), best, scores.present[1::2].size, float(excess[1]))


def clopper_pearson(successes: ArrayLike, trials: int, failure: float) -> tuple[FloatArray, FloatArray]:
    """Exact limits of a probability, each wrong with probability at most `failure` (Clopper and Pearson, 1934)."""
    count = np.asarray(successes, dtype=np.float64)
    low = np.where(count > 0, beta.ppf(failure, np.maximum(count, 1.0), trials - count + 1), 0.0)
    high = np.where(count < trials, beta.isf(failure, count + 1, np.maximum(trials - count, 1.0)), 1.0)
    return low, high


def rates(scores: CanaryScores, claim: Claim) -> dict[str, list[float]]:
    """True- over false-positive rates as measured, and the most that the claim allows."""
    alarms = np.geomspace(10.0 / scores.without.size, 1.0 - 1e-9, _RATES)
    thresholds = np.quantile(scores.without, 1.0 - alarms)
    hits = [float(np.mean(scores.present > level)) for level in thresholds]
    return {
        "false_positive": alarms.tolist(),
        "true_positive": hits,
        "most": claim.most(alarms).tolist(),
    }


@dataclass(frozen=True)
class MeasuredMu:
    """What scores show of mu.

    measured   the distance of their means in deviations
    low, high  its interval at the wanted confidence
    proved     a lower bound from error rates alone, whatever the scores are distributed like
    """

    measured: float
    low: float
    high: float
    proved: float


def measure_mu(scores: CanaryScores, confidence: float) -> MeasuredMu:
    """mu from the two distributions of scores.

    The interval is that of a standardised difference of two normal means with n scores each, of variance
    `2 / n + mu^2 / (4 n)`. The bound takes a threshold from one half of the scores and counts on the other, with
    Clopper and Pearson's limits: `Phi^-1(true positives) - Phi^-1(false positives)`.
    """
    without, present, failure = scores.without, scores.present, (1.0 - confidence) / 2.0
    count = without.size
    spread = math.sqrt((without.var(ddof=1) + present.var(ddof=1)) / 2.0)
    mu = float(present.mean() - without.mean()) / spread
    width = float(norm.isf(failure)) * math.sqrt(2.0 / count + mu**2 / (4.0 * count))
    threshold = (without[::2].mean() + present[::2].mean()) / 2.0
    hits, alarms = (np.sum(one[1::2] > threshold) for one in (present, without))
    low, _ = clopper_pearson(hits, present[1::2].size, failure)
    _, high = clopper_pearson(alarms, without[1::2].size, failure)
    proved = float(norm.ppf(low) - norm.ppf(high))
    return MeasuredMu(mu, mu - width, mu + width, max(proved, 0.0))
