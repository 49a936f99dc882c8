"""The clip of a round: the plan's, or one that follows a quantile of the norms (`niss.mechanism.adaptive`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from niss.mechanism.adaptive import AdaptiveClip

if TYPE_CHECKING:
    from niss.runs import RoundRecord
    from niss.simulation.config import Config
    from niss.simulation.sections import MethodConfig


def adaptive_clip(config: Config, method: MethodConfig) -> AdaptiveClip | None:
    """How the clip moves when this method runs; None: it stays, or there is none."""
    privacy = config.privacy
    if privacy.quantile is None or not method.kind.private:
        return None
    return AdaptiveClip(privacy.clip, privacy.quantile, privacy.first_clip, privacy.clip_rate)


def next_clip(adaptive: AdaptiveClip, last: RoundRecord | None) -> float:
    """The clip after this round; None: there was none yet.

    It follows from what the rounds released, so a run that is resumed goes on with the same one.
    """
    if last is None or last.clip is None:
        return adaptive.start
    return last.clip if last.below_clip is None else adaptive.after(last.clip, last.below_clip)
