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
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.errors import ConfigError
from niss.mechanism.blocks import BLOCK, Blocks
from niss.mechanism.clipping import clip_l2
from niss.mechanism.grid import Grid
from niss.randomness import SecretStream

# How many deviations of `||q||^2` are left below the bound, in the first draw and in those after it.
MARGINS = (3.0, 6.0, 12.0, 24.0)

_PASSES = 12
_LIMB_BITS = 21
_LIMB = (1 << _LIMB_BITS) - 1

Floats = NDArray[np.float64]
Steps = NDArray[np.signedinteger[Any]]


def round_randomly(
    grid: Grid,
    values: NDArray[np.floating[Any]] | Blocks,
    bound: float | Fraction,
    coins: SecretStream,
    kind: type[np.int32 | np.int64] = np.int64,
) -> Steps:
    """Grid steps of L2 norm at most `bound`, in expectation `values`, or those shortened where they must be.

    `coins` is a stream of its own: never one that noise is drawn from, and never used for another update. `kind` is
    wide enough for `bound`.
    """
    if not isinstance(coins, SecretStream):
        raise ConfigError(
            f"must be a SecretStream, not {type(coins).__name__}",
            field="coins",
            hint="use SecretStream.fresh()",
        )
    if not math.isfinite(bound) or bound <= 0.0:
        raise ConfigError(f"must be a finite number above 0, not {bound!r}", field="bound")
    blocks = Blocks.of(values)
    for block in blocks:
        grid.in_steps(block)  # Refuses what has no place on the grid.
    steps = blocks.map(lambda block: np.ldexp(block.astype(np.float64), grid.bits), np.float64)
    # Whole squares are within the bound if and only if they are within its floor.
    most = math.floor((Fraction(bound) * 2**grid.bits) ** 2)
    rounded = _round(steps, most, coins, kind)
    return rounded if isinstance(values, Blocks) else rounded.reshape(values.shape)


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


def beside(grid: Grid, update: Blocks, clip: float, participants: int, kept: int) -> Blocks:
    """An update within the clip, shortened but for the last `kept` coordinates, which rounding then leaves alone.

    It enters the sum with the weight 1 / participants, and is rounded after that. `round_randomly` shortens all
    coordinates of a vector alike. Once the others are shortened in advance, it finds room for the whole vector, whose
    last coordinates it then leaves as long as they are. In steps, those add at most `norm^2 + kept / 4` to `E||q||^2`,
    and to its deviation at most `norm + sqrt(kept) / 2`.
    """
    if not kept:
        return update
    end = update.size - kept
    own, others = update.part(0, end).map(lambda block: block / participants), update.part(end, update.size)
    most = clip / participants * 2.0**grid.bits
    norm = others.norm / participants * 2.0**grid.bits
    left = most**2 - norm**2 - kept / 4.0 - MARGINS[0] * (norm + math.sqrt(kept) / 2.0)
    scale = 0.0
    if left >= 1.0:
        scale = _fitting_scale(own.map(grid.in_steps), math.floor(left), MARGINS[0], 1.0)
    return Blocks.joined([own.map(lambda block: block * scale * participants), others])


def squared_norm(steps: Steps) -> int:
    """`sum q^2`, exactly: a block at a time, in limbs of 21 bits whose products cannot overflow."""
    total = 0
    flat = steps.ravel()
    for start in range(0, flat.size, BLOCK):
        size = np.abs(flat[start : start + BLOCK].astype(np.int64, copy=False))
        limbs = [size & _LIMB]
        for shift in range(_LIMB_BITS, int(size.max()).bit_length(), _LIMB_BITS):
            limbs.append(size >> shift & _LIMB)
        for i, left in enumerate(limbs):
            for j, right in enumerate(limbs):
                # At most 2^14 products below 2^42.
                total += int(np.sum(left * right)) << (_LIMB_BITS * (i + j))
    return total


def _round(steps: Blocks, most: int, coins: SecretStream, kind: type[np.int32 | np.int64]) -> Steps:
    rounded = np.zeros(steps.size, dtype=kind)
    if most == 0:  # Less than a step: nothing but zero fits.
        return rounded
    scale = 1.0
    for margin in MARGINS:
        scale = _fitting_scale(steps, most, margin, scale)
        if _fill(rounded, steps, partial(_draw, scale, coins.uniforms(steps.size, block=BLOCK))) <= most:
            return rounded
    # Toward zero: no entry grows, so the norm fits if that of `steps` does, and else once it is scaled to.
    if _fill(rounded, steps, np.floor) <= most:
        return rounded
    # The guard of 2^-30 is far more than the rounding of the norm and the product can amount to (1e-13).
    shorter = (1.0 - 2.0**-30) * math.sqrt(most) / steps.norm
    _fill(rounded, steps, lambda sizes: np.floor(sizes * shorter))
    return rounded


def _fill(rounded: Steps, steps: Blocks, make: Callable[[Floats], Floats]) -> int:
    """Put what `make` makes of the sizes in each block there, with the signs; returns the squared norm, exactly."""
    start = square = 0
    for block in steps:
        part = rounded[start : start + block.size]
        part[:] = np.copysign(make(np.abs(block)), block)
        square += squared_norm(part)
        start += block.size
    return square


def _draw(scale: float, uniforms: Iterator[Floats], sizes: Floats) -> Floats:
    scaled = sizes * scale
    whole = np.floor(scaled)
    np.subtract(scaled, whole, out=scaled)
    whole += next(uniforms) < scaled
    return whole


def _fitting_scale(steps: Blocks, most: int, margin: float, scale: float) -> float:
    """The given scale if `E ||q||^2 + margin D <= most` there, else a smaller one found by Newton's method.

    `E ||q||^2` is convex in the scale, so the steps come down from above; they aim a third of the margin lower,
    where they would otherwise never arrive. Whatever is returned, the draw itself is checked.
    """
    room = float(most) * (1.0 + 2.0**-40)  # A norm on the bound may come out a hair above.
    for _ in range(_PASSES):
        mean, slope, deviation = _moments(steps, scale)
        if mean + margin * deviation <= room:
            break
        excess = mean + margin * 4.0 / 3.0 * deviation - room
        scale = max(scale - excess / slope, scale / 8.0)
    return scale


def _moments(steps: Blocks, scale: float) -> tuple[float, float, float]:
    """`E ||q||^2`, its derivative by the scale, and the deviation of `||q||^2`."""
    mean = slope = variance = 0.0
    for block in steps:
        sizes = np.abs(block)
        scaled = sizes * scale
        whole = np.floor(scaled)
        fraction = scaled - whole
        odd = 2.0 * whole + 1.0  # (t + 1)^2 - t^2
        mean += float(np.sum(whole * whole + fraction * odd))
        slope += float(np.sum(sizes * odd))
        odd *= odd
        fraction -= fraction * fraction
        variance += float(np.sum(odd * fraction))
    return mean, slope, math.sqrt(variance)
