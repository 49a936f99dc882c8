"""Attacks on whole runs against a model of the noise that uses nothing of the package but the plan's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta, norm

from niss.accounting import Committed, forecast
from niss.attacks.canary import CanaryScores, MeasuredMu, measure_mu
from niss.attacks.runs import SERVERS, CyclicRun, SeenRun, ServerGain, play_run, reached_mu
from niss.errors import PrivacyError
from niss.randomness import SimStream

Vertex = tuple[int, int, int]
Gains = dict[str, ServerGain]
ROUNDING = 1e-9
# Each statistical assertion here fails by chance at most this often.
RARE = 1e-6


# So rarely that in a million rounds none loses two.
ONE_MAY_BE_LOST: dict[str, Any] = {"mode": "repair", "dropout": 1e-4}


def make_plan(m: int = 5, rounds: int = 12, separation: int = 4, **options: Any) -> Committed:
    numbers = {"kappa": 5.0, **options}
    return forecast(carry=True, participants=m, clients=m * separation, rounds=rounds, **numbers).run


@dataclass
class World:
    """All uploads (client, round, attempt) and every unknown noise: a variance, and its sign in each upload."""

    uploads: list[Vertex] = field(default_factory=list)
    noises: list[tuple[float, dict[Vertex, float]]] = field(default_factory=list)

    def within(self, plan: Committed, number: int, clients: Iterable[int], attempt: int = 0) -> None:
        """A round's uploads with fresh noise, and a share from everyone to everyone else."""
        here = [(client, number, attempt) for client in clients]
        self.uploads += here
        for a in here:
            self.noises.append((plan.noise.residual, {a: 1.0}))
            for b in here:
                if a != b:
                    self.noises.append((plan.noise.unit, {a: 1.0, b: -1.0}))

    def carried(self, plan: Committed, added: Vertex, *taken: Vertex) -> None:
        """One carried share."""
        variance = plan.noise.carried / plan.noise.participants
        self.noises.append((variance, {added: 1.0, **dict.fromkeys(taken, -1.0)}))

    def mu(self, client: int, *, hidden: Iterable[Vertex] = ()) -> float:
        """sqrt(d' Sigma^-1 d) over all uploads but the hidden ones."""
        left_out = set(hidden)
        rows = {upload: place for place, upload in enumerate(u for u in self.uploads if u not in left_out)}
        noise = np.zeros((len(rows), len(self.noises)))
        for column, (variance, signs) in enumerate(self.noises):
            for upload, sign in signs.items():
                if upload in rows:
                    noise[rows[upload], column] += sign * math.sqrt(variance)
        move = np.array([float(upload[0] == client) for upload in rows])
        return math.sqrt(move @ np.linalg.solve(noise @ noise.T, move))

    def without(self, known: Callable[[dict[Vertex, float]], bool]) -> World:
        """The same where the adversary knows the noises of which `known(signs)` is true."""
        return World(self.uploads, [one for one in self.noises if not known(one[1])])

    def against(self, theirs: Collection[int]) -> World:
        """The same where these clients are on the adversary's side."""
        left = self.without(lambda signs: any(client in theirs for client, _, _ in signs))
        return World([upload for upload in self.uploads if upload[0] not in theirs], left.noises)


def cohort(plan: Committed, number: int) -> list[int]:
    m = plan.noise.participants
    return list(range(m * (number % plan.separation), m * (number % plan.separation) + m))


def honest_world(plan: Committed, cohorts: list[list[int]] | None = None) -> World:
    seats = cohorts or [cohort(plan, number) for number in range(plan.horizon)]
    world = World()
    for number, clients in enumerate(seats):
        world.within(plan, number, clients)
    for number, (here, there) in enumerate(pairwise(seats)):
        for a, b in product(here, there):
            world.carried(plan, (a, number, 0), (b, number + 1, 0))
    return world


def repeated_world(plan: Committed, repeated: Iterable[int], *, again: bool) -> World:
    """Repeated rounds have a second attempt, from which the run goes on; shares of the first lead nowhere."""
    twice = set(repeated)
    world = World()
    for number in range(plan.horizon):
        for attempt in range(1 + (number in twice)):
            world.within(plan, number, cohort(plan, number), attempt)
        if number == plan.horizon - 1:
            break
        official = int(number in twice)
        for a, b in product(cohort(plan, number), cohort(plan, number + 1)):
            taken: list[Vertex] = [(b, number + 1, 0)]
            if again and number + 1 in twice:
                taken.append((b, number + 1, 1))
            world.carried(plan, (a, number, official), *taken)
            if official:
                world.carried(plan, (a, number, 0))
    return world


