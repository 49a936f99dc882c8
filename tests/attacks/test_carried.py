"""Attacks on carried shares against a model of the noise that uses nothing of the package but the plan's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta, norm

from niss.accounting import Committed, plan_carried
from niss.attacks.carried import CarriedExperiment
from niss.attacks.carried_runs import (
    added_up,
    measure_mu,
    play_run,
    play_scores,
    see_run,
)
from niss.attacks.carried_servers import (
    SERVERS,
    Assumed,
    CarriedTraining,
    ServerGain,
    against_colluders,
    colluders_of,
    repeat_rounds,
)
from niss.attacks.experiment import no_progress
from niss.errors import ConfigError
from niss.randomness import SimStream

Vertex = tuple[int, int, int]
ROUNDING = 1e-9
# Each statistical assertion here fails by chance at most this often.
RARE = 1e-6


def make_plan(m: int = 5, rounds: int = 12, separation: int = 4, **options: Any) -> Committed:
    numbers = {"kappa": 5.0, **options}
    return plan_carried(participants=m, clients=m * separation, rounds=rounds, **numbers).plan


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

    def without(self, known: Any) -> World:
        """The same where the adversary knows the noises of which `known(signs)` is true."""
        return World(self.uploads, [one for one in self.noises if not known(one[1])])


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


def seats(signs: dict[Vertex, float], m: int) -> tuple[int, ...]:
    """Sender's and receiver's seat of a carried share."""
    return tuple(client % m for client, _, _ in sorted(signs, key=lambda upload: upload[1]))


def adder(signs: dict[Vertex, float]) -> Vertex:
    return next(upload for upload, sign in signs.items() if sign > 0)


@pytest.fixture(scope="module")
def training() -> CarriedTraining:
    return CarriedTraining(make_plan())


@pytest.fixture(scope="module")
def assumed() -> Assumed:
    return Assumed(
        CarriedTraining(make_plan(collusion=0.2)),
        CarriedTraining(make_plan(declared_dropped=1)),
        SimStream(3),
    )


@pytest.fixture(scope="module")
def outcomes(training: CarriedTraining, assumed: Assumed) -> dict[str, ServerGain]:
    return {name: server(training, assumed) for name, server in SERVERS.items()}


class TestExactly:
    """The attack's numbers, and those of the brute force above."""

    def test_the_likelihood_ratio_reaches_the_promise(self, training: CarriedTraining) -> None:
        reached = training.mu(training.seen)
        assert reached == pytest.approx(honest_world(training.plan).mu(training.victim), rel=ROUNDING)
        assert reached == pytest.approx(training.plan.mu, rel=ROUNDING)
        assert training.claimed == pytest.approx(training.plan.mu, rel=ROUNDING)

    def test_and_with_colluders(self, assumed: Assumed) -> None:
        plan, victim = assumed.colluders.plan, assumed.colluders.victim
        theirs = set(colluders_of(plan))
        assert len(theirs) == plan.separation
        assert victim not in theirs
        world = honest_world(plan).without(lambda signs: any(client in theirs for client, _, _ in signs))
        world.uploads = [upload for upload in world.uploads if upload[0] not in theirs]
        reached = assumed.colluders.mu(against_colluders(assumed.colluders))
        assert reached == pytest.approx(world.mu(victim), rel=ROUNDING)
        assert reached == pytest.approx(plan.mu, rel=ROUNDING)

    def test_the_worst_of_any_pattern_reaches_the_promise(self) -> None:
        plan = make_plan(pattern="any")
        seats = [list(range(100 * t, 100 * t + plan.noise.participants)) for t in range(1, plan.horizon + 1)]
        for number in plan.worst.rounds:
            seats[number][0] = 0
        assert see_run(play_run(plan, seats)).mu(0) == pytest.approx(plan.mu, rel=ROUNDING)
        assert honest_world(plan, seats).mu(0) == pytest.approx(plan.mu, rel=ROUNDING)

    def test_nobody_is_charged_less_than_the_best_test_tells(self, training: CarriedTraining) -> None:
        for first in range(training.plan.separation):
            reached = training.mu(training.seen, training.first_of(first))
            assert reached <= training.charged(training.visits_of(first)) * (1.0 + ROUNDING)

    def test_no_other_weights_tell_more(self, training: CarriedTraining) -> None:
        seen, most = training.seen, training.mu(training.seen)
        best, draws = seen.best_weights(training.victim), np.random.default_rng(1)
        for scale in (1e-3, 0.03, 1.0):
            for _ in range(20):
                weights = best + scale * np.abs(best).max() * draws.standard_normal(best.size)
                assert seen.mu(training.victim, weights) < most
        for rounds in ([0], [0, 1], [4, 5], [7, 8, 9], training.visits, range(training.plan.horizon)):
            assert abs(seen.mu(training.victim, added_up(seen, rounds))) < most


