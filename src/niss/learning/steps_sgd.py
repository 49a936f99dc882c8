"""One step of torch.optim.SGD in place, as `local.train_client` takes it, without a gradient in memory."""

from __future__ import annotations

from torch import Tensor

from niss.learning.local import LocalTraining


def velocity_like(weights: Tensor, settings: LocalTraining) -> Tensor | None:
    """Zeros, from which `v <- momentum * v + g` gives `v = g` at first; None without momentum."""
    return weights.new_zeros(weights.shape) if settings.momentum else None


def step(weights: Tensor, velocity: Tensor | None, gradient: Tensor, settings: LocalTraining) -> None:
    """`weights` takes one step along `gradient`, which is used up."""
    if settings.weight_decay:
        gradient.add_(weights, alpha=settings.weight_decay)
    if velocity is not None:
        gradient = velocity.mul_(settings.momentum).add_(gradient)
    weights.add_(gradient, alpha=-settings.learning_rate)


def step_by_product(
    weights: Tensor, velocity: Tensor | None, left: Tensor, right: Tensor, settings: LocalTraining
) -> None:
    """The same for the gradient `left @ right` (of one client, or of many stacked), which is never formed:

    w <- (1 - learning_rate * weight_decay) w - learning_rate * left @ right    without momentum.
    """
    if velocity is None:
        decay = 1.0 - settings.learning_rate * settings.weight_decay
        _add_product(weights, left, right, beta=decay, alpha=-settings.learning_rate)
        return
    _add_product(velocity, left, right, beta=settings.momentum, alpha=1.0)
    if settings.weight_decay:
        velocity.add_(weights, alpha=settings.weight_decay)
    weights.add_(velocity, alpha=-settings.learning_rate)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float) -> None:
    if total.ndim == 3:
        total.baddbmm_(left, right, beta=beta, alpha=alpha)
    else:
        total.addmm_(left, right, beta=beta, alpha=alpha)