def is_carried(signs: dict[Vertex, float]) -> bool:
    return len({number for _, number, _ in signs}) > 1


def adder(signs: dict[Vertex, float]) -> Vertex:
    return next(upload for upload, sign in signs.items() if sign > 0)


def followers(plan: Committed) -> Iterator[tuple[int, float, list[int]]]:
    """Clients, what their rounds are charged, and rounds before those: one, or all."""
    for first in range(plan.separation):
        visits = list(range(first, plan.horizon, plan.separation))
        before = [t - 1 for t in visits if t > 0]
        for chosen in (before, *([one] for one in before)):
            yield plan.noise.participants * first, charged(plan, visits), chosen


def charged(plan: Committed, visits: list[int]) -> float:
    return math.sqrt(plan.matrix[np.ix_(visits, visits)].sum())


def worst(pairs: Iterable[tuple[float, float]]) -> Any:
    """The pair (reached, charged) with the largest ratio, compared to 1e-8."""
    return pytest.approx(max(pairs, key=lambda pair: pair[0] / pair[1]), rel=1e-8)


def both(gain: ServerGain) -> tuple[tuple[float, float], tuple[float, float]]:
    """(reached, charged) with the rule off, and with it on."""
    return (gain.off.reached, gain.off.charged), (gain.on.reached, gain.on.charged)


def first_client(plan: Committed, visits: list[int]) -> int:
    return cohort(plan, visits[0])[0]


def played(
    seen: SeenRun, victim: int, weights: list[np.ndarray], runs: int, stream: SimStream
) -> list[MeasuredMu]:
    named = {str(number): one for number, one in enumerate(weights)}
    scores = seen.scores(victim, named, runs=runs, stream=stream)
    return [measure_mu(scores[name], 1.0 - RARE) for name in named]


@pytest.fixture(scope="module")
def training() -> CyclicRun:
    return CyclicRun(make_plan())


@pytest.fixture(scope="module")
def colluding() -> CyclicRun:
    return CyclicRun(make_plan(collusion=0.2))


@pytest.fixture(scope="module")
def dropping() -> CyclicRun:
    return CyclicRun(make_plan(**ONE_MAY_BE_LOST))


@pytest.fixture(scope="module")
def outcomes(training: CyclicRun, colluding: CyclicRun, dropping: CyclicRun) -> Gains:
    return {name: server(training, colluding, dropping) for name, server in SERVERS.items()}


class TestExactly:
    """The attack's numbers, and those of the brute force above."""

    @pytest.mark.parametrize("carries", [True, False])
    def test_the_likelihood_ratio_reaches_the_promise(self, carries: bool) -> None:
        plan = make_plan()
        training = CyclicRun(plan if carries else replace(plan, noise=replace(plan.noise, carried=0.0)))
        pair, seen = training.of_victim(training.honest), SeenRun.of(training.honest)
        assert (pair.reached, pair.charged) == pytest.approx([training.plan.mu] * 2, rel=ROUNDING)
        assert pair.reached == pytest.approx(honest_world(training.plan).mu(training.victim), rel=ROUNDING)
        best = seen.mu(training.victim, seen.best_weights(training.victim))
        assert best == pytest.approx(pair.reached, rel=ROUNDING)

    def test_and_with_colluders(self, colluding: CyclicRun) -> None:
        plan, victim, theirs = colluding.plan, colluding.victim, set(colluding.colluders)
        assert len(theirs) == plan.separation
        assert victim not in theirs
        reached, seen = colluding.against_colluders().reached, SeenRun.of(colluding.honest, theirs)
        assert reached == pytest.approx(honest_world(plan).against(theirs).mu(victim), rel=ROUNDING)
        assert reached == pytest.approx(plan.mu, rel=ROUNDING)
        assert reached == pytest.approx(seen.mu(victim, seen.best_weights(victim)), rel=ROUNDING)

    def test_the_worst_of_any_pattern_reaches_the_promise(self) -> None:
        plan = make_plan(pattern="any")
        seats = [list(range(100 * t, 100 * t + plan.noise.participants)) for t in range(1, plan.horizon + 1)]
        for number in plan.worst.rounds:
            seats[number][0] = 0
        assert reached_mu(play_run(plan, seats))[0] == pytest.approx(plan.mu, rel=ROUNDING)
        assert honest_world(plan, seats).mu(0) == pytest.approx(plan.mu, rel=ROUNDING)

    def test_nobody_is_charged_less_than_the_best_test_tells(self, training: CyclicRun) -> None:
        reached = reached_mu(training.honest)
        for first in range(training.plan.separation):
            most = training.charged(training.visits_of(first))
            assert reached[training.cohorts[first][0]] <= most * (1.0 + ROUNDING)

    def test_no_other_weights_tell_more(self, training: CyclicRun) -> None:
        seen, victim = SeenRun.of(training.honest), training.victim
        best, draws = seen.best_weights(victim), np.random.default_rng(1)
        most = seen.mu(victim, best)
        for scale in (1e-3, 0.03, 1.0):
            for _ in range(20):
                weights = best + scale * np.abs(best).max() * draws.standard_normal(best.size)
                assert seen.mu(victim, weights) < most
        for rounds in ([0], [0, 1], [4, 5], [7, 8, 9], training.visits, range(training.plan.horizon)):
            assert abs(seen.mu(victim, seen.added_up(rounds))) < most


