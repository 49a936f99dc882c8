"""Runs with carried shares as a server sees them, and servers that bend their rules; all numbers here are exact.

Everything is taken from the edges, one column for each noise that the adversary does not know; nothing comes from the
accountant, whose claims are attacked. Write N for the matrix (uploads x noises) and d for what the victim adds to its
uploads, one `Delta` in each of its rounds. A server that combines the uploads with the weights q tells whether the
victim took part with

    mu(q) = q'd / |N'q|,     at most     sqrt(d' (N N')^-1 d),

which the likelihood ratio reaches with `q = (N N')^-1 d` (Neyman and Pearson; the noise is Gaussian).

`SERVERS` lists the servers. Each returns what the likelihood ratio tells of the victim where its rule is off and where
it is on, beside what the victim was charged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse import block_array, csc_array, csr_array, hstack

from niss.accounting import Committed
from niss.accounting.committed import spent_in
from niss.errors import PrivacyError
from niss.graph import ShareGraph
from niss.randomness import SimStream
from niss.views import CompleteRun, RoundNoise, RunNoise

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

STAYS = -1
_SPLITS = 8


@dataclass(frozen=True)
class SeenRun:
    """All honest uploads of a run, and the noises in them that the adversary does not know.

    clients, rounds   whose upload it is, and of which round
    signs             uploads x noises: 1 where an upload holds the noise, -1 where it was subtracted
    variance          of each noise
    sent              of each noise, the round that carries it to the next; `STAYS` for others
    """

    clients: IntArray
    rounds: IntArray
    signs: csc_array
    variance: FloatArray
    sent: IntArray

    @cached_property
    def noise(self) -> csr_array:
        """N, deviations included."""
        return csr_array(self.signs.multiply(np.sqrt(self.variance)[None, :]))

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

    def added_up(self, rounds: Iterable[int]) -> FloatArray:
        """Weights that add up all uploads of these rounds."""
        return np.isin(self.rounds, list(rounds)).astype(np.float64)

    def sent_in(self, rounds: Iterable[int]) -> BoolArray:
        """Which noises are carried from these rounds to the next."""
        return np.isin(self.sent, list(rounds))

    def held_by(self, uploads: BoolArray) -> BoolArray:
        """Which noises are in at least one of these uploads."""
        return np.asarray(abs(self.signs).T @ uploads.astype(np.float64) > 0.0)

    def knowing(self, known: BoolArray) -> SeenRun:
        """The same where the adversary knows some of the noises."""
        kept = ~known
        return replace(self, signs=self.signs[:, kept], variance=self.variance[kept], sent=self.sent[kept])

    def only(self, kept: BoolArray) -> SeenRun:
        """The same where other uploads never arrived; their shares stay with the uploads that did."""
        held = self.knowing(~self.held_by(kept))
        return replace(held, clients=self.clients[kept], rounds=self.rounds[kept], signs=held.signs[kept])

    def against(self, colluders: Collection[int]) -> SeenRun:
        """The same for a server with these clients on its side: their uploads and all their shares are known."""
        theirs = np.isin(self.clients, list(colluders))
        return self.knowing(self.held_by(theirs)).only(~theirs)

    def unsent(self, which: BoolArray) -> SeenRun:
        """The same where those who should add these noises did not; they are subtracted all the same."""
        signs = self.signs - self.signs.maximum(0.0).multiply(which[None, :])
        return replace(self, signs=csc_array(signs))

    def apart(self, which: BoolArray) -> SeenRun:
        """The same, but sender and receiver of these hold independent noises instead of one: nothing cancels."""
        split, order = self.signs[:, which], np.argsort(which, kind="stable")
        signs = hstack([self.signs[:, ~which], split.maximum(0.0), split.minimum(0.0)], format="csc")
        order = np.append(order, np.flatnonzero(which))
        return replace(self, signs=signs, variance=self.variance[order], sent=self.sent[order])

    def repeat(self, rounds: Collection[int], *, subtract_again: bool) -> SeenRun:
        """Those rounds are run twice with the same clients, who upload both times; the run goes on from the second.

        Shares within the round, fresh noise and outgoing shares are drawn anew. What the first attempt carried on is
        never taken out. What was carried into it is subtracted again, or, as the rule wants, not.
        """
        seen = self
        for number in sorted(rounds, reverse=True):
            seen = seen._repeat_round(number, subtract_again)
        return seen

    def _repeat_round(self, number: int, subtract_again: bool) -> SeenRun:
        old = self.rounds == number
        onward = self.sent == number
        within = self.held_by(old) & (self.sent == STAYS)
        first, carried = self.signs[old], self.signs[:, onward]
        added, taken = carried.maximum(0.0), carried.minimum(0.0)
        again = first[:, ~onward].multiply(self.sent_in([number - 1] * subtract_again)[None, ~onward])
        signs = block_array(
            [[self.signs[:, ~onward], taken, added, None], [again, added[old], None, first[:, within]]],
            format="csc",
        )
        columns = np.concatenate([np.flatnonzero(one) for one in (~onward, onward, onward, within)])
        return SeenRun(
            np.append(self.clients, self.clients[old]),
            np.append(self.rounds, self.rounds[old]),
            signs,
            self.variance[columns],
            self.sent[columns],
        )


def see_run(run: RunNoise) -> SeenRun:
    """What a server without colluders does not know of a run in which everybody keeps to the rules."""
    sizes = [len(one.clients) for one in run.rounds]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    added, taken, variance, sent = [], [], [], []
    for number, one in enumerate(run.rounds):
        for graph, unit in ((one.shares, one.unit_variance), *filter(None, [one.carried])):
            added.append(graph.senders + starts[number])
            taken.append(graph.receivers + starts[number + graph.between])
            variance.append(unit * graph.weights)
            sent.append(np.full(graph.senders.size, number if graph.between else STAYS))
    uploads, shared = np.arange(starts[-1]), sum(map(len, added))
    fresh = [np.broadcast_to(np.asarray(one.residual, float), len(one.clients)) for one in run.rounds]
    rows = np.concatenate([*added, *taken, uploads])
    columns = np.concatenate([np.arange(shared), np.arange(shared), shared + uploads])
    values = np.repeat([1.0, -1.0, 1.0], [shared, shared, uploads.size])
    return SeenRun(
        np.concatenate([np.array(one.clients, dtype=np.int64) for one in run.rounds]),
        np.repeat(np.arange(len(sizes)), sizes),
        csc_array((values, (rows, columns)), shape=(uploads.size, shared + uploads.size)),
        np.concatenate(variance + fresh),
        np.concatenate([*sent, np.full(uploads.size, STAYS)]),
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


@dataclass(frozen=True)
class CarriedTraining:
    """A run on complete graphs in fixed cohorts, and its victim: a client with the costliest of all patterns."""

    plan: Committed

    @cached_property
    def visits(self) -> tuple[int, ...]:
        """The rounds of the victim."""
        return self.plan.worst.rounds

    @property
    def victim(self) -> int:
        """The first client of its cohort."""
        return self.first_of(self.visits[0])

    def first_of(self, number: int) -> int:
        """The client in the first seat of a round."""
        return self.plan.noise.participants * (number % self.plan.separation)

    def visits_of(self, cohort: int) -> range:
        """The rounds of a cohort."""
        return range(cohort, self.plan.horizon, self.plan.separation)

    def followers(self) -> Iterator[tuple[int, range, list[int]]]:
        """Clients, their rounds, and rounds before those that a server may tamper with: one, or all."""
        for cohort in range(self.plan.separation):
            before = [t - 1 for t in self.visits_of(cohort) if t > 0]
            for chosen in (before, *([one] for one in before)):
                yield self.first_of(cohort), self.visits_of(cohort), chosen

    @cached_property
    def seen(self) -> SeenRun:
        """The run as a server without colluders sees it."""
        return see_run(play_run(self.plan, cyclic_cohorts(self.plan)))

    @property
    def colluders(self) -> list[int]:
        """The last seats of every cohort, as many as the plan takes to be known; never the victim."""
        m = self.plan.noise.participants
        return [
            client for client in range(m * self.plan.separation) if client % m >= m - self.plan.noise.known
        ]

    @cached_property
    def seen_by_colluders(self) -> SeenRun:
        """The run as seen by a server with as many clients of each round as the plan assumes."""
        return self.seen.against(self.colluders)

    @cached_property
    def claimed(self) -> float:
        """mu that a client of the victim's cohort is charged for the whole run, round by round."""
        return math.sqrt(
            math.fsum(
                self.plan.charge(number, self.visits[:place]) for place, number in enumerate(self.visits)
            )
        )

    def charged(self, rounds: Sequence[int]) -> float:
        """mu that these participations are charged."""
        return math.sqrt(spent_in(self.plan.matrix, rounds))

    def of_victim(self, seen: SeenRun) -> Pair:
        """What the likelihood ratio tells of the victim, beside what it is charged for the whole run."""
        return Pair(seen.mu(self.victim), self.claimed)


