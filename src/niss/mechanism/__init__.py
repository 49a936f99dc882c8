"""The noise: how much is needed, how an update is bounded, how noise is split into shares, the grid it lies on.

`niss.mechanism.rounding` puts updates on that grid. No I/O, no torch.
"""

from niss.mechanism.clipping import clip_elements, clip_l2, l2_norm, require_finite
from niss.mechanism.gaussian import classical_sigma, gdp_delta, gdp_epsilon, gdp_mu
from niss.mechanism.grid import Grid, centred, discretisation_delta
from niss.mechanism.shares import (
    DISTORTIONS,
    Distortion,
    Edges,
    add_gaussian,
    add_shares,
    distortion_named,
)
from niss.mechanism.slots import Slots, poisson_multiplier
