"""Sparse carried graphs with colluders and repairs: what is committed, what is checked, and what it is worth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import hypergeom

from niss.accounting import Plan
from niss.errors import ConfigError, PrivacyError
from niss.graph import CarriedGraph, ShareGraph
from niss.mechanism import gdp_delta, gdp_mu
from niss.methods import METHODS
from niss.views.carried_floor import within_connectivity

SIZE, APART, ROUNDS = 16, 2, 4
CARRIED = METHODS["niss-carried"]


def plan_of(**changes) -> Plan:
    settings = {
        "method": "niss-carried",
        "graph": "regular",
        "neighbours": 6,
        "carried_neighbours": 5,
        "kappa": 20.0,
        "separation": APART,
        "participations": ROUNDS // APART,
        "horizon": ROUNDS,
        "participants": SIZE,
        "colluders": 1,
    }
    return Plan(**settings | changes)


def drawn_run(plan: Plan, seed: int) -> tuple[list[ShareGraph], list[CarriedGraph]]:
    """The graphs of all rounds of fixed cohorts, and those between them, as clients draw them."""
    lists = [np.arange(SIZE) + SIZE * (number % APART) for number in range(ROUNDS)]
    beacons = [bytes([seed, number]) * 16 for number in range(ROUNDS)]
    within = [
        plan.for_round(one, weights=1.0, records=1, beacon=beacon).graph
        for one, beacon in zip(lists, beacons, strict=True)
    ]
    onward = [
        CARRIED.carried_graph(plan, (lists[number], lists[number + 1]), beacons[number])
        for number in range(ROUNDS - 1)
    ]
    return within, onward


def covariance(
    plan: Plan, within: list[ShareGraph], onward: list[CarriedGraph], known: set[int]
) -> np.ndarray:
    """Sigma over all uploads without the `known` (their rows are left diagonal), edge by edge."""
    run = plan.committed(SIZE)
    sigma = np.eye(SIZE * ROUNDS) * run.residual / SIZE

    def add(graph, first, second, unit):
        for a, b, weight in zip(graph.senders, graph.receivers, graph.weights, strict=True):
            u, v = int(a) + first, int(b) + second
            if u not in known and v not in known:
                sigma[[u, v], [u, v]] += weight * unit
                sigma[[u, v], [v, u]] -= weight * unit

    for number, graph in enumerate(within):
        add(graph, number * SIZE, number * SIZE, run.spatial / (2.0 * plan.neighbours))
    for number, graph in enumerate(onward):
        add(graph, number * SIZE, (number + 1) * SIZE, run.carried / graph.weights.sum())
    return sigma


def dearest(sigma: np.ndarray, known: set[int]) -> float:
    """mu^2 of the honest client that has least, by an exact inverse; clients come back after APART rounds."""
    precision = np.linalg.inv(sigma)
    costs = []
    for seat, cohort in itertools.product(range(SIZE), range(APART)):
        places = [number * SIZE + seat for number in range(cohort, ROUNDS, APART)]
        if not known.intersection(places):
            costs.append(precision[np.ix_(places, places)].sum())
    return max(costs)


@pytest.mark.parametrize("changes", [{}, {"carried_neighbours": None}, {"graph": "complete"}])
def test_every_placement_of_colluders_stays_within_the_promise(changes):
    """One static colluder in each of two cohorts: all 256 pairs, on graphs that were drawn and checked."""
    plan = plan_of(**changes)
    if plan.graph == "complete":
        plan = plan_of(**changes, neighbours=SIZE - 1)
    promise = plan.committed(SIZE).promise
    within, onward = drawn_run(plan, seed=3)
    onward = [CarriedGraph.complete((SIZE, SIZE)) if graph is None else graph for graph in onward]
    worst = 0.0
    for pair in itertools.product(range(SIZE), repeat=APART):
        known = {number * SIZE + pair[number % APART] for number in range(ROUNDS)}
        worst = max(worst, dearest(covariance(plan, within, onward, known), known))
    assert worst <= promise.worst.cost * (1 + 1e-9)
    assert worst > 0.3 * promise.worst.cost
    assert promise.worst.cost <= gdp_mu(plan.epsilon, plan.gaussian_delta) ** 2 * (1 + 1e-9)


def test_the_bound_on_colluding_neighbours_is_paid_for_in_delta():
    plan = plan_of(participants=300, neighbours=40, carried_neighbours=10, colluders=30)
    run = plan.committed(300)
    assert plan.failing_delta == pytest.approx(0.1 * plan.delta)
    known = run.promise.connectivity.known_neighbours
    assert known < 30
    # Any client of any graph of the run: a union bound, with as many neighbours as a client can have at most.
    failing = [ROUNDS * 300 * hypergeom.sf(more, 299, 30, 80) for more in (known, known - 1)]
    assert failing[0] <= plan.failing_delta < failing[1]
    spent = gdp_delta(plan.epsilon, run.promise.mu)
    assert spent + plan.failing_delta <= plan.delta * (1 + 1e-9)
    # Where everyone shares with everyone nothing can fail, and nothing is paid.
    complete = plan_of(participants=300, graph="complete", colluders=30)
    assert (complete.failing_delta, complete.committed(300).promise.connectivity.known_neighbours) == (0.0, 0)


def test_graphs_that_are_worse_than_committed_are_drawn_again(monkeypatch):
    plan = plan_of()
    promised = plan.committed(SIZE).promise.connectivity
    for seed in range(10):
        within, onward = drawn_run(plan, seed)
        for graph in within:
            assert within_connectivity(graph, promised.known_neighbours) >= promised.spatial
        for graph in onward:
            second = np.linalg.norm(graph.matrix() / plan.carried_neighbours - 1.0 / SIZE, 2)
            assert second <= promised.carried * (1 + 1e-12)
    from niss.methods import niss_carried

    poor = ShareGraph(SIZE, [(seat, (seat + 1) % SIZE, 6.0) for seat in range(SIZE)])
    monkeypatch.setattr(niss_carried, "draw_graph", lambda *_, **__: poor)
    with pytest.raises(ConfigError, match="no well connected graph"):
        plan_of(kappa=20.5).for_round(np.arange(SIZE), weights=1.0, records=1, beacon=bytes(32))


@pytest.mark.parametrize("seed", range(4))
def test_the_connectivity_of_a_graph_holds_for_every_set_of_known_clients(seed):
    """The least eigenvalue between honest deviations, for all pairs of colluders, against the bound."""
    size, degree = 12, 5
    graph = ShareGraph.regular(size, degree=degree, beacon=bytes([seed]) * 32)
    weights = -graph.laplacian()
    np.fill_diagonal(weights, 0.0)
    bound = [within_connectivity(graph, known) * 2 * degree for known in range(3)]
    assert bound[0] == pytest.approx(np.linalg.eigvalsh(graph.laplacian())[1], rel=1e-9)
    for known in (1, 2):
        for out in itertools.combinations(range(size), known):
            inner = np.delete(np.delete(weights, out, 0), out, 1)
            laplacian = np.diag(inner.sum(axis=1)) - inner
            assert np.linalg.eigvalsh(laplacian)[1] >= bound[known] - 1e-12
    assert bound[0] > bound[1] > bound[2] > 0.0


def test_too_sparse_a_graph_for_its_colluders_is_refused():
    with pytest.raises(PrivacyError, match="could cut a client off"):
        plan_of(neighbours=2, colluders=6).committed(SIZE)
    with pytest.raises(ConfigError, match="strip a client of all its shares"):
        plan_of(colluders=0, dropped=6, revealed=6)