class TestServers:
    """Each server with its rule off and on: what is reached by our own count, and that the rule holds it."""

    @pytest.mark.parametrize("name", SERVERS)
    def test_the_rule_makes_the_difference(self, outcomes: dict[str, ServerGain], name: str) -> None:
        off, on = outcomes[name].off, outcomes[name].on
        assert off[0] > 1.02 * off[1]
        assert on[0] <= on[1] * (1.0 + ROUNDING)

    @pytest.mark.parametrize(("rounds", "separation"), [(13, 4), (9, 2), (7, 6)])
    def test_runs_of_other_lengths(self, rounds: int, separation: int) -> None:
        plans = [
            make_plan(rounds=rounds, separation=separation, **options)
            for options in ({}, {"collusion": 0.2}, {"declared_dropped": 1})
        ]
        training, colluders, dropped = map(CarriedTraining, plans)
        for server in SERVERS.values():
            found = server(training, Assumed(colluders, dropped, SimStream(3)))
            assert found.on[0] <= found.on[1] * (1.0 + ROUNDING)
            assert found.off[0] > 0.9 * found.off[1]

    def test_each_round_the_last(self, outcomes: dict[str, ServerGain], training: CarriedTraining) -> None:
        bare = honest_world(training.plan).without(is_carried).mu(training.victim)
        assert outcomes["each round is the last"].off[0] == pytest.approx(bare, rel=ROUNDING)
        assert outcomes["calls cohorts dropped"].off[0] == pytest.approx(bare, rel=ROUNDING)

    def test_an_early_end(self, outcomes: dict[str, ServerGain], training: CarriedTraining) -> None:
        plan, world, best = training.plan, honest_world(training.plan), {"on": (0.0, 1.0), "off": (0.0, 1.0)}
        for first in range(plan.separation):
            for end in range(first + 1, plan.horizon):
                hidden = [upload for upload in world.uploads if upload[1] >= end]
                visits = list(range(first, end, plan.separation))
                matrix = plan.matrix[np.ix_(visits, visits)]
                client = plan.noise.participants * first
                cut = world.without(lambda signs, last=end - 1: is_carried(signs) and adder(signs)[1] == last)
                for rule, seen in (("on", world), ("off", cut)):
                    pair = (seen.mu(client, hidden=hidden), math.sqrt(matrix.sum()))
                    best[rule] = max(best[rule], pair, key=lambda one: one[0] / one[1])
        assert outcomes["ends early"].on == pytest.approx(best["on"], rel=1e-8)
        assert outcomes["ends early"].off == pytest.approx(best["off"], rel=1e-8)

    def test_repeated_rounds(self, outcomes: dict[str, ServerGain], training: CarriedTraining) -> None:
        plan, victim, visits = training.plan, training.victim, training.visits
        after = [t + 1 for t in visits if t + 1 < plan.horizon]
        senders = outcomes["repeats: senders"]
        assert senders.off[0] == pytest.approx(
            repeated_world(plan, after, again=True).mu(victim), rel=ROUNDING
        )
        assert senders.on[0] == pytest.approx(
            repeated_world(plan, after, again=False).mu(victim), rel=ROUNDING
        )
        own = repeated_world(plan, [t for t in visits if t], again=True)
        assert outcomes["repeats: receivers"].off[0] == pytest.approx(own.mu(victim), rel=ROUNDING)

    def test_those_who_come_after_a_repeated_round(
        self, outcomes: dict[str, ServerGain], training: CarriedTraining
    ) -> None:
        plan = training.plan
        found = []
        for first in range(plan.separation):
            visits = list(range(first, plan.horizon, plan.separation))
            before = [t - 1 for t in visits if t > 0]
            for repeated in (before, *([one] for one in before)):
                reached = repeated_world(plan, repeated, again=False).mu(plan.noise.participants * first)
                found.append((reached, math.sqrt(plan.matrix[np.ix_(visits, visits)].sum())))
        worst = max(found, key=lambda one: one[0] / one[1])
        assert outcomes["repeats: those after"].off == pytest.approx(worst, rel=1e-8)
        most = max(reached for reached, _ in found)
        assert most > plan.mu, "the promise itself would be broken, not only a client's own charge"

    def test_rounds_that_failed_before_their_list_was_fixed(
        self, outcomes: dict[str, ServerGain], training: CarriedTraining
    ) -> None:
        plan, whole, best = training.plan, honest_world(training.plan), {"on": (0.0, 1.0), "off": (0.0, 1.0)}
        for first in range(plan.separation):
            visits = list(range(first, plan.horizon, plan.separation))
            before = [t - 1 for t in visits if t > 0]
            for failed in (before, *([one] for one in before)):
                hidden = [upload for upload in whole.uploads if upload[1] in failed]
                bare = whole.without(lambda signs, failed=failed: adder(signs)[1] in failed)
                for rule, seen in (("on", whole), ("off", bare)):
                    reached = seen.mu(plan.noise.participants * first, hidden=hidden)
                    pair = (reached, math.sqrt(plan.matrix[np.ix_(visits, visits)].sum()))
                    best[rule] = max(best[rule], pair, key=lambda one: one[0] / one[1])
        assert outcomes["skips rounds"].off == pytest.approx(best["off"], rel=1e-8)
        assert outcomes["skips rounds"].on == pytest.approx(best["on"], rel=1e-8)

    def test_who_is_told_another_horizon_shares_nothing(self, training: CarriedTraining) -> None:
        plan, seen, draws = training.plan, training.seen, np.random.default_rng(4)
        for part in (0.1, 0.3, 0.5, 0.7, 0.9) * 3:
            group = draws.random(plan.noise.participants * plan.separation) < part
            world = honest_world(plan)
            noises = []
            for variance, signs in world.noises:
                if len({bool(group[client]) for client, _, _ in signs}) == 1:
                    noises.append((variance, signs))
                else:
                    noises += [(variance, {upload: sign}) for upload, sign in signs.items()]
            reached = World(world.uploads, noises).mu(training.victim)
            assert reached <= plan.mu * (1.0 + ROUNDING)
            side = np.append(group[seen.clients], False)
            split = side[seen.shares.added] != side[seen.shares.taken]
            assert training.mu(seen.with_shares(seen.shares.apart(split))) == pytest.approx(
                reached, rel=ROUNDING
            )

    def test_horizons_that_are_not_in_the_seeds(
        self, outcomes: dict[str, ServerGain], training: CarriedTraining
    ) -> None:
        world, victim, visits = honest_world(training.plan), training.victim, set(training.visits)
        noises = []
        for variance, signs in world.noises:
            who, number, _ = adder(signs) if is_carried(signs) else (victim, -1, 0)
            silent = number in visits and who != victim
            noises.append((variance, {u: s for u, s in signs.items() if s < 0} if silent else signs))
        reached = World(world.uploads, noises).mu(victim)
        assert outcomes["different horizons"].off[0] == pytest.approx(reached, rel=ROUNDING)

    def test_a_client_seated_again(self, outcomes: dict[str, ServerGain], training: CarriedTraining) -> None:
        plan, victim = training.plan, training.victim
        seats = [cohort(plan, number) for number in range(plan.horizon)]
        for number in training.visits:
            if number + 1 < plan.horizon:
                seats[number + 1][0] = victim
        found = outcomes["seats a client again"]
        assert found.off[0] == pytest.approx(honest_world(plan, seats).mu(victim), rel=ROUNDING)
        assert "round 1 comes 1 after round 0" in found.ending

    def test_refusals_are_the_accounts_own(
        self, outcomes: dict[str, ServerGain], training: CarriedTraining
    ) -> None:
        for name in ("repeats: receivers", "seats a client again"):
            assert outcomes[name].ending.startswith("refused: round")
        # Where clients may come back at once, nothing refuses the second seat, and the outcome says so.
        lax = CarriedTraining(replace(training.plan, separation=1))
        found = SERVERS["seats a client again"](lax, None)  # type: ignore[arg-type]
        assert (found.on, found.ending) == (found.off, "not refused")

    def test_a_cohort_of_strangers(self, outcomes: dict[str, ServerGain], training: CarriedTraining) -> None:
        plan, victim = training.plan, training.victim
        theirs = {client for number in training.visits for client in cohort(plan, number + 1)}
        world = honest_world(plan).without(lambda signs: any(client in theirs for client, _, _ in signs))
        world.uploads = [upload for upload in world.uploads if upload[0] not in theirs]
        assert outcomes["replaces the next cohort"].off[0] == pytest.approx(world.mu(victim), rel=ROUNDING)

    def test_what_repairs_reveal(self, assumed: Assumed) -> None:
        """All shares of one client in each round, whoever it is: of others than the victim, which has its self-mask."""
        plan, victim, draws = assumed.dropped.plan, assumed.dropped.victim, np.random.default_rng(8)
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