@dataclass(frozen=True)
class ServerGain:
    """What a server gets with the rule off and on, and how the rule ends it."""

    off: Pair
    on: Pair
    ending: str


@dataclass(frozen=True)
class Assumed:
    """What the plans of some servers allow for: colluders in each round, and clients that repairs may call dropped."""

    colluders: CarriedTraining
    dropped: CarriedTraining
    stream: SimStream


Server = Callable[[CarriedTraining, Assumed], ServerGain]


def end_early(training: CarriedTraining, _: Assumed) -> ServerGain:
    """Ends the run after any round. Rule: all carry shares on unless the committed last round has come."""
    cut, bare = [], []
    for end in range(1, training.plan.horizon):
        seen = training.seen.only(training.seen.rounds < end)
        last = seen.knowing(seen.sent_in([end - 1]))
        for cohort in range(min(training.plan.separation, end)):
            client = training.first_of(cohort)
            paid = training.charged([t for t in training.visits_of(cohort) if t < end])
            cut.append(Pair(seen.mu(client), paid))
            bare.append(Pair(last.mu(client), paid))
    return ServerGain(_worst(bare), _worst(cut), "less is seen than was charged")


def call_each_the_last(training: CarriedTraining, _: Assumed) -> ServerGain:
    """Calls every round the last, so that nobody carries anything. Rule: the last round is committed."""
    seen = training.seen
    bare = training.of_victim(seen.knowing(seen.sent != STAYS))
    return ServerGain(bare, training.of_victim(seen), "clients carry on all the same")


