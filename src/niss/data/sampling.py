"""Two small tools of selection: a reproducible random order, and fair whole-number shares."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from niss.randomness import SimStream


def random_order(count: int, stream: SimStream) -> npt.NDArray[np.int64]:
    """A uniformly random order of 0 .. count-1, fixed by the stream.

    Sorts random keys rather than calling `Generator.permutation`: numpy may change that method's numbers
    between versions, while plain uniform doubles are as stable as it gets.
    """
    return np.argsort(stream.generator().random(count), kind="stable").astype(np.int64)


def largest_remainder(total: int, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Whole shares of `total` in proportion to `weights`, each within one of its exact share.

    Every share is rounded down, and what is left goes one by one to the largest remainders (the earlier
    place wins a tie): Hamilton's method. The shares sum to `total`.
    """
    exact = weights * (total / weights.sum())
    shares: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
    left = total - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:left]] += 1
    return shares


def even_sizes(total: int, parts: int) -> list[int]:
    """`total` cut into `parts` sizes that differ by at most one, the larger ones first."""
    base, extra = divmod(total, parts)
    return [base + (place < extra) for place in range(parts)]
