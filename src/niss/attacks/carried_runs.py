"""Runs with carried shares as a server sees them: which noise is in which upload, and what tells a client apart.

Everything is taken from the edges, one column for each noise that the adversary does not know; nothing comes from the
accountant, whose claims are attacked. Write N for the matrix (uploads x noises) and d for what the victim adds to its
uploads, one `Delta` in each of its rounds. A server that combines the uploads with the weights q tells whether the
victim took part with

    mu(q) = q'd / |N'q|,     at most     sqrt(d' (N N')^-1 d),

which the likelihood ratio reaches with `q = (N N')^-1 d` (Neyman and Pearson; the noise is Gaussian).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse import csr_array
from scipy.stats import norm

from niss.accounting import Committed
from niss.attacks.canary import clopper_pearson
from niss.graph import ShareGraph
from niss.randomness import SimStream
from niss.views import RoundNoise, RunNoise

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

NOBODY = -1
_BLOCK = 200


@dataclass(frozen=True)
class Shares:
    """Noises that more than one upload may hold: upload `added` holds n, `taken` and `again` hold -n.

    Uploads are numbered as in `SeenRun`, `NOBODY` is none; `again` is the second upload of which a share is subtracted,
    which the rules forbid. `carried` marks those between rounds.
    """

    added: IntArray
    taken: IntArray
    again: IntArray
    variance: FloatArray
    carried: BoolArray

    def chosen(self, which: BoolArray) -> Shares:
        """Some of them."""
        return Shares(
            self.added[which],
            self.taken[which],
            self.again[which],
            self.variance[which],
            self.carried[which],
        )

    def and_also(self, other: Shares) -> Shares:
        """Both together."""
        return Shares(
            np.concatenate([self.added, other.added]),
            np.concatenate([self.taken, other.taken]),
            np.concatenate([self.again, other.again]),
            np.concatenate([self.variance, other.variance]),
            np.concatenate([self.carried, other.carried]),
        )

    def apart(self, which: BoolArray) -> Shares:
        """The same, but sender and receiver of `which` hold independent noises instead of one: nothing cancels."""
        split = self.chosen(which)
        nobody = np.full(split.added.size, NOBODY)
        return (
            self.chosen(~which)
            .and_also(replace(split, taken=nobody, again=nobody))
            .and_also(replace(split, added=nobody))
        )


@dataclass(frozen=True)
class SeenRun:
    """All honest uploads of a run, and the noise in them that the adversary does not know.

    clients, rounds   whose upload it is, and of which round
    residual          variance of the fresh noise of each upload
    """

    clients: IntArray
    rounds: IntArray
    residual: FloatArray
    shares: Shares

    @cached_property
    def noise(self) -> csr_array:
        """N, deviations included; the last columns are the fresh noise."""
        shares, size = self.shares, self.clients.size
        deviation, columns = np.sqrt(shares.variance), np.arange(shares.variance.size)
        held = [(shares.added, deviation), (shares.taken, -deviation), (shares.again, -deviation)]
        rows, places, values = [np.arange(size)], [columns.size + np.arange(size)], [np.sqrt(self.residual)]
        for uploads, signed in held:
            there = uploads != NOBODY
            rows.append(uploads[there])
            places.append(columns[there])
            values.append(signed[there])
        entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(places)))
        return csr_array(entries, shape=(size, columns.size + size))

    def move(self, client: int) -> FloatArray:
        """d: what the client may add to its uploads, in units of their sensitivity."""
        return np.where(self.clients == client, 1.0, 0.0)

    @cached_property
    def _factor(self) -> tuple[FloatArray, bool]:
        factor: tuple[FloatArray, bool] = cho_factor((self.noise @ self.noise.T).toarray(), lower=True)
        return factor

    def best_weights(self, client: int) -> FloatArray:
        """q of the likelihood ratio."""
        return np.asarray(cho_solve(self._factor, self.move(client)))

    def mu(self, client: int, weights: FloatArray | None = None) -> float:
        """What these weights tell, or the likelihood ratio where none are given."""
        chosen = self.best_weights(client) if weights is None else weights
        spread = float(np.linalg.norm(self.noise.T @ chosen))
        return float(chosen @ self.move(client)) / spread

    def with_shares(self, shares: Shares) -> SeenRun:
        """The same uploads with other noise in them."""
        return replace(self, shares=shares)

    def knowing(self, known: BoolArray) -> SeenRun:
        """The same where the adversary knows some of the shares."""
        return self.with_shares(self.shares.chosen(~known))

    def only(self, kept: BoolArray) -> SeenRun:
        """The same where other uploads never arrived; their shares stay with the uploads that did."""
        numbers = np.append(np.where(kept, np.cumsum(kept) - 1, NOBODY), NOBODY)
        shares = self.shares
        ends = replace(
            shares, added=numbers[shares.added], taken=numbers[shares.taken], again=numbers[shares.again]
        )
        held = (ends.added != NOBODY) | (ends.taken != NOBODY) | (ends.again != NOBODY)
        return SeenRun(self.clients[kept], self.rounds[kept], self.residual[kept], ends.chosen(held))

    def against(self, colluders: Collection[int]) -> SeenRun:
        """The same for a server with these clients on its side: their uploads and all their shares are known."""
        theirs = np.append(np.isin(self.clients, list(colluders)), False)
        shares = self.shares
        return self.knowing(theirs[shares.added] | theirs[shares.taken]).only(~theirs[:-1])

    def round_of(self, uploads: IntArray) -> IntArray:
        """The round of each upload; -1 for nobody."""
        return np.append(self.rounds, NOBODY)[uploads]

    def carried_from(self, rounds: Iterable[int]) -> BoolArray:
        """Which shares are carried from these rounds to the next."""
        return np.asarray(self.shares.carried & np.isin(self.round_of(self.shares.added), list(rounds)))


def see_run(run: RunNoise) -> SeenRun:
    """What a server without colluders does not know of a run in which everybody keeps to the rules."""
    sizes = [len(one.clients) for one in run.rounds]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    parts = []
    for number, one in enumerate(run.rounds):
        graphs = [(one.shares, one.unit_variance)]
        if one.carried is not None:
            graphs.append(one.carried)
        for graph, variance in graphs:
            parts.append(
                Shares(
                    graph.senders + starts[number],
                    graph.receivers + starts[number + graph.between],
                    np.full(graph.senders.size, NOBODY),
                    variance * graph.weights,
                    np.full(graph.senders.size, graph.between),
                )
            )
    shares = parts[0]
    for part in parts[1:]:
        shares = shares.and_also(part)
    fresh = [np.broadcast_to(np.asarray(one.residual, float), len(one.clients)) for one in run.rounds]
    return SeenRun(
        np.concatenate([np.array(one.clients, dtype=np.int64) for one in run.rounds]),
        np.repeat(np.arange(len(sizes)), sizes),
        np.concatenate(fresh),
        shares,
    )


def cyclic_cohorts(plan: Committed) -> list[list[int]]:
    """Fixed cohorts in turn: client k sits in seat k % m of every round that falls to its cohort."""
    m, b = plan.noise.participants, plan.separation
    return [[m * (number % b) + seat for seat in range(m)] for number in range(plan.horizon)]


def play_run(plan: Committed, cohorts: Sequence[Sequence[int]]) -> RunNoise:
    """A run with the plan's noise: everyone shares with everyone, within a round and with the next."""
    noise, rounds = plan.noise, []
    size = noise.participants
    for number, cohort in enumerate(cohorts):
        onward = None
        if noise.carried and number + 1 < plan.rounds:
            onward = ShareGraph.complete((size, size)), noise.carried / size
        rounds.append(
            RoundNoise(tuple(cohort), ShareGraph.complete(size), noise.unit, noise.residual, onward)
        )
    return RunNoise(tuple(rounds))