def tell_other_horizons(training: CarriedTraining, assumed: Assumed) -> ServerGain:
    """Tells clients of different horizons. Rule: the plan's hash is part of every seed.

    Off: all but the victim believe that each of its rounds is the last. On: clients that were told different plans have
    different seeds; the worst of some splits.
    """
    seen, victim = training.seen, training.seen.clients == training.victim
    misled = seen.unsent(seen.sent_in(training.visits) & (seen.signs.T @ victim < 1.0))
    everybody = training.plan.noise.participants * training.plan.separation
    draws = assumed.stream.child("horizons").generator()
    groups = [draws.random(everybody) < part for part in np.linspace(0.05, 0.95, _SPLITS)]
    groups += [np.arange(everybody) == training.victim]
    split = (training.of_victim(split_horizons(seen, group)) for group in groups)
    return ServerGain(training.of_victim(misled), _worst(split), "shares no longer cancel: more noise")


def split_horizons(seen: SeenRun, group: BoolArray) -> SeenRun:
    """The run where the clients of a group were told of another horizon: they share nothing with the others."""
    inside = group[seen.clients]
    return seen.apart(seen.held_by(inside) & seen.held_by(~inside))


def repeat_for_senders(training: CarriedTraining, _: Assumed) -> ServerGain:
    """Repeats each round after one of the victim's. Rule: a share is subtracted once, ever."""
    after = [t + 1 for t in training.visits if t + 1 < training.plan.horizon]
    twice, once = (
        training.of_victim(training.seen.repeat(after, subtract_again=again)) for again in (True, False)
    )
    return ServerGain(twice, once, "the repeated round takes nothing out")


def repeat_for_receivers(training: CarriedTraining, _: Assumed) -> ServerGain:
    """Repeats each of the victim's rounds, charged once. Rule: one charge and one upload a round."""
    visits = [t for t in training.visits if t > 0]
    twice = training.seen.repeat(visits, subtract_again=True)
    return _unless_refused(training, twice, (visits[0], visits[0]))


def repeat_for_followers(training: CarriedTraining, _: Assumed) -> ServerGain:
    """Goes on from a repeated round, which took nothing out, to those who come next.

    Without what was carried into it the repeated round is a new beginning, and rounds after it hide less. Rule: all
    charges after it are made for the chain as it then is.
    """
    off, on = [], []
    for client, visits, repeated in training.followers():
        reached = training.seen.repeat(repeated, subtract_again=False).mu(client)
        off.append(Pair(reached, training.charged(visits)))
        on.append(Pair(reached, _charged_anew(training.plan, repeated, visits)))
    return ServerGain(_worst(off), _worst(on), "charged as a new beginning")


