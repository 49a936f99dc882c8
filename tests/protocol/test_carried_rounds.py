"""Shares carried from round to round: what comes out in the end, and who may be asked what."""

from __future__ import annotations

import numpy as np
import pytest

from support.carried_run import GRID, CarriedFederation, schedule


def in_steps(total: np.ndarray) -> np.ndarray:
    return np.rint(total * 2.0**GRID).astype(np.int64)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"participants": 7, "separation": 3, "rounds": 7},
        {"participants": 7, "neighbours": 2.0, "carried_neighbours": 3.0, "mixing": 1.0},
        {"closing": True, "rounds": 4},
        {"modulus_bits": 32, "grid_bits": 20, "unit_variance": 0.01, "carried_variance": 0.01},
    ],
)
def test_the_sum_of_all_rounds_is_exact_to_the_last_bit(changes: dict) -> None:
    """Without fresh noise and with nobody lost, what was carried is gone after the last round, bit by bit."""
    federation = CarriedFederation(schedule(**changes))
    rounds = federation.schedule.rounds
    totals = [in_steps(federation.play_round(number).total) for number in range(rounds)]
    assert all(federation.outcomes[number].exact for number in range(rounds))
    sums = federation.sums
    if federation.schedule.closing:
        sums[rounds - 1] = np.zeros_like(sums[0])
    np.testing.assert_array_equal(sum(totals), sum(sums.values()))
    # And no round before the last was without noise.
    for number in range(rounds - 1):
        assert np.abs(totals[number] - sums[number]).max() > 1000
        assert federation.outcomes[number].under_way > 0.0
    assert federation.outcomes[rounds - 1].under_way == 0.0
