"""The joint view over a whole training against brute force that uses nothing of the package but the graphs' edges."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.views import CompleteRun, RoundNoise, RunNoise, effective_variance, run_mu2
from niss.views import run as run_view

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Training:
    run: RunNoise
    known: dict[str, Any]
    sensitivity: FloatArray


@st.composite
def trainings(draw: Any) -> Training:
    """Random graphs, clients that come back, colluders, drops and revealed edges."""
    count, population = draw(st.integers(2, 4)), 7
    positive = st.floats(0.1, 3.0)
    cohorts = [
        tuple(draw(st.lists(st.integers(0, population - 1), min_size=1, max_size=4, unique=True)))
        for _ in range(count)
    ]
    rounds = []
    for number, clients in enumerate(cohorts):
        size = len(clients)
        edges = []
        if size > 1:
            pairs = st.tuples(st.integers(0, size - 1), st.integers(1, size - 1), positive)
            edges = [(a, (a + step) % size, c) for a, step, c in draw(st.lists(pairs, max_size=6))]
        carried = None
        if number + 1 < count and draw(st.booleans()):
            there = len(cohorts[number + 1])
            ends = st.tuples(st.integers(0, size - 1), st.integers(0, there - 1), positive)
            carried = ShareGraph((size, there), draw(st.lists(ends, max_size=6))), draw(positive)
        residual = draw(st.lists(st.floats(0.05, 2.0), min_size=size, max_size=size))
        rounds.append(RoundNoise(clients, ShareGraph(size, edges), draw(positive), residual, carried))
    run = RunNoise(tuple(rounds))
    vertices = [(client, number) for number, clients in enumerate(cohorts) for client in clients]
    some = st.lists(st.sampled_from(vertices), max_size=3)
    pairs = st.tuples(st.sampled_from(vertices), st.sampled_from(vertices))
    known = {
        "colluders": draw(st.sets(st.integers(0, population - 1), max_size=3)),
        "dropped": draw(some),
        "revealed": draw(st.lists(pairs, max_size=3)),
    }
    return Training(run, known, np.array(draw(st.lists(positive, min_size=count, max_size=count))))


def brute_force(case: Training) -> dict[int, float]:
    """Each independent noise is a column; what a client's uploads show beyond the others is a least-squares problem.

    Columns: shares that nobody dishonest knows, and fresh noise. Rows: honest uploads that arrived.
    mu^2 = |pinv(noise) d|^2, the least noise that imitates the client's move.
    """
    run, colluders = case.run, case.known["colluders"]
    vertices = [(client, number) for number, one in enumerate(run.rounds) for client in one.clients]
    told = {frozenset(pair) for pair in case.known["revealed"]}
    columns = []

    def share(sender: tuple[int, int], receiver: tuple[int, int], variance: float) -> None:
        if {sender[0], receiver[0]} & colluders or frozenset((sender, receiver)) in told:
            return
        column = dict.fromkeys(vertices, 0.0)
        column[sender] += math.sqrt(variance)
        column[receiver] -= math.sqrt(variance)
        columns.append(column)

    for number, one in enumerate(run.rounds):
        here = [(client, number) for client in one.clients]
        inner = one.shares
        for a, b, c in zip(inner.senders, inner.receivers, inner.weights, strict=True):
            share(here[a], here[b], one.unit_variance * c)
        if one.carried is not None:
            graph, variance = one.carried
            for a, b, c in zip(graph.senders, graph.receivers, graph.weights, strict=True):
                share(here[a], (run.rounds[number + 1].clients[b], number + 1), variance * c)
        for vertex, variance in zip(here, np.asarray(one.residual), strict=True):
            columns.append({**dict.fromkeys(vertices, 0.0), vertex: math.sqrt(variance)})
    kept = [v for v in vertices if v[0] not in colluders and v not in case.known["dropped"]]
    noise = np.array([[column[vertex] for column in columns] for vertex in kept]).reshape(
        len(kept), len(columns)
    )
    result = {}
    for client in sorted({client for client, _ in kept}):
        move = np.array([case.sensitivity[number] if who == client else 0.0 for who, number in kept])
        imitation = np.linalg.lstsq(noise, move, rcond=None)[0]
        result[client] = float(imitation @ imitation)
    return result


@settings(max_examples=150, deadline=None)
@given(trainings())
def test_the_view_equals_brute_force(case):
    found = run_mu2(case.run, **case.known, sensitivity=case.sensitivity)
    wanted = brute_force(case)
    assert found.keys() == wanted.keys()
    for client, value in wanted.items():
        assert found[client] == pytest.approx(value, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(trainings(), st.integers(0, 6))
def test_more_colluders_reveals_and_uploads_never_protect(case, more):
    before = run_mu2(case.run, **case.known, sensitivity=case.sensitivity)
    rounds = enumerate(case.run.rounds)
    within = [((a, number), (b, number)) for number, one in rounds for a in one.clients for b in one.clients]
    worse = {"colluders": {*case.known["colluders"], more}}
    for changed in (worse, {"revealed": [*case.known["revealed"], *within]}, {"dropped": ()}):
        after = run_mu2(case.run, **{**case.known, **changed}, sensitivity=case.sensitivity)
        for client in before.keys() & after.keys():
            assert after[client] >= before[client] * (1 - 1e-9)


def cyclic_run(*, participants, separation, carried, spatial) -> RunNoise:
    """Fixed cohorts that take turns, r = 1; w_t and spatial variances as the closed form has them."""
    rounds = len(carried) + 1
    made = []
    for number in range(rounds):
        first = number % separation * participants
        onward = None
        if number + 1 < rounds:
            onward = ShareGraph.complete((participants, participants)), carried[number] / participants**2
        made.append(
            RoundNoise(
                tuple(range(first, first + participants)),
                ShareGraph.complete(participants),
                spatial / (2 * (participants - 1)),
                1.0 / participants,
                onward,
            )
        )
    return RunNoise(tuple(made))


@pytest.mark.parametrize("carrying", [0.0, 1.0])
@pytest.mark.parametrize("colluding", [0, 1, 3])
def test_complete_graphs_equal_the_closed_form(colluding, carrying):
    """Without carried noise, too, where K is diagonal and each round is the view of a single one."""
    participants, separation, rounds = 6, 3, 8
    rng = np.random.default_rng(3)
    carried, sensitivity = carrying * rng.uniform(1.0, 6.0, rounds - 1), rng.uniform(0.5, 1.5, rounds)
    run = cyclic_run(participants=participants, separation=separation, carried=carried, spatial=3.0)
    colluders = [cohort * participants + place for cohort in range(separation) for place in range(colluding)]
    exact = run_mu2(run, colluders=colluders, sensitivity=sensitivity)
    matrix = CompleteRun(participants, colluding, carried).matrix(1.0, 3.0)
    for client, value in exact.items():
        place = np.arange(client // participants, rounds, separation)
        move = sensitivity[place]
        assert move @ matrix[np.ix_(place, place)] @ move == pytest.approx(value, rel=1e-10)
    if not carrying:
        assert np.count_nonzero(matrix) == rounds
        alone = effective_variance(
            ShareGraph.complete(participants),
            unit_variance=0.3,
            residual_variance=1.0 / participants,
            colluders=range(colluding),
        )
        assert 1.0 / matrix[0, 0] == pytest.approx(alone[0], rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(trainings())
def test_a_round_is_a_run_of_one_round(case):
    """And rounds between which nothing is carried cost what each costs alone, added up."""
    apart = RunNoise(tuple(replace(one, carried=None) for one in case.run.rounds))
    total: dict[int, float] = {}
    for one in apart.rounds:
        variance = effective_variance(
            one.shares, unit_variance=one.unit_variance, residual_variance=np.asarray(one.residual)
        )
        found = run_mu2(RunNoise((one,)))
        for client, left in zip(one.clients, variance, strict=True):
            assert found[client] == pytest.approx(1.0 / left, rel=1e-12)
            total[client] = total.get(client, 0.0) + 1.0 / left
    assert run_mu2(apart) == pytest.approx(total, rel=1e-12)


def test_squared_shifts_add_up_on_every_path():
    """Given the past, a round is a Gaussian with shift (R^-1 d)_t; whatever the order of rounds, the sum is d'G d."""
    run = cyclic_run(participants=4, separation=2, carried=np.full(4, 3.0), spatial=2.0)
    covariance = run.graph.laplacian() + np.diag(run.residual)
    starts = np.arange(0, 24, 4)
    move = np.array([1.0 if vertex[0] == 1 else 0.0 for vertex in run.places])
    total = 0.0
    for first, last in itertools.pairwise(starts):
        past, now = np.arange(first), np.arange(first, last)
        gain = covariance[np.ix_(now, past)] @ np.linalg.inv(covariance[np.ix_(past, past)])
        shift = move[now] - gain @ move[past]
        spread = covariance[np.ix_(now, now)] - gain @ covariance[np.ix_(past, now)]
        total += float(shift @ np.linalg.solve(spread, shift))
        # An early end shows less than a run planned to end there, whose last round carries nothing.
        number = last // 4
        ended = RunNoise((*run.rounds[: number - 1], replace(run.rounds[number - 1], carried=None)))
        assert total <= run_mu2(ended)[1] + 1e-12
    assert run_mu2(run)[1] == pytest.approx(total, rel=1e-10)


def test_runs_that_cannot_be_are_refused(monkeypatch):
    run = cyclic_run(participants=3, separation=2, carried=np.ones(2), spatial=1.0)
    between = ShareGraph.complete((3, 2))
    for refused, why in (
        (lambda: RunNoise(run.rounds[:2]), "does not exist"),
        (lambda: run_mu2(run, dropped=[(0, 1)]), "did not take part"),
        (lambda: RunNoise((replace(run.rounds[0], carried=(between, 1.0)), *run.rounds[1:])), "joins"),
    ):
        with pytest.raises(ConfigError, match=why):
            refused()
    monkeypatch.setattr(run_view, "DENSE_VERTICES", 8)
    with pytest.raises(ConfigError, match="9 uploads are too many"):
        run_mu2(run)
