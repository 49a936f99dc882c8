"""Servers that bend the rules of carried shares, each with its rule off and on; all numbers are exact.

`SERVERS` lists them. Each is given a `CarriedTraining` (the plan, the run that it allows, a victim) and returns what
the likelihood ratio then tells of the victim, beside what the victim was charged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from niss.accounting import Committed
from niss.accounting.committed import spent_in
from niss.attacks.carried_runs import (
    NOBODY,
    SeenRun,
    Shares,
    cyclic_cohorts,
    play_run,
    see_run,
)
from niss.errors import PrivacyError
from niss.randomness import SimStream
from niss.views import CompleteRun

_SPLITS = 8


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

    def mu(self, seen: SeenRun, client: int | None = None) -> float:
        """What the likelihood ratio tells of the victim, or of another client."""
        return seen.mu(self.victim if client is None else client)


@dataclass(frozen=True)
class ServerGain:
    """What a server gets: mu reached and charged with the rule off and on, and how the rule ends it."""

    off: tuple[float, float]
    on: tuple[float, float]
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
    cut, bare = (0.0, 1.0), (0.0, 1.0)
    for end in range(1, training.plan.horizon):
        seen = training.seen.only(training.seen.rounds < end)
        last = seen.knowing(seen.carried_from([end - 1]))
        for cohort in range(min(training.plan.separation, end)):
            client = training.first_of(cohort)
            paid = training.charged([t for t in training.visits_of(cohort) if t < end])
            cut = max(cut, (training.mu(seen, client), paid), key=_ratio)
            bare = max(bare, (training.mu(last, client), paid), key=_ratio)
    return ServerGain(bare, cut, "less is seen than was charged")


def call_each_the_last(training: CarriedTraining, _: Assumed) -> ServerGain:
    """Calls every round the last, so that nobody carries anything. Rule: the last round is committed."""
    bare = training.seen.knowing(training.seen.shares.carried)
    return ServerGain(
        (training.mu(bare), training.claimed), _as_planned(training), "clients carry on all the same"
    )


def tell_other_horizons(training: CarriedTraining, assumed: Assumed) -> ServerGain:
    """Tells clients of different horizons. Rule: the plan's hash is part of every seed.

    Off: all but the victim believe that each of its rounds is the last. On: clients that were told different plans have
    different seeds; the worst of some splits.
    """
    seen, shares = training.seen, training.seen.shares
    owner = np.append(seen.clients, NOBODY)
    silent = seen.carried_from(training.visits) & (owner[shares.added] != training.victim)
    misled = seen.with_shares(replace(shares, added=np.where(silent, NOBODY, shares.added)))
    everybody = training.plan.noise.participants * training.plan.separation
    draws = assumed.stream.child("horizons").generator()
    groups = [draws.random(everybody) < part for part in np.linspace(0.05, 0.95, _SPLITS)]
    groups += [np.arange(everybody) == training.victim]
    split = []
    for group in groups:
        side = np.append(group[seen.clients], False)
        apart = shares.apart(side[shares.added] != side[shares.taken])
        split.append((training.mu(seen.with_shares(apart)), training.claimed))
    return ServerGain(
        (training.mu(misled), training.claimed), max(split, key=_ratio), "shares no longer cancel: more noise"
    )


def repeat_for_senders(training: CarriedTraining, _: Assumed) -> ServerGain:
    """Repeats each round after one of the victim's. Rule: a share is subtracted once, ever."""
    after = [t + 1 for t in training.visits if t + 1 < training.plan.horizon]
    twice = repeat_rounds(training.seen, after, subtract_again=True)
    once = repeat_rounds(training.seen, after, subtract_again=False)
    return ServerGain(
        (training.mu(twice), training.claimed),
        (training.mu(once), training.claimed),
        "the repeated round takes nothing out",
    )


def repeat_for_receivers(training: CarriedTraining, _: Assumed) -> ServerGain:
    """Repeats each of the victim's rounds, charged once. Rule: one charge and one upload a round."""
    visits = [t for t in training.visits if t > 0]
    twice = repeat_rounds(training.seen, visits, subtract_again=True)
    return _unless_refused(training, twice, (visits[0], visits[0]))


def repeat_for_followers(training: CarriedTraining, _: Assumed) -> ServerGain:
    """Goes on from a repeated round, which took nothing out, to those who come next.

    Without what was carried into it the repeated round is a new beginning, and rounds after it hide less. Rule: all
    charges after it are made for the chain as it then is.
    """
    off, on = (0.0, 1.0), (0.0, 1.0)
    for client, visits, repeated in training.followers():
        reached = training.mu(repeat_rounds(training.seen, repeated, subtract_again=False), client)
        off = max(off, (reached, training.charged(visits)), key=_ratio)
        on = max(on, (reached, _charged_anew(training.plan, repeated, visits)), key=_ratio)
    return ServerGain(off, on, "charged as a new beginning")


