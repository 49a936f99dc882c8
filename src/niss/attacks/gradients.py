"""A client's update as a function of its pictures, and what can be read from an update without a search.

The adversary can compute everything public that a client does (`UpdateFunction`), and so test a guess. Some things
need no guess: the labels stand in the bias of the last layer, and a picture in a first layer that is linear.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from niss.accounting import Plan
from niss.attacks.observation import FloatArray
from niss.attacks.pictures import Pictures
from niss.errors import ConfigError
from niss.learning import FlatLayout


@dataclass(frozen=True)
class UpdateFunction:
    """The update that given pictures would cause: `steps` local steps on all of them, then the clip of `plan`.

    `__call__` is differentiable in pictures and labels, and can be batched with `torch.func.vmap`.

    module, layout   the network, and where each parameter lies in `weights`
    weights          the public global model from which the client starts
    plan             None: no clip
    """

    module: nn.Module
    layout: FlatLayout
    weights: Tensor
    learning_rate: float
    steps: int = 1
    plan: Plan | None = None

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The update in the units of a gradient, -update / (learning_rate * steps), as one vector.

        inputs   [B, C, H, W], as the model reads them
        labels   [B, classes], rows that sum to 1
        """
        slope = grad(self._loss)
        start = self.layout.split(self.weights)
        moved = start
        for _ in range(self.steps):
            slopes = slope(moved, inputs, labels)
            moved = {name: moved[name] - self.learning_rate * slopes[name] for name in moved}
        update = torch.cat([(moved[name] - start[name]).reshape(-1) for name in start])
        return -self._clipped(update) / (self.learning_rate * self.steps)

    def _loss(self, parts: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy, mean_i -sum_c labels_ic log softmax(logits_i)_c, for labels that may be soft."""
        logits = functional_call(self.module, parts, (inputs,))
        return -(labels * functional.log_softmax(logits, dim=-1)).sum(dim=-1).mean()

    def _clipped(self, update: Tensor) -> Tensor:
        """As `niss.attacks.rounds.clip_update`, differentiable."""
        plan = self.plan
        if plan is None or not plan.private:
            return update
        if plan.unit == "nbafl":
            return update.clamp(-plan.clip, plan.clip)
        norm = update.pow(2).sum().clamp_min(1e-24).sqrt()
        return update * (plan.clip / norm).clamp(max=1.0)

    def to(self, device: torch.device, dtype: torch.dtype) -> UpdateFunction:
        """The same function on another device; the module itself moves."""
        module = self.module.to(device=device, dtype=dtype)
        return replace(self, module=module, weights=self.weights.to(device=device, dtype=dtype))


def recover_labels(
    gradient: FloatArray, update_function: UpdateFunction, like: Pictures
) -> NDArray[np.int64]:
    """As many labels as `like` has pictures, in rising order; of `like` only what is public is used.

    For cross-entropy the gradient of the last bias is mean_i p_i - n / B, with p_i the predicted probabilities and n
    the count of each label. Of a single picture only the entry of its own label is negative: the sign rule of iDLG
    (Zhao, Mopuri and Bilen, 2020). In a batch, the probabilities the model gives to even grey pictures stand for p_i.
    """
    bias = last_bias(gradient, update_function)
    count = len(like.pixels)
    if count == 1:
        return np.array([int(np.argmin(bias))])
    expected = _expected_probabilities(update_function.module, like)
    # A clip shrinks the whole gradient by one factor, which the labels that do not occur give away.
    positive = bias > 0.0
    scale = float(np.median(bias[positive] / expected[positive])) if positive.any() else 1.0
    counts = np.maximum(expected - bias / max(scale, 1e-12), 0.0)
    counts = counts * count / max(float(counts.sum()), 1e-12)
    return np.sort(np.repeat(np.arange(like.classes), _rounded(counts, count)))


def last_bias(gradient: FloatArray, update_function: UpdateFunction) -> FloatArray:
    """The gradient of the last layer's bias, one entry per class."""
    parts = update_function.layout.split(torch.from_numpy(gradient))
    return np.asarray(next(reversed(parts.values())).numpy())


def _expected_probabilities(module: nn.Module, like: Pictures) -> FloatArray:
    """What the model makes of an even grey, which stands for pictures that the adversary does not know."""
    grey = torch.full((1, *like.shape), 0.5, dtype=torch.float64)
    first = next(module.parameters())
    with torch.no_grad():
        logits = module(like.normalise(grey).to(first.device, first.dtype))
    return np.asarray(logits[0].double().softmax(dim=0).cpu().numpy())


def _rounded(counts: FloatArray, total: int) -> NDArray[np.int64]:
    """Whole numbers with that sum, by the largest remainders."""
    whole = np.floor(counts).astype(np.int64)
    for place in np.argsort(whole - counts, kind="stable")[: total - int(whole.sum())]:
        whole[place] += 1
    return whole


def read_picture(
    gradient: FloatArray,
    update_function: UpdateFunction,
    like: Pictures,
    variance: FloatArray | None = None,
) -> FloatArray:
    """The one picture [1, C, H, W], in pixels, behind one step of a network that begins with a linear layer.

    For z = W x + b the gradients are dL/dW = (dL/dz) x^T and dL/db = dL/dz, so every row of the first is x times an
    entry of the second, and least squares over the rows gives x = sum_i b_i W_i / sum_i b_i^2 (Phong et al., 2017;
    Geiping et al., 2020, Proposition 3.1). No search, no restarts, whatever the scale.

    like       of it only shape and scaling are used
    variance   of each entry of the gradient: the rows are weighted by its inverse, pixel by pixel

    Raises `ConfigError` where the first layer is not linear.
    """
    parts = list(update_function.layout.split(torch.from_numpy(gradient)).values())
    weight, bias = parts[0].numpy(), parts[1].numpy()
    inputs = int(np.prod(like.shape))
    if weight.shape != (bias.size, inputs):
        raise ConfigError(
            "the first layer of this model is not linear", field="model", hint="use the mlp, or invert_update"
        )
    trust = np.ones_like(weight)
    if variance is not None and float(variance.min()) > 0.0:
        trust = 1.0 / variance[: weight.size].reshape(weight.shape)
    energy = bias**2 @ trust
    flat = (bias @ (trust * weight)) / np.where(energy > 0.0, energy, 1.0)
    mean, std = np.asarray(like.mean), np.asarray(like.std)
    picture = flat.reshape(like.shape) * std[:, None, None] + mean[:, None, None]
    return np.asarray(picture[None])
