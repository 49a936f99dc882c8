"""The root of a function of one variable, and tails of the distributions that bounds on colluders and dropouts rest on.

`scipy.optimize` and `scipy.stats` have them too, but importing either takes longer than most plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, gammainc, gammaln

FloatArray = NDArray[np.float64]

_EPSILON = 2.0**-52
_MOST_STEPS = 100


def find_root(
    function: Callable[[float], float],
    low: float,
    high: float,
    *,
    xtol: float = 2e-12,
    rtol: float = 4.0 * _EPSILON,
) -> float:
    """Where `function`, which has different signs at `low` and `high`, is 0, within `xtol + rtol |x|`.

    Brent's method (1973, chapter 4), step by step that of `scipy.optimize.brentq`: same roots, to the last bit. A plan
    needs nothing else of that package, and importing it takes longer than the plan.
    """
    before, here, opposite = low, high, 0.0
    f_before, f_here, f_opposite = function(before), function(here), 0.0
    if f_before == 0.0:
        return before
    if f_here == 0.0:
        return here
    if not (f_before < 0.0 < f_here or f_here < 0.0 < f_before):
        raise ValueError(f"the function does not change its sign between {low!r} and {high!r}")
    last_step = step = 0.0
    for _ in range(_MOST_STEPS):
        if f_before != 0.0 and f_here != 0.0 and (f_before < 0.0) != (f_here < 0.0):
            opposite, f_opposite = before, f_before
            last_step = step = here - before
        if abs(f_opposite) < abs(f_here):
            before, here, opposite = here, opposite, here
            f_before, f_here, f_opposite = f_here, f_opposite, f_here
        within = (xtol + rtol * abs(here)) / 2.0
        half = (opposite - here) / 2.0
        if f_here == 0.0 or abs(half) < within:
            return here
        tried = math.inf
        if abs(last_step) > within and abs(f_here) < abs(f_before):
            if before == opposite:
                tried = -f_here * (here - before) / (f_here - f_before)
            else:
                slope = (f_before - f_here) / (before - here)
                far_slope = (f_opposite - f_here) / (opposite - here)
                tried = -f_here * (f_opposite * far_slope - f_before * slope)
                tried /= far_slope * slope * (f_opposite - f_before)
        if 2.0 * abs(tried) < min(abs(last_step), 3.0 * abs(half) - within):
            last_step, step = step, tried
        else:
            last_step = step = half
        before, f_before = here, f_here
        here += step if abs(step) > within else math.copysign(within, half)
        f_here = function(here)
    raise ValueError(f"no root found within {_MOST_STEPS} steps")


def binomial_tail(count: int, trials: int, probability: float) -> float:
    """P(X > count), X binomial: `I_p(count + 1, trials - count)`."""
    if count < 0:
        return 1.0
    return float(betainc(count + 1.0, trials - count, probability)) if count < trials else 0.0


def binomial_quantile(tail: float, trials: int, probability: float) -> int:
    """The least k with P(X > k) <= tail."""
    return _least(lambda count: binomial_tail(count, trials, probability) <= tail, trials)


def poisson_quantile(tail: float, mean: float, most: int) -> int:
    """The least k with P(X > k) <= tail, X Poisson, or `most`: `P(X > k) = P(k + 1, mean)`, the incomplete gamma."""
    return _least(lambda count: float(gammainc(count + 1.0, mean)) <= tail, most)


def hypergeometric_tails(population: int, marked: int, drawn: int) -> FloatArray:
    """P(X > k) for k = 0 ... min(marked, drawn) - 1, X the marked ones in a sample without replacement.

    The terms are summed from the small end, so that the far tail keeps its relative precision.
    """
    most = min(marked, drawn)
    counts = np.arange(max(drawn + marked - population, 0), most + 1)
    logs = (
        _log_choose(marked, counts)
        + _log_choose(population - marked, drawn - counts)
        - _log_choose(population, np.asarray(drawn))
    )
    above = np.cumsum(np.exp(logs)[::-1])[::-1]
    # Below the least possible count the tail is certain.
    return np.asarray(np.minimum(np.concatenate([np.ones(int(counts[0])), above[1:]]), 1.0))


def _log_choose(total: int, chosen: NDArray[np.int64]) -> FloatArray:
    return np.asarray(gammaln(total + 1.0) - gammaln(chosen + 1.0) - gammaln(total - chosen + 1.0))


def _least(enough: Callable[[int], bool], most: int) -> int:
    """The least k in 0 ... most for which `enough`, by bisection; `most` is enough."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
