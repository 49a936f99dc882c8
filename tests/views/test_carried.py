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
from niss.graph import CarriedGraph, ShareGraph
from niss.views import carried as carried_view
from niss.views.carried import CarriedRound, CarriedRun, RunKnowledge, run_mu2
from niss.views.carried_floor import complete_floor, mixed_carried, sparse_floors

FloatArray = NDArray[np.float64]
HASHES = (b"a" * 32, b"b" * 32)


@dataclass(frozen=True)
class Training:
    run: CarriedRun
    known: RunKnowledge
    sensitivity: FloatArray


@st.composite
def trainings(draw: Any) -> Training:
    """Random graphs, clients that come back, factors, colluders, drops and revealed edges."""
    count, population = draw(st.integers(2, 4)), 7
    positive = st.floats(0.1, 3.0)
    cohorts = [
        tuple(draw(st.lists(st.integers(0, population - 1), min_size=1, max_size=4, unique=True)))
        for _ in range(count)
    ]
    rescaled = draw(st.booleans())
    rounds = []
    for number, clients in enumerate(cohorts):
        size = len(clients)
        edges = []
        if size > 1:
            pairs = st.tuples(st.integers(0, size - 1), st.integers(1, size - 1), positive)
            edges = [(a, (a + step) % size, c) for a, step, c in draw(st.lists(pairs, max_size=6))]
        carried = []
        for lag in range(1, min(2, count - 1 - number) + 1):
            there = len(cohorts[number + lag])
            ends = st.tuples(st.integers(0, size - 1), st.integers(0, there - 1), positive)
            drawn = draw(st.lists(ends, max_size=6))
            graph = CarriedGraph(
                (size, there),
                np.array([a for a, _, _ in drawn], dtype=np.int64),
                np.array([b for _, b, _ in drawn], dtype=np.int64),
                np.array([c for _, _, c in drawn], dtype=np.float64),
                lag=lag,
            )
            carried.append((graph, draw(positive)))
        residual = draw(st.lists(st.floats(0.05, 2.0), min_size=size, max_size=size))
        factor = draw(st.floats(0.5, 2.0)) if rescaled else 1.0
        rounds.append(
            CarriedRound(clients, ShareGraph(size, edges), draw(positive), residual, tuple(carried), factor)
        )
    run = CarriedRun(tuple(rounds))
    vertices = [(client, number) for number, clients in enumerate(cohorts) for client in clients]
    some = st.lists(st.sampled_from(vertices), max_size=3)
    known = RunKnowledge(
        colluders=draw(st.sets(st.integers(0, population - 1), max_size=3)),
        dropped=draw(some),
        revealed=draw(st.lists(st.tuples(st.sampled_from(vertices), st.sampled_from(vertices)), max_size=3)),
    )
    return Training(run, known, np.array(draw(st.lists(positive, min_size=count, max_size=count))))


def brute_force(case: Training) -> dict[int, float]:
    """Each independent noise is a column; what a client's uploads show beyond the others is a least-squares problem.

    Columns: shares that nobody dishonest knows, and fresh noise. Rows: honest uploads that arrived.
    mu^2 = |pinv(noise) d|^2, the least noise that imitates the client's move.
    """
    run, known = case.run, case.known
    vertices = [(client, number) for number, one in enumerate(run.rounds) for client in one.clients]
    told = {frozenset(pair) for pair in known.revealed}
    columns = []

    def share(sender: tuple[int, int], receiver: tuple[int, int], variance: float, ratio: float) -> None:
        if {sender[0], receiver[0]} & set(known.colluders) or frozenset((sender, receiver)) in told:
            return
        column = dict.fromkeys(vertices, 0.0)
        column[sender] += math.sqrt(variance)
        column[receiver] -= math.sqrt(variance) * ratio
        columns.append(column)

    for number, one in enumerate(run.rounds):
        here = [(client, number) for client in one.clients]
        inner = one.shares
        for a, b, c in zip(inner.senders, inner.receivers, inner.weights, strict=True):
            share(here[a], here[b], one.unit_variance * c, 1.0)
        for graph, variance in one.carried:
            later = run.rounds[number + graph.lag]
            for a, b, c in zip(graph.senders, graph.receivers, graph.weights, strict=True):
                there = (later.clients[b], number + graph.lag)
                share(here[a], there, variance * c, one.factor / later.factor)
        for vertex, variance in zip(here, np.asarray(one.residual), strict=True):
            columns.append({**dict.fromkeys(vertices, 0.0), vertex: math.sqrt(variance)})
    kept = [v for v in vertices if v[0] not in known.colluders and v not in known.dropped]
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
    found = run_mu2(case.run, case.known, sensitivity=case.sensitivity)
    wanted = brute_force(case)
    assert found.keys() == wanted.keys()
    for client, value in wanted.items():
        assert found[client] == pytest.approx(value, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(trainings())
def test_conjugate_gradients_bound_from_above(case):
    exact = run_mu2(case.run, case.known, sensitivity=case.sensitivity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carried_view, "DENSE_VERTICES", 0)
        bounded = run_mu2(case.run, case.known, sensitivity=case.sensitivity)
    for client, value in exact.items():
        assert value <= bounded[client] * (1 + 1e-13) <= value * (1 + 1e-8)


@settings(max_examples=40, deadline=None)
@given(trainings())
def test_a_poor_solution_is_still_bounded(case):
    exact = run_mu2(case.run, case.known, sensitivity=case.sensitivity)

    def careless(matrix: Any, move: FloatArray, **_: Any) -> tuple[FloatArray, int]:
        return 0.8 * move / matrix.diagonal(), 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carried_view, "DENSE_VERTICES", 0)
        patch.setattr(carried_view, "cg", careless)
        bounded = run_mu2(case.run, case.known, sensitivity=case.sensitivity)
    for client, value in exact.items():
        assert value <= bounded[client] * (1 + 1e-13)