def test_a_repeated_round_has_new_uploads_and_keeps_the_old(training: CarriedTraining) -> None:
    twice = repeat_rounds(training.seen, [3, 6], subtract_again=False)
    assert twice.clients.size == training.seen.clients.size + 2 * training.plan.noise.participants
    assert np.all(twice.shares.again < 0)
    again = repeat_rounds(training.seen, [3], subtract_again=True).shares
    assert np.sum(again.again >= 0) == training.plan.noise.participants**2


def test_played_runs_show_the_exact_mu(training: CarriedTraining) -> None:
    seen, victim = training.seen, training.victim
    weights = [
        seen.best_weights(victim),
        added_up(seen, (0, 1)),
        added_up(seen, range(training.plan.horizon)),
        seen.move(victim),
    ]
    scores = play_scores(seen, victim, weights, runs=2000, stream=SimStream(6), progress=lambda *_: None)
    for number, chosen in enumerate(weights):
        found = measure_mu(scores[0][number], scores[1][number], 1.0 - RARE)
        assert found.low < seen.mu(victim, chosen) < found.high
        assert found.proved < found.high


def test_the_measure_knows_two_normal_distributions_apart() -> None:
    draws = np.random.default_rng(2)
    for mu in (0.0, 0.5, 3.0):
        found = measure_mu(draws.standard_normal(20_000), mu + draws.standard_normal(20_000), 1.0 - RARE)
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
    training, runs = CarriedTraining(plan), 40_000
    seen = training.seen
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
    training = CarriedTraining(plan)
    claimed, seen = training.claimed, against_colluders(training)
    scores = play_scores(
        seen,
        training.victim,
        [seen.best_weights(training.victim)],
        runs=200_000,
        stream=SimStream(21).child(case),
        progress=lambda *_: None,
    )
    found = measure_mu(scores[0][0], scores[1][0], 1.0 - RARE)
    assert found.low < claimed < found.high
    assert found.proved <= claimed
    assert found.low > 0.95 * claimed


