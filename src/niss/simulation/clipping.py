"""The clip of a round: the plan's, or one that follows a quantile of the norms (`niss.mechanism.adaptive`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from niss.mechanism.adaptive import AdaptiveClip

if TYPE_CHECKING:
    from niss.simulation.config import Config
    from niss.simulation.sections import MethodConfig


def adaptive_clip(config: Config, method: MethodConfig) -> AdaptiveClip | None:
    """How the clip moves when this method runs; None: it stays, or there is none."""
    privacy = config.privacy
    if privacy.quantile is None or not method.kind.private:
        return None
    return AdaptiveClip(privacy.clip, privacy.quantile, privacy.first_clip, privacy.clip_rate)


def next_clip(adaptive: AdaptiveClip, last: dict[str, Any] | None) -> float:
    """The clip after the round with this line in metrics.jsonl; None: there was none yet.

    It follows from what the rounds released, so a run that is resumed goes on with the same one.
    """
    if last is None:
        return adaptive.start
    clip, fraction = float(last["clip"]), last["below_clip"]
    return clip if fraction is None else adaptive.after(clip, fraction)