def without_carried(plan: Committed, _: list[int]) -> World:
    return honest_world(plan).without(is_carried)


def split_by_horizon(plan: Committed, visits: list[int]) -> World:
    """All but the victim believe that each of its rounds is the last: they add nothing that the next would take out."""
    world, victim, noises = honest_world(plan), first_client(plan, visits), []
    for variance, signs in world.noises:
        who, number, _ = adder(signs) if is_carried(signs) else (victim, -1, 0)
        silent = number in visits and who != victim
        noises.append((variance, {u: s for u, s in signs.items() if s < 0} if silent else signs))
    return World(world.uploads, noises)


def seated_again(plan: Committed, visits: list[int]) -> World:
    seats = [cohort(plan, number) for number in range(plan.horizon)]
    for number in visits:
        if number + 1 < plan.horizon:
            seats[number + 1][0] = first_client(plan, visits)
    return honest_world(plan, seats)


def repeated_after(plan: Committed, visits: list[int], *, again: bool) -> World:
    return repeated_world(plan, [t + 1 for t in visits if t + 1 < plan.horizon], again=again)


# What each server makes of a run with its rule off, by our own count, where that is one run.
BENT: dict[str, Callable[[Committed, list[int]], World]] = {
    "each round is the last": without_carried,
    "calls cohorts dropped": without_carried,
    "seats a client again": seated_again,
    "replaces the next cohort": lambda plan, visits: honest_world(plan).against(
        {client for number in visits for client in cohort(plan, number + 1)}
    ),
}
# Servers whose runs are no graphs of shares, each taken out once, so that `niss attack carried` leaves them out.
NO_GRAPHS: dict[str, Callable[[Committed, list[int]], World]] = {
    "repeats rounds after the victim's, which subtract again": partial(repeated_after, again=True),
    "repeats the victim's rounds, which subtract again": lambda plan, visits: repeated_world(
        plan, [t for t in visits if t], again=True
    ),
    "tells all but the victim that its rounds are the last": split_by_horizon,
}


