"""The noise: how much is needed, how an update is bounded, how noise is split into shares."""

from niss.mechanism.clipping import clip_elements, clip_l2, l2_norm, require_finite
from niss.mechanism.gaussian import MECHANISMS, gaussian_sigma, gdp_delta, gdp_epsilon, gdp_mu
from niss.mechanism.shares import (
    DISTORTIONS,
    Distortion,
    Edges,
    add_gaussian,
    add_shares,
    aggregate_variance,
    distortion_named,
    share_counts,
)

__all__ = [
    "DISTORTIONS",
    "MECHANISMS",
    "Distortion",
    "Edges",
    "add_gaussian",
    "add_shares",
    "aggregate_variance",
    "clip_elements",
    "clip_l2",
    "distortion_named",
    "gaussian_sigma",
    "gdp_delta",
    "gdp_epsilon",
    "gdp_mu",
    "l2_norm",
    "require_finite",
    "share_counts",
]
