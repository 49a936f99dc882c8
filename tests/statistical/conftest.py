"""One case per kind of graph, with unequal noise and unequal distortion, and a way to draw uploads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from niss.graph import ShareGraph
from niss.mechanism import add_shares
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]
Draw = Callable[["Case", str], FloatArray]
Noise = tuple[FloatArray, Any]

UNIT_VARIANCE = 0.5
BEACON = b"beacon of the statistical tests"


@dataclass(frozen=True)
class Case:
    """A graph with sigma_k^2 (`own`) and tau_k^2 per client; v_k = sigma_k^2 / sigma^2."""

    name: str
    graph: ShareGraph
    own: FloatArray
    tau2: FloatArray
    unit_variance: float = UNIT_VARIANCE

    @property
    def residual(self) -> FloatArray:
        return self.tau2 * self.unit_variance * self.graph.in_weight

    @property
    def covariance(self) -> FloatArray:
        """sigma^2 L + diag(residual): of the additive distortion, and of the others on average over s."""
        return self.unit_variance * self.graph.laplacian() + np.diag(self.residual)

    def noise(self, coordinates: int, stream: SimStream, distortion: str = "scalar", **changes: Any) -> Noise:
        """The noise in everyone's upload (clients, coordinates), and the factors drawn where shares have one each."""
        uploads = np.zeros((self.graph.size, coordinates))
        settings = {"unit_variance": self.unit_variance, "tau2": self.tau2, **changes}
        scales = add_shares(uploads, self.graph, distortion=distortion, stream=stream, **settings)
        assert (scales is None) == (distortion != "scalar")
        return uploads, scales


def make_case(name: str) -> Case:
    own = np.array([2.0, 3.0, 1.5, 2.5, 2.2, 1.8])
    tau2 = np.array([0.4, 0.1, 0.9, 0.25, 0.6, 0.05])
    shares = own / UNIT_VARIANCE
    if name == "regular":
        graph = ShareGraph.regular(6, degree=3, beacon=BEACON, shares=shares)
    elif name == "complete":
        own = np.full(6, 2.5)
        graph = ShareGraph.complete(6)
    elif name == "random":
        graph = ShareGraph.random(6, degree=3, beacon=BEACON, shares=shares)
    elif name == "coalition":
        graph = ShareGraph.coalition(6, groups=[[0, 1, 3], [2, 4, 5]], beacon=BEACON, shares=shares)
    else:
        edges = [(0, 1, 4.0), (1, 2, 1.5), (1, 3, 4.5), (2, 0, 3.0), (3, 4, 5.0), (4, 5, 2.0), (4, 0, 2.4)]
        graph = ShareGraph(6, [*edges, (5, 3, 3.6), (0, 5, 0.7), (2, 4, 1.1)])
    return Case(name, graph, own, tau2)


@pytest.fixture(params=["regular", "complete", "random", "coalition", "given"])
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


@pytest.fixture(scope="session")
def draw() -> Draw:
    """Noise of independent experiments, shape (experiments, clients, coordinates).

    With `scalar` all coordinates of one experiment share their factors, so there are many experiments;
    otherwise every coordinate is an experiment of its own.
    """
    drawn: dict[tuple[str, str], FloatArray] = {}

    def uploads(case: Case, distortion: str) -> FloatArray:
        key = (case.name, distortion)
        if key not in drawn:
            experiments, coordinates = (1000, 8) if distortion == "scalar" else (1, 40_000)
            noise = np.zeros((experiments, case.graph.size, coordinates))
            for number in range(experiments):
                noise[number] = case.noise(coordinates, SimStream(20).child(case.name, number), distortion)[0]
            if experiments == 1:
                noise = np.ascontiguousarray(noise.transpose(2, 1, 0))
            drawn[key] = noise
        return drawn[key]

    return uploads