def added_up(seen: SeenRun, rounds: Iterable[int]) -> FloatArray:
    """Weights that add up all uploads of these rounds."""
    return np.isin(seen.rounds, list(rounds)).astype(np.float64)


@dataclass(frozen=True)
class MeasuredMu:
    """What scores of runs with and without the victim's data show of mu.

    mu         the distance of their means in deviations
    low, high  its interval at the wanted confidence
    proved     a lower bound from error rates alone, whatever the scores are distributed like
    """

    mu: float
    low: float
    high: float
    proved: float


def one_thread() -> AbstractContextManager[object]:
    """Matrices of some hundred rows: more threads of the linear algebra only wait for each other."""
    try:
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError:
        return nullcontext()
    limits: AbstractContextManager[object] = threadpool_limits(limits=1)
    return limits


def play_scores(
    seen: SeenRun,
    client: int,
    weights: Sequence[FloatArray],
    *,
    runs: int,
    stream: SimStream,
    progress: Callable[[int, int, str], None],
) -> tuple[FloatArray, FloatArray]:
    """Scores q'y of whole runs, one row for each q of `weights`: without the victim's data, and with it.

    Every noise of every run is drawn, and the uploads are put together from them.
    """
    noise = seen.noise.astype(np.float32)
    move = seen.move(client)
    chosen = np.stack(weights)
    scores = [np.empty((len(chosen), runs)) for _ in range(2)]
    for start in range(0, runs, _BLOCK):
        count = min(_BLOCK, runs - start)
        for present, row in enumerate(scores):
            drawn = stream.child(present, start).generator().standard_normal((noise.shape[1], count), "f4")
            uploads = noise @ drawn + present * move[:, None]
            row[:, start : start + count] = chosen @ uploads
        progress(start + count, runs, "")
    return scores[0], scores[1]


def measure_mu(without: FloatArray, present: FloatArray, confidence: float) -> MeasuredMu:
    """mu from the two distributions of scores.

    The interval is that of a standardised difference of two normal means with n scores each, of variance
    `2 / n + mu^2 / (4 n)`. The bound takes a threshold from one half of the scores and counts on the other, with
    Clopper and Pearson's limits: `Phi^-1(true positives) - Phi^-1(false positives)`.
    """
    count = without.size
    spread = math.sqrt((without.var(ddof=1) + present.var(ddof=1)) / 2.0)
    mu = float(present.mean() - without.mean()) / spread
    width = float(norm.isf((1.0 - confidence) / 2.0)) * math.sqrt(2.0 / count + mu**2 / (4.0 * count))
    threshold = (without[::2].mean() + present[::2].mean()) / 2.0
    hits, alarms = np.sum(present[1::2] > threshold), np.sum(without[1::2] > threshold)
    failure = (1.0 - confidence) / 2.0
    low, _ = clopper_pearson(hits, present[1::2].size, failure)
    _, high = clopper_pearson(alarms, without[1::2].size, failure)
    proved = float(norm.ppf(low) - norm.ppf(high))
    return MeasuredMu(mu, mu - width, mu + width, max(proved, 0.0))