def skip_rounds(training: CarriedTraining, _: Assumed) -> ServerGain:
    """Lets the rounds before the victim's fail, so that nothing is carried into them.

    Rule: a client refuses a round unless it has checked the list of the round before, and takes out what was carried to
    it whether the senders uploaded or not. Off: no such list, no shares. On: no uploads, but shares.
    """
    off, on, seen = [], [], training.seen
    for client, visits, skipped in training.followers():
        there, paid = ~np.isin(seen.rounds, skipped), training.charged(visits)
        off.append(Pair(seen.knowing(seen.sent_in(skipped)).only(there).mu(client), paid))
        on.append(Pair(seen.only(there).mu(client), paid))
    return ServerGain(_worst(off), _worst(on), "shares are taken out all the same")


def call_cohorts_dropped(training: CarriedTraining, assumed: Assumed) -> ServerGain:
    """Calls every cohort dropped one round later, to have revealed what was carried to it.

    Rule: at most some clients of a round, all of whose shares were counted as known when it was planned.
    """
    bare = training.of_victim(training.seen.knowing(training.seen.sent != STAYS))
    told = assumed.dropped.of_victim(assumed.dropped.seen_by_colluders)
    return ServerGain(bare, told, "what was revealed was charged")


def seat_again(training: CarriedTraining, _: Assumed) -> ServerGain:
    """Seats the victim in the next round too. Rule: a client comes back after the separation, or not at all."""
    cohorts = cyclic_cohorts(training.plan)
    for number in training.visits:
        if number + 1 < training.plan.horizon:
            cohorts[number + 1][0] = training.victim
    crowded = see_run(play_run(training.plan, cohorts))
    return _unless_refused(training, crowded, (training.visits[0], training.visits[0] + 1))


def replace_cohorts(training: CarriedTraining, assumed: Assumed) -> ServerGain:
    """Puts its own clients into the rounds after the victim's.

    Rule: the next cohort is committed before the beacon, checked against the list, and has at most the assumed
    colluders, here in every round.
    """
    mine = cyclic_cohorts(training.plan)[training.visits[0] + 1]
    off = training.of_victim(training.seen.against(mine))
    on = assumed.colluders.of_victim(assumed.colluders.seen_by_colluders)
    return ServerGain(off, on, "covered up to the colluders assumed")


# Each server, under the name that the table shows.
SERVERS: dict[str, Server] = {
    "ends early": end_early,
    "repeats: senders": repeat_for_senders,
    "repeats: receivers": repeat_for_receivers,
    "repeats: those after": repeat_for_followers,
    "skips rounds": skip_rounds,
    "calls cohorts dropped": call_cohorts_dropped,
    "each round is the last": call_each_the_last,
    "different horizons": tell_other_horizons,
    "seats a client again": seat_again,
    "replaces the next cohort": replace_cohorts,
}


def _unless_refused(training: CarriedTraining, bent: SeenRun, rounds: Sequence[int]) -> ServerGain:
    """What a server gets from `bent`, which needs the last of these participations; the client's account decides."""
    off = training.of_victim(bent)
    try:
        training.plan.charge(rounds[-1], rounds[:-1])
    except PrivacyError as error:
        return ServerGain(off, training.of_victim(training.seen), f"refused: {error.message}")
    return ServerGain(off, off, "not refused")


def _charged_anew(plan: Committed, repeated: Collection[int], visits: Sequence[int]) -> float:
    """mu for `visits` in a chain that breaks off at each repeated round and begins again with its second attempt."""
    attempts = [(t, attempt) for t in range(plan.horizon) for attempt in range(1 + (t in repeated))]
    official = [t not in repeated or attempt == 1 for t, attempt in attempts]
    rounds = [t for t, _ in attempts]
    noise = plan.noise
    carried = np.where(official[:-1], noise.carried / noise.residual, 0.0)
    view = CompleteRun(noise.participants, noise.known, carried)
    matrix = view.matrix(noise.participants * noise.residual, noise.spatial)
    return math.sqrt(spent_in(matrix, [rounds.index(t) for t in visits]))
