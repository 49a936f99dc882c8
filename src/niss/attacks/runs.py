"""Whole runs as a server sees them, and servers that bend the rules of a run; all numbers here are exact.

Everything is taken from the edges of the run, whether they carry noise to the next round or not; nothing comes from the
accountant, whose claims are attacked. Write N for the matrix (uploads x noises that the adversary does not know) and d
for what the victim adds to its uploads, one `Delta` in each of its rounds. A server that combines the uploads with the
weights q tells whether the victim took part with

    mu(q) = q'd / |N'q|,     at most     sqrt(d' (N N')^-1 d),

which the likelihood ratio reaches with `q = (N N')^-1 d` (Neyman and Pearson; the noise is Gaussian).

`SERVERS` lists the servers. Each returns what the likelihood ratio tells of the victim where its rule is off and where
it is on, beside what the victim was charged. A server that breaks a rule turns the run into another one, so that
`niss.views.run_mu2` knows what it reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse import csr_array

from niss.accounting import Committed
from niss.accounting.committed import spent_in
from niss.attacks.canary import CanaryScores
from niss.attacks.estimates import FloatArray
from niss.attacks.experiment import Step
from niss.errors import PrivacyError
from niss.graph import ShareGraph
from niss.randomness import SimStream
from niss.views import CompleteRun, RoundNoise, RunNoise, run_mu2

_RUNS = 200
Cohorts = list[list[int]]
Vertex = tuple[int, int]


@dataclass(frozen=True)
class SeenRun:
    """All honest uploads of a run, and the noises in them that the adversary does not know.

    clients, rounds   whose upload it is, and of which round
    noise             N, deviations included
    """

    clients: NDArray[np.int64]
    rounds: NDArray[np.int64]
    noise: csr_array

    @classmethod
    def of(cls, run: RunNoise, colluders: Collection[int] = ()) -> SeenRun:
        """A run in which everybody keeps to the rules, for a server with these clients on its side."""
        clients, rounds = np.array(list(run.places)).T
        honest, graph = ~np.isin(clients, list(colluders)), run.graph
        hidden = np.flatnonzero(honest[graph.senders] & honest[graph.receivers])
        # Round by round, shares that stay before those that are carried on.
        started, ended = (rounds[ends[hidden]] for ends in (graph.senders, graph.receivers))
        hidden = hidden[np.argsort(started + ended, kind="stable")]
        senders, receivers = graph.senders[hidden], graph.receivers[hidden]
        deviations = np.sqrt(graph.weights[hidden])
        fresh, shares = np.flatnonzero(honest), np.arange(deviations.size)
        rows = np.concatenate([senders, receivers, fresh])
        columns = np.concatenate([shares, shares, shares.size + np.arange(fresh.size)])
        values = np.concatenate([deviations, -deviations, np.sqrt(run.residual[honest])])
        noise = csr_array((values, (rows, columns)), shape=(clients.size, shares.size + fresh.size))
        return cls(clients[honest], rounds[honest], noise[fresh])

    def move(self, client: int) -> FloatArray:
        """d: what the client may add to its uploads, in units of their sensitivity."""
        return np.where(self.clients == client, 1.0, 0.0)

    def best_weights(self, client: int) -> FloatArray:
        """q of the likelihood ratio."""
        factor = cho_factor((self.noise @ self.noise.T).toarray(), lower=True)
        return np.asarray(cho_solve(factor, self.move(client)))

    def mu(self, client: int, weights: FloatArray) -> float:
        """What these weights tell."""
        return float(weights @ self.move(client)) / float(np.linalg.norm(self.noise.T @ weights))

    def added_up(self, rounds: Iterable[int]) -> FloatArray:
        """Weights that add up all uploads of these rounds."""
        return np.isin(self.rounds, list(rounds)).astype(np.float64)

    def scores(
        self,
        victim: int,
        weights: Mapping[str, FloatArray],
        *,
        runs: int,
        stream: SimStream,
        progress: Step | None = None,
    ) -> dict[str, CanaryScores]:
        """Scores q'y of whole runs, for each q of `weights`; the victim's data is the canary.

        Every noise of every run is drawn, and the uploads are put together from them.
        """
        noise, move, chosen = self.noise.astype("f4"), self.move(victim), np.stack(list(weights.values()))
        without, present = (np.empty((len(chosen), runs)) for _ in range(2))
        for start in range(0, runs, _RUNS):
            count = min(_RUNS, runs - start)
            for there, scores in enumerate((without, present)):
                drawn = stream.child(there, start).generator().standard_normal((noise.shape[1], count), "f4")
                scores[:, start : start + count] = chosen @ (noise @ drawn + there * move[:, None])
            if progress is not None:
                progress(start + count, runs, "")
        return {name: CanaryScores(without[place], present[place]) for place, name in enumerate(weights)}


@dataclass(frozen=True)
class Pair:
    """mu that is reached of a client, and mu that the client was charged."""

    reached: float
    charged: float

    @property
    def ratio(self) -> float:
        return self.reached / self.charged


def _worst(pairs: Iterable[Pair]) -> Pair:
    return max(pairs, key=lambda pair: pair.ratio)


def play_run(plan: Committed, cohorts: Cohorts, broken: Collection[int] = ()) -> RunNoise:
    """A run with the plan's noise: everyone shares with everyone, within a round and with the next.

    broken   places of cohorts after which nothing is carried on
    """
    noise, rounds = plan.noise, []
    size = noise.participants
    for place, cohort in enumerate(cohorts):
        onward = None
        if noise.carried and place + 1 < len(cohorts) and place not in broken:
            onward = ShareGraph.complete((size, size)), noise.carried / size
        rounds.append(
            RoundNoise(tuple(cohort), ShareGraph.complete(size), noise.unit, noise.residual, onward)
        )
    return RunNoise(tuple(rounds))


@dataclass(frozen=True)
class CyclicRun:
    """A run on complete graphs in fixed cohorts, and its victim: a client with the costliest of all patterns."""

    plan: Committed

    @property
    def cohorts(self) -> Cohorts:
        """In turn: client k sits in seat k % m of every round that falls to its cohort."""
        m, b = self.plan.noise.participants, self.plan.separation
        return [[m * (number % b) + seat for seat in range(m)] for number in range(self.plan.horizon)]

    @cached_property
    def honest(self) -> RunNoise:
        """The run as it is where everybody keeps to the rules."""
        return play_run(self.plan, self.cohorts)

    @cached_property
    def visits(self) -> tuple[int, ...]:
        """The rounds of the victim."""
        return self.plan.worst.rounds

    @property
    def victim(self) -> int:
        """The first client of its cohort."""
        return self.cohorts[self.visits[0]][0]

    @property
    def colluders(self) -> list[int]:
        """The last seats of every cohort, as many as the plan takes to be known; never the victim."""
        m = self.plan.noise.participants
        return [
            client for client in range(m * self.plan.separation) if client % m >= m - self.plan.noise.known
        ]

    @cached_property
    def claimed(self) -> float:
        """mu that a client of the victim's cohort is charged for the whole run, round by round."""
        costs = (self.plan.charge(number, self.visits[:place]) for place, number in enumerate(self.visits))
        return math.sqrt(math.fsum(costs))

    def visits_of(self, cohort: int) -> range:
        """The rounds of a cohort."""
        return range(cohort, self.plan.horizon, self.plan.separation)

    def followers(self) -> Iterator[tuple[int, range, list[int]]]:
        """Clients, their rounds, and rounds before those that a server may tamper with: one, or all."""
        for cohort in range(self.plan.separation):
            before = [t - 1 for t in self.visits_of(cohort) if t > 0]
            for chosen in (before, *([number] for number in before)):
                yield self.cohorts[cohort][0], self.visits_of(cohort), chosen

    def charged(self, rounds: Sequence[int]) -> float:
        """mu that these participations are charged."""
        return math.sqrt(spent_in(self.plan.matrix, rounds))

    def of_victim(self, run: RunNoise, colluders: Collection[int] = ()) -> Pair:
        """What the likelihood ratio tells of the victim, beside what it is charged for the whole run."""
        return Pair(reached_mu(run, colluders=colluders)[self.victim], self.claimed)

    def against_colluders(self) -> Pair:
        """The same where as many clients of each round collude as the plan assumes."""
        return self.of_victim(self.honest, self.colluders)

    def uploads_in(self, rounds: Iterable[int]) -> list[Vertex]:
        """All (client, round) of these rounds."""
        return [(client, number) for number in rounds for client in self.cohorts[number]]


