"""Updates off the grid in whole rounds: what is rounded sums to the last bit, and nothing is lost on average."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from niss.protocol import client as client_module
from niss.protocol import shares as shares_module
from niss.randomness import SecretStream
from support.protocol_round import Federation


def off_the_grid(federation: Federation, coordinates: int) -> list[np.ndarray]:
    return [update + 2.0**-21 / 3.0 for update in federation.updates(coordinates)]


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_the_sum_is_exactly_that_of_the_rounded_updates(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(6)
    rounded: list[np.ndarray] = []
    round_update = client_module.round_update

    def noted(*arguments: Any) -> np.ndarray:
        rounded.append(round_update(*arguments))
        return rounded[-1].copy()

    monkeypatch.setattr(client_module, "round_update", noted)
    opened = federation.open(federation.terms(mode=mode, neighbours=5.0, coordinates=100))
    updates = off_the_grid(federation, 100)
    federation.upload(opened, updates)
    if mode == "repair":
        federation.repair()
    outcome = federation.server.finish()
    assert outcome.exact
    np.testing.assert_array_equal(outcome.total, np.sum(rounded, axis=0) * 2.0**-20)
    clipped = [update * min(1.0, 2.0 / float(np.linalg.norm(update))) for update in updates]
    np.testing.assert_allclose(outcome.total, np.mean(clipped, axis=0), atol=6 * 2.0**-20)
    assert not np.array_equal(outcome.total, np.mean(clipped, axis=0))


def test_updates_far_below_a_step_come_through_on_average() -> None:
    """Every entry is a twentieth of a step: cut toward zero, all of it would be lost.

    The sum of 8 x 4,000 coins along the common direction: 6 deviations, false-alarm rate 2e-9.
    """
    size, coordinates, bits, part = 8, 4000, 4, 0.05
    federation = Federation(size, "far below")
    signs = np.where(np.arange(coordinates) % 3, 1.0, -1.0)
    update = signs * part * size * 2.0**-bits
    opened = federation.open(federation.terms(coordinates=coordinates, grid_bits=bits, clip=10.0))
    federation.upload(opened, [update] * size)
    outcome = federation.server.finish()
    assert outcome.exact
    kept = float(outcome.total @ update) / float(update @ update)
    deviation = math.sqrt((1.0 - part) / (part * size * coordinates))
    assert abs(kept - 1.0) < 6.0 * deviation < 0.2


def test_an_update_of_any_length_is_sent_within_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a step in every entry, longer than the clip: in whole numbers, `size ||q|| g <= clip`."""
    federation = Federation(5)
    sent: list[np.ndarray] = []
    masked = client_module.masked_upload

    def noted(ties: Any, steps: np.ndarray, *rest: Any) -> Any:
        sent.append(steps.copy())
        return masked(ties, steps, *rest)

    monkeypatch.setattr(client_module, "masked_upload", noted)
    opened = federation.open(federation.terms(coordinates=4000, grid_bits=6, clip=1.0))
    for client, length in zip(federation.clients, (0.0, 0.1, 1.0, 3.0, 1e6), strict=True):
        client.upload(opened, np.full(4000, length / math.sqrt(4000.0)), federation.entropy)
    squares = [sum(step**2 for step in steps.tolist()) for steps in sent]
    assert all(25 * square <= 4**6 for square in squares)
    assert squares[0] == 0
    assert all(squares[1:])


def test_coins_are_fresh_and_no_noise_is_drawn_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two clients' uploads in one round: every stream made has its own seed but for the shares of one edge."""
    federation = Federation(5)
    made: list[bytes] = []
    flipped: list[Any] = []

    class Noting:
        def __new__(cls, seed: bytes) -> Any:
            made.append(bytes(seed))
            return SecretStream(seed)

        @classmethod
        def fresh(cls, entropy: Any) -> SecretStream:
            return cls(entropy(32))

    round_randomly = shares_module.round_randomly

    def noted(grid: Any, values: Any, bound: Any, coins: SecretStream, *rest: Any) -> Any:
        flipped.append((made[-1], coins))
        return round_randomly(grid, values, bound, coins, *rest)

    monkeypatch.setattr(shares_module, "SecretStream", Noting)
    monkeypatch.setattr(shares_module, "round_randomly", noted)
    opened = federation.open(
        federation.terms(mode="repair", coordinates=50, neighbours=4.0, residual_variance=0.01)
    )
    federation.upload(opened, off_the_grid(federation, 50))
    assert len(flipped) == 5
    assert all(isinstance(stream, SecretStream) for _, stream in flipped)
    # Coins, residual and self-mask of each client once; each of 20 shares at both its ends.
    assert all(made.count(seed) == 1 for seed, _ in flipped)
    assert (len(made), len(set(made))) == (5 * 3 + 2 * 20, 5 * 3 + 20)
