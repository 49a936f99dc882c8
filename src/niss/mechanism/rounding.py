"""Randomised rounding to the grid: it keeps the direction of an update and never lengthens it past its clip.

An entry of `s = x / g` steps is rounded away from zero with the probability of its fraction, else toward zero:

    q = sign(s) (t + [u < f]),    t = floor(c |s|),  f = c |s| - t,  u uniform on the multiples of 2^-53 in [0, 1).

The scale `c <= 1` and the draws are such that `||q|| g <= bound`, always; the check is in whole numbers.

**Privacy.** `||q|| g <= bound` for every x and every u, and x = 0 gives q = 0. So for fixed coins both sensitivities
are what the clip promised: left out, a client moves the sum by `||q - 0|| g <= bound`; replaced, by
`||q - q'|| g <= 2 bound` (triangle inequality). Let the noise make `q -> Y` (epsilon, delta)-private at that
sensitivity. The coins are independent of all noise, so for the laws of q given x and of q' given x'

    P(Y in A | x) = E P(Y in A | q) <= E [e^epsilon P(Y in A | q') + delta] = e^epsilon P(Y in A | x') + delta.

That holds at every epsilon with its delta, hence for the whole curve of a mu-GDP mechanism, which then composes as
before. The scale and the number of tries are functions of x and the coins, so they are part of the law of q.

**Accuracy.** A draw has `E q = c s`, within 2^-53 of a step an entry, and variance `f (1 - f) <= 1/4` an entry.
`E ||q||^2 = ||c s||^2 + V`, `V = sum f (1 - f)`, is convex and grows with c; the deviation of `||q||^2` is
`D = sqrt(sum (2 t + 1)^2 f (1 - f))`. c is 1 where `E ||q||^2 + 3 D <= (bound / g)^2`, else about the largest that
allows it. A draw that does not fit is thrown away and the margin doubled; after `len(MARGINS)` of them the update is
cut toward zero, which fits. So `E [q] g = x` where nothing was scaled, but for the draws thrown away: with three
deviations left about one in a thousand of them, where many entries matter, and hardly any where the norm is well
below the bound. Entries below one step: `||q||^2 >= ||q||_1` for whole numbers, so no rounding with `E q = c s`
has a larger c than `(bound / g)^2 / ||s||_1`. An update of very many of them is shortened by any; a finer grid helps.

**A sum over records** (`round_records`) is not rounded: its records are, each with coins of its own, and added as whole
numbers. The proof above is about an update that becomes zero. Rounding a sum S of which one record is a part would move
it from R(S) to R(S + s), which is further than s where many entries cross a whole number (1.08 times the clip, at a
million coordinates). Rounded on its own, record i adds q_i, `||q_i|| g <= bound`, to the rounded others, whose law is
the same with it and without it: a stream's coins are independent, whoever used those before. So, given all other
records and their coins, the proof above applies with `Y = base + q + noise`: the noise makes `q -> Y` as private around
any base as around zero. In whole numbers no order of adding and no rounding of floats has a part in that.

`span` then cuts each entry of the sum to what the modulus has room for. Cutting entries to an interval moves no two
vectors apart (`|cut(a) - cut(b)| <= |a - b|`) and leaves whole numbers whole, so it costs nothing. Nothing wraps before
it: 2^31 records of 2^32 steps add up in 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.errors import ConfigError
from niss.mechanism.clipping import clip_l2, l2_norm
from niss.mechanism.grid import Grid
from niss.randomness import SecretStream

# How many deviations of `||q||^2` are left below the bound, in the first draw and in those after it.
MARGINS = (3.0, 6.0, 12.0, 24.0)

_BLOCK = 16384
_PASSES = 12
_LIMB_BITS = 21
_LIMB = (1 << _LIMB_BITS) - 1

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


def round_randomly(
    grid: Grid, values: NDArray[np.floating[Any]], bound: float | Fraction, coins: SecretStream
) -> Steps:
    """Grid steps of L2 norm at most `bound`, in expectation `values`, or those shortened where they must be.

    `coins` is a stream of its own: never one that noise is drawn from, and never used for another update.
    """
    if not isinstance(coins, SecretStream):
        raise ConfigError(
            f"must be a SecretStream, not {type(coins).__name__}",
            field="coins",
            hint="use SecretStream.fresh()",
        )
    if not math.isfinite(bound) or bound <= 0.0:
        raise ConfigError(f"must be a finite number above 0, not {bound!r}", field="bound")
    steps = grid.in_steps(values)
    # Whole squares are within the bound if and only if they are within its floor.
    most = math.floor((Fraction(bound) * 2**grid.bits) ** 2)
    negative = steps < 0.0
    rounded = _round_sizes(np.abs(steps, out=steps).ravel(), most, coins).reshape(steps.shape)
    np.negative(rounded, out=rounded, where=negative)
    return rounded


def round_records(
    grid: Grid,
    rows: Iterable[tuple[NDArray[np.floating[Any]], int]],
    size: int,
    *,
    clip: float,
    divisor: float,
    span: float,
    coins: SecretStream,
) -> Steps:
    """The sum over records of their rows over `divisor`, each rounded on its own to at most `clip / divisor`.

    rows     matrices of float64 of `size` columns, a record a row: a function of that record alone; with each, how many
             of its rows count. The others are rounded like them and left out, so that time does not say how many they
             are. A longer row is clipped; one with an entry that is not finite counts as zero: to say anything else of
             it would say which
    span     no entry of the sum exceeds `span / divisor`
    coins    as in `round_randomly`
    """
    total, bound = np.zeros(size, dtype=np.int64), Fraction(clip) / Fraction(divisor)
    for matrix, real in rows:
        for place, row in enumerate(matrix):
            if np.all(np.isfinite(row)):
                rounded = round_randomly(grid, clip_l2(row, clip) / divisor, bound, coins)
                total += rounded * (place < real)
    most = math.floor(Fraction(span) / Fraction(divisor) * 2**grid.bits)
    return np.clip(total, -most, most)


def beside(
    grid: Grid, update: NDArray[np.floating[Any]], clip: float, participants: int, kept: int
) -> NDArray[np.float64]:
    """An update within the clip, shortened but for the last `kept` coordinates, which rounding then leaves alone.

    It enters the sum with the weight 1 / participants, and is rounded after that. `round_randomly` shortens all
    coordinates of a vector alike. Once the others are shortened in advance, it finds room for the whole vector, whose
    last coordinates it then leaves as long as they are. In steps, those add at most `norm^2 + kept / 4` to `E||q||^2`,
    and to its deviation at most `norm + sqrt(kept) / 2`.
    """
    whole = update.astype(np.float64, copy=False)
    if not kept:
        return whole
    own, others = whole[:-kept] / participants, whole[-kept:]
    most = clip / participants * 2.0**grid.bits
    norm = l2_norm(others) / participants * 2.0**grid.bits
    left = most**2 - norm**2 - kept / 4.0 - MARGINS[0] * (norm + math.sqrt(kept) / 2.0)
    scale = 0.0
    if left >= 1.0:
        scale = _fitting_scale(np.abs(grid.in_steps(own)).ravel(), math.floor(left), MARGINS[0], 1.0)
    return np.concatenate([own * scale * participants, others])


def squared_norm(steps: Steps) -> int:
    """`sum q^2`, exactly: a block at a time, in limbs of 21 bits whose products cannot overflow."""
    total = 0
    flat = steps.ravel()
    for start in range(0, flat.size, _BLOCK):
        size = np.abs(flat[start : start + _BLOCK])
        limbs = [size & _LIMB]
        for shift in range(_LIMB_BITS, int(size.max()).bit_length(), _LIMB_BITS):
            limbs.append(size >> shift & _LIMB)
        for i, left in enumerate(limbs):
            for j, right in enumerate(limbs):
                # At most 2^14 products below 2^42.
                total += int(np.sum(left * right)) << (_LIMB_BITS * (i + j))
    return total


def _round_sizes(sizes: Floats, most: int, coins: SecretStream) -> Steps:
    if most == 0:  # Less than a step: nothing but zero fits.
        return np.zeros(sizes.size, dtype=np.int64)
    scale = 1.0
    for margin in MARGINS:
        scale = _fitting_scale(sizes, most, margin, scale)
        rounded = _draw(sizes, scale, coins)
        if squared_norm(rounded) <= most:
            return rounded
    return _cut(sizes, most)


def _draw(sizes: Floats, scale: float, coins: SecretStream) -> Steps:
    rounded = np.empty(sizes.size, dtype=np.int64)
    start = 0
    for uniform in coins.uniforms(sizes.size, block=_BLOCK):
        block = slice(start, start + uniform.size)
        scaled = sizes[block] * scale
        whole = np.floor(scaled)
        np.subtract(scaled, whole, out=scaled)
        rounded[block] = whole
        rounded[block] += uniform < scaled
        start += uniform.size
    return rounded


def _cut(sizes: Floats, most: int) -> Steps:
    """Toward zero: no entry grows, so the norm fits if that of `sizes` does, and else once it is scaled to.

    The guard of 2^-30 is far more than the rounding of the norm and the product can amount to (1e-13).
    """
    cut = np.floor(sizes).astype(np.int64)
    if squared_norm(cut) <= most:
        return cut
    largest = float(sizes.max())
    norm = largest * math.sqrt(float(np.sum(np.square(sizes / largest))))
    return np.floor(sizes * ((1.0 - 2.0**-30) * math.sqrt(most) / norm)).astype(np.int64)


def _fitting_scale(sizes: Floats, most: int, margin: float, scale: float) -> float:
    """The given scale if `E ||q||^2 + margin D <= most` there, else a smaller one found by Newton's method.

    `E ||q||^2` is convex in the scale, so the steps come down from above; they aim a third of the margin lower,
    where they would otherwise never arrive. Whatever is returned, the draw itself is checked.
    """
    room = float(most) * (1.0 + 2.0**-40)  # A norm on the bound may come out a hair above.
    for _ in range(_PASSES):
        mean, slope, deviation = _moments(sizes, scale)
        if mean + margin * deviation <= room:
            break
        excess = mean + margin * 4.0 / 3.0 * deviation - room
        scale = max(scale - excess / slope, scale / 8.0)
    return scale


def _moments(sizes: Floats, scale: float) -> tuple[float, float, float]:
    """`E ||q||^2`, its derivative by the scale, and the deviation of `||q||^2`."""
    mean = slope = variance = 0.0
    for start in range(0, sizes.size, _BLOCK):
        block = sizes[start : start + _BLOCK]
        scaled = block * scale
        whole = np.floor(scaled)
        fraction = scaled - whole
        odd = 2.0 * whole + 1.0  # (t + 1)^2 - t^2
        mean += float(np.sum(whole * whole + fraction * odd))
        slope += float(np.sum(block * odd))
        odd *= odd
        fraction -= fraction * fraction
        variance += float(np.sum(odd * fraction))
    return mean, slope, math.sqrt(variance)
