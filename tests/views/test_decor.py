"""The joint view beside published figures: DECOR's own tables of shared noise on a ring, a grid and a complete graph.

Allouah et al. 2024 (2405.01031), from the result files in their repository (elfirdoussilab1/DECOR): 16 nodes, noise of
deviation `sigma_cor` on each edge and of `sigma` at each node. The divergence of a round is `alpha` times what is
listed, for updates that are replaced, and epsilon (delta = 1e-5) follows from it by the usual conversion. All 190 rows
that have noise agree to 2.5e-14; these are the first and the last of some tables.
"""

from __future__ import annotations

import math

import pytest

from niss.graph import ShareGraph
from niss.mechanism import gdp_epsilon
from niss.views import effective_variance

NODES, SIDE, DELTA = 16, 4, 1e-5
RING = [(k, (k + 1) % NODES, 1.0) for k in range(NODES)]
ACROSS = [(k, SIDE * (k // SIDE) + (k + 1) % SIDE, 1.0) for k in range(NODES)]
GRAPHS = {
    "ring": RING,
    "grid": [*ACROSS, *((k, (k + SIDE) % NODES, 1.0) for k in range(NODES))],
    "complete": [(a, b, 1.0) for a in range(NODES) for b in range(a)],
}
# Their graph, clip, rounds, sigma, sigma_cor, divergence of a round over alpha, and epsilon.
TABLE = [
    ("complete", 1.0, 3500, 153.83550190535897, 251.0, 7.0994030070188394e-06, 1.0945621561613659),
    ("complete", 1.0, 3500, 53.29268054475337, 126.0, 5.1312189796822965e-05, 3.055448681556296),
    ("complete", 1.0, 3500, 6.880990508150071, 8.0, 0.004390156900607886, 41.9664831294737),
    ("complete", 1.5, 2500, 195.0220934454164, 501.0, 8.43540009653262e-06, 1.0065636779022544),
    ("complete", 1.5, 2500, 22.59997321199106, 47.0, 0.0006683135227206823, 10.44246766699349),
    ("grid", 1.0, 3500, 153.83550190535897, 501.0, 7.3513532020161215e-06, 1.1142600025482112),
    ("grid", 1.0, 3500, 5.865762400390225, 32.0, 0.004150772743849698, 40.39323226303661),
    ("grid", 1.5, 2500, 22.59997321199106, 126.0, 0.0006258352002673263, 10.052929425253241),
    ("ring", 1.0, 3500, 189.33600234505718, 501.0, 1.0409741704100391e-05, 1.3317534098343329),
    ("ring", 1.0, 3500, 17.827099282407094, 188.0, 0.0004656256603611915, 10.29282950264761),
    ("ring", 1.0, 3500, 5.865762400390225, 70.0, 0.004158812546216141, 40.4464094548877),
    ("ring", 1.5, 2500, 67.56080356242892, 501.0, 8.369313381946008e-05, 3.3133475418254656),
]


@pytest.mark.parametrize(("graph", "clip", "rounds", "own", "shared", "divergence", "theirs"), TABLE)
def test_the_joint_view_is_that_of_decor_and_exact_accounting_gives_less(
    graph: str, clip: float, rounds: int, own: float, shared: float, divergence: float, theirs: float
) -> None:
    variance = effective_variance(
        ShareGraph(NODES, GRAPHS[graph]), unit_variance=shared**2, residual_variance=own**2
    ).min()
    mu2 = (2.0 * clip) ** 2 / variance
    assert mu2 / 2.0 == pytest.approx(divergence, rel=1e-12)
    total = rounds * mu2 / 2.0
    assert total + 2.0 * math.sqrt(total * math.log(1.0 / DELTA)) == pytest.approx(theirs, rel=1e-12)
    assert 0.74 < gdp_epsilon(math.sqrt(rounds * mu2), DELTA) / theirs < 0.912
