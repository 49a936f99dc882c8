"""How far one client moves its upload: the paper does not say, so every reading has a name.

All use the paper's Gaussian mechanism, sigma_k = Delta sqrt(2 ln(1.25 / delta)) / epsilon, outside its range
(epsilon = 10, not below 1). None proves anything for E = 5 local epochs, except `clip` and `replace` if the update
were clipped in L2 norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from niss.errors import ConfigError


@dataclass(frozen=True)
class Setup:
    """The quantities the readings are made of; `records` is d_k, `shares` is v."""

    records: int = 600
    clip: float = 3.0
    epsilon: float = 10.0
    delta: float = 1e-4
    learning_rate: float = 0.01
    batch_size: int = 10
    participants: int = 30
    shares: int = 10


@dataclass(frozen=True)
class Reading:
    """One reading: its name, the formula of its sensitivity, and what it takes the paper to mean."""

    name: str
    formula: str
    meaning: str
    sensitivity: Callable[[Setup], float]

    def sigma(self, setup: Setup) -> float:
        """sigma_k, the deviation of the noise on one upload."""
        return self.sensitivity(setup) * _multiplier(setup)


def _multiplier(setup: Setup) -> float:
    return math.sqrt(2.0 * math.log(1.25 / setup.delta)) / setup.epsilon


NBAFL = Reading(
    "nbafl",
    "2 ζ / d_k",
    "the reference the paper gives for its clipping (NbAFL); the reading used for Figure 3",
    lambda s: 2.0 * s.clip / s.records,
)

READINGS = (
    NBAFL,
    Reading(
        "nbafl-weighted",
        "2 ζ p_k / d_k",
        "as NbAFL, the noise added before the parameters are weighted by p_k = 1/m",
        lambda s: 2.0 * s.clip / (s.records * s.participants),
    ),
    Reading(
        "one-step",
        "2 η ζ / d_k",
        "one gradient step over all of a client's records",
        lambda s: 2.0 * s.learning_rate * s.clip / s.records,
    ),
    Reading(
        "minibatch",
        "2 ζ / B",
        "one minibatch gradient, as in DP-SGD",
        lambda s: 2.0 * s.clip / s.batch_size,
    ),
    Reading("unit", "1", "the sensitivity left out of the formula", lambda _: 1.0),
    Reading("clip", "ζ", "a whole client appears or not", lambda s: s.clip),
    Reading("replace", "2 ζ", "a whole client is replaced", lambda s: 2.0 * s.clip),
    Reading(
        "unit-noise",
        "√(0.01 v) ε / √(2 ln(1.25/δ))",
        "the paper's list of settings, unit noise variance 0.01, with v = 10 shares",
        lambda s: math.sqrt(0.01 * s.shares) / _multiplier(s),
    ),
)


def find_reading(name: str) -> Reading:
    """The reading of that name; a number is taken as sigma_k itself."""
    for reading in READINGS:
        if reading.name == name:
            return reading
    try:
        sigma = float(name)
    except ValueError:
        sigma = math.nan
    if not (math.isfinite(sigma) and sigma > 0.0):
        raise ConfigError(
            f"unknown reading {name!r}",
            field="--reading",
            hint="give sigma_k, or one of: " + ", ".join(reading.name for reading in READINGS),
        )
    return given_sigma(sigma)


def given_sigma(sigma: float) -> Reading:
    """The reading that yields this sigma_k, whatever the sensitivity."""
    return Reading(f"sigma-{sigma:.3g}", "σ_k given", "a point of a sweep", lambda s: sigma / _multiplier(s))