class TestServers:
    """Each server with its rule off and on: what is reached by our own count, and that the rule holds it."""

    @pytest.mark.parametrize("name", SERVERS)
    def test_the_rule_makes_the_difference(self, outcomes: Gains, name: str) -> None:
        assert outcomes[name].off.ratio > 1.02
        assert outcomes[name].on.ratio <= 1.0 + ROUNDING

    @pytest.mark.parametrize(("rounds", "separation"), [(13, 4), (9, 2), (7, 6)])
    def test_runs_of_other_lengths(self, rounds: int, separation: int) -> None:
        plans = [
            make_plan(rounds=rounds, separation=separation, **options)
            for options in ({}, {"collusion": 0.2}, ONE_MAY_BE_LOST)
        ]
        for server in SERVERS.values():
            found = server(*map(CyclicRun, plans))
            assert found.on.ratio <= 1.0 + ROUNDING
            assert found.off.ratio > 0.9

    @pytest.mark.parametrize("name", BENT)
    def test_what_is_reached_without_the_rule(self, outcomes: Gains, training: CyclicRun, name: str) -> None:
        reached = BENT[name](training.plan, list(training.visits)).mu(training.victim)
        assert outcomes[name].off.reached == pytest.approx(reached, rel=ROUNDING)

    @pytest.mark.parametrize("name", NO_GRAPHS)
    def test_other_rules_are_needed_too(self, training: CyclicRun, name: str) -> None:
        reached = NO_GRAPHS[name](training.plan, list(training.visits)).mu(training.victim)
        assert reached > 1.02 * training.plan.mu

    def test_a_repeated_round_that_subtracts_nothing(self, training: CyclicRun) -> None:
        reached = repeated_after(training.plan, list(training.visits), again=False).mu(training.victim)
        assert reached <= training.plan.mu * (1.0 + ROUNDING)

    def test_the_same_round_again_is_refused(self, training: CyclicRun) -> None:
        again = training.visits[1]
        with pytest.raises(PrivacyError, match="comes 0 after"):
            training.plan.charge(again, [again])

    def test_an_early_end(self, outcomes: Gains, training: CyclicRun) -> None:
        plan, world, off, on = training.plan, honest_world(training.plan), [], []
        for first in range(plan.separation):
            client = plan.noise.participants * first
            for end in range(first + 1, plan.horizon):
                hidden = [upload for upload in world.uploads if upload[1] >= end]
                paid = charged(plan, list(range(first, end, plan.separation)))
                cut = world.without(lambda signs, last=end - 1: is_carried(signs) and adder(signs)[1] == last)
                on.append((world.mu(client, hidden=hidden), paid))
                off.append((cut.mu(client, hidden=hidden), paid))
        assert both(outcomes["ends early"]) == (worst(off), worst(on))

    def test_those_who_come_after_a_repeated_round(self, outcomes: Gains, training: CyclicRun) -> None:
        plan = training.plan
        found = [
            (repeated_world(plan, repeated, again=False).mu(client), paid)
            for client, paid, repeated in followers(plan)
        ]
        assert both(outcomes["repeats rounds"])[0] == worst(found)
        most = max(reached for reached, _ in found)
        assert most > plan.mu, "the promise itself would be broken, not only a client's own charge"

    def test_rounds_that_failed_before_their_list_was_fixed(
        self, outcomes: Gains, training: CyclicRun
    ) -> None:
        whole, off, on = honest_world(training.plan), [], []
        for client, paid, failed in followers(training.plan):
            hidden = [upload for upload in whole.uploads if upload[1] in failed]
            bare = whole.without(lambda signs, failed=failed: adder(signs)[1] in failed)
            on.append((whole.mu(client, hidden=hidden), paid))
            off.append((bare.mu(client, hidden=hidden), paid))
        assert both(outcomes["skips rounds"]) == (worst(off), worst(on))

    def test_who_is_told_another_horizon_shares_nothing(self, training: CyclicRun) -> None:
        plan, world, draws = training.plan, honest_world(training.plan), np.random.default_rng(4)
        for part in (0.1, 0.3, 0.5, 0.7, 0.9) * 3:
            group = draws.random(plan.noise.participants * plan.separation) < part
            noises = []
            for variance, signs in world.noises:
                if len({bool(group[client]) for client, _, _ in signs}) == 1:
                    noises.append((variance, signs))
                else:
                    noises += [(variance, {upload: sign}) for upload, sign in signs.items()]
            reached = World(world.uploads, noises).mu(training.victim)
            assert reached <= plan.mu * (1.0 + ROUNDING)

    def test_refusals_are_the_accounts_own(self, outcomes: Gains, training: CyclicRun) -> None:
        assert outcomes["seats a client again"].ending.startswith("refused: round 1 comes 1 after round 0")
        # Where clients may come back at once, nothing refuses the second seat, and the outcome says so.
        lax = CyclicRun(replace(training.plan, separation=1))
        found = SERVERS["seats a client again"](lax, lax, lax)
        assert (found.on, found.ending) == (found.off, "not refused")

    def test_what_repairs_reveal(self, dropping: CyclicRun) -> None:
        """All shares of one client in each round, whoever it is: of others than the victim, which has its self-mask."""
        plan, victim, draws = dropping.plan, dropping.victim, np.random.default_rng(8)
        m, world = plan.noise.participants, honest_world(plan)
        for _ in range(12):
            called = {
                (int(draws.choice([one for one in cohort(plan, number) if one != victim])), number, 0)
                for number in range(plan.horizon)
            }
            left = world.without(lambda signs, called=called: bool(called & set(signs)))
            assert left.mu(victim, hidden=called) <= plan.mu * (1.0 + ROUNDING)
        same = {(number % plan.separation * m + m - 1, number, 0) for number in range(plan.horizon)}
        told = world.without(lambda signs: bool(same & set(signs)))
        assert told.mu(victim, hidden=same) == pytest.approx(plan.mu, rel=ROUNDING)


