"""Graphs that noise is shared over: when they are too sparse, and why a round has no bound.

A distortion that adds fresh noise enters the covariance of what the adversary cannot know as a diagonal; one that
multiplies is conditioned on the factors that were drawn, and earns nothing for shares that a colluder knows.
"""

from __future__ import annotations

from functools import lru_cache

from niss.errors import PrivacyError
from niss.graph import ShareGraph
from niss.mechanism.shares import Distortion
from niss.views import Corruption, expected_bound

# What is lost to colluders among few neighbours, in units of 1 / kappa, is little up to this.
_LITTLE = 3.0


def why_no_bound(distortion: Distortion) -> str:
    """Why a round that was distorted (tau^2 > 0) has no epsilon in the joint view, as a sentence."""
    if distortion.per_coordinate:
        return "For a distortion per coordinate in a round this large no joint-view bound is computed."
    if distortion.multiplies:
        return f"For a {distortion.name} distortion there is no bound without the factors that were drawn."
    return "The uploads of some group of clients carry too little noise of their own, so their sum lays them open."


def too_sparse(size: int, neighbours: float, corruption: Corruption) -> PrivacyError:
    """What to say where colluders could cut a client off from the others, so that its shares are worth nothing."""
    if corruption.removed == 0:
        return PrivacyError(
            f"with {neighbours:g} neighbours each, nothing is proved about how noise spreads among {size} participants",
            hint="let each send more shares (neighbours = 4)",
        )
    enough = enough_neighbours(size, corruption)
    hint = "use graph = 'complete', more participants, or fewer colluders"
    if enough < size - 1:
        hint = f"let each send {enough} shares (neighbours = {enough}), or use graph = 'complete'"
    return PrivacyError(
        f"with {neighbours:g} neighbours each, {corruption.removed} of {size} participants could cut a client off from "
        "the others' noise",
        hint=hint,
    )


def enough_neighbours(size: int, corruption: Corruption, least: int = 4) -> int:
    """The fewest neighbours, `least` or more, with which colluders cost little; `size - 1` where only all will do.

    Little: with shares of strength kappa, at most 3 / kappa of the noise a client would need alone.
    """
    degree = least
    while degree < (size - 1) / 2:
        if degree * expected_bound(size, float(degree), corruption).energy <= _LITTLE:
            return degree
        degree += max(1, degree // 8)
    return size - 1


@lru_cache(maxsize=8)
def everyone(size: int) -> ShareGraph:
    """Everyone shares with everyone; made once."""
    return ShareGraph.complete(size)
