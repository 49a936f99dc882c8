"""What correlated noise is charged, where rounds are not alike."""

from __future__ import annotations

import numpy as np
import pytest

from niss.accounting import Plan
from niss.methods import CentralMf

WEIGHTS = (0.5, 0.1, 0.4, 0.3, 0.05, 0.5)


@pytest.mark.parametrize("strategy", ["optimised", "square-root"])
def test_clients_whose_weight_changes_are_charged_at_least_what_they_pay(strategy: str) -> None:
    """One client in every second of six rounds, with less weight at first or later; cost from the whole covariance."""
    method = CentralMf(strategy=strategy)
    plan = Plan(method=method, epsilon=3.0, participations=3, horizon=6, separation=2)
    rounds = [
        plan.for_round([0, 1], weights=[weight, 1.0 - weight], records=1.0, beacon=b"b", number=number)
        for number, weight in enumerate(WEIGHTS)
    ]
    scales = np.array([np.sqrt(method._scale2(one)) for one in rounds])
    noise = method.noise(plan)
    covariance = noise.inverse @ noise.inverse.T
    precision = np.linalg.inv(np.diag(scales) @ covariance @ np.diag(scales))
    for seat in (0, 1):
        for first in (0, 1):
            pattern = np.arange(first, 6, 2)
            moved = np.array([rounds[number].sensitivity[seat] for number in pattern])
            paid = moved @ precision[np.ix_(pattern, pattern)] @ moved
            charged = sum(rounds[number].joint_mu[seat] ** 2 for number in pattern)
            assert paid <= charged * (1.0 + 1e-12)
            assert charged <= plan.budget(1)[0] ** 2 * (1.0 + 1e-9)
