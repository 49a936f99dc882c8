"""From a plan to the terms of a protocol round.

The terms are committed to before the beacon, and so before the graph, is known. The residual noise is therefore taken
with a margin over what several random graphs need; each client still checks the graph that is drawn.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from niss.accounting.assess import LEAST_STEPS
from niss.accounting.plan import Plan
from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.mechanism.discretisation import discretisation_delta
from niss.mechanism.grid import Grid
from niss.protocol.messages import MODES, Terms
from niss.views import calibrate_for, colluding_neighbours

_GRAPHS = 3
_MARGIN = 1.03
# A hair more than the promise needs, so that no client refuses for the last bit of a float.
_ROUNDING = 1.0 + 1e-9
_LOG_STEPS = 8.0
_BITS_WITHOUT_NOISE = 24
_FIRST = np.zeros(1, dtype=np.int64)


def make_terms(
    plan: Plan,
    *,
    participants: int,
    coordinates: int,
    run: bytes,
    number: int,
    attempt: int = 0,
    mode: str = "tolerate",
    grid_bits: int | None = None,
    modulus_bits: int = 64,
) -> Terms:
    """The terms under which every participant keeps the plan's promise, with equal weights 1 / participants.

    The grid is chosen so that the residual noise is some hundred steps wide: narrower, rounding would cost
    privacy; much wider, the sampler's tiny distance from the Gaussian would. For a very large model it is finer: an
    entry of an update as long as the clip has to be a step long, or rounding would shorten the update.
    """
    if not plan.kind.has_protocol or plan.unit != "client" or isinstance(plan.epsilon, tuple):
        raise ConfigError("the protocol runs niss with one client-level target for all", field="plan")
    if mode not in MODES:
        raise ConfigError(f"unknown value {mode!r}", field="mode", hint="use one of: " + ", ".join(MODES))
    own = _own_variance(plan, participants)
    unit = plan.kappa * own / plan.neighbours
    residual = _residual(plan, participants, unit, own)
    linked = min(participants - 1, 2 * math.ceil(plan.neighbours))
    return Terms(
        run=run,
        round=number,
        attempt=attempt,
        mode=mode,
        coordinates=coordinates,
        grid_bits=_bits(residual, plan.clip / (participants * math.sqrt(coordinates)))
        if grid_bits is None
        else grid_bits,
        modulus_bits=modulus_bits,
        clip=float(plan.clip),
        neighbours=float(plan.neighbours),
        unit_variance=unit,
        residual_variance=residual,
        self_variance=max(own * _ROUNDING - residual, 0.0) if mode == "repair" else 0.0,
        colluding_neighbours=colluding_neighbours(
            participants, linked, plan.colluders, plan.corruption.failure
        ),
        revealed=plan.revealed if mode == "repair" else 0,
        dropped=plan.dropped if mode == "repair" else 0,
        threshold_share=0.5,
    )


def _bits(residual: float, entry: float) -> int:
    """For a residual variance, and the root mean square of the entries of an update as long as the clip."""
    if residual == 0.0:
        return _BITS_WITHOUT_NOISE
    wide = _LOG_STEPS - math.log2(math.sqrt(residual))
    return max(1, min(60, math.ceil(max(wide, -math.log2(entry)))))


def _own_variance(plan: Plan, participants: int) -> float:
    drawn = plan.sensitivity(1.0 / participants, 1.0) / plan.round_mu(_FIRST)
    return float(drawn[0]) ** 2


def _residual(plan: Plan, participants: int, unit: float, own: float) -> float:
    """eta^2: the given tau^2, or the most that a few random graphs need, with a margin."""
    if plan.tau2 is not None:
        if isinstance(plan.tau2, tuple):
            raise ConfigError("the protocol takes one tau2 for all", field="tau2")
        return float(plan.tau2 * unit * plan.neighbours)
    if plan.neighbours >= participants - 1:
        graph = ShareGraph.complete(participants, weight=plan.neighbours / (participants - 1))
        tau2, _ = calibrate_for(graph, plan.corruption, unit_variance=unit, target_variance=own)
        return tau2 * unit * plan.neighbours * _ROUNDING
    needed = []
    for number in range(_GRAPHS):
        beacon = hashlib.sha256(b"niss.terms" + bytes([number])).digest()
        graph = ShareGraph.regular(participants, degree=plan.neighbours, beacon=beacon)
        tau2, _ = calibrate_for(graph, plan.corruption, unit_variance=unit, target_variance=own)
        needed.append(tau2)
    return _MARGIN * max(needed) * unit * plan.neighbours


def grid_delta(plan: Plan, terms: Terms) -> float:
    """What rounding to the grid, and the sampler, add to delta over all participations of a client.

    The bound is `niss.mechanism.discretisation`'s. Noise of only a few grid steps is refused.
    """
    if not terms.residual_variance:
        return 0.0
    grid = Grid(terms.grid_bits)
    steps = grid.deviation_steps(terms.residual_variance)
    if steps < LEAST_STEPS:
        raise ConfigError(
            f"residual noise of {steps:.2g} grid steps is too narrow to be told from a Gaussian",
            field="protocol.grid_bits",
            hint=f"use more than {terms.grid_bits} bits",
        )
    epsilon = plan.epsilon if isinstance(plan.epsilon, float | int) else max(plan.epsilon)
    each = min(1.0, terms.neighbours)
    return discretisation_delta(
        [steps],
        terms.coordinates,
        plan.participations,
        epsilon=float(epsilon),
        share_steps=[grid.deviation_steps(each * terms.unit_variance)] * math.ceil(2 * terms.neighbours),
    )
