"""How far the noise of `SecretStream` is from the ideal rounded Gaussian.

One draw. Let `T(y)` be the error of `P(noise > y s)`, `s` the deviation in steps and `y` one of the cell
borders `(k + 1/2) / s`. Half a step of the uniform and the error `E` of the deviate are all there is:

    T(y) <= a(y) + E(y) phi(y - E(y)),   a = 2^-64 (2^-80 in the refined tail),   E(y) = 2^-51 (1 + |y|),

so the total variation distance is at most the sum of `T` over the borders, about `8e-16 s + 7e-16`.

Many draws. Distances add up at most, but errors this even add up far slower. Cut at some `K`. Inside,
`KL <= chi^2 = sum_k (P'_k - P_k)^2 / P_k` adds over independent draws and Pinsker gives `sqrt(KL / 2)`;
outside, the sum of `T` counts for each draw. With `Q` = the sampler inside (scaled to the ideal's mass
there) and the ideal outside, the triangle inequality gives

    TV(N draws) <= N * 2 sum_{y >= K} T(y)  +  sqrt(N chi^2(K) / 2)          for every K; the best one is taken.

Inside, scaling to the right mass only lowers chi^2 but for a factor `1 + 1e-12`, put at 1.001 here.
Draws that depend on earlier rounds change nothing: the rounds are a function of one tape of noise.

What that is worth to an opponent. A distance `D` adds `(1 + e^epsilon) D` to delta, which says little where epsilon or
the model is large. But inside the cut the error is a *factor* on probabilities: `x = P' / P - 1` has mean 0 under `P`,
`E x^2 = chi^2` and `|x| <= r < 1`. So for every `b > 0`, with `g = (1 - r)^-(b + 2)`,

    E_P (1 + x)^(1 + b),  E_P (1 + x)^-b  <=  1 + b (b + 1) chi^2 g / 2,

and by Markov the factor of all draws together, either way, stays below `e^h` but for probability
`exp(N b (b + 1) chi^2 g / 2 - b h)`. With `h` such that this is `2^-80`, for all events A

    P'(A) <= e^h P(A) + rest,    P(A) <= e^h P'(A) + rest,    rest = 2^-80 + the distance outside.

Then noise that is (epsilon, delta)-private when ideal is, as it is drawn (`sampler_factor`), private with epsilon + 2 h
and `e^h delta + (1 + e^(epsilon + h)) rest`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.errors import ConfigError

# `|deviation * z computed - deviation * z exact| <= deviation * DEVIATE_ERROR * (1 + |z|)`.
DEVIATE_ERROR = 2.0**-51
_END = 10.25  # beyond the last deviate, 10.22
_NARROWEST = 0.01  # from here down every draw is 0
_REFINED = 4.77  # tail probability below 2^-20
_CUTS = np.arange(2.0, _END, 0.25)
_SLACK = 1.001
_ORDERS = 2.0 ** np.arange(4.0, 60.0, 0.25)  # b
_LOG_REST = 80.0 * math.log(2.0)

Floats = NDArray[np.float64]


def sampler_distance(deviation_steps: ArrayLike, draws: ArrayLike = 1) -> float:
    """A bound on the total variation distance between all the draws and ideal rounded Gaussians.

    `deviation_steps` and `draws` are numbers or arrays of the same length: so many draws of each deviation.
    """
    outside, inside, _ = _profile_of_all(deviation_steps, draws)
    return min(1.0, float(np.min(outside + np.sqrt(_SLACK * inside / 2.0))))


def sampler_factor(deviation_steps: ArrayLike, draws: ArrayLike = 1, *, rest: float) -> float:
    """The least `h` with `P'(A) <= e^h P(A) + rest` and `P(A) <= e^h P'(A) + rest` for all events `A`.

    `P'` is the law of all the draws, `P` that of ideal rounded Gaussians; the arguments are those of
    `sampler_distance`. Infinite where the part that is not a factor already exceeds `rest`.
    """
    outside, inside, ratio = _profile_of_all(deviation_steps, draws)
    within = (outside + 2.0**-80 <= rest) & (ratio < 0.5)
    if not within.any():
        return math.inf
    # Cuts as rows, orders as columns; an exponent beyond 700 is no bound at all.
    exponent = -np.log1p(-ratio[within, None]) * (_ORDERS + 2.0)
    growth = np.where(exponent < 700.0, np.exp(np.minimum(exponent, 700.0)), math.inf)
    squares = _SLACK * inside[within, None]
    return float(
        np.min(_LOG_REST / _ORDERS + np.where(squares > 0.0, (_ORDERS + 1.0) / 2.0 * squares * growth, 0.0))
    )


def _profile_of_all(deviation_steps: ArrayLike, draws: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """`_profile` summed over all draws (the last: its largest)."""
    steps = np.atleast_1d(np.asarray(deviation_steps, dtype=np.float64))
    counts = np.atleast_1d(np.asarray(draws, dtype=np.float64))
    if steps.ndim != 1 or not np.all(np.isfinite(steps)) or np.any(steps < 0.0):
        raise ConfigError("must be finite and not negative", field="deviation_steps")
    if counts.shape not in ((1,), steps.shape) or not np.all(np.isfinite(counts)) or np.any(counts < 0.0):
        raise ConfigError("must be finite, not negative, one or as many as deviations", field="draws")
    deviations, kind = np.unique(steps, return_inverse=True)
    total = np.bincount(kind, weights=np.broadcast_to(counts, steps.shape), minlength=deviations.size)
    outside, inside, ratio = np.zeros((3, _CUTS.size + 1))
    for deviation, number in zip(deviations, total, strict=True):
        if deviation > 0.0 and number > 0.0:
            tail, chi2, worst = _profile(float(deviation))
            outside += number * tail
            inside += number * chi2
            ratio = np.maximum(ratio, worst)
    return outside, inside, ratio


@lru_cache(maxsize=4096)
def _profile(steps: float) -> tuple[Floats, Floats, Floats]:
    """For no inside at all, then for each cut: the distance outside, chi^2 inside, largest |x| inside; per draw.

    Cells come in bins of `width`; a bin's `T` is taken at its worst end, its cells' probability as well.
    """
    steps = max(steps, _NARROWEST)
    width = max(1.0, math.ceil(steps / 64.0))
    bins = math.ceil(_END * steps / width) + 1
    low = (np.arange(bins) * width + 0.5) / steps
    high = low + width / steps
    error = np.where(low < _REFINED, 2.0**-64, 2.0**-80)
    error += _SLACK * DEVIATE_ERROR * (1.0 + high) * _density(low)
    # Both sides; 2^-78 for the last border and for what lies beyond.
    outside = 2.0 * width * np.append(np.cumsum(error[::-1])[::-1], 0.0) + 2.0**-78
    if steps < 0.5:
        nothing = np.zeros(_CUTS.size + 1)
        return np.full(_CUTS.size + 1, outside[0]), nothing, nothing
    middle_error = 2.0**-64 + _SLACK * DEVIATE_ERROR * (1.0 + low[0]) * _density(np.zeros(1))
    middle = (2.0 * middle_error) ** 2 * steps / _density(low[:1])
    per_bin = 2.0 * width * (2.0 * error) ** 2 * steps / _density(high)
    inside = np.cumsum(np.append(middle, per_bin))
    ratios = np.append(2.0 * middle_error * steps / _density(low[:1]), 2.0 * error * steps / _density(high))
    worst = np.maximum.accumulate(ratios)
    cut = np.minimum(np.ceil(_CUTS * steps / width).astype(np.int64), bins)
    return (
        np.append(outside[0], outside[cut]),
        np.append(0.0, inside[cut]),
        np.append(0.0, _SLACK * worst[cut]),
    )


def _density(z: NDArray[np.floating[Any]]) -> Floats:
    return np.asarray(np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi))