def skip_rounds(training: CarriedTraining, _: Assumed) -> ServerGain:
    """Lets the rounds before the victim's fail, so that nothing is carried into them.

    Rule: a client refuses a round unless it has checked the list of the round before, and takes out what was carried to
    it whether the senders uploaded or not. Off: no such list, no shares. On: no uploads, but shares.
    """
    off, on = (0.0, 1.0), (0.0, 1.0)
    for client, visits, skipped in training.followers():
        silent = training.seen.only(~np.isin(training.seen.rounds, skipped))
        unlisted = training.seen.knowing(training.seen.carried_from(skipped))
        bare = unlisted.only(~np.isin(unlisted.rounds, skipped))
        paid = training.charged(visits)
        off = max(off, (training.mu(bare, client), paid), key=_ratio)
        on = max(on, (training.mu(silent, client), paid), key=_ratio)
    return ServerGain(off, on, "shares are taken out all the same")


def call_cohorts_dropped(training: CarriedTraining, assumed: Assumed) -> ServerGain:
    """Calls every cohort dropped one round later, to have revealed what was carried to it.

    Rule: at most some clients of a round, all of whose shares were counted as known when it was planned.
    """
    bare = training.seen.knowing(training.seen.shares.carried)
    told = assumed.dropped.mu(against_colluders(assumed.dropped)), assumed.dropped.claimed
    return ServerGain((training.mu(bare), training.claimed), told, "what was revealed was charged")


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
    return ServerGain(
        (training.mu(training.seen.against(mine)), training.claimed),
        (assumed.colluders.mu(against_colluders(assumed.colluders)), assumed.colluders.claimed),
        "covered up to the colluders assumed",
    )


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


def against_colluders(training: CarriedTraining) -> SeenRun:
    """The run as seen by a server with as many clients of each round as the plan assumes; never the victim."""
    return training.seen.against(colluders_of(training.plan))


def colluders_of(plan: Committed) -> list[int]:
    """The last seats of every cohort, as many as the plan takes to be known."""
    m = plan.noise.participants
    return [client for client in range(m * plan.separation) if client % m >= m - plan.noise.known]


def _unless_refused(training: CarriedTraining, bent: SeenRun, rounds: Sequence[int]) -> ServerGain:
    """What a server gets from `bent`, which needs the last of these participations; the client's account decides."""
    off = (training.mu(bent), training.claimed)
    try:
        training.plan.charge(rounds[-1], rounds[:-1])
    except PrivacyError as error:
        return ServerGain(off, _as_planned(training), f"refused: {error.message}")
    return ServerGain(off, off, "not refused")


def repeat_rounds(seen: SeenRun, rounds: Collection[int], *, subtract_again: bool) -> SeenRun:
    """Those rounds are run twice with the same clients, who upload both times; the run goes on from the second.

    Shares within the round, fresh noise and outgoing shares are drawn anew. What the first attempt carried on is never
    taken out. What was carried into it is subtracted again, or, as the rule wants, not.
    """
    for number in sorted(rounds, reverse=True):
        old = np.flatnonzero(seen.rounds == number)
        new = np.full(seen.clients.size + 1, NOBODY)
        new[old] = seen.clients.size + np.arange(old.size)
        shares = seen.shares
        into = shares.carried & (seen.round_of(shares.taken) == number)
        onward = seen.carried_from([number])
        within = ~shares.carried & (seen.round_of(shares.added) == number)
        lost, fresh = shares.chosen(onward), shares.chosen(within)
        kept = replace(
            shares,
            added=np.where(onward, new[shares.added], shares.added),
            again=np.where(into & subtract_again, new[shares.taken], shares.again),
        )
        seen = SeenRun(
            np.append(seen.clients, seen.clients[old]),
            np.append(seen.rounds, seen.rounds[old]),
            np.append(seen.residual, seen.residual[old]),
            kept.and_also(_never_taken(lost)).and_also(
                replace(fresh, added=new[fresh.added], taken=new[fresh.taken])
            ),
        )
    return seen


def _never_taken(shares: Shares) -> Shares:
    nobody = np.full(shares.added.size, NOBODY)
    return replace(shares, taken=nobody, again=nobody)


def _charged_anew(plan: Committed, repeated: Collection[int], visits: Sequence[int]) -> float:
    """mu for `visits` in a chain that breaks off at each repeated round and begins again with its second attempt."""
    attempts = [(t, attempt) for t in range(plan.horizon) for attempt in range(1 + (t in repeated))]
    official = [t not in repeated or attempt == 1 for t, attempt in attempts]
    rounds = [t for t, _ in attempts]
    noise = plan.noise
    carried = np.where(official[:-1], noise.carried / noise.residual, 0.0)
    view = CompleteRun(noise.participants, noise.known, np.ones(len(rounds)), carried)
    matrix = view.matrix(noise.participants * noise.residual, noise.spatial)
    return math.sqrt(spent_in(matrix, [rounds.index(t) for t in visits]))


def _as_planned(training: CarriedTraining) -> tuple[float, float]:
    return training.mu(training.seen), training.claimed


def _ratio(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1]
