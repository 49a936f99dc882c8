"""What noise shares are made of and worth: the graph of a round, its calibration, one upload looked at alone.

A distortion that adds fresh noise enters the covariance of what the adversary cannot know as a diagonal; one that
multiplies is conditioned on the factors that were drawn, and earns nothing for shares that a colluder knows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from niss.errors import PrivacyError
from niss.graph import ShareGraph
from niss.mechanism.shares import Distortion
from niss.methods.base import FloatArray, mu_of
from niss.views import Corruption, WorstCase, calibrate_for, expected_bound

# What is lost to colluders among few neighbours, in units of 1 / kappa, is little up to this.
_LITTLE = 3.0


def marginal_variance(
    *,
    unit_variance: float,
    sent: ArrayLike,
    received: ArrayLike,
    tau2: ArrayLike = 0.0,
    residual_variance: ArrayLike = 0.0,
) -> FloatArray:
    """Noise variance of one upload looked at alone: `sigma^2 (sent + (1 + tau^2) received) + residual`.

    sent, received     unit shares (of variance `unit_variance`) that the client sends and receives
    tau2               distortion of what it receives; leave it out where the residual is given itself
    residual_variance  eta^2, the fresh noise that the client adds; with v shares each way, 2 v sigma^2 + eta^2
    """
    undistorted = np.asarray(sent) + (1.0 + np.asarray(tau2)) * np.asarray(received)
    return np.asarray(unit_variance * undistorted + np.asarray(residual_variance))


def marginal_mu(sensitivity: ArrayLike, **noise: Any) -> FloatArray:
    """mu of one upload looked at alone: `sensitivity / sqrt(marginal_variance(...))`, the only place that says so.

    `sensitivity` is how far one client can move its upload `p_k x_k`, in L2 norm: `p_k clip` where its update becomes
    zero, twice that where it becomes any other. The noise is that of `marginal_variance`, whose arguments it takes.
    """
    return mu_of(sensitivity, marginal_variance(**noise))


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


@lru_cache(maxsize=32)
def calibrated_tau2(
    graph: ShareGraph, corruption: Corruption, unit: float, target: bytes
) -> tuple[float, WorstCase]:
    """`calibrate_for` the targets in these bytes."""
    return calibrate_for(
        graph, corruption, unit_variance=unit, target_variance=np.frombuffer(target, dtype=np.float64)
    )


@lru_cache(maxsize=8)
def everyone(size: int) -> ShareGraph:
    """Everyone shares with everyone; made once."""
    return ShareGraph.complete(size)