def reached_mu(
    run: RunNoise, *, colluders: Collection[int] = (), dropped: Collection[Vertex] = ()
) -> dict[int, float]:
    """What the likelihood ratio over all uploads that arrived tells of each honest client."""
    found = run_mu2(run, colluders=colluders, dropped=dropped)
    return {client: math.sqrt(mu2) for client, mu2 in found.items()}


@dataclass(frozen=True)
class ServerGain:
    """What a server gets with the rule off and on, and how the rule ends it."""

    off: Pair
    on: Pair
    ending: str


# A server, given the run, the same under a plan that allows for colluders, and under one for clients called dropped.
Server = Callable[[CyclicRun, CyclicRun, CyclicRun], ServerGain]


def end_early(run: CyclicRun, _colluding: CyclicRun, _dropping: CyclicRun) -> ServerGain:
    """Ends the run after any round. Rule: all carry shares on unless the committed last round has come."""
    cut, bare = [], []
    for end in range(1, run.plan.horizon):
        ended = reached_mu(play_run(run.plan, run.cohorts[:end]))
        onward = play_run(run.plan, run.cohorts[: end + 1])
        carrying = reached_mu(onward, dropped=run.uploads_in([end]))
        for cohort in range(min(run.plan.separation, end)):
            client = run.cohorts[cohort][0]
            paid = run.charged([t for t in run.visits_of(cohort) if t < end])
            bare.append(Pair(ended[client], paid))
            cut.append(Pair(carrying[client], paid))
    return ServerGain(_worst(bare), _worst(cut), "less is seen than was charged")


