"""How much of a picture was recovered.

All scores look at pictures cut to the range [0, 1]: whoever attacks knows that pixels lie there, and a wild
value far outside would only make an attack look worse than it is. A picture that says nothing still has a
score, so `blind_guess` gives the PSNR of an even grey, the line below which nothing was learned.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.signal import convolve2d

from niss.errors import ConfigError

FloatArray = NDArray[np.float64]

_WINDOW, _SPREAD = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2


@dataclass(frozen=True)
class PictureScores:
    """Mean squared error, peak signal-to-noise ratio in dB (peak 1) and structural similarity."""

    mse: float
    psnr: float
    ssim: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def score_pictures(recovered: FloatArray, original: FloatArray) -> PictureScores:
    """Scores of pictures [N, C, H, W] against the originals: of the mean error, and the mean SSIM.

    A gradient does not say in which order its pictures came, so the order that fits best is taken.
    """
    if recovered.shape != original.shape or original.ndim != 4:
        raise ConfigError(f"shape {recovered.shape} beside {original.shape}", field="recovered")
    cut = np.clip(np.nan_to_num(recovered, nan=0.5), 0.0, 1.0)
    ordered = cut[best_order(cut, original)]
    mse = mean_squared_error(ordered, original)
    similar = [structural_similarity(one, other) for one, other in zip(ordered, original, strict=True)]
    return PictureScores(mse, peak_ratio(mse), float(np.mean(similar)))


def best_order(recovered: FloatArray, original: FloatArray) -> NDArray[np.int64]:
    """Which recovered picture belongs to which original, by the least total squared error."""
    flat, wanted = recovered.reshape(len(recovered), -1), original.reshape(len(original), -1)
    costs = np.array([[float(np.mean((one - other) ** 2)) for other in flat] for one in wanted])
    return np.asarray(linear_sum_assignment(costs)[1], dtype=np.int64)


def mean_squared_error(one: FloatArray, other: FloatArray) -> float:
    return float(np.mean((one - other) ** 2))


def peak_ratio(mse: float) -> float:
    """PSNR in dB for pixels in [0, 1]: -10 log10(mse)."""
    return math.inf if mse == 0.0 else -10.0 * math.log10(mse)


def blind_guess(original: FloatArray) -> float:
    """The PSNR of the even grey that fits best: what is reached without any knowledge of the picture."""
    return peak_ratio(float(np.mean((original - original.mean()) ** 2)))


def structural_similarity(one: FloatArray, other: FloatArray) -> float:
    """SSIM of two pictures [C, H, W] in [0, 1] (Wang et al., 2004): 11 x 11 Gaussian window, mean over channels.

    ((2 m1 m2 + c1)(2 s12 + c2)) / ((m1^2 + m2^2 + c1)(s1^2 + s2^2 + c2)), c1 = 0.01^2, c2 = 0.03^2.
    """
    window = _gaussian_window(min(_WINDOW, *one.shape[1:]))
    values = [_similarity_map(a, b, window) for a, b in zip(one, other, strict=True)]
    return float(np.mean(values))


def _similarity_map(one: FloatArray, other: FloatArray, window: FloatArray) -> FloatArray:
    def local(values: FloatArray) -> FloatArray:
        return np.asarray(convolve2d(values, window, mode="valid"))

    mean_one, mean_other = local(one), local(other)
    spread_one = local(one * one) - mean_one**2
    spread_other = local(other * other) - mean_other**2
    common = local(one * other) - mean_one * mean_other
    above = (2.0 * mean_one * mean_other + _C1) * (2.0 * common + _C2)
    below = (mean_one**2 + mean_other**2 + _C1) * (spread_one + spread_other + _C2)
    return np.asarray(above / below)


def _gaussian_window(width: int) -> FloatArray:
    places = np.arange(width) - (width - 1) / 2.0
    line = np.exp(-0.5 * (places / _SPREAD) ** 2)
    window: FloatArray = np.outer(line, line)
    return np.asarray(window / window.sum())