class TestExperiment:
    def test_findings(self) -> None:
        experiment = CarriedExperiment(clients=5, rounds=9, separation=3, colluders=1, dropped=1, runs=400)
        findings = experiment.start()
        experiment.run(findings, no_progress)
        rows = {(row["attack"], row["rule"]): row for row in findings.rows}
        assert {name for name, rule in rows if rule} == set(SERVERS)
        assert rows["likelihood ratio", None]["outcome"] == "reaches the claim"
        for (_, rule), row in rows.items():
            assert rule == "off" or row["ratio"] <= 1.0 + ROUNDING
            assert rule != "off" or row["outcome"] == "more than was charged"
        assert rows["seats a client again", "on"]["outcome"].startswith("refused")

    @pytest.mark.parametrize(
        ("options", "flag"),
        [
            ({"clients": 3}, "--colluders"),
            ({"clients": 6, "colluders": 5}, "--colluders"),
            ({"rounds": 10}, "--separation"),
            ({"separation": 1}, "--separation"),
            ({"dropped": 11}, "--dropped"),
            ({"confidence": 1.0}, "--confidence"),
            ({"kappa": 0.0}, "--kappa"),
            ({"runs": 10}, "--runs"),
        ],
    )
    def test_bad_options(self, options: dict[str, Any], flag: str) -> None:
        with pytest.raises(ConfigError) as caught:
            CarriedExperiment(**options).start()
        assert caught.value.field == flag
