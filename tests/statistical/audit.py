"""An empirical audit of the joint view: the best attack there is, run on the uploads the mechanism makes.

The adversary sees every upload, knows the graph, every variance and every other client's update, and
has the shares its colluders sent or received. It decides whether the victim contributed 0 or a canary of
norm Delta. The best test (Neyman and Pearson) thresholds the log-likelihood ratio, which is linear:

    score = w . (uploads - all that is known),   w = Sigma_H^-1 e_k,

N(0, 1) without the canary and N(mu, 1) with it once scaled, mu = Delta sqrt((Sigma_H^-1)_kk) if the claim
is right. Nothing below uses the package's matrix: `Audit.covariance` adds up the edges anew, and a
`learned` attack estimates it from uploads alone. Bounds come from counts and hold whatever is true.

All coordinates of a round are independent and alike, so a call of `add_shares` with h coordinates is h
independent trials of the one-dimensional mechanism. A canary in `dimension` coordinates takes a block of
as many; the noise is isotropic, so only its projection on the canary matters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from niss.accounting import Plan
from niss.graph import ShareGraph
from niss.mechanism import add_shares
from niss.randomness import SimStream
from niss.views import effective_variance

FloatArray = NDArray[np.float64]

_BATCH = 50_000
_THRESHOLDS = 400


@dataclass(frozen=True)
class Scores:
    """The adversary's score in trials without and with the canary; larger speaks for the canary."""

    without: FloatArray
    present: FloatArray

    def halves(self) -> tuple[Scores, Scores]:
        """Independent halves: one to choose thresholds on, one to count on."""
        return Scores(self.without[::2], self.present[::2]), Scores(self.without[1::2], self.present[1::2])

    def turned(self) -> Scores:
        """The other direction of the claim: 0 takes the part of the canary."""
        return Scores(-self.present, -self.without)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """A round, a victim in it, and who helps the server; additive distortion."""

    graph: ShareGraph
    unit_variance: float
    tau2: ArrayLike
    victim: int
    sensitivity: float
    colluders: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    dimension: int = 1

    @classmethod
    def of_plan(
        cls, plan: Plan, clients: int, *, beacon: bytes = b"audit", victim: int | None = None
    ) -> Audit:
        """A round as the package plans it, equal weights; the victim is the worst protected client."""
        numbers = plan.for_round(
            np.arange(clients),
            weights=np.full(clients, 1.0 / clients),
            records=np.ones(clients),
            beacon=beacon,
        )
        chosen = int(np.argmax(numbers.joint_mu)) if victim is None else victim
        return cls(
            graph=numbers.graph,
            unit_variance=numbers.unit_variance,
            tau2=numbers.tau2,
            victim=chosen,
            sensitivity=float(numbers.sensitivity[chosen]),
        )

    @property
    def residual(self) -> FloatArray:
        return np.asarray(self.tau2) * self.unit_variance * self.graph.in_weight

    @property
    def watched(self) -> NDArray[np.int64]:
        """Honest clients whose uploads arrived."""
        return np.setdiff1d(np.arange(self.graph.size), (*self.colluders, *self.dropped))

    @property
    def seat(self) -> int:
        """The victim's place among the watched clients."""
        return int(np.searchsorted(self.watched, self.victim))

    @property
    def claimed_mu(self) -> float:
        """What the package claims, for the adversary this audit plays."""
        variance = effective_variance(
            self.graph,
            unit_variance=self.unit_variance,
            residual_variance=self.residual,
            colluders=self.colluders,
            dropped=self.dropped,
        )[self.seat]
        return float(self.sensitivity / np.sqrt(variance)) if variance > 0.0 else np.inf

    @property
    def marginal_mu(self) -> float:
        """The paper's view of one upload alone; Delta / sqrt(2 sigma_k^2) on balanced graphs at tau = 0."""
        shares = self.unit_variance * (self.graph.out_weight + self.graph.in_weight)
        return float(self.sensitivity / np.sqrt((shares + self.residual)[self.victim]))

    def covariance(self) -> FloatArray:
        """Covariance of what the adversary does not know, over the watched clients, edge by edge."""
        matrix = np.diag(self.residual)
        for sender, receiver, weight in self._edges(known=False):
            step = np.zeros(self.graph.size)
            step[sender], step[receiver] = 1.0, -1.0
            matrix += self.unit_variance * weight * np.outer(step, step)
        return matrix[np.ix_(self.watched, self.watched)]

    def attack(self) -> FloatArray:
        """w, scaled so that the score has variance 1; where noise cancels wholly, so that Delta moves it by 1."""
        values, vectors = np.linalg.eigh(self.covariance())
        null = vectors[:, values <= 1e-12 * values[-1]]
        exposed = null @ null[self.seat]
        if exposed[self.seat] > 1e-9:
            return np.asarray(exposed / (exposed[self.seat] * self.sensitivity))
        weights = vectors @ (vectors[self.seat] / values)
        return np.asarray(weights / np.sqrt(weights[self.seat]))

    def learned_attack(self, trials: int, stream: SimStream) -> FloatArray:
        """w from the covariance of uploads without canary: an adversary that never heard of the theory."""
        seen = self._seen(trials, stream.child("learning"), canary=False)
        weights = np.linalg.inv(seen @ seen.T / trials)[self.seat]
        return np.asarray(weights / np.sqrt(weights[self.seat]))

    def scores(self, trials: int, stream: SimStream, attack: FloatArray | None = None) -> Scores:
        """Independent trials of the mechanism, `trials` without and as many with the canary."""
        weights = self.attack() if attack is None else attack
        both = []
        for canary in (False, True):
            parts = [
                weights @ self._seen(min(_BATCH, trials - start), stream.child(int(canary), start), canary)
                for start in range(0, trials, _BATCH)
            ]
            both.append(np.concatenate(parts))
        return Scores(*both)

    def _seen(self, trials: int, stream: SimStream, canary: bool) -> FloatArray:
        """Uploads less all that is known, along the canary, one column per trial."""
        generator = stream.child("updates").generator()
        known = generator.normal(size=(self.graph.size, 1)) * np.ones(trials * self.dimension)
        known[self.victim] = 0.0
        direction = generator.normal(size=self.dimension)
        direction /= np.linalg.norm(direction)
        uploads = known.copy()
        uploads[self.victim] += canary * self.sensitivity * np.tile(direction, trials)
        self._add(uploads, self.graph, self.tau2, stream)
        # The colluders' shares again: an edge draws the same numbers whatever other edges there are.
        self._add(known, ShareGraph(self.graph.size, self._edges(known=True)), 0.0, stream)
        unknown = (uploads - known)[self.watched]
        return np.asarray(unknown.reshape(self.watched.size, trials, self.dimension) @ direction)

    def _add(self, uploads: FloatArray, graph: ShareGraph, tau2: ArrayLike, stream: SimStream) -> None:
        add_shares(
            uploads,
            graph,
            unit_variance=self.unit_variance,
            tau2=tau2,
            distortion="additive",
            stream=stream.child("noise"),
        )

    def _edges(self, *, known: bool) -> list[tuple[int, int, float]]:
        """The edges with a colluder at an end, or the others."""
        rows = zip(self.graph.senders, self.graph.receivers, self.graph.weights, strict=True)
        return [
            (int(sender), int(receiver), float(weight))
            for sender, receiver, weight in rows
            if (sender in self.colluders or receiver in self.colluders) == known
        ]


