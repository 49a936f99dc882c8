from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from niss.errors import ConfigError
from niss.randomness import SecretStream, SimStream
from niss.records import draw_batch
from niss.records.batches import flip_coins

STREAMS = {"secret": lambda: SecretStream(bytes(31) + b"r"), "simulated": lambda: SimStream(4)}


@pytest.mark.parametrize("kind", STREAMS)
def test_each_record_is_in_the_batch_with_its_probability(kind: str) -> None:
    count, probability = 400_000, 0.05
    batch = draw_batch(count, probability, STREAMS[kind]())
    assert batch.dtype == np.int64
    assert np.all(np.diff(batch) > 0)
    # Five deviations: a false alarm in 1.7 million seeds.
    assert abs(batch.size - count * probability) < 5 * math.sqrt(count * probability * (1 - probability))
    # Neighbours are independent: pairs are as rare as they should be.
    pairs = int((np.diff(batch) == 1).sum())
    assert abs(pairs - count * probability**2) < 6 * math.sqrt(count * probability**2)


@pytest.mark.parametrize("kind", STREAMS)
def test_all_none_and_again(kind: str) -> None:
    assert draw_batch(7, 1.0, STREAMS[kind]()).tolist() == list(range(7))
    assert draw_batch(0, 0.5, STREAMS[kind]()).size == 0
    assert draw_batch(50, 5e-324, STREAMS[kind]()).size == 0
    again = STREAMS[kind](), STREAMS[kind]()
    assert draw_batch(90, 0.3, again[0]).tolist() == draw_batch(90, 0.3, again[1]).tolist()


def test_a_secret_stream_moves_on_and_never_repeats_a_batch() -> None:
    stream = STREAMS["secret"]()
    assert draw_batch(90, 0.3, stream).tolist() != draw_batch(90, 0.3, stream).tolist()


def probability_of_heads(probability: float) -> Fraction:
    """Exactly, from which numbers decide what: those below the border, and, at the border, those of the next step."""
    total, share, border = Fraction(0), Fraction(1), []

    def uniforms(count: int) -> np.ndarray:
        # Every coin lands on the border, where the first step left it.
        whole = math.floor(Fraction(rest[0]) * 2**53)
        border.append(whole)
        rest[0] = float(Fraction(rest[0]) * 2**53 - whole)
        return np.full(count, whole * 2.0**-53)

    rest = [probability]
    assert not flip_coins(1, probability, uniforms)[0]
    for whole in border:
        total += share * Fraction(whole, 2**53)
        share /= 2**53
    return total


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.3, 1 / 3, 0.75, 1e-9, 2.0**-60, 1.0])
def test_coins_are_exact(probability: float) -> None:
    """u < q alone would be heads with probability ceil(2^53 q) / 2^53, which is more than q below 1/2."""
    assert probability_of_heads(probability) == Fraction(probability)


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.5, math.nan, True, "half"])
def test_refuses_what_is_no_probability(probability: object) -> None:
    with pytest.raises(ConfigError, match="probability"):
        draw_batch(3, probability, SimStream(1))


def test_refuses_other_streams() -> None:
    with pytest.raises(ConfigError, match="SecretStream") as caught:
        draw_batch(3, 0.5, np.random.default_rng(1))
    assert "SecretStream.fresh()" in str(caught.value)
