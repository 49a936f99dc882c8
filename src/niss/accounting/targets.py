"""What every plan starts from: relations, the parts of delta, and targets that can be planned for at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.errors import ConfigError, all_faults
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


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "participants": (lambda value: value >= 2, "a round needs at least two, not {}"),
    "epsilon": (lambda value: 0.0 < value < math.inf, "must be a finite number above 0, not {!r}"),
    "delta": (lambda value: 0.0 < value < 1.0, "must lie in (0, 1), not {!r}"),
    "clip": (lambda value: 0.0 < value < math.inf, "must be a finite number above 0, not {!r}"),
    "participations": (lambda value: value >= 1, "must be at least 1, not {}"),
    "collusion": (
        lambda value: 0.0 <= value < 1.0,
        "must lie in [0, 1), not {!r}: a share of the participants",
    ),
    "dropout": (
        lambda value: 0.0 <= value < 1.0,
        "must lie in [0, 1), not {!r}: a share of the participants",
    ),
    "mode": (lambda value: value in MODES, "unknown value {!r}: use one of " + ", ".join(MODES)),
    "relation": (lambda value: value in RELATIONS, "unknown value {!r}: use one of " + ", ".join(RELATIONS)),
    "kappa": (lambda value: 0.0 < value < math.inf, "must be a finite number above 0, not {!r}"),
    "tau2": (lambda value: 0.0 <= value < math.inf, "must be finite and not negative, not {!r}"),
    "neighbours": (lambda value: 1.0 <= value < math.inf, "each client sends at least one share, not {!r}"),
}
"""What each part of a target must satisfy, and what to say where it does not."""


def check_target(**target: Any) -> None:
    """Raise a `ConfigError` that names every part of a target that cannot be planned for; None stands for no choice."""
    faults = [
        ConfigError(words.format(value), field=name)
        for name, value in target.items()
        for holds, words in [_RULES[name]]
        if value is not None and not holds(value)
    ]
    if faults:
        raise all_faults(faults)
