"""Tails of the distributions that bounds on colluders and dropouts rest on.

`scipy.stats` has them too, but importing it takes longer than most plans.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, gammainc, gammaln

FloatArray = NDArray[np.float64]


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
