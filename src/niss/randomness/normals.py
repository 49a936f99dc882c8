"""Simulated Gaussians, fast: what a round of simulated shares is made of.

float32 by Box and Muller (1958) in blocks that stay in the cache: two 32-bit words `a`, `b` give

    r = sqrt(-2 ln((a + 1/2) / 2^32)),    phi = pi b / 2^31,    r cos(phi)  and  r sin(phi),

three times as fast as numpy's own sampler. Nothing lies beyond 6.76 deviations (probability 1.4e-11). float64 is
left to numpy. Values are the same for the same stream, but their last bits may depend on the processor, as those of
trained weights do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from niss.randomness.sim import SimStream

BLOCK = 16384
Floats = NDArray[np.floating[Any]]

_WORD = np.float32(2.0**-32)
_ANGLE = np.float32(math.pi * 2.0**-31)


def normal_blocks(stream: SimStream, count: int, dtype: DTypeLike) -> Iterator[tuple[slice, Floats]]:
    """`count` standard normal numbers of a stream: pairs of where they belong and a block, valid until the next.

    The blocks may be changed in place.
    """
    generator = stream.generator()
    kind = np.dtype(dtype)
    block: Floats = np.empty(min(BLOCK, count + count % 2), dtype=kind)
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        if kind == np.float32:
            _box_muller(generator, block[: size + size % 2])
        else:
            generator.standard_normal(out=block[:size])
        yield slice(start, start + size), block[:size]


def _box_muller(generator: np.random.Generator, out: Floats) -> None:
    """Fill a float32 array of even size."""
    half = out.size // 2
    words = generator.bit_generator.random_raw(half).view(np.uint32)
    radius = words[:half].astype(np.float32)
    radius += np.float32(0.5)
    radius *= _WORD
    np.log(radius, out=radius)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    angle = words[half:].view(np.int32).astype(np.float32)
    angle *= _ANGLE
    np.cos(angle, out=out[:half])
    np.sin(angle, out=out[half:])
    out[:half] *= radius
    out[half:] *= radius