def composed(rounds: Iterable[Scores], mus: Iterable[float]) -> Scores:
    """The product of the rounds' likelihood ratios, scaled: the same canary present in all or in none."""
    strengths = np.array(list(mus))
    without, present = zip(*((each.without, each.present) for each in rounds), strict=True)
    scale = np.linalg.norm(strengths)
    return Scores(strengths @ np.stack(without) / scale, strengths @ np.stack(present) / scale)


def rates(scores: Scores, thresholds: ArrayLike, failure: float) -> tuple[FloatArray, FloatArray]:
    """Exact (Clopper-Pearson) bounds at each threshold: true positives from below, false ones from above.

    Both hold at a given threshold except with probability `failure`.
    """
    levels = np.asarray(thresholds, dtype=np.float64)
    hits = scores.present.size - np.searchsorted(np.sort(scores.present), levels)
    alarms = scores.without.size - np.searchsorted(np.sort(scores.without), levels)
    spared = scores.without.size - alarms
    # At no hit, or no trial spared, the beta distribution degenerates and the bound is 0 or 1.
    low = stats.beta.ppf(failure / 2, np.maximum(hits, 1), scores.present.size - hits + 1)
    high = stats.beta.isf(failure / 2, alarms + 1, np.maximum(spared, 1))
    return np.where(hits == 0, 0.0, low), np.where(spared == 0, 1.0, high)


def candidates(scores: Scores) -> FloatArray:
    """Thresholds worth trying: evenly spaced over all scores."""
    low, high = (extreme(np.r_[scores.without, scores.present]) for extreme in (np.min, np.max))
    return np.linspace(low, high, _THRESHOLDS)


def delta_bounds(scores: Scores, epsilons: ArrayLike, failure: float) -> FloatArray:
    """Lower bounds of delta at each epsilon: TPR - e^eps FPR at the best threshold.

    The threshold is chosen on one half and the rates bounded on the other. All bounds hold together
    except with probability `failure` (Bonferroni over the grid).
    """
    grid = np.asarray(epsilons, dtype=np.float64)
    rate = failure / grid.size
    choosing, counting = scores.halves()
    tried = candidates(choosing)
    hits, alarms = rates(choosing, tried, rate)
    chosen = tried[np.argmax(hits - np.exp(grid)[:, None] * alarms, axis=1)]
    hits, alarms = rates(counting, chosen, rate)
    return np.asarray(hits - np.exp(grid) * alarms)


def epsilon_bound(scores: Scores, delta: float, failure: float) -> float:
    """A lower bound of epsilon at `delta`, wrong with probability at most `failure`; threshold as above."""
    choosing, counting = scores.halves()
    tried = candidates(choosing)
    hits, alarms = rates(choosing, tried, failure)
    threshold = tried[np.argmax((hits - delta) / alarms)]
    hits, alarms = rates(counting, threshold, failure)
    return float(np.log(max(float(hits) - delta, 1e-300) / float(alarms)))


def mu_interval(scores: Scores, failure: float) -> tuple[float, float, float]:
    """Measured mu (shift over spread) between bounds that fail with probability at most `failure`.

    Exact for Gaussian scores of equal spread, which sums of Gaussians are: a normal interval for the
    shift and a chi-square interval for the spread, `failure / 2` each.
    """
    trials = scores.without.size
    freedom = 2 * trials - 2
    squares = trials * (np.var(scores.without) + np.var(scores.present))
    spread = np.sqrt(squares / freedom)
    narrow, wide = np.sqrt(squares / stats.chi2.isf([failure / 4, 1.0 - failure / 4], freedom))
    shift = float(np.mean(scores.present) - np.mean(scores.without))
    slack = stats.norm.isf(failure / 4) * np.sqrt(2.0 / trials)
    return float(shift / wide - slack), float(shift / spread), float(shift / narrow + slack)