def test_played_runs_show_the_exact_mu(training: CyclicRun) -> None:
    seen, victim = SeenRun.of(training.honest), training.victim
    weights = [
        seen.best_weights(victim),
        seen.added_up((0, 1)),
        seen.added_up(range(training.plan.horizon)),
        seen.move(victim),
    ]
    for found, chosen in zip(played(seen, victim, weights, 2000, SimStream(6)), weights, strict=True):
        assert found.low < seen.mu(victim, chosen) < found.high
        assert found.proved < found.high


def test_the_measure_knows_two_normal_distributions_apart() -> None:
    draws = np.random.default_rng(2)
    for mu in (0.0, 0.5, 3.0):
        scores = CanaryScores(draws.standard_normal(20_000), mu + draws.standard_normal(20_000))
        found = measure_mu(scores, 1.0 - RARE)
        assert found.low < mu < found.high
        assert found.high - found.low < 0.2
        assert found.proved <= mu


@pytest.mark.parametrize(("turns", "stops"), [(False, False), (True, False), (True, True), (False, True)])
def test_moves_and_ends_that_follow_what_was_seen_gain_nothing(turns: bool, stops: bool) -> None:
    """The victim's moves change sign with what was seen, and the server may stop as soon as it is sure.

    Given the past, a round is a Gaussian shifted by (R^-1 d)_t; the squares add up to at most mu^2 on every path. So no
    threshold of the likelihood ratio may separate better than mu-GDP allows. Moves of one sign to the end reach it.
    """
    plan = make_plan(m=3, rounds=9, separation=3)
    training, runs = CyclicRun(plan), 40_000
    seen = SeenRun.of(training.honest)
    root = np.linalg.cholesky((seen.noise @ seen.noise.T).toarray())
    inverse = np.linalg.inv(root)
    draws = np.random.default_rng(12)
    scores = []
    for present in (0.0, 1.0):
        white = draws.standard_normal((seen.clients.size, runs))
        moves, ratio = np.zeros_like(white), np.zeros(runs)
        running = np.ones(runs, dtype=bool)
        for number in range(plan.horizon):
            rows = np.flatnonzero(seen.rounds == number)
            past = (root @ white + present * moves)[seen.rounds < number].sum(axis=0)
            moves[rows] = (seen.clients[rows] == training.victim)[:, None] * np.where(
                turns & (past < 0.0), -1.0, 1.0
            )
            shift = (inverse @ moves)[rows]
            found = np.sum(shift * (white[rows] + present * shift) - shift**2 / 2.0, axis=0)
            ratio += np.where(running, found, 0.0)
            if stops:
                running &= np.abs(ratio) < 0.5
        scores.append(ratio)
    proved = []
    for threshold in np.quantile(scores[0], (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)):
        hits, alarms = (int(np.sum(one > threshold)) for one in scores[::-1])
        low = beta.ppf(RARE / 14.0, hits, runs - hits + 1)
        high = beta.isf(RARE / 14.0, alarms + 1, runs - alarms)
        proved.append(norm.ppf(low) - norm.ppf(high))
    assert max(proved) <= plan.mu
    assert turns or stops or max(proved) > 0.85 * plan.mu


@pytest.mark.slow
@pytest.mark.parametrize("case", ["complete", "colluders"])
def test_audit_over_many_runs(case: str) -> None:
    """The claim lies in the interval, nothing above it is proved, and one of 0.95 of it would be caught."""
    plan = make_plan(m=6, rounds=12, separation=4, collusion=0.0 if case == "complete" else 1 / 3)
    training = CyclicRun(plan)
    claimed, victim = training.claimed, training.victim
    seen = SeenRun.of(training.honest, training.colluders)
    [found] = played(seen, victim, [seen.best_weights(victim)], 200_000, SimStream(21).child(case))
    assert found.low < claimed < found.high
    assert found.proved <= claimed
    assert found.low > 0.95 * claimed
