"""The root of a function of one variable."""

from __future__ import annotations

import math
from collections.abc import Callable

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
