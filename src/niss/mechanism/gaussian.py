"""How much Gaussian noise a privacy target needs, and what a given noise promises.

Everything goes through Gaussian differential privacy (Dong, Roth and Su, 2019): adding
`N(0, sigma^2 I)` to a value that one client can move by at most `Delta` in L2 norm is exactly
mu-GDP with `mu = Delta / sigma`, and

    delta(epsilon) = Phi(-epsilon/mu + mu/2) - exp(epsilon) * Phi(-epsilon/mu - mu/2).

That curve is tight (Balle and Wang, 2018, call it the analytic Gaussian mechanism), and mu composes
exactly: `mu_total^2 = sum of mu_t^2`.

**With secret Poisson sampling** (`poisson_epsilon`): each round takes every client with probability q, on its own and
unseen, and releases the sum with noise of `z` times what one client can put into it. Against someone who does not learn
who took part this is amplified by sampling; the number is that of dp-accounting's PLD accountant (Koskela et al. 2020,
Doroshenko et al. 2022), for neighbours of whom one lacks the client, in every round that drew it (ADD_OR_REMOVE_ONE). A
client whose update becomes zero is such a one where the sum is divided by a fixed number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from niss.checks import require_real
from niss.errors import ConfigError, PrivacyError

MECHANISMS = ("analytic", "classical")
# Above this privacy loss (mu^2 / 2) sampling is worth next to nothing, and its distribution is too wide to compute.
WIDEST_LOSS = 1e4
# How far below the target the epsilon of the noise found may lie, as a part of it.
_PRECISION = 1e-4
# The search goes most of its way on a distribution this many times coarser.
_COARSE = 100.0


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


def gaussian_sigma(
    epsilon: float,
    delta: float,
    sensitivity: float,
    *,
    mechanism: str = "analytic",
    allow_invalid: bool = False,
) -> float:
    """The noise standard deviation that makes one release (epsilon, delta)-DP.

    `sensitivity` is how far one client can move the released value in L2 norm, `Delta` above.
    `analytic` is exact at every epsilon. `classical` is the paper's Theorem 1,
    `sigma = Delta * sqrt(2 ln(1.25/delta)) / epsilon`, proved only for epsilon < 1; at larger epsilon
    it may add too little noise, so it is refused unless `allow_invalid=True` (at epsilon = 10,
    delta = 1e-4 its true delta is 2.7e-4).
    """
    require_real(epsilon, field="epsilon", zero_allowed=False)
    _require_delta(delta)
    require_real(sensitivity, field="sensitivity", zero_allowed=False)
    if mechanism == "analytic":
        return sensitivity / gdp_mu(epsilon, delta)
    if mechanism != "classical":
        raise ConfigError(
            f"unknown mechanism {mechanism!r}", field="mechanism", hint="use one of: " + ", ".join(MECHANISMS)
        )
    if epsilon >= 1.0 and not allow_invalid:
        raise PrivacyError(
            f"the classical Gaussian mechanism is proved only for epsilon < 1, not epsilon = {epsilon:g}",
            hint="use mechanism='analytic', or allow_invalid=True to reproduce the paper without a guarantee",
        )
    return sensitivity * math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon


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


@lru_cache(maxsize=256)
def poisson_epsilon(
    rounds: tuple[tuple[float, int], ...], probability: float, delta: float, coarser: float = 1.0
) -> float:
    """Epsilon at `delta` of rounds given as (noise multiplier, how many of them); never too small.

    coarser  how many times coarser to compute than usual, which is quicker and rounds up more
    """
    loss = 0.5 * math.fsum(count / z**2 for z, count in rounds)
    if probability == 1.0 or loss > WIDEST_LOSS:
        return gdp_epsilon(math.sqrt(2.0 * loss), delta)
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    # dp-accounting's own interval, made coarser as the losses grow wide: about 1e5 steps at all times.
    interval = min(max(1e-4, 1e-5 * loss), 1e-2) * coarser
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, interval)
    for z, count in rounds:
        event = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(z))
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=256)
def poisson_multiplier(epsilon: float, delta: float, probability: float, rounds: int) -> float:
    """The noise multiplier z that keeps the target over all rounds together, with hardly anything left over.

    Raises PrivacyError where dp-accounting sees no noise that does.
    """
    if not 0.0 < probability <= 1.0:
        raise ConfigError(f"must lie in (0, 1], not {probability!r}", field="probability")
    unsampled = math.sqrt(rounds) / gdp_mu(epsilon, delta)
    if probability == 1.0:
        return unsampled

    def reached(log_z: float, coarser: float = 1.0) -> float:
        return poisson_epsilon(((math.exp(log_z), rounds),), probability, delta, coarser)

    # Roughly: bisection from above, where sampling is worth nothing.
    coarser = min(max(epsilon * _COARSE, 1.0), _COARSE)
    high = math.log(unsampled) + 0.1
    low = high - 1.0
    while reached(low, coarser) <= epsilon:
        low -= 1.0
    while high - low > 1e-3:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if reached(middle, coarser) <= epsilon else (middle, high)
    # Exactly: by the secant of log epsilon, aiming at the middle of what is accepted.
    log_z, slope, found = high, -1.0, reached(high)
    for _ in range(40):
        if epsilon * (1.0 - _PRECISION) <= found <= epsilon:
            return math.exp(log_z)
        step = math.log(epsilon * (1.0 - 0.5 * _PRECISION) / max(found, 0.5 * epsilon)) / slope
        log_z += step
        before, found = found, reached(log_z)
        if found > 0.0 and before > 0.0 and found != before:
            slope = math.log(found / before) / step
    raise PrivacyError(
        f"no noise is seen to keep epsilon = {epsilon:g} over {rounds} sampled rounds",
        hint="ask for a larger epsilon, or use a method without sampling",
    )
