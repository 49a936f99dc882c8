"""How much Gaussian noise a privacy target needs, and what a given noise promises.

Everything goes through Gaussian differential privacy (Dong, Roth and Su, 2019): adding
`N(0, sigma^2 I)` to a value that one client can move by at most `Delta` in L2 norm is exactly
mu-GDP with `mu = Delta / sigma`, and

    delta(epsilon) = Phi(-epsilon/mu + mu/2) - exp(epsilon) * Phi(-epsilon/mu - mu/2).

That curve is tight (Balle and Wang, 2018, call it the analytic Gaussian mechanism), and mu composes
exactly: `mu_total^2 = sum of mu_t^2`. Rounds with secret batches: `niss.mechanism.slots`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from niss.checks import require_real
from niss.errors import ConfigError, PrivacyError


def log_normal_cdf(x: float) -> float:
    """`log Phi(x)`, to about 1e-13 relative, far into the lower tail."""
    if x > -30.0:
        return math.log(0.5 * math.erfc(-x / math.sqrt(2.0)))
    inverse_square = 1.0 / (x * x)
    # Asymptotic series of the Mills ratio; at x = -30 the first omitted term is below 3e-16.
    series = 0.0
    for coefficient in (10395.0, 945.0, 105.0, 15.0, 3.0, 1.0):
        series = inverse_square * (coefficient - series)
    return -0.5 * x * x - math.log(-x * math.sqrt(2.0 * math.pi)) + math.log1p(-series)


def gdp_delta(epsilon: float, mu: float) -> float:
    """The smallest delta for which mu-GDP implies (epsilon, delta)-DP.

    Relative error below 1e-9 for epsilon >= 0.1 down to delta = 1e-300; the two terms cancel more as
    mu shrinks, to about 1e-7 at epsilon = 1e-3.
    """
    require_real(epsilon, field="epsilon")
    require_real(mu, field="mu")
    if mu == 0.0:
        return 0.0
    upper = log_normal_cdf(-epsilon / mu + mu / 2.0)
    lower = epsilon + log_normal_cdf(-epsilon / mu - mu / 2.0)
    if lower >= upper:
        return 0.0
    return -math.exp(upper) * math.expm1(lower - upper)


@lru_cache(maxsize=65_536)
def gdp_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon for which mu-GDP implies (epsilon, delta)-DP; infinite for infinite mu."""
    _require_delta(delta)
    if mu == math.inf:
        return math.inf
    if gdp_delta(0.0, mu) <= delta:
        return 0.0
    high = 1.0
    while gdp_delta(high, mu) > delta:
        high *= 2.0
        if math.isinf(high):
            return math.inf
    return _bisect(lambda epsilon: gdp_delta(epsilon, mu) <= delta, low=0.0, high=high)


@lru_cache(maxsize=65_536)
def gdp_mu(epsilon: float, delta: float) -> float:
    """The largest mu for which mu-GDP implies (epsilon, delta)-DP, rounded to the safe side."""
    require_real(epsilon, field="epsilon", zero_allowed=False)
    _require_delta(delta)
    high = 1.0
    while gdp_delta(epsilon, high) <= delta:
        high *= 2.0
    # Search downwards in -mu so that the end returned is the one that keeps the promise.
    return -_bisect(lambda negative: gdp_delta(epsilon, -negative) <= delta, low=-high, high=0.0)


def classical_sigma(epsilon: float, delta: float, *, allow_invalid: bool = False) -> float:
    """The deviation that the paper's Theorem 1 asks for at sensitivity 1, `sqrt(2 ln(1.25/delta)) / epsilon`.

    Exact is `1 / gdp_mu`. This is proved only for epsilon < 1; at larger epsilon it may add too little noise, so it is
    refused unless `allow_invalid=True` (at epsilon = 10, delta = 1e-4 its true delta is 2.7e-4).
    """
    require_real(epsilon, field="epsilon", zero_allowed=False)
    _require_delta(delta)
    if epsilon >= 1.0 and not allow_invalid:
        raise PrivacyError(
            f"the classical Gaussian mechanism is proved only for epsilon < 1, not epsilon = {epsilon:g}",
            hint="use mechanism='analytic', or allow_invalid=True to reproduce the paper without a guarantee",
        )
    return math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon


def _bisect(holds: Callable[[float], bool], *, low: float, high: float) -> float:
    """The boundary of a predicate that is false at `low` and true at `high`, from the true side."""
    while True:  # Ends: between two neighbouring floats there is no third.
        middle = 0.5 * (low + high)
        if middle in (low, high):
            return high
        if holds(middle):
            high = middle
        else:
            low = middle


def _require_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise ConfigError(
            f"must lie strictly between 0 and 1, not {delta!r}",
            field="delta",
            hint="a common choice is below 1 / number of clients, for example 1e-5",
        )
