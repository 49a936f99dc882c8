"""Graphs of every kind, drawn at random for properties that have to hold on all of them; and the view by inversion."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from niss.graph import ShareGraph

FloatArray = NDArray[np.float64]


def drawn_graph(kind: str, size: int, degree: float, draw: np.random.Generator) -> ShareGraph:
    """A graph of that kind; `coalition` has two groups, and `unequal` sends two to three shares a client."""
    beacon = draw.bytes(8)
    if kind == "complete":
        return ShareGraph.complete(size, weight=0.7)
    if kind == "unequal":
        return ShareGraph.regular(size, degree=2, beacon=beacon, shares=draw.uniform(2.0, 3.0, size))
    if kind == "coalition":
        groups = [range(size // 2), range(size // 2, size)]
        return ShareGraph.coalition(size, groups=groups, degree=min(degree, size // 2 - 1), beacon=beacon)
    if kind == "random":
        return ShareGraph.random(size, degree=degree, beacon=beacon)
    return ShareGraph.regular(size, degree=degree, beacon=beacon)


def weights_between(graph: ShareGraph) -> FloatArray:
    """What each two clients share, in either direction."""
    matrix = np.zeros((graph.size, graph.size))
    np.add.at(matrix, (graph.senders, graph.receivers), graph.weights)
    return matrix + matrix.T


def left_to(
    weights: FloatArray, colluders: NDArray[np.bool_], unit: float, residual: FloatArray
) -> FloatArray:
    """The effective variance of every client, by inverting the matrix of the honest ones; infinite for colluders."""
    honest = np.flatnonzero(~colluders)
    within = unit * weights[np.ix_(honest, honest)]
    covariance = np.diag(within.sum(axis=1) + residual[honest]) - within
    result = np.full(colluders.size, np.inf)
    result[honest] = 1.0 / np.diag(np.linalg.inv(covariance))
    return result
