"""Bounding what one client can change.

Only the L2 clip gives a sensitivity that the Gaussian mechanism can use. The element-wise clip is
what the paper describes (zeta = 3 on single entries); it is here for reproduction and yields no claim.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from niss.checks import require_real
from niss.errors import PrivacyError

Float = TypeVar("Float", bound=np.floating[Any])


def l2_norm(vector: NDArray[np.floating[Any]]) -> float:
    """The L2 norm in float64, safe against overflow of the squares."""
    if vector.size == 0:
        return 0.0
    largest = max(float(np.max(vector)), -float(np.min(vector)))
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    # Not numpy's norm: its BLAS threads collapse on a busy machine.
    scaled = vector.astype(np.float64, copy=False) / largest
    return largest * math.sqrt(float(np.sum(np.square(scaled, out=scaled))))


def clip_l2(update: NDArray[Float], bound: float) -> NDArray[Float]:
    """`update * min(1, bound / ||update||_2)`, whose norm is at most `bound` after rounding too.

    A zero update stays zero. An update with NaN or infinite entries has no norm to bound and is
    refused; a caller that must go on sends the zero update instead, which every clip allows.
    """
    require_real(bound, field="clip", zero_allowed=False)
    require_finite(update)
    norm = l2_norm(update)
    if norm <= bound:
        return update.copy()
    limits = np.finfo(update.dtype)
    factor = bound / norm
    if factor < float(limits.smallest_normal):
        # The factor would lose its digits: bring the entries near 1 first.
        update = (update / np.max(np.abs(update))).astype(update.dtype, copy=False)
        factor = bound / l2_norm(update)
    clipped = _scaled(update, factor)
    step = float(limits.eps)
    while l2_norm(clipped) > bound:
        factor *= max(0.0, 1.0 - step)
        step *= 2.0
        clipped = _scaled(update, factor)
    return clipped


def clip_elements(update: NDArray[Float], bound: float) -> NDArray[Float]:
    """Every entry cut to [-bound, bound]: the paper's clipping, which bounds no useful L2 norm."""
    require_real(bound, field="clip", zero_allowed=False)
    require_finite(update)
    limit = update.dtype.type(min(bound, float(np.finfo(update.dtype).max)))
    return np.asarray(np.clip(update, -limit, limit))


def require_finite(update: NDArray[np.floating[Any]]) -> None:
    """Refuse an update with NaN or infinite entries, saying how many."""
    bad = int(update.size - np.count_nonzero(np.isfinite(update)))
    if bad:
        raise PrivacyError(
            f"update has {bad} of {update.size} entries that are NaN or infinite",
            hint="training diverged: lower the learning rate, or send a zero update for this client",
        )


def _scaled(update: NDArray[Float], factor: float) -> NDArray[Float]:
    with np.errstate(under="ignore"):
        return (update * update.dtype.type(factor)).astype(update.dtype, copy=False)
