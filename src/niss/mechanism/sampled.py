"""The Gaussian mechanism with secret Poisson sampling: its epsilon, and the noise that a target needs.

Each of `rounds` rounds takes every client with probability q, on its own and unseen, and releases the sum with noise of
`z` times what one client can put into it. Against someone who does not learn who took part this is amplified by
sampling; the number is that of dp-accounting's PLD accountant (Koskela et al. 2020, Doroshenko et al. 2022), for
neighbours of whom one lacks the client, in every round that drew it (ADD_OR_REMOVE_ONE). A client whose update becomes
zero is such a one where the sum is divided by a fixed number.
"""

from __future__ import annotations

import math
from functools import lru_cache

from niss.errors import ConfigError, PrivacyError
from niss.mechanism.gaussian import gdp_epsilon, gdp_mu

# Above this privacy loss (mu^2 / 2) sampling is worth next to nothing, and its distribution is too wide to compute.
_WIDEST_LOSS = 1e4
# How far below the target the epsilon of the noise found may lie, as a part of it.
_PRECISION = 1e-4
# The search goes most of its way on a distribution this many times coarser.
_COARSE = 100.0


@lru_cache(maxsize=256)
def poisson_epsilon(
    rounds: tuple[tuple[float, int], ...], probability: float, delta: float, coarser: float = 1.0
) -> float:
    """Epsilon at `delta` of rounds given as (noise multiplier, how many of them); never too small.

    coarser  how many times coarser to compute than usual, which is quicker and rounds up more
    """
    loss = 0.5 * math.fsum(count / z**2 for z, count in rounds)
    if probability == 1.0 or loss > _WIDEST_LOSS:
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
