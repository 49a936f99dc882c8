"""L-BFGS for many independent problems at once.

Every restart of an attack is its own minimisation. They are stacked, so that one evaluation serves all of
them, and each keeps its own curvature pairs, step and state of convergence (Liu and Nocedal, 1989; steps by
backtracking to the Armijo condition).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Points [R, n] -> values [R] and gradients [R, n]; row r of each depends on row r alone."""

_ARMIJO, _SHRINK, _TRIES = 1e-4, 0.4, 12
_CURVATURE = 1e-10


class BatchedLbfgs:
    """Minimises R functions side by side; `values` and `points` are the best so far of each."""

    def __init__(self, objective: Objective, start: Tensor, *, memory: int = 20) -> None:
        self._objective = objective
        self._pairs: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=memory)
        self.points = start.clone()
        self.values, self._slopes = objective(self.points)
        self.stuck = ~torch.isfinite(self.values)

    def step(self) -> Tensor:
        """One iteration of each; returns the values. A problem without a way down is `stuck` and stays."""
        direction = self._direction()
        rate = (self._slopes * direction).sum(1)
        uphill = rate >= 0
        direction = torch.where(uphill[:, None], -self._slopes, direction)
        rate = torch.where(uphill, -(self._slopes**2).sum(1), rate)
        direction[self.stuck] = 0.0
        points, values, slopes, moved = self._search(direction, rate)
        self._remember(points - self.points, slopes - self._slopes)
        self.stuck = self.stuck | ~moved
        self.points, self.values, self._slopes = points, values, slopes
        return values

    def _direction(self) -> Tensor:
        """The two-loop recursion."""
        turned = self._slopes.clone()
        kept: list[Tensor] = []
        for step, change, inverse in reversed(self._pairs):
            part = inverse * (step * turned).sum(1)
            turned -= part[:, None] * change
            kept.append(part)
        turned *= self._scale()[:, None]
        for (step, change, inverse), part in zip(self._pairs, reversed(kept), strict=True):
            turned += (part - inverse * (change * turned).sum(1))[:, None] * step
        return -turned

    def _scale(self) -> Tensor:
        first = (1.0 / self._slopes.abs().sum(1).clamp_min(1e-30)).clamp(max=1.0)
        if not self._pairs:
            return first
        step, change, inverse = self._pairs[-1]
        fitted = (step * change).sum(1) / (change**2).sum(1).clamp_min(1e-30)
        return torch.where(inverse > 0, fitted, first)

    def _search(self, direction: Tensor, rate: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Halve the steps that do not descend enough; whoever finds none stays where it is."""
        length = torch.ones_like(self.values)
        for _ in range(_TRIES):
            tried = self.points + length[:, None] * direction
            values, slopes = self._objective(tried)
            good = (values <= self.values + _ARMIJO * length * rate) & torch.isfinite(slopes).all(1)
            if bool((good | self.stuck).all()):
                break
            length = torch.where(good, length, length * _SHRINK)
        good = good & ~self.stuck
        return (
            torch.where(good[:, None], tried, self.points),
            torch.where(good, values, self.values),
            torch.where(good[:, None], slopes, self._slopes),
            good,
        )

    def _remember(self, step: Tensor, change: Tensor) -> None:
        product = (step * change).sum(1)
        usable = product > _CURVATURE * (change**2).sum(1)
        inverse = torch.where(usable, 1.0 / product.clamp_min(1e-30), torch.zeros_like(product))
        self._pairs.append((step, change, inverse))
