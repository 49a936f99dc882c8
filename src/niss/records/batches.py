"""The secret batch of a round: each record is in it by a coin of its own.

Poisson sampling is what the claim is about: records are independent of each other, the size of the batch is random,
and an empty batch is a batch. Shuffled epochs and batches of a fixed size are neither, and have another account.
Every round, and every attempt of one, draws a batch of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from niss.checks import require_whole
from niss.errors import ConfigError
from niss.mechanism.slots import OVERSIZE
from niss.randomness import SecretStream, SimStream
from niss.views.numerics import binomial_quantile

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
# The next so many numbers k / 2^53, k uniform on 0 .. 2^53 - 1.
Uniforms = Callable[[int], FloatArray]


def draw_batch(count: int, probability: float, stream: SecretStream | SimStream) -> IntArray:
    """The numbers of the records that are in this round's batch, ascending; of `count`, each with `probability`.

    count        how many records there are
    probability  q, in (0, 1], for each of them; exact, as the float64 it is
    stream       a `SecretStream`, fresh for this round, on a node: the claim rests on nobody else knowing the batch. A
                 `SimStream` in a simulation, whose seed gives the batch away.

    >>> draw_batch(5, 1.0, SimStream(1))
    array([0, 1, 2, 3, 4])
    """
    require_whole(count, field="count", at_least=0)
    if isinstance(probability, bool) or not isinstance(probability, int | float) or not 0 < probability <= 1:
        raise ConfigError(f"must be above 0 and at most 1, not {probability!r}", field="probability")
    return np.flatnonzero(flip_coins(count, float(probability), _uniforms(stream)))


def largest_batch(most: int, probability: float) -> int:
    """B, the largest batch that a silo of at most so many records plans its time for; a larger one goes out empty.

    That says something of a record only where the others alone fill B: with it in the batch the sum would be gone. So B
    is the least number with `P(Binomial(most - 1, q) >= B) <= OVERSIZE`, which each round adds to delta
    (`docs/concepts/records.md` has the proof).

    >>> largest_batch(6000, 0.05), largest_batch(60, 0.5), largest_batch(60, 1.0)
    (456, 59, 60)
    """
    return min(binomial_quantile(OVERSIZE, most - 1, probability) + 1, most) if most else 0


def flip_coins(count: int, probability: float, uniforms: Uniforms) -> NDArray[np.bool_]:
    """`count` independent coins that show True with exactly this probability.

    A uniform u = k / 2^53 decides alone where k differs from floor(2^53 q). Where they are equal (once in 2^53 coins)
    the rest of q decides, 2^53 q - k, by a number of its own: comparing u < q would round q up to a multiple of 2^-53.
    Every step is exact in float64, and a rest ends after at most as many steps as q has digits.
    """
    heads = np.zeros(count, dtype=np.bool_)
    undecided = np.arange(count)
    while undecided.size and probability > 0.0:
        whole = np.floor(probability * 2.0**53)
        steps = uniforms(undecided.size) * 2.0**53
        heads[undecided] = steps < whole
        undecided = undecided[steps == whole]
        probability = probability * 2.0**53 - whole
    return heads


def _uniforms(stream: SecretStream | SimStream) -> Uniforms:
    if isinstance(stream, SecretStream):
        return lambda count: next(iter(stream.uniforms(count, block=count)))
    if isinstance(stream, SimStream):
        return stream.generator().random
    raise ConfigError(
        f"must be a SecretStream or a SimStream, not {type(stream).__name__}",
        field="stream",
        hint="SecretStream.fresh() on a node, SimStream(seed).child('batch', round) in a simulation",
    )
