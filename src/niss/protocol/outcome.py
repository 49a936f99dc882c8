"""How a round ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Outcome:
    """The end of a round.

    total           sum of the survivors' parts `p_k x_k` and residual noises, as floats
    survivors       seats whose uploads are in it
    dropped         all other seats
    uncancelled     shares, sent to or by dropped clients, that were not taken out; of those carried to this round, the
                    ones of which only one end was uploaded
    masked          survivors whose self-masks could not be rebuilt, and are still in it
    extra_variance  what the last two leave in each coordinate beyond the intended noise
    under_way       variance that the sum carries to the next round, which takes it out again
    repaired        variance of carried shares that were taken out of the sum: of senders that had dropped out of the
                    round before, and to receivers that dropped out of this one
    problems        in words, what went wrong and with whom
    liars           seats that are proven to have lied in the repair; what they said falsely was left out
    """

    total: NDArray[np.float64]
    survivors: tuple[int, ...]
    dropped: tuple[int, ...]
    uncancelled: int
    masked: tuple[int, ...]
    extra_variance: float
    problems: tuple[str, ...]
    liars: tuple[int, ...]
    under_way: float = 0.0
    repaired: tuple[float, float] = (0.0, 0.0)

    @property
    def exact(self) -> bool:
        """Whether nothing but the intended noise is left."""
        return self.uncancelled == 0 and not self.masked