@settings(max_examples=60, deadline=None)
@given(trainings(), st.integers(0, 6))
def test_more_colluders_reveals_and_uploads_never_protect(case, more):
    before = run_mu2(case.run, case.known, sensitivity=case.sensitivity)
    worse = case.known._replace(colluders={*case.known.colluders, more})
    rounds = enumerate(case.run.rounds)
    within = [((a, number), (b, number)) for number, one in rounds for a in one.clients for b in one.clients]
    shown = case.known._replace(revealed=[*case.known.revealed, *within])
    arrived = case.known._replace(dropped=())
    for known in (worse, shown, arrived):
        after = run_mu2(case.run, known, sensitivity=case.sensitivity)
        for client in before.keys() & after.keys():
            assert after[client] >= before[client] * (1 - 1e-9)


def cyclic_run(
    *,
    participants,
    separation,
    rounds,
    residual,
    carried,
    spatial,
    degree=None,
    outgoing=None,
    factors=None,
    seed=0,
) -> CarriedRun:
    """Fixed cohorts that take turns; r_t, w_t and spatial variances as the closed form has them."""
    made = []
    for number in range(rounds):
        first = number % separation * participants
        clients = tuple(range(first, first + participants))
        beacon = f"{seed}/{number}".encode()
        if degree is None:
            within = ShareGraph.complete(participants)
        else:
            within = ShareGraph.regular(participants, degree=degree, beacon=beacon)
        onward = ()
        if number + 1 < rounds:
            sizes = (participants, participants)
            if outgoing is None:
                graph = CarriedGraph.complete(sizes)
            else:
                graph = CarriedGraph.draw(sizes, degree=outgoing, beacon=beacon, lists=HASHES)
            onward = ((graph, carried[number] / graph.weights.sum()),)
        sent = float(within.out_weight[0])
        factor = 1.0 if factors is None else factors[number]
        made.append(
            CarriedRound(
                clients, within, spatial / (2 * sent), residual[number] / participants, onward, factor
            )
        )
    return CarriedRun(tuple(made))


