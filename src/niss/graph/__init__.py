"""Who shares noise with whom: graphs drawn from a public beacon, the same for everyone who draws them.

A new kind of graph is a function of `Drawing`, and a line in `GRAPHS`: `GRAPHS["regular"](Drawing(...))` draws one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from niss.errors import ConfigError
from niss.graph.shares import ShareGraph


@dataclass(frozen=True)
class Drawing:
    """What a graph is drawn from.

    members  the clients that take part, seat by seat
    degree   unit shares that a client sends, the one with the least noise where `shares` differ
    beacon   public randomness
    groups   for a coalition graph: the clients of each group
    shares   unit shares that each member sends, where they are not all alike
    """

    members: Sequence[int]
    degree: float
    beacon: bytes
    groups: Sequence[Sequence[int]] = ()
    shares: NDArray[np.float64] | None = None

    @property
    def size(self) -> int:
        """How many take part."""
        return len(self.members)


def _regular(drawing: Drawing) -> ShareGraph:
    if drawing.shares is None:
        return _alike(drawing.size, drawing.degree, drawing.beacon)
    return ShareGraph.regular(
        drawing.size, degree=drawing.degree, beacon=drawing.beacon, shares=drawing.shares
    )


# Methods that are compared draw the same graph in the same round, and have the same worst case.
@lru_cache(maxsize=32)
def _alike(size: int, degree: float, beacon: bytes) -> ShareGraph:
    return ShareGraph.regular(size, degree=degree, beacon=beacon)


def _complete(drawing: Drawing) -> ShareGraph:
    size = drawing.size
    if drawing.shares is None:
        return ShareGraph.complete(size, weight=drawing.degree / (size - 1))
    return ShareGraph.regular(size, degree=size - 1, beacon=drawing.beacon, shares=drawing.shares)


def _random(drawing: Drawing) -> ShareGraph:
    return ShareGraph.random(
        drawing.size, degree=drawing.degree, beacon=drawing.beacon, shares=drawing.shares
    )


def _coalition(drawing: Drawing) -> ShareGraph:
    seats = {client: seat for seat, client in enumerate(drawing.members)}
    seated = [[seats[client] for client in group if client in seats] for group in drawing.groups]
    seated = [group for group in seated if len(group) >= 2]
    single = drawing.size - sum(len(group) for group in seated)
    if single:
        raise ConfigError(
            f"{single} participants of this round have no partner in their group",
            field="groups",
            hint="let whole groups take part, or use graph = 'regular'",
        )
    return ShareGraph.coalition(
        drawing.size, groups=seated, degree=drawing.degree, beacon=drawing.beacon, shares=drawing.shares
    )


GRAPHS: dict[str, Callable[[Drawing], ShareGraph]] = {
    "regular": _regular,  # Balanced and random.
    "complete": _complete,  # Everyone with everyone.
    "random": _random,  # A plain random list, for comparison.
    "coalition": _coalition,  # Within groups that trust each other.
}
