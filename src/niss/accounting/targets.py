"""What every plan starts from: relations, the parts of delta, and targets that can be planned for at all."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.errors import ConfigError
from niss.protocol.messages import MODES

FloatArray = NDArray[np.float64]

# Neighbouring updates of a client lie this many times the clip apart.
RELATIONS = {"zero-out": 1.0, "replace-one": 2.0}
# The parts of delta that pay for the bound on colluding neighbours, and for noise that is drawn on a grid.
FAILURE_SHARE = 0.1
GRID_SHARE = 0.02


def client_sensitivity(weight: ArrayLike, clip: float, relation: str) -> FloatArray:
    """`p_k clip`, or twice that: how far a client whose update has norm <= clip can move `p_k x_k`."""
    return np.asarray(np.asarray(weight) * clip * RELATIONS[relation])


def most_dropped(count: int, dropout: float, delta: float) -> int:
    """The most of `count` clients that drop out, but for one round in a million; beyond it a repair is refused."""
    from scipy.stats import binom

    return int(binom.isf(min(1e-6, delta), count, dropout)) if dropout else 0


def check_target(
    participants: int, epsilon: float, collusion: float, dropout: float, mode: str, kappa: float | None
) -> None:
    if participants < 2:
        raise ConfigError(f"a round needs at least two, not {participants}", field="participants")
    if not (math.isfinite(epsilon) and epsilon > 0.0):
        raise ConfigError(f"must be a finite number above 0, not {epsilon!r}", field="epsilon")
    for field, value in (("collusion", collusion), ("dropout", dropout)):
        if not 0.0 <= value < 1.0:
            raise ConfigError(
                f"must lie in [0, 1), not {value!r}", field=field, hint="a share of the participants"
            )
    if mode not in MODES:
        raise ConfigError(f"unknown value {mode!r}", field="mode", hint="use one of: " + ", ".join(MODES))
    if kappa is not None and not (math.isfinite(kappa) and kappa > 0.0):
        raise ConfigError(f"must be a finite number above 0, not {kappa!r}", field="kappa")