@pytest.mark.parametrize("colluding", [0, 1, 3])
@pytest.mark.parametrize("rescaled", [False, True])
def test_complete_graphs_equal_the_closed_form(colluding, rescaled):
    participants, separation, rounds = 6, 3, 8
    rng = np.random.default_rng(3)
    residual, carried = rng.uniform(0.5, 2.0, rounds), rng.uniform(1.0, 6.0, rounds - 1)
    factors = rng.uniform(0.5, 1.5, rounds) if rescaled else None
    sensitivity = rng.uniform(0.5, 1.5, rounds)
    settings_ = {"residual": residual, "carried": carried, "spatial": 3.0, "factors": factors}
    run = cyclic_run(participants=participants, separation=separation, rounds=rounds, **settings_)
    colluders = [cohort * participants + place for cohort in range(separation) for place in range(colluding)]
    exact = run_mu2(run, RunKnowledge(colluders), sensitivity=sensitivity)
    matrix = complete_floor(participants=participants, colluders=colluding, **settings_).matrix
    for client, value in exact.items():
        place = np.arange(client // participants, rounds, separation)
        move = sensitivity[place]
        assert move @ matrix[np.ix_(place, place)] @ move == pytest.approx(value, rel=1e-10)


def test_squared_shifts_add_up_on_every_path():
    """Given the past, a round is a Gaussian with shift (R^-1 d)_t; whatever the order of rounds, the sum is d'G d."""
    run = cyclic_run(
        participants=4,
        separation=2,
        rounds=5,
        residual=np.full(5, 1.0),
        carried=np.full(4, 3.0),
        spatial=2.0,
        outgoing=2,
    )
    graph, _ = run.graph
    covariance = graph.laplacian() + np.diag(run.residual)
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
        ended = CarriedRun((*run.rounds[: number - 1], replace(run.rounds[number - 1], carried=())))
        assert total <= run_mu2(ended)[1] + 1e-12
    assert run_mu2(run)[1] == pytest.approx(total, rel=1e-10)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("spatial", [0.02, 1.0, 20.0])
def test_sparse_floors_are_never_below_the_truth(share, spatial):
    participants, separation, rounds = 20, 3, 9
    run = cyclic_run(
        participants=participants,
        separation=separation,
        rounds=rounds,
        residual=np.full(rounds, 0.3),
        carried=np.full(rounds - 1, 3.0),
        spatial=spatial,
        degree=4,
        outgoing=4,
    )
    everyone = np.arange(separation * participants)
    colluders = np.random.default_rng(7).choice(everyone, int(share * everyone.size), replace=False).tolist()
    exact = run_mu2(run, RunKnowledge(colluders))
    floors = sparse_floors(run, colluders)
    for client, value in exact.items():
        place = np.arange(client // participants, rounds, separation)
        bounds = [float(floor.matrix[np.ix_(place, place)].sum()) for floor in floors]
        assert min(bounds) >= value * (1 - 1e-10)
    if spatial == 20.0:
        worst = max(exact.values())
        offsets = [np.arange(o, rounds, separation) for o in range(separation)]
        claim = min(max(float(f.matrix[np.ix_(p, p)].sum()) for p in offsets) for f in floors)
        assert claim <= 1.25 * worst
        without = max(float(floors[-1].matrix[np.ix_(p, p)].sum()) for p in offsets)
        assert claim < 0.7 * without


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.001, 3.0), st.floats(0.1, 20.0))
def test_unequal_carried_weights_are_never_flattered(seed, spatial, carried):
    """Few and unequal carried edges: most clients have none, and the bound must not spread what the others have."""
    rng = np.random.default_rng(seed)
    size, rounds = 5, 4
    made = []
    for number in range(rounds):
        onward = ()
        if number + 1 < rounds:
            count = int(rng.integers(1, 6))
            ends = rng.integers(0, size, (2, count))
            graph = CarriedGraph((size, size), ends[0], ends[1], rng.exponential(1.0, count) + 0.01)
            onward = ((graph, carried),)
        clients = tuple(range(number % 2 * size, number % 2 * size + size))
        made.append(CarriedRound(clients, ShareGraph.complete(size), spatial, 0.2, onward))
    run = CarriedRun(tuple(made))
    floors = sparse_floors(run)
    for client, value in run_mu2(run).items():
        place = np.arange(client // size, rounds, 2)
        assert min(float(floor.matrix[np.ix_(place, place)].sum()) for floor in floors) >= value * (1 - 1e-10)


def test_colluders_anywhere_leave_the_mixing_weight():
    participants, degree = 12, 4
    graph = CarriedGraph.draw((participants,) * 2, degree=degree, beacon=b"m", lists=HASHES)
    second = float(np.linalg.svd(graph.matrix() / degree, compute_uv=False)[1])
    rng = np.random.default_rng(1)
    total = float(graph.weights.sum())
    for colluders in (1, 3, 6):
        least, loss = mixed_carried(total, second, participants, colluders)
        for _ in range(300):
            rows, columns = (np.sort(rng.permutation(participants)[colluders:]) for _ in range(2))
            inner = graph.matrix()[np.ix_(rows, columns)]
            weight = inner.sum()
            assert weight >= least - 1e-9
            for sums in (inner.sum(axis=0), inner.sum(axis=1)):
                if least > 0.0:
                    assert 2.0 * np.sum((sums - sums.mean()) ** 2) / weight <= loss + 1e-9


def test_a_run_that_carries_past_its_end_is_refused():
    run = cyclic_run(
        participants=3, separation=2, rounds=3, residual=np.ones(3), carried=np.ones(2), spatial=1.0
    )
    with pytest.raises(ConfigError, match="does not exist"):
        CarriedRun(run.rounds[:2])
    with pytest.raises(ConfigError, match="did not take part"):
        run_mu2(run, RunKnowledge(dropped=[(0, 1)]))
