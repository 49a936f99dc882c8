"""Bounding what one client can change.

Only the L2 clip gives a sensitivity that the Gaussian mechanism can use. The element-wise clip is
what the paper describes (zeta = 3 on single entries); it is here for reproduction and yields no claim.

**A clip that follows the norms** (`AdaptiveClip`): a quantile of them is estimated from one more coordinate of every
upload.

In a round with the clip C, client k uploads

    x_k = [ w_k ; p C u_k ],   w_k its update clipped to C sqrt(1 - p^2),   u_k = 1 if it was that short, else -1

so that `||x_k||^2 <= (1 - p^2) C^2 + p^2 C^2 = C^2`. Noise is the same and independent in every coordinate, and a round
is charged for any vector within C: update and bit are charged together, in each view and for both relations. The bit
costs no epsilon of its own, but room: updates are clipped a little shorter. A client without an update sends u = 0.

The noisy mean of u gives the fraction of short updates, `b = (1 + mean u) / 2`, and the next clip

    C' = C exp(-eta (b - gamma)),   within [C_max / 10^4, C_max],

is computed from what was released, so it costs nothing more, and is as public as the model. Its noise is in proportion.

Andrew, Thakkar, McMahan and Ramaswamy, Differentially Private Learning with Adaptive Clipping, NeurIPS 2021
(1905.03871), where the noise of bits and updates is chosen apart; p says here how the clip is divided between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from niss.checks import require_real
from niss.errors import ConfigError, PrivacyError
from niss.mechanism.blocks import Blocks, Floats

Float = TypeVar("Float", bound=np.floating[Any])

PART = 0.2
"""p: leaves 98 % of the clip to the update."""
RATE = 0.5
"""eta: the paper's 0.2 is for thousands of rounds; in 30, a clip that began 25 times too small grew 16-fold."""
_LEAST = 1e-4
# Too small a clip costs a few rounds until it has grown, too large a one costs accuracy for good.
_FIRST = 0.1
# Rounding of the parts, even in float32, must not make the whole longer than the clip.
_HAIR = 1.0 - 2.0**-20


def l2_norm(vector: NDArray[np.floating[Any]] | Blocks) -> float:
    """The L2 norm in float64, safe against overflow of the squares."""
    return Blocks.of(vector).norm


def clip_l2(update: NDArray[Float], bound: float) -> NDArray[Float]:
    """`update * min(1, bound / ||update||_2)`, whose norm is at most `bound` after rounding too.

    A zero update stays zero. An update with NaN or infinite entries has no norm to bound and is
    refused; a caller that must go on sends the zero update instead, which every clip allows.
    """
    return cast("NDArray[Float]", clipped(Blocks.of(update), bound).array().reshape(update.shape))


def clipped(update: Blocks, bound: float) -> Blocks:
    """What `clip_l2` makes of an update, each block when it is read."""
    require_real(bound, field="clip", zero_allowed=False)
    require_finite(update)
    if update.norm <= bound:
        return update
    limits, factor = np.finfo(update.dtype), bound / update.norm
    if factor < float(limits.smallest_normal):
        # The factor would lose its digits: bring the entries near 1 first.
        largest = update.largest
        update = update.map(lambda block: block / largest)
        factor = bound / update.norm
    short = _scaled(update, factor)
    step = float(limits.eps)
    while short.norm > bound:
        factor *= max(0.0, 1.0 - step)
        step *= 2.0
        short = _scaled(update, factor)
    return short


def clip_elements(update: NDArray[Float], bound: float) -> NDArray[Float]:
    """Every entry cut to [-bound, bound]: the paper's clipping, which bounds no useful L2 norm."""
    require_real(bound, field="clip", zero_allowed=False)
    require_finite(update)
    limit = update.dtype.type(min(bound, float(np.finfo(update.dtype).max)))
    return np.asarray(np.clip(update, -limit, limit))


def require_finite(update: NDArray[np.floating[Any]] | Blocks) -> None:
    """Refuse an update with NaN or infinite entries, saying how many."""
    blocks = Blocks.of(update)
    if not math.isfinite(blocks.largest):
        bad = blocks.size - sum(int(np.count_nonzero(np.isfinite(block))) for block in blocks)
        raise PrivacyError(
            f"update has {bad} of {blocks.size} entries that are NaN or infinite",
            hint="training diverged: lower the learning rate, or send a zero update for this client",
        )


def _scaled(update: Blocks, factor: float) -> Blocks:
    scale = np.array(factor, dtype=update.dtype)

    def scaled(block: Floats) -> Floats:
        with np.errstate(under="ignore"):
            return np.asarray(block * scale)

    return update.map(scaled)


@dataclass(frozen=True)
class AdaptiveClip:
    """How the clip follows the norms of updates; raises `ConfigError` for what cannot be.

    most      C_max: the largest clip of any round
    quantile  gamma: the part of the updates that is to be shorter than the clip
    first     clip of the first round; None: a tenth of the largest
    rate      eta: how fast it moves, by a factor of exp(eta) a round at most
    """

    most: float
    quantile: float = 0.5
    first: float | None = None
    rate: float = RATE

    def __post_init__(self) -> None:
        if not 0.0 < self.quantile < 1.0:
            raise ConfigError(f"must lie between 0 and 1, not {self.quantile!r}", field="quantile")
        if not 0.0 < self.rate <= 2.0:
            raise ConfigError(f"must be above 0 and at most 2, not {self.rate!r}", field="clip_rate")
        if self.first is not None and not _LEAST * self.most <= self.first <= self.most:
            raise ConfigError(
                f"must lie between {_LEAST:g} and 1 times the largest clip of {self.most:g}, not {self.first!r}",
                field="first_clip",
            )

    @property
    def start(self) -> float:
        """The clip of the first round."""
        return _FIRST * self.most if self.first is None else self.first

    def after(self, clip: float, fraction: float) -> float:
        """The clip after a round with this one, of whose updates that noisy fraction was short."""
        fraction = min(max(fraction, 0.0), 1.0)
        moved = clip * math.exp(-self.rate * (fraction - self.quantile))
        return min(max(moved, _LEAST * self.most), self.most)


def room(clip: float) -> float:
    """What is left of the clip for the update, beside the bit."""
    return clip * math.sqrt(1.0 - PART**2)


def bit_weight(clip: float) -> float:
    """The coordinate of a client whose update was short enough."""
    return PART * clip * _HAIR


def was_short(norm: float, limit: float) -> float:
    """u: 1 for an update of this norm that clipping leaves as it is, -1 for a longer one, 0 for none at all."""
    if not 0.0 < norm < math.inf:
        return 0.0
    return 1.0 if norm <= limit else -1.0


def short_fraction(mean: float, clip: float) -> float:
    """b: the fraction of short updates, from the mean of the coordinate over clients; without bias."""
    return 0.5 + 0.5 * mean / bit_weight(clip)


def in_words(clips: Sequence[float]) -> str:
    """A sentence for the statement of a run whose rounds had these clips."""
    moved = f", from {clips[0]:.3g} to {clips[-1]:.3g}" if clips else ""
    return (
        f"The clip followed a quantile of the updates' norms{moved}. The quantile was one more coordinate of every "
        "upload, within the clip with the update and charged with it."
    )
