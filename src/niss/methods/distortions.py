"""The distortions of received shares, and what the joint view makes of each.

The objects themselves stand in `niss.mechanism.shares`, next to the code that draws them. A distortion that adds fresh
noise enters the covariance of what the adversary cannot know as a diagonal; one that multiplies is conditioned on the
factors that were drawn, and earns nothing for shares that a colluder knows.
"""

from __future__ import annotations

from niss.mechanism.shares import DISTORTIONS, Distortion, distortion_named

__all__ = ["DISTORTIONS", "Distortion", "distortion_named", "why_no_bound"]


def why_no_bound(distortion: Distortion) -> str:
    """Why a round that was distorted (tau^2 > 0) has no epsilon in the joint view, as a sentence."""
    if distortion.per_coordinate:
        return "For a distortion per coordinate in a round this large no joint-view bound is computed."
    if distortion.multiplies:
        return f"For a {distortion.name} distortion there is no bound without the factors that were drawn."
    return "The uploads of some group of clients carry too little noise of their own, so their sum lays them open."
