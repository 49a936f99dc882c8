"""What an adversary computes to test a guess: the update that guessed pictures would have caused.

It imitates everything public that a client does: the local steps from the global weights, and the clip.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from niss.accounting import Plan
from niss.learning import FlatLayout


@dataclass(frozen=True)
class Imitation:
    """A client's public recipe: `steps` steps of rate `learning_rate`, each on all its pictures, then the clip.

    `__call__` is differentiable in pictures and labels, and can be batched with `torch.func.vmap`.
    """

    module: nn.Module
    layout: FlatLayout
    weights: Tensor
    learning_rate: float
    steps: int = 1
    plan: Plan | None = None

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The update, in units of a gradient (less the sign and `learning_rate * steps`), as one vector.

        inputs [B, C, H, W] as the model reads them; labels [B, classes], rows that sum to 1.
        """
        slope = grad(self._loss)
        start = self.layout.split(self.weights)
        moved = start
        for _ in range(self.steps):
            slopes = slope(moved, inputs, labels)
            moved = {name: moved[name] - self.learning_rate * slopes[name] for name in moved}
        update = torch.cat([(moved[name] - start[name]).reshape(-1) for name in start])
        return self.as_gradient(self._clipped(update))

    def as_gradient(self, update: Tensor) -> Tensor:
        """An update in the same units: -update / (learning_rate * steps)."""
        return -update / (self.learning_rate * self.steps)

    def _loss(self, parts: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(self.module, parts, (inputs,))
        return -(labels * functional.log_softmax(logits, dim=-1)).sum(dim=-1).mean()

    def _clipped(self, update: Tensor) -> Tensor:
        plan = self.plan
        if plan is None or not plan.private:
            return update
        if plan.unit == "nbafl":
            return update.clamp(-plan.clip, plan.clip)
        norm = update.pow(2).sum().clamp_min(1e-24).sqrt()
        return update * (plan.clip / norm).clamp(max=1.0)

    def to(self, device: torch.device, dtype: torch.dtype) -> Imitation:
        return Imitation(
            self.module.to(device=device, dtype=dtype),
            self.layout,
            self.weights.to(device=device, dtype=dtype),
            self.learning_rate,
            self.steps,
            self.plan,
        )