def repeat_rounds(run: CyclicRun, _colluding: CyclicRun, _dropping: CyclicRun) -> ServerGain:
    """Goes on from a repeated round, which took nothing out, to those who come next.

    What the first attempt carried on is never taken out; the second begins anew, and rounds after it hide less. Rule:
    all charges after it are made for the chain as it then is.
    """
    off, on, noise = [], [], run.plan.noise
    for client, visits, repeated in run.followers():
        attempts = [t for t in range(run.plan.horizon) for _ in range(1 + (t in repeated))]
        first = [place for place, t in enumerate(attempts[:-1]) if attempts[place + 1] == t]
        rounds = list(play_run(run.plan, [run.cohorts[t] for t in attempts], first).rounds)
        for place in first:
            rounds[place] = replace(rounds[place], residual=noise.residual + noise.carried)
        reached = reached_mu(RunNoise(tuple(rounds)))[client]
        off.append(Pair(reached, run.charged(visits)))
        on.append(Pair(reached, _charged_anew(run.plan, attempts, first, visits)))
    return ServerGain(_worst(off), _worst(on), "charged as a new beginning")


def _charged_anew(
    plan: Committed, attempts: Sequence[int], first: Collection[int], visits: Sequence[int]
) -> float:
    """mu for `visits` in a chain of attempts that breaks off after those at the places `first`."""
    noise = plan.noise
    carried = np.full(len(attempts) - 1, noise.carried / noise.residual)
    carried[list(first)] = 0.0
    view = CompleteRun(noise.participants, noise.known, carried)
    matrix = view.matrix(noise.participants * noise.residual, noise.spatial)
    return math.sqrt(spent_in(matrix, [attempts.index(t) for t in visits]))


def skip_rounds(run: CyclicRun, _colluding: CyclicRun, _dropping: CyclicRun) -> ServerGain:
    """Lets the rounds before the victim's fail, so that nothing is carried into them.

    Rule: a client refuses a round unless it has checked the list of the round before, and takes out what was carried to
    it whether the senders uploaded or not. Off: no such list, no shares. On: no uploads, but shares.
    """
    off, on = [], []
    for client, visits, skipped in run.followers():
        unseen, paid = run.uploads_in(skipped), run.charged(visits)
        bare = play_run(run.plan, run.cohorts, skipped)
        off.append(Pair(reached_mu(bare, dropped=unseen)[client], paid))
        on.append(Pair(reached_mu(run.honest, dropped=unseen)[client], paid))
    return ServerGain(_worst(off), _worst(on), "shares are taken out all the same")


def call_cohorts_dropped(run: CyclicRun, _colluding: CyclicRun, dropping: CyclicRun) -> ServerGain:
    """Calls every cohort dropped one round later, to have revealed what was carried to it.

    Rule: at most some clients of a round, all of whose shares were counted as known when it was planned.
    """
    bare = run.of_victim(play_run(run.plan, run.cohorts, range(run.plan.horizon)))
    return ServerGain(bare, dropping.against_colluders(), "what was revealed was charged")


def call_each_the_last(run: CyclicRun, _colluding: CyclicRun, _dropping: CyclicRun) -> ServerGain:
    """Calls every round the last, so that nobody carries anything. Rule: the last round is committed."""
    bare = run.of_victim(play_run(run.plan, run.cohorts, range(run.plan.horizon)))
    return ServerGain(bare, run.of_victim(run.honest), "clients carry on all the same")


def seat_again(run: CyclicRun, _colluding: CyclicRun, _dropping: CyclicRun) -> ServerGain:
    """Seats the victim in the next round too. Rule: a client comes back after the separation, or not at all."""
    cohorts = run.cohorts
    for number in run.visits:
        if number + 1 < run.plan.horizon:
            cohorts[number + 1][0] = run.victim
    off, first = run.of_victim(play_run(run.plan, cohorts)), run.visits[0]
    try:
        run.plan.charge(first + 1, [first])
    except PrivacyError as error:
        return ServerGain(off, run.of_victim(run.honest), f"refused: {error.message}")
    return ServerGain(off, off, "not refused")


def replace_cohorts(run: CyclicRun, colluding: CyclicRun, _dropping: CyclicRun) -> ServerGain:
    """Puts its own clients into the rounds after the victim's.

    Rule: the next cohort is committed before the beacon, checked against the list, and has at most the assumed
    colluders, here in every round.
    """
    off = run.of_victim(run.honest, run.cohorts[run.visits[0] + 1])
    return ServerGain(off, colluding.against_colluders(), "covered up to the colluders assumed")


# Each server, under the name that the table shows.
SERVERS: dict[str, Server] = {
    "ends early": end_early,
    "repeats rounds": repeat_rounds,
    "skips rounds": skip_rounds,
    "calls cohorts dropped": call_cohorts_dropped,
    "each round is the last": call_each_the_last,
    "seats a client again": seat_again,
    "replaces the next cohort": replace_cohorts,
}
