"""Clients that are called dropped although they uploaded: every story that the rules allow, by brute force.

Each round the server may call up to so many clients dropped. It is then given all shares of theirs, within the round
and carried to it or from it, but never their self-masks; of all others it is given the self-masks and no share. What it
says does not have to be true. To be given fewer shares never tells it more (`tests/views/test_run.py`). Nothing
here uses the package's views: Sigma is built edge by edge, or from the seeds that were used, and inverted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from niss.accounting import Plan, make_schedule
from niss.graph import ShareGraph
from support.protocol_round import GRID, CarriedFederation

APART, ROUNDS = 2, 4
# So rare that in a million rounds none loses two.
ONE_MAY_BE_LOST = 1e-4


def plan_of(size: int, **changes) -> Plan:
    settings = {
        "method": "niss-carried",
        "graph": "complete",
        "kappa": 3.0,
        "separation": APART,
        "participations": ROUNDS // APART,
        "horizon": ROUNDS,
        "participants": size,
        "mode": "repair",
        "dropout": ONE_MAY_BE_LOST,
    }
    return Plan(**settings | changes)


class Run:
    """All uploads of a run with fixed cohorts, vertex `round * size + seat`, in units of the sensitivity."""

    def __init__(self, plan: Plan, size: int) -> None:
        self.plan, self.size, self.committed = plan, size, plan.committed(size)
        self.rounds = ROUNDS + plan.closing
        lists = [np.arange(size) + size * (number % APART) for number in range(self.rounds)]
        self.edges: list[tuple[int, int, float]] = []
        for number, members in enumerate(lists):
            beacon = bytes([number + 1]) * 32
            graph = plan.for_round(members, weights=1.0, records=1, beacon=beacon, number=number).graph
            self._add(graph, number, number, self.committed.noise.unit)
            if number + 1 < self.rounds:
                onward = ShareGraph.complete((size, size))
                self._add(onward, number, number + 1, self.committed.noise.carried / size)

    def _add(self, graph: ShareGraph, first: int, second: int, unit: float) -> None:
        for a, b, weight in zip(graph.senders, graph.receivers, graph.weights, strict=True):
            self.edges.append((first * self.size + int(a), second * self.size + int(b), unit * float(weight)))

    def charges(self, cohort: int) -> dict[int, float]:
        """What each participation of a client of that cohort is charged, before its upload."""
        taken: list[int] = []
        costs = {}
        for number in range(cohort, ROUNDS, APART):
            costs[number] = self.committed.charge(number, taken)
            taken.append(number)
        return costs

    def costs(
        self,
        colluders: set[int],
        called: Sequence[int | None],
        *,
        masked: bool = True,
        mask: float | None = None,
    ) -> dict[int, float]:
        """mu^2 of every honest client of the run, by seat and cohort, if these seats were called dropped.

        Whoever is called dropped keeps a self-mask: `mask`, or what brings its own noise up to what its charge covers.
        """
        size, residual = self.size, self.committed.noise.residual
        known = {number * size + seat for number in range(self.rounds) for seat in colluders}
        stripped = {number * size + seat for number, seat in enumerate(called) if seat is not None}
        sigma = np.diag(np.full(size * self.rounds, residual))
        for u, v, variance in self.edges:
            if not {u, v} & (known | stripped):
                sigma[[u, v], [u, v]] += variance
                sigma[[u, v], [v, u]] -= variance
        if masked:
            for vertex in stripped - known:
                number, cohort = vertex // size, vertex // size % APART
                if number == ROUNDS:
                    continue  # A closing round has no data to hide.
                if mask is not None:
                    sigma[vertex, vertex] += mask
                    continue
                sigma[vertex, vertex] = max(1.0 / self.charges(cohort)[number], residual)
        precision = np.linalg.inv(sigma)
        found = {}
        for seat, cohort in itertools.product(range(size), range(APART)):
            if seat not in colluders:
                places = [number * size + seat for number in range(cohort, ROUNDS, APART)]
                found[cohort * size + seat] = float(precision[np.ix_(places, places)].sum())
        return found


@pytest.mark.parametrize(
    "changes", [{}, {"collusion": 0.25}, {"closing": True}], ids=["", "colluder", "closing"]
)
@pytest.mark.parametrize("part", [None, 1.0, 0.3, 0.0])
def test_every_lie_about_dropouts_stays_within_the_charge(changes, part):
    """With a self-mask for each round, or one for all as the protocol has it: at its planned strength it costs nothing,
    a weaker one is charged for."""
    size = 4
    run = Run(plan_of(size, **changes), size)
    planned = plan = run.committed
    mask = None if part is None else part * planned.needed_self_mask
    if mask is not None:
        plan = replace(planned, noise=replace(planned.noise, self_mask=mask * (1.0 + 1e-9), committee=size))
    assert plan.matrix.min() >= 0.0
    charged = {}
    for cohort in range(APART):
        rounds = range(cohort, ROUNDS, APART)
        charged[cohort] = float(plan.matrix[np.ix_(rounds, rounds)].sum())
        assert charged[cohort] <= plan.worst.cost * (1.0 + 1e-9)
        if part is None:
            assert charged[cohort] == pytest.approx(sum(run.charges(cohort).values()), rel=1e-9)
    worst = victim = 0.0
    for called in itertools.product((None, *range(size)), repeat=run.rounds):
        for client, cost in run.costs(set(range(run.committed.noise.colluders)), called, mask=mask).items():
            seat, cohort = client % size, client // size
            assert cost <= charged[cohort] * (1.0 + (1e-9 if part is None else 1e-8))
            worst = max(worst, cost / charged[cohort])
            if any(called[number] == seat for number in range(cohort, ROUNDS, APART)):
                victim = max(victim, cost / charged[cohort])
    # The claim is no idle one: others come close to it, and so does whoever is called dropped in every round.
    assert worst > 0.5
    if part is None:
        assert victim > 0.5
    elif part == 1.0:
        np.testing.assert_array_equal(plan.matrix, planned.matrix)
    else:
        assert plan.worst.cost > planned.worst.cost


def test_without_the_self_mask_a_lie_would_strip_its_victim():
    size = 5
    run = Run(plan_of(size), size)
    called = [0, None, 0, None]
    assert run.costs(set(), called)[0] <= sum(run.charges(0).values()) * (1.0 + 1e-9)
    assert run.costs(set(), called, masked=False)[0] > 2.0 * sum(run.charges(0).values())


@pytest.mark.parametrize("called", [(0, 0, 0, 0), (1, 2, 3, 4), (0, 0, 1, 1), (None, 3, 3, None)])
def test_the_charge_covers_what_the_protocol_gives_such_a_server(called: tuple) -> None:
    """Everyone uploads, but the server says that one a round did not: it holds that upload, and all its shares."""
    committed = make_schedule(plan_of(5, clip=2.0), participants=5, coordinates=8, grid_bits=GRID)
    federation = CarriedFederation(committed)
    for number, seat in enumerate(called):
        assert federation.play_round(number, pretended=() if seat is None else (seat,)).exact
    stripped = {
        (federation.listed(number)[seat].identity, number)
        for number, seat in enumerate(called)
        if seat is not None
    }
    charged = {seat.identity.public: sum(mu**2 for _, _, mu in seat.charges) for seat in federation.seats}
    found = federation.seen.mu2(stripped=stripped)
    assert len(found) == 10
    assert all(mu2 <= charged[owner] * (1.0 + 1e-9) for owner, mu2 in found.items())
    assert max(mu2 / charged[owner] for owner, mu2 in found.items()) > 0.5
