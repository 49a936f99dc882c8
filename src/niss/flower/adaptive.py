"""What NISS itself sends inside uploads: a bit for a clip that follows the norms, and the weights of updates.

`niss.mechanism.adaptive` says how the clip moves, and what it costs; `niss.flower.metrics` how updates are weighted.

The bit of a client travels as the metric `niss-below-clip` inside its upload (`niss.flower.metrics`). The clip of a
round stands in its terms, as it always did: a client accepts any that is not above the plan's, nor above its own limit,
and finds for itself what the round costs with it. Terms have noise in proportion to their clip, so that is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from niss.accounting import Plan
from niss.errors import ConfigError
from niss.flower.metrics import BELOW_CLIP, WEIGHT, NoisyMetrics
from niss.mechanism.adaptive import AdaptiveClip
from niss.protocol import Agreed, Outcome

Ranges = Mapping[str, tuple[float, float]]


def adaptive_clip(plan: Plan, quantile: float | None, first: float | None) -> AdaptiveClip | None:
    """How the clip moves below that of the plan; None without a quantile, where it stays.

    Raises `ConfigError` for numbers that cannot be, and for a plan whose rounds must all have the same clip.
    """
    if quantile is None:
        if first is not None:
            raise ConfigError("the clip stays as it is without a quantile", field="first_clip")
        return None
    _require_independent(plan, "quantile", "the clip, and the noise with it, has changed")
    return AdaptiveClip(plan.clip, quantile, first)


def with_own(
    plan: Plan, ranges: Ranges | None, adaptive: AdaptiveClip | None, weight: str, cap: float | None
) -> Ranges | None:
    """The metrics of a run; with the fraction of short updates where the clip follows it, and capped weights if any."""
    own: dict[str, tuple[float, float]] = {}
    if adaptive is not None:
        own[BELOW_CLIP] = 0.0, 1.0
    if cap is not None:
        if not 0.0 < cap < math.inf:
            raise ConfigError(f"must be a finite number above 0, not {cap!r}", field="weight_cap")
        _require_independent(plan, "weight_cap", "the sum is divided by another weight")
        own[WEIGHT + weight] = 0.0, float(cap)
    return {**(ranges or {}), **own} if own else ranges


def _require_independent(plan: Plan, field: str, change: str) -> None:
    if plan.kind.correlates:
        raise ConfigError(
            f"the plan takes noise of one round out in another, which fails if {change} in between",
            field=field,
            hint="leave it out, or use a plan whose rounds are independent",
        )


def next_clip(adaptive: AdaptiveClip, metrics: NoisyMetrics, agreed: Agreed, outcome: Outcome) -> float:
    """The clip of the round after this one; the same again where no upload arrived."""
    clip, size = agreed.terms.clip, len(outcome.survivors)
    if not size:
        return clip
    tail = outcome.total[-len(metrics) :] * (len(agreed.participants) / size)
    return adaptive.after(clip, metrics.means(tail, clip, 0.0)[BELOW_CLIP])
